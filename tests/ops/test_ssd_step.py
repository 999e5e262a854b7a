"""ssd_step: its declaration, padding, clamp, and who may write what."""

import pytest
import torch
from paged_step import PagedStep, changed_pages

from midstream.errors import ContractError
from midstream.ops.ssd_step import SsdShape, draw_ssd, ssd_step
from midstream.ops.testing import build_args, op_suite


def make_step(device, step=(0.0, float("inf")), **changes):
    shape = SsdShape(heads=2, width=12, size=20, step=step)
    args = draw_ssd(torch.Generator().manual_seed(3), 6, torch.float32, shape)
    args |= changes
    del args["out"]
    args = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    rows = {name: args.pop(name) for name in ("x", "dt", "B", "C")}
    return PagedStep(ssd_step.launch, rows, args, shape.elements)


@pytest.fixture
def step(device):
    return make_step(device)


@pytest.mark.parametrize("check", op_suite(ssd_step), ids=str)
def test_obeys_its_declaration(check):
    check.run()


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


def test_steps_below_the_clamp_are_raised_to_it(device):
    low = make_step(device, step=(0.01, 0.5), dt_bias=torch.full((2,), -12.0))
    flat = make_step(device, step=(0.01, 0.01))
    have, want = low.arena(live=[1]), flat.arena(live=[1])
    assert torch.equal(low.run(have, [1], [2]), flat.run(want, [1], [2]))
    assert torch.equal(low.region(have, 2), flat.region(want, 2))


def test_small_steps_keep_their_relative_precision(device):
    # softplus(-12) = 6.1e-6: without log1p, 1 + exp(-12) would keep no more than two digits of it
    tiny = make_step(device, dt=torch.full((6, 2), -12.0), dt_bias=torch.zeros(2))
    arena = tiny.arena(live=[])
    tiny.run(arena, read_page=[0], write_page=[1])
    x, B = tiny.rows["x"][0].double(), tiny.rows["B"][0].double()
    dt = torch.nn.functional.softplus(torch.tensor(-12.0, dtype=torch.float64, device=device))
    want = (dt * x[:, :, None] * B[0]).flatten().float()
    torch.testing.assert_close(tiny.region(arena, 1), want, rtol=1e-6, atol=0.0)


def test_heads_that_groups_do_not_divide_are_refused():
    args = build_args(ssd_step.cases[0], torch.float32, torch.device("cpu"))
    with pytest.raises(ContractError, match="multiple of G"):
        ssd_step.launch(**args | {"B": args["B"].repeat(1, 3, 1)})
