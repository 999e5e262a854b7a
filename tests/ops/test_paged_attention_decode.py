"""paged_attention_decode: kernel against float64; padding, strides, pieces and what may be read."""

import pytest
import torch

from midstream.errors import ContractError
from midstream.ops import paged_attention_decode as module
from midstream.ops.paged_attention_decode import num_spare, paged_attention_decode
from midstream.ops.paged_kv import kv_region
from midstream.ops.testing import (
    build_args,
    check_kernel,
    check_reference,
    check_registration,
    op_cases,
)

CPU = torch.device("cpu")
CASES = {case.id: case for case in paged_attention_decode.cases}
BASE = paged_attention_decode.cases[0]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PATHS = [paged_attention_decode.reference, paged_attention_decode.launch]
path_ids = ["cpu", "kernel"]
WINDOWED = [case for case in paged_attention_decode.cases if "window" in case.id]


@pytest.mark.parametrize(("spec", "case"), [*op_cases(paged_attention_decode)], ids=[*CASES])
def test_kernel_equals_float64_reference(spec, case, device):
    check_kernel(spec, case, torch.float32, device)


@pytest.mark.parametrize("case", [BASE, CASES["R3-H4-G2-D80-block16-window7-cap2-length40"]])
def test_fp16_kernel_equals_float64_reference(case, device):
    check_kernel(paged_attention_decode, case, torch.float16, device)


@pytest.mark.gpu  # the interpreter has no bf16 dot
@pytest.mark.parametrize(("spec", "case"), [*op_cases(paged_attention_decode)], ids=[*CASES])
def test_bf16_kernel_equals_float64_reference(spec, case, device):
    check_kernel(spec, case, torch.bfloat16, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("spec", "case"), [*op_cases(paged_attention_decode)], ids=[*CASES])
def test_cpu_implementation_equals_float64_reference(spec, case, dtype):
    check_reference(spec, case, dtype)


def test_is_a_well_formed_torch_operator():
    check_registration(paged_attention_decode, BASE)


