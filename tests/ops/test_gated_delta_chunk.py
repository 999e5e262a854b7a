"""gated_delta_chunk: kernels against float64, exports, packing, strong decay, who may write what."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from midstream.ops.chunk_table import cut_chunks
from midstream.ops.gated_delta_chunk import _build, _Case, gated_delta_chunk, launch_chunks
from midstream.ops.gated_delta_step import gated_delta_step
from midstream.ops.registry import OpCase
from midstream.ops.testing import (
    build_args,
    check_kernel,
    check_reference,
    check_registration,
    expected,
)

CASES = {case.id: case for case in gated_delta_chunk.cases}
BASE, *_ = CASES.values()
# fp32 activations are launched token by token; the chunk kernels are checked in fp32 as well
CHUNKS = replace(gated_delta_chunk, launch=launch_chunks)
all_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
both_paths = pytest.mark.parametrize("spec", [CHUNKS, gated_delta_chunk], ids=["chunks", "tokens"])


@all_cases
def test_chunk_kernels_equal_float64_reference(case, device):
    check_kernel(CHUNKS, case, torch.float32, device)


@all_cases
def test_chunk_kernels_in_bf16_equal_float64_reference(case, device, bf16_dots):
    check_kernel(CHUNKS, case, torch.bfloat16, device)


@pytest.mark.parametrize("at", [0, 4, 5], ids=lambda at: [*CASES][at])
def test_token_kernel_equals_float64_reference(at, device):
    check_kernel(gated_delta_chunk, [*CASES.values()][at], torch.float32, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@all_cases
def test_cpu_implementation_equals_float64_reference(case, dtype):
    check_reference(gated_delta_chunk, case, dtype)


def test_is_a_well_formed_torch_operator():
    check_registration(gated_delta_chunk, BASE)


@pytest.mark.parametrize(
    "lengths",
    [(1, 2, 3, 4, 5, 6, 7, 8, 9), (63, 64, 65), (127, 128, 129)],
    ids=lambda lengths: "+".join(map(str, lengths)),
)
def test_any_length_equals_float64_reference(lengths, device):
    check_kernel(CHUNKS, case_of(lengths=lengths, heads=1), torch.float32, device)


@pytest.mark.parametrize("decay", [1e-12, 0.0])
@both_paths
def test_strong_decay_inside_a_chunk_stays_finite(spec, decay, device):
    args = build_args(case_of(lengths=(20,), decay=decay), torch.float32, device)
    spec.launch(**args)
    assert args["out"][:-1].isfinite().all()
    assert args["arena"][args["chunk_page"][0], 192 : 192 + 2 * 16 * 32].isfinite().all()


@both_paths
def test_packed_rows_equal_rows_alone_bit_for_bit(spec, device):
    lengths = (1, 3, 64, 65, 7) if spec is CHUNKS else (1, 3, 7)
    packed = build_args(case_of(lengths=lengths, heads=1), torch.float32, device)
    alone = build_args(case_of(lengths=lengths, heads=1), torch.float32, device)
    spec.launch(**packed)
    start = 0
    for row, length in enumerate(lengths):
        page = int(alone["chunk_page"][alone["row_chunk"][row + 1] - 1])
        run_alone(spec, alone, row, start, start + length, page)
        assert torch.equal(
            packed["out"][start : start + length], alone["out"][start : start + length]
        )
        assert same_bytes(packed["arena"][page], alone["arena"][page])
        start += length


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@both_paths
def test_an_export_equals_a_run_that_ends_there(spec, state_dtype, device):
    """And a run resumed from the export equals the run that made it."""
    case = case_of(lengths=(20,), exports=((0, 9),), heads=1, state_dtype=state_dtype)
    whole, parts = (build_args(case, torch.float32, device) for _ in range(2))
    exported, last = whole["chunk_page"].tolist()[:2]
    spec.launch(**whole)
    run_alone(spec, parts, 0, 0, 9, exported)
    assert same_bytes(parts["arena"][exported], whole["arena"][exported])
    parts["read_page"][0] = exported
    run_alone(spec, parts, 0, 9, 20, last)
    assert same_bytes(parts["arena"][last], whole["arena"][last])
    assert torch.equal(parts["out"][:20], whole["out"][:20])


def test_a_run_of_steps_gives_the_same_state_and_outputs(device):
    chunk, step = (build_args(case_of(lengths=(70,)), torch.float32, device) for _ in range(2))
    CHUNKS.launch(**chunk)
    page = step["read_page"][:1]
    for t in range(70):
        row = {name: step[name][t : t + 1] for name in ("out", "q", "k", "v", "g", "beta")}
        shared = {"arena": step["arena"], "offset": step["offset"]}
        gated_delta_step.reference(**shared, **row, read_page=page, write_page=page)
    torch.testing.assert_close(chunk["out"][:70], step["out"][:70], rtol=0, atol=2e-6)
    torch.testing.assert_close(
        chunk["arena"][page.long()], step["arena"][page.long()], rtol=0, atol=1e-5, equal_nan=True
    )


@both_paths
def test_a_read_page_that_is_not_written_keeps_its_bytes(spec, device):
    args = build_args(case_of(lengths=(2, 3, 5)), torch.float32, device)
    page = args["read_page"][2].item()
    assert page not in args["chunk_page"].tolist()
    before = args["arena"][page].clone()
    spec.launch(**args)
    assert same_bytes(args["arena"][page], before)


@both_paths
def test_padding_is_inert(spec, device):
    """A step of nothing but padding touches neither pages nor outputs."""
    args = build_args(BASE, torch.float32, device)
    args["row_chunk"][:] = 0
    args["chunk_start"][:] = 0
    args["chunk_row"][:] = -1
    args["chunk_page"][:] = 0
    before = {name: args[name].clone() for name in ("arena", "out")}
    spec.launch(**args)
    assert all(same_bytes(args[name], before[name]) for name in before)


def test_the_reference_goes_on_from_what_it_saved():
    case = case_of(lengths=(20,), exports=((0, 9),), state_dtype=None)
    args = build_args(case, torch.bfloat16, torch.device("cpu"))
    once = build_args(case, torch.bfloat16, torch.device("cpu"))
    once["chunk_page"][0] = 0
    gated_delta_chunk.reference(**args)
    gated_delta_chunk.reference(**once)
    assert not torch.equal(args["out"][9:20], once["out"][9:20])
    assert expected(gated_delta_chunk, args)["out"][:20].isfinite().all()


def case_of(**changes) -> OpCase:
    case = _Case(**changes)
    return OpCase(case.id(), lambda *context: _build(case, *context))


def run_alone(spec, args, row, start, end, page) -> None:
    """Run tokens [start, end) of a row as a step of their own."""
    tokens = {name: args[name][start:end] for name in ("out", "q", "k", "v", "g", "beta")}
    table = cut_chunks((end - start,), (page,))
    names = ("chunk_start", "chunk_row", "chunk_page", "row_chunk")
    tables = {name: getattr(table, name).to(args["arena"].device) for name in names}
    shared = {"arena": args["arena"], "offset": args["offset"]}
    spec.launch(**shared, **tokens, read_page=args["read_page"][row:], **tables)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.fixture
def bf16_dots(monkeypatch):
    """Triton's interpreter multiplies the bits of bf16 operands; make it multiply their values."""
    if torch.cuda.is_available():
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def widened(operand):
        if operand.dtype.scalar.name != "bf16":
            return operand.data
        return (operand.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(self, a, b, acc, *precision):
        product = np.matmul(widened(a), widened(b), dtype=acc.data.dtype)
        return interpreter.TensorHandle(product + acc.data, acc.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
