"""paged_attention_chunk: kernel against float64; causality, padding and what may be read."""

import pytest
import torch

from midstream.ops.paged_attention_chunk import paged_attention_chunk
from midstream.ops.paged_attention_decode import paged_attention_decode
from midstream.ops.testing import (
    build_args,
    check_kernel,
    check_reference,
    check_registration,
    op_cases,
)

CASES = {case.id: case for case in paged_attention_chunk.cases}
BASE = paged_attention_chunk.cases[0]
PATHS = [paged_attention_chunk.reference, paged_attention_chunk.launch]
path_ids = ["cpu", "kernel"]


@pytest.mark.parametrize(("spec", "case"), [*op_cases(paged_attention_chunk)], ids=[*CASES])
def test_kernel_equals_float64_reference(spec, case, device):
    check_kernel(spec, case, torch.float32, device)


@pytest.mark.gpu  # the interpreter has no bf16 dot
@pytest.mark.parametrize(("spec", "case"), [*op_cases(paged_attention_chunk)], ids=[*CASES])
def test_bf16_kernel_equals_float64_reference(spec, case, device):
    check_kernel(spec, case, torch.bfloat16, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("spec", "case"), [*op_cases(paged_attention_chunk)], ids=[*CASES])
def test_cpu_implementation_equals_float64_reference(spec, case, dtype):
    check_reference(spec, case, dtype)


def test_is_a_well_formed_torch_operator():
    check_registration(paged_attention_chunk, BASE)


@pytest.mark.parametrize("attend", PATHS, ids=path_ids)
def test_a_chunk_equals_its_tokens_decoded_one_by_one(attend, device):
    args = build_args(BASE, torch.float32, device)
    attend(**args)
    starts = args["chunk_start"].tolist()
    for chunk, row in enumerate(args["chunk_row"].tolist()):
        here = slice(starts[chunk], starts[chunk + 1])
        if row < 0:
            continue
        position = args["position"][here].contiguous()
        alone = torch.full_like(args["out"][here], torch.nan)
        paged_attention_decode.reference(
            alone, args["arena"], args["q"][here], args["offset"], args["kv_table"],
            args["row_slot"][row].repeat(len(position)), position,
            args["kv_heads"], args["kv_block"], args["scale"],
        )  # fmt: skip
        torch.testing.assert_close(args["out"][here], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attend", PATHS, ids=path_ids)
def test_tokens_outside_all_chunks_keep_their_output(attend, device):
    args = build_args(BASE, torch.float32, device)
    attend(**args)
    used = int(args["chunk_start"][-1])
    assert (args["out"][used:] == 7).all()
    assert args["out"].isfinite().all()


@pytest.mark.parametrize("attend", PATHS, ids=path_ids)
def test_columns_beyond_the_last_position_are_not_followed(attend, device):
    """A page id far outside the pool faults, or reads NaN, as soon as it is followed."""
    args = build_args(BASE, torch.float32, device)
    attend(**args)
    want = args["out"].clone()
    starts = args["chunk_start"].tolist()
    for chunk, row in enumerate(args["chunk_row"].tolist()):
        if row >= 0:
            column = int(args["position"][starts[chunk + 1] - 1]) // args["kv_block"]
            args["kv_table"][int(args["row_slot"][row]), column + 1 :] = 2**30
    attend(**args)
    assert torch.equal(args["out"], want)
