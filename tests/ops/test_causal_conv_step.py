"""causal_conv_step: kernel against float64 and conv1d, padding, and who may write what."""

import pytest
import torch
import torch.nn.functional as F
from paged_step import PagedStep, changed_pages

from midstream.errors import ContractError
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
def test_kernel_equals_float64_reference(spec, case, device):
    check_kernel(spec, case, torch.float32, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("spec", "case"), list(op_cases(causal_conv_step)), ids=ids)
def test_bf16_kernel_equals_float64_reference(spec, case, device):
    check_kernel(spec, case, torch.bfloat16, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("spec", "case"), list(op_cases(causal_conv_step)), ids=ids)
def test_cpu_implementation_equals_float64_reference(spec, case, dtype):
    check_reference(spec, case, dtype)


def test_is_a_well_formed_torch_operator():
    check_registration(causal_conv_step, causal_conv_step.cases[0])


def test_padded_rows_write_no_page_and_their_output_is_zero(step):
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
