"""paged_attention_chunk: kernel against float64; causality, padding and what may be read."""

import pytest
import torch

from midstream.errors import ContractError
from midstream.ops import paged_attention_chunk as module
from midstream.ops.paged_attention_chunk import num_spare, paged_attention_chunk
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
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CPU = torch.device("cpu")
PATHS = [paged_attention_chunk.reference, paged_attention_chunk.launch]
path_ids = ["cpu", "kernel"]
WINDOWED = [case for case in paged_attention_chunk.cases if "window" in case.id]


@pytest.mark.parametrize(("spec", "case"), [*op_cases(paged_attention_chunk)], ids=[*CASES])
def test_kernel_equals_float64_reference(spec, case, device):
    check_kernel(spec, case, torch.float32, device)


# with 16 bits a program holds all tokens of a chunk, so some see nothing of the first tile
@pytest.mark.parametrize("case", [BASE, *WINDOWED], ids=["base", *(c.id for c in WINDOWED)])
def test_fp16_kernel_equals_float64_reference(case, device):
    check_kernel(paged_attention_chunk, case, torch.float16, device)


@pytest.mark.gpu  # the interpreter has no bf16 dot
@pytest.mark.parametrize(("spec", "case"), [*op_cases(paged_attention_chunk)], ids=[*CASES])
def test_bf16_kernel_equals_float64_reference(spec, case, device):
    check_kernel(spec, case, torch.bfloat16, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("spec", "case"), [*op_cases(paged_attention_chunk)], ids=[*CASES])
def test_cpu_implementation_equals_float64_reference(spec, case, dtype):
    check_reference(spec, case, dtype)


def test_is_a_well_formed_torch_operator():
    check_registration(paged_attention_chunk, BASE)


@pytest.mark.parametrize("case", CASES.values(), ids=[*CASES])
def test_j2_a_chunk_equals_its_tokens_decoded_one_by_one(case):
    args = build_args(case, torch.float64, CPU)
    paged_attention_chunk.reference(**args)
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
            args["kv_heads"], args["kv_block"], args["scale"], args["window"], args["softcap"],
        )  # fmt: skip
        torch.testing.assert_close(args["out"][here], alone)


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


@pytest.mark.parametrize("attend", PATHS, ids=path_ids)
@pytest.mark.parametrize("case", WINDOWED, ids=[case.id for case in WINDOWED])
def test_columns_before_the_window_are_not_followed(attend, case, device):
    args = build_args(case, torch.float32, device)
    attend(**args)
    want = args["out"].clone()
    starts, first = args["chunk_start"].tolist(), set()
    for chunk, row in enumerate(args["chunk_row"].tolist()):
        if row >= 0 and row not in first:
            first.add(row)
            hidden = max(0, int(args["position"][starts[chunk]]) + 1 - args["window"])
            slot = int(args["row_slot"][row])
            args["kv_table"][slot, : hidden // args["kv_block"]] = 2**30
    attend(**args)
    assert torch.equal(args["out"], want)


@pytest.mark.gpu
def test_c1_page_beyond_2_31_elements_equals_a_low_page(device):
    """After a wrap at 2**31 elements, page 2049 of 2**20 elements each would be page 1."""
    args = build_args(BASE, torch.bfloat16, device)
    small, page_size = args["arena"], args["arena"].shape[1]
    paged_attention_chunk.launch(**args)
    want = args["out"].clone()
    args["arena"] = torch.full((2050, 2**20), torch.nan, dtype=torch.bfloat16, device=device)
    top = 2050 - len(small)
    args["arena"][top:, :page_size] = small
    args["kv_table"] += top
    paged_attention_chunk.launch(**args)
    assert torch.equal(args["out"], want)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["q", "out"])
