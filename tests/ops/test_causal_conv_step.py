"""causal_conv_step: kernel against float64 and conv1d, padding, and who may write what."""

import pytest
import torch
import torch.nn.functional as F
from grid_recorder import GridRecorder
from paged_step import PAGES, START, PagedStep, changed_pages

from midstream.errors import ContractError
from midstream.ops import causal_conv_step as op_file
from midstream.ops.case_data import element_offset, index
from midstream.ops.causal_conv_step import causal_conv_step
from midstream.ops.testing import (
    build_args,
    check_kernel,
    check_reference,
    check_registration,
    op_cases,
)

ids = [case.id for case in causal_conv_step.cases]
CHANNELS, TAPS = 20, 4


@pytest.fixture
def step(device):
    generator = torch.Generator().manual_seed(3)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(device)
        for shape in ((6, CHANNELS), (CHANNELS, TAPS), (CHANNELS,))
    )
    params = {"weight": weight, "bias": bias, "silu": True}
    return PagedStep(causal_conv_step.launch, {"x": x}, params, (TAPS - 1) * CHANNELS)


@pytest.mark.parametrize(("spec", "case"), list(op_cases(causal_conv_step)), ids=ids)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_equals_float64_reference(spec, case, dtype, device):
    check_kernel(spec, case, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("spec", "case"), list(op_cases(causal_conv_step)), ids=ids)
def test_bf16_kernel_equals_float64_reference(spec, case, device):
    check_kernel(spec, case, torch.bfloat16, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("spec", "case"), list(op_cases(causal_conv_step)), ids=ids)
def test_cpu_implementation_equals_float64_reference(spec, case, dtype):
    check_reference(spec, case, dtype)


def test_is_a_well_formed_torch_operator():
    check_registration(causal_conv_step, causal_conv_step.cases[0])


def test_a2_a3_padded_rows_write_no_page_and_their_output_is_zero(step):
    arena = step.arena(live=[1])
    before = arena.clone()
    out = step.run(arena, read_page=[1, 2, 0], write_page=[0, 0, 0])
    assert changed_pages(before, arena) == []
    assert (out == 0).all()


def test_a_row_that_moves_leaves_the_page_that_it_read(step):
    arena = step.arena(live=[1])
    before = arena.clone()
    step.run(arena, read_page=[1], write_page=[2])
    assert changed_pages(before, arena) == [2]


def test_in_place_equals_moving_bit_for_bit(step):
    moved, same = step.arena(live=[1]), step.arena(live=[1])
    out_moved = step.run(moved, read_page=[1], write_page=[2])
    out_same = step.run(same, read_page=[1], write_page=[1])
    assert torch.equal(out_moved, out_same)
    assert torch.equal(step.region(moved, 2), step.region(same, 1))


def test_the_null_page_reads_as_zeros(step):
    fresh, zeros = step.arena(live=[]), step.arena(live=[])
    step.region(zeros, 3).zero_()
    out_fresh = step.run(fresh, read_page=[0], write_page=[2])
    out_zeros = step.run(zeros, read_page=[3], write_page=[2])
    assert torch.equal(out_fresh, out_zeros)
    assert torch.equal(step.region(fresh, 2), step.region(zeros, 2))


def test_rows_may_share_the_page_that_they_read(step):
    arena = step.arena(live=[1])
    before = arena.clone()
    together = step.run(arena, read_page=[1, 1, 0], write_page=[2, 3, 4])
    assert changed_pages(before, arena) == [2, 3, 4]
    alone = step.arena(live=[1])
    assert torch.equal(step.run(alone, read_page=[1], write_page=[2])[0], together[0])
    assert torch.equal(step.region(alone, 2), step.region(arena, 2))


def test_a1_a2_the_null_page_and_the_last_page_belong_to_nobody_else(step):
    """Live rows have the lowest and the highest page; padding stands before, between and behind."""
    arena = step.arena(live=[1, PAGES - 1])
    before = arena.clone()
    out = step.run(arena, read_page=[0, 1, 0, PAGES - 1, 0], write_page=[0, 1, 0, PAGES - 1, 0])
    assert changed_pages(before, arena) == [1, PAGES - 1]
    assert out.isfinite().all()
    assert torch.equal(out[0], torch.zeros_like(out[0]))


def test_a4_entries_behind_the_rows_are_stale(step):
    """The index buffers are longer than the step: their tail names the page of a parked request."""
    arena = step.arena(live=[1, 3])
    before = arena.clone()
    args = {"x": step.rows["x"][:1], "offset": element_offset(START).to(arena.device)}
    pages = index(1, 3, 3).to(arena.device)
    out = torch.empty_like(args["x"])
    step.call(arena=arena, out=out, **args, **step.params, read_page=pages, write_page=pages)
    assert changed_pages(before, arena) == [1]


def test_a5_rows_and_pages_are_different_numbers(step):
    arena = step.arena(live=[2, 7])
    before = arena.clone()
    out = step.run(arena, read_page=[7, 0, 2], write_page=[5, 0, 1])
    assert changed_pages(before, arena) == [1, 5]
    for row, (read, write) in {0: (7, 5), 2: (2, 1)}.items():
        alone = before.clone()
        one = PagedStep(step.call, {"x": step.rows["x"][row : row + 1]}, step.params, step.size)
        assert torch.equal(one.run(alone, read_page=[read], write_page=[write])[0], out[row])
        assert torch.equal(step.region(alone, write), step.region(arena, write))


