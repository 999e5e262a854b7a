"""rg_lru_step: its declaration, the reset, who may write what, precision of the state, what is refused."""

import pytest
import torch
from drift_rig import DriftRig
from paged_step import PagedStep, changed_pages

from midstream.errors import ContractError
from midstream.ops.case_data import element_offset, index
from midstream.ops.rg_lru_chunk import rg_lru_chunk
from midstream.ops.rg_lru_step import RgLruShape, draw_rg_lru, rg_lru_step
from midstream.ops.testing import build_args, op_suite

CHANNELS = 13
TOKENS = ("x", "input_gate", "recurrent_gate", "position")


def make_step(device, first=7, **changes):
    args = draw_rg_lru(torch.Generator().manual_seed(3), 6, torch.float32, RgLruShape(CHANNELS))
    args |= {"position": torch.arange(first, first + 6, dtype=torch.int32)} | changes
    del args["out"]
    args = {name: value.to(device) for name, value in args.items()}
    rows = {name: args.pop(name) for name in TOKENS}
    return PagedStep(rg_lru_step.launch, rows, args, CHANNELS)


@pytest.fixture
def step(device):
    return make_step(device)


@pytest.mark.parametrize("check", op_suite(rg_lru_step), ids=str)
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


def test_at_position_zero_the_state_is_the_gated_input_whatever_the_page_held(device):
    begins = make_step(device, first=0)
    arena = begins.arena(live=[])  # all pages hold NaN
    out = begins.run(arena, read_page=[1], write_page=[1])
    want = begins.rows["x"][0] * torch.sigmoid(begins.rows["input_gate"][0])
    torch.testing.assert_close(out[0], want, rtol=1e-6, atol=1e-7)
    assert torch.equal(begins.region(arena, 1), out[0])


def test_the_input_of_a_unit_that_hardly_decays_keeps_its_relative_precision(device):
    # log_a = -8 * softplus(-30) / 2 = -3.7e-13: in fp32 exp(log_a) is 1, and 1 - a^2 would be 0
    slow = make_step(
        device,
        recurrent_param=torch.full((CHANNELS,), -30.0),
        recurrent_gate=torch.zeros(6, CHANNELS),
    )
    arena = slow.arena(live=[])
    slow.run(arena, read_page=[0], write_page=[1])
    log_a = -4 * torch.nn.functional.softplus(torch.tensor(-30.0, dtype=torch.float64))
    gated = slow.rows["x"][0].double() * torch.sigmoid(slow.rows["input_gate"][0].double())
    want = (torch.sqrt(-torch.expm1(2 * log_a)).item() * gated).float()
    torch.testing.assert_close(slow.region(arena, 1), want, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("log_a", [-1e-4, -0.01, -0.24, -0.26, -1.0, -20.0])
def test_the_scale_of_the_input_is_right_on_both_sides_of_its_series(log_a, device):
    wide = {"dtype": torch.float64}
    param = torch.log(torch.expm1(torch.tensor(-log_a / 4, **wide)))  # softplus of it is -log_a / 4
    ones = {name: torch.ones(6, CHANNELS) for name in ("x", "input_gate")}
    gate = {"recurrent_gate": torch.zeros(6, CHANNELS)}
    unit = make_step(device, recurrent_param=param.float().expand(CHANNELS).clone(), **ones, **gate)
    arena = unit.arena(live=[])
    unit.run(arena, read_page=[0], write_page=[1])
    exact = -4 * torch.nn.functional.softplus(param.float().double(), threshold=40.0)
    want = torch.sqrt(-torch.expm1(2 * exact)) * torch.sigmoid(torch.ones(CHANNELS, **wide))
    torch.testing.assert_close(unit.region(arena, 1).cpu().double(), want, rtol=5e-7, atol=0.0)


@pytest.mark.parametrize(
    ("state_dtype", "bound"),
    [(torch.float32, 1e-6), (torch.bfloat16, 4e-2), (torch.float16, 6e-3)],
    ids=["float32", "bfloat16", "float16"],
)
def test_thousands_of_steps_drift_by_the_rounding_of_the_state_only(state_dtype, bound, device):
    """The decay forgets old rounding, so that the bound is some eps of the state at any length."""
    shape = RgLruShape(channels=24, param=-4.0)  # remembers some 10 to 100 tokens

    def draw(tokens):
        args = draw_rg_lru(torch.Generator().manual_seed(5), tokens, torch.float32, shape)
        return args | {"position": torch.arange(tokens, dtype=torch.int32)}

    errors = DriftRig(rg_lru_step, rg_lru_chunk, draw, TOKENS).errors(state_dtype, device)
    assert max(errors) < bound, errors


@pytest.mark.parametrize("state_dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_other_state_types_are_refused(state_dtype):
    args = build_args(rg_lru_step.cases[0], torch.float32, torch.device("cpu"))
    with pytest.raises(ContractError, match="keeps its state in float32, bfloat16, float16"):
        rg_lru_step.launch(**args | {"arena": args["arena"].to(state_dtype)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_gate": torch.zeros(6, 4, 6)}, "flatten the blocks"),
        ({"recurrent_param": torch.zeros(12)}, "recurrent_param is"),
        ({"x": torch.zeros(24, 6).T}, "adjacent channels"),
    ],
    ids=["blocks", "parameter", "channels_apart"],
)
def test_arguments_that_the_kernel_cannot_read_are_refused(changes, message):
    args = build_args(rg_lru_step.cases[0], torch.float32, torch.device("cpu"))
    with pytest.raises(ContractError, match=message):
        rg_lru_step.launch(**args | changes)


@pytest.mark.gpu
def test_pages_behind_two_to_the_31_elements_are_reached():
    device = torch.device("cuda")
    far = torch.zeros((3, 2**30 + 2**29), dtype=torch.float16, device=device)
    near = torch.zeros((3, 64), dtype=torch.float16, device=device)
    args = build_args(rg_lru_step.cases[1], torch.float16, device)
    start, page = element_offset(0).to(device), index(2).to(device)
    far[2, :24] = near[2, :24] = torch.randn(24, device=device).half()
    for arena in (far, near):
        out = torch.empty_like(args["x"])
        pages = {"offset": start, "read_page": page, "write_page": page}
        rg_lru_step(**args | pages | {"arena": arena, "out": out})
    assert torch.equal(far[2, :64], near[2])
    assert far[0].count_nonzero() == 0