@pytest.mark.parametrize("pitch", [(2**28, 16), (64, 2**30)], ids=["tokens", "heads"])
def test_c2_tokens_and_heads_beyond_2_31_elements_equal_packed_ones(pitch, name, device):
    """After a wrap at 2**31 the last tokens, or the last head, would lie before the first."""
    args = build_args(BASE, torch.float16, device)
    paged_attention_chunk.launch(**args)
    want = args["out"].clone()
    args = build_args(BASE, torch.float16, device)
    wide = torch.zeros(2**30 + 2**32 + 2**10, dtype=torch.float16, device=device)
    args[name] = wide.as_strided(want.shape, (*pitch, 1), 2**30).copy_(args[name])
    paged_attention_chunk.launch(**args)
    assert torch.equal(args["out"], want)


@pytest.mark.parametrize(("chunks", "heads"), [(70_000, 32), (1, 70_000), (2, 2)])
def test_c3_no_grid_axis_but_the_first_grows_with_chunks_or_heads(chunks, heads, monkeypatch):
    args = build_args(BASE, torch.float32, CPU)
    for name in ("q", "out"):
        args[name] = args[name][:1, :1].expand(chunks, heads, 16)
    args["chunk_row"] = args["chunk_row"][:1].expand(chunks)
    grids = []

    class Recorder:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr(module, "_attend_kernel", Recorder())
    monkeypatch.setattr(module, "_combine_kernel", Recorder())
    paged_attention_chunk.launch(**{**args, "kv_heads": 1})
    assert len(grids) == (2 if chunks == 2 else 1)  # cut only where few
    assert all(first < 2**31 and second <= 65_535 for first, second in grids)


@pytest.mark.parametrize(("name", "turn"), [("long-past", 2), ("long-past-window", 1)])
def test_any_number_of_pieces_gives_the_same_result(name, turn, monkeypatch, device):
    """Not cut, a few pieces, more than are added up in a turn; with a window turns without a position."""
    (case,) = (case for case in paged_attention_chunk.cases if case.id.endswith(name))
    args = build_args(case, torch.float32, device)
    three_parts = 3 * len(args["chunk_row"]) * args["kv_heads"]  # which no power of two divides
    monkeypatch.setattr(module, "_FOLD_PROGRAMS", three_parts)
    monkeypatch.setattr(module, "_FEWEST_TILES", 1)
    monkeypatch.setattr(module, "turn_of_pieces", lambda *tile: turn)
    results = []
    for spare in (0, 1, 4, 12):
        monkeypatch.setattr(module, "num_spare", lambda *shapes, n=spare, **more: n)
        args["out"] = torch.full_like(args["out"], 7.0)
        paged_attention_chunk.launch(**args)
        results.append(args["out"])
    for cut in results[1:]:
        torch.testing.assert_close(cut, results[0], rtol=1e-5, atol=1e-6)


def test_programs_to_spare_fill_the_device_unless_chunks_do():
    assert num_spare(4, 16, programs=264) == 17
    assert num_spare(4 * 17, 16, programs=264) == 0
    assert num_spare(1, 10**6, programs=264) == 0


@pytest.mark.gpu
def test_c3_three_thousand_chunks_of_one_token_equal_their_values(device):
    """One position: the result is its value."""
    rows, heads, width, kv_block = 3000, 32, 64, 16
    arena = torch.zeros(rows + 1, 2 * kv_block * width, dtype=torch.bfloat16, device=device)
    value = torch.randn(rows, width, device=device).bfloat16()
    arena[1:, kv_block * width :][:, :width] = value
    out = torch.full((rows, heads, width), torch.nan, dtype=torch.bfloat16, device=device)
    every = torch.arange(rows + 1, dtype=torch.int32, device=device)
    paged_attention_chunk.launch(
        out, arena, torch.randn_like(out.float()).bfloat16(),
        torch.zeros(1, dtype=torch.int64, device=device), every[1:, None].contiguous(), every[:-1],
        torch.zeros_like(every), every, every[:-1], 1, kv_block, 1.0, 0, 0.0,
    )  # fmt: skip
    assert torch.equal(out, value[:, None].expand_as(out))


@pytest.mark.parametrize(("name", "value"), [("window", -1), ("softcap", -30.0)])
def test_refuses_a_negative_window_or_softcap(name, value):
    args = build_args(BASE, torch.float32, CPU) | {name: value}
    with pytest.raises(ContractError, match="expected both >= 0"):
        paged_attention_chunk.launch(**args)