@pytest.mark.parametrize("rows", [1, 70_000])
def test_c3_rows_and_channels_beyond_65535_fit_the_grid(rows, monkeypatch):
    recorder = GridRecorder()
    monkeypatch.setattr(op_file, "_causal_conv_step_kernel", recorder)
    channels = 70_000
    x = torch.zeros(1, channels).expand(rows, channels)
    causal_conv_step.launch(
        torch.zeros(1, 64), x, x, torch.zeros(channels, 4), None, None, None, None, True
    )
    assert recorder.grids[0][0] == rows  # only the first axis may be longer than 65,535
    assert max(recorder.grids[0][1:]) <= 65_535


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_k1_a_window_is_the_last_inputs_bit_for_bit_after_any_number_of_steps(dtype, device):
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter rounds bfloat16 wrongly")
    gen = torch.Generator().manual_seed(8)
    x = torch.randn(12, CHANNELS, generator=gen).to(device, dtype)
    weight = torch.randn(CHANNELS, TAPS, generator=gen).to(device, dtype)
    arena = torch.zeros(2, 64, dtype=dtype, device=device)
    page, zero = index(1).to(device), element_offset(0).to(device)
    for token in x:
        causal_conv_step.launch(
            arena, torch.empty_like(token[None]), token[None], weight, None, zero, page, page, True
        )
    assert torch.equal(arena[1, : (TAPS - 1) * CHANNELS].view(TAPS - 1, -1), x[1 - TAPS :])


@pytest.mark.parametrize("silu", [True, False], ids=["silu", "linear"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("taps", range(2, 9))
def test_every_width_equals_conv1d(taps, bias, silu, device):
    gen = torch.Generator().manual_seed(taps)
    x = torch.randn(taps + 2, CHANNELS, generator=gen).to(device)
    weight = torch.randn(CHANNELS, taps, generator=gen).to(device)
    shift = torch.randn(CHANNELS, generator=gen).to(device) if bias else None
    want = F.conv1d(F.pad(x.T, (taps - 1, 0)), weight[:, None], shift, groups=CHANNELS).T
    params = {"weight": weight, "bias": shift, "silu": silu}
    size = (taps - 1) * CHANNELS
    arena = PagedStep(causal_conv_step.launch, {"x": x}, params, size).arena(live=[])
    for token in range(x.shape[0]):
        one = PagedStep(causal_conv_step.launch, {"x": x[token : token + 1]}, params, size)
        out = one.run(arena, read_page=[1 if token else 0], write_page=[1])
        goal = F.silu(want[token]) if silu else want[token]
        torch.testing.assert_close(out[0], goal, rtol=0.0, atol=4e-6)


@pytest.mark.gpu
def test_f2_a_window_that_shifts_within_its_page_never_races(device):
    """One page, one thousand steps, every width: equal to a step that moves to another page."""
    for taps in range(2, 9):
        gen = torch.Generator().manual_seed(taps)
        x, weight = (torch.randn(n, 4352, generator=gen).to(device) for n in (64, taps))
        arena = torch.randn(129, 7 * 4352 + 64, generator=gen).to(device)
        pages = torch.arange(1, 65, dtype=torch.int32, device=device)
        args = (x, weight.T.contiguous(), None, element_offset(0).to(device), pages)
        moved = arena.clone()
        causal_conv_step.launch(moved, torch.empty_like(x), *args, pages + 64, True)
        for _ in range(1000):
            same = arena.clone()
            causal_conv_step.launch(same, torch.empty_like(x), *args, pages, True)
            size = (taps - 1) * 4352
            assert torch.equal(same[1:65, :size], moved[65:, :size])


def test_no_rows_are_no_work(step):
    arena = step.arena(live=[1])
    before = arena.clone()
    step.run(arena, read_page=[1], write_page=[])
    assert changed_pages(before, arena) == []


def test_token_by_token_equals_conv1d(step):
    x, (weight, bias, _) = step.rows["x"], step.params.values()
    want = F.silu(F.conv1d(F.pad(x.T, (TAPS - 1, 0)), weight[:, None], bias, groups=CHANNELS)).T
    arena = step.arena(live=[])
    for token in range(x.shape[0]):
        one = PagedStep(step.call, {"x": x[token : token + 1]}, step.params, step.size)
        out = one.run(arena, read_page=[1 if token else 0], write_page=[1])
        torch.testing.assert_close(out[0], want[token], rtol=0.0, atol=2e-6)


def test_arenas_with_odd_page_pitch_are_refused():
    args = build_args(causal_conv_step.cases[0], torch.float32, torch.device("cpu"))
    with pytest.raises(ContractError, match="bytes apart"):
        causal_conv_step.launch(**args | {"arena": torch.zeros(12, 101)})


def test_channels_that_are_not_adjacent_are_refused():
    args = build_args(causal_conv_step.cases[0], torch.float32, torch.device("cpu"))
    with pytest.raises(ContractError, match="adjacent channels"):
        causal_conv_step.launch(**args | {"x": args["x"].T.contiguous().T})