def written_out(args, row: int) -> torch.Tensor:
    """The definition once more, in float64: one head and one visible position at a time."""
    slot, end = int(args["row_slot"][row]), int(args["position"][row]) + 1
    kv_heads, kv_block = args["kv_heads"], args["kv_block"]
    heads, width = args["q"].shape[1:]
    region = kv_region(args["arena"], args["offset"], kv_block, kv_heads, width)
    q = args["q"][row]
    visible = range(max(0, end - args["window"]) if args["window"] else 0, end)
    places = [(int(args["kv_table"][slot, p // kv_block]), p % kv_block) for p in visible]
    result = torch.empty(heads, width, dtype=torch.float64)
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        keys = torch.stack([region[page, 0, place, kv_head] for page, place in places])
        values = torch.stack([region[page, 1, place, kv_head] for page, place in places])
        score = args["scale"] * (keys @ q[head])
        if args["softcap"]:
            score = args["softcap"] * torch.tanh(score / args["softcap"])
        result[head] = score.softmax(0) @ values
    return result


@pytest.mark.parametrize("case", CASES.values(), ids=[*CASES])
def test_j2_every_length_equals_a_softmax_over_single_positions(case):
    args = build_args(case, torch.float64, CPU)
    paged_attention_decode.reference(**args)
    for row, slot in enumerate(args["row_slot"][: len(args["out"])].tolist()):
        if slot >= 0:
            want = written_out(args, row)
            torch.testing.assert_close(args["out"][row], want)


@pytest.mark.parametrize("attend", PATHS, ids=path_ids)
@pytest.mark.parametrize("window", [0, 3])
def test_padded_rows_are_zero_though_every_page_is_nan(attend, window, device):
    args = build_args(BASE, torch.float32, device) | {"window": window}
    args["row_slot"].fill_(-1)
    args["arena"].fill_(torch.nan)
    attend(**args)
    assert torch.equal(args["out"], torch.zeros_like(args["out"]))


@pytest.mark.parametrize("attend", PATHS, ids=path_ids)
def test_columns_beyond_the_position_are_not_followed(attend, device):
    """A page id far outside the pool faults, or reads NaN, as soon as it is followed."""
    args = build_args(BASE, torch.float32, device)
    attend(**args)
    want = args["out"].clone()
    for row, slot in enumerate(args["row_slot"].tolist()):
        if slot >= 0:
            args["kv_table"][slot, int(args["position"][row]) // args["kv_block"] + 1 :] = 2**30
    attend(**args)
    assert torch.equal(args["out"], want)


@pytest.mark.parametrize("attend", PATHS, ids=path_ids)
@pytest.mark.parametrize("case", WINDOWED, ids=[case.id for case in WINDOWED])
def test_columns_before_the_window_are_not_followed(attend, case, device):
    args = build_args(case, torch.float32, device)
    attend(**args)
    want = args["out"].clone()
    for row, slot in enumerate(args["row_slot"].tolist()):
        if slot >= 0:
            hidden = max(0, int(args["position"][row]) + 1 - args["window"])
            args["kv_table"][slot, : hidden // args["kv_block"]] = 2**30
    attend(**args)
    assert torch.equal(args["out"], want)


def test_any_number_of_pieces_gives_the_same_result(monkeypatch, device):
    """One piece, a few, and more than the combining kernel takes in a turn."""
    args = build_args(CASES["R2-H8-G1-D16-block16-length700"], torch.float32, device)
    results = []
    for spare in (1, 5, 40):
        monkeypatch.setattr(module, "num_spare", lambda *shapes, n=spare, **more: n)
        args["out"] = torch.full_like(args["out"], torch.nan)
        paged_attention_decode.launch(**args)
        results.append(args["out"])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[2], results[0], rtol=1e-5, atol=1e-6)


def test_programs_to_spare_fill_the_device():
    assert num_spare(8, processors=132) == 4 * 132 // 8
    assert num_spare(1, processors=1) == 4
    assert num_spare(10**6, processors=132) == 1


@pytest.mark.parametrize("attend", PATHS, ids=path_ids)
def test_output_may_be_a_slice_of_a_wider_buffer(attend, device):
    args = build_args(BASE, torch.float32, device)
    attend(**args)
    want = args["out"].clone()
    wide = torch.full((*want.shape[:2], want.shape[2] + 3), 7.0, device=device)
    args["out"] = wide[:, :, : want.shape[2]]
    attend(**args)
    assert torch.equal(args["out"], want)
    assert (wide[:, :, want.shape[2] :] == 7).all()


@pytest.mark.gpu
def test_c1_page_beyond_2_31_elements_equals_a_low_page(device):
    """After a wrap at 2**31 elements, page 2049 of 2**20 elements each would be page 1."""
    args = build_args(BASE, torch.bfloat16, device)
    small, page_size = args["arena"], args["arena"].shape[1]
    paged_attention_decode.launch(**args)
    want = args["out"].clone()
    args["arena"] = torch.full((2050, 2**20), torch.nan, dtype=torch.bfloat16, device=device)
    top = 2050 - len(small)
    args["arena"][top:, :page_size] = small
    args["kv_table"] += top
    paged_attention_decode.launch(**args)
    assert torch.equal(args["out"], want)


@pytest.mark.gpu
@pytest.mark.parametrize("pitch", [(2**30, 16), (64, 2**30)], ids=["rows", "heads"])
def test_c2_rows_and_heads_beyond_2_31_elements_equal_packed_ones(pitch, device):
    """After a wrap, element 3 * 2**30 would lie 2**30 before the first: the view starts there."""
    args = build_args(BASE, torch.float16, device)
    paged_attention_decode.launch(**args)
    want = args["out"].clone()
    wide = torch.zeros(2**32 + 2**10, dtype=torch.float16, device=device)
    args["q"] = wide.as_strided(args["q"].shape, (*pitch, 1), 2**30).copy_(args["q"])
    paged_attention_decode.launch(**args)
    assert torch.equal(args["out"], want)
    args["out"] = wide.as_strided(want.shape, (*pitch, 1), 2**30)
    args["q"] = build_args(BASE, torch.float16, device)["q"]
    paged_attention_decode.launch(**args)
    assert torch.equal(args["out"], want)


class Recorder:
    """In place of a kernel: keeps the grids that it is launched with."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *args, **kwargs: None


@pytest.mark.parametrize(("rows", "heads"), [(70_000, 32), (1, 70_000), (3000, 32)])
def test_c3_no_grid_axis_but_the_first_grows_with_rows_or_heads(rows, heads, monkeypatch):
    args = build_args(BASE, torch.float32, CPU)
    for name in ("q", "out"):
        args[name] = args[name][:1, :1].expand(rows, heads, 16)
    args["row_slot"], args["position"] = (
        args[name][:1].expand(rows) for name in ("row_slot", "position")
    )
    attend, combine = Recorder(), Recorder()
    monkeypatch.setattr(module, "_attend_kernel", attend)
    monkeypatch.setattr(module, "_combine_kernel", combine)
    paged_attention_decode.launch(**{**args, "kv_heads": 1})
    for grid in attend.grids + combine.grids:
        assert grid[0] < 2**31 and all(axis <= 65_535 for axis in grid[1:])


@pytest.mark.gpu
def test_c3_three_thousand_rows_of_one_position_equal_their_values(device):
    """One position: the result is its value."""
    rows, heads, width, kv_block = 3000, 32, 64, 16
    arena = torch.zeros(rows + 1, 2 * kv_block * width, dtype=torch.bfloat16, device=device)
    value = torch.randn(rows, width, device=device).bfloat16()
    arena[1:, kv_block * width :][:, :width] = value
    out = torch.full((rows, heads, width), torch.nan, dtype=torch.bfloat16, device=device)
    every = torch.arange(rows, dtype=torch.int32, device=device)
    paged_attention_decode.launch(
        out, arena, torch.randn_like(out.float()).bfloat16(),
        torch.zeros(1, dtype=torch.int64, device=device), every[:, None] + 1, every,
        torch.zeros_like(every), 1, kv_block, 1.0, 0, 0.0,
    )  # fmt: skip
    assert torch.equal(out, value[:, None].expand_as(out))


def test_refuses_heads_that_cannot_be_shared_evenly():
    args = build_args(BASE, torch.float32, CPU)
    with pytest.raises(ContractError, match="4 query heads and 3 KV heads"):
        paged_attention_decode.launch(**{**args, "kv_heads": 3})


@pytest.mark.parametrize(("name", "value"), [("window", -1), ("softcap", -30.0)])
def test_refuses_a_negative_window_or_softcap(name, value):
    args = build_args(BASE, torch.float32, CPU) | {name: value}
    with pytest.raises(ContractError, match="expected both >= 0"):
        paged_attention_decode.launch(**args)
