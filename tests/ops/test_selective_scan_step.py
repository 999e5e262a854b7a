"""selective_scan_step: its declaration, who may write what, precision of the state, what is refused."""

import pytest
import torch
from drift_rig import DriftRig
from paged_step import PagedStep, changed_pages

from midstream.errors import ContractError
from midstream.ops.case_data import element_offset, index
from midstream.ops.selective_scan_chunk import selective_scan_chunk
from midstream.ops.selective_scan_step import SelectiveShape, draw_selective, selective_scan_step
from midstream.ops.testing import build_args, op_suite

TOKENS = ("x", "dt", "B", "C")


def make_step(device, **changes):
    shape = SelectiveShape(channels=13, size=12)
    args = draw_selective(torch.Generator().manual_seed(3), 6, torch.float32, shape) | changes
    del args["out"]
    args = {name: value.to(device) for name, value in args.items()}
    rows = {name: args.pop(name) for name in TOKENS}
    return PagedStep(selective_scan_step.launch, rows, args, shape.elements)


@pytest.fixture
def step(device):
    return make_step(device)


@pytest.mark.parametrize("check", op_suite(selective_scan_step), ids=str)
def test_obeys_its_declaration(check):
    check.run()


def test_equals_one_step_of_the_mixer_of_transformers(step):
    mamba = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    arena = step.arena(live=[1])
    x, dt, B, C = (step.rows[name][:1] for name in TOKENS)
    A_log, skip, bias = (step.params[name] for name in ("A_log", "skip", "dt_bias"))
    update = getattr(mamba, "mamba_selective_state_update", None)
    if update is None:
        pytest.skip("this release of transformers has the step inside its mixer")
    state = step.region(arena, 1).view(1, 13, 12).clone()
    want = update(
        state, x, dt, -A_log.exp(), B[:, 0], C[:, 0], skip, dt_bias=bias, dt_softplus=True
    )
    have = step.run(arena, read_page=[1], write_page=[1])
    torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(step.region(arena, 1), state.flatten(), rtol=1e-5, atol=1e-5)


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


def test_small_steps_keep_their_relative_precision(device):
    # softplus(-12) = 6.1e-6: without log1p, 1 + exp(-12) would keep no more than two digits of it
    tiny = make_step(device, dt=torch.full((6, 13), -12.0), dt_bias=torch.zeros(13))
    arena = tiny.arena(live=[])
    tiny.run(arena, read_page=[0], write_page=[1])
    x, B = tiny.rows["x"][0].double(), tiny.rows["B"][0, 0].double()
    dt = torch.nn.functional.softplus(torch.tensor(-12.0, dtype=torch.float64, device=device))
    want = torch.outer(dt * x, B).flatten().float()
    torch.testing.assert_close(tiny.region(arena, 1), want, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    ("state_dtype", "bound"),
    [(torch.float32, 2e-6), (torch.bfloat16, 4e-2), (torch.float16, 4e-3)],
    ids=["float32", "bfloat16", "float16"],
)
def test_thousands_of_steps_drift_by_the_rounding_of_the_state_only(state_dtype, bound, device):
    """The decay forgets old rounding, so that the bound is some eps of the state at any length."""
    shape = SelectiveShape(channels=4, size=8, step=-4.0)  # remembers some 50 tokens

    def draw(tokens):
        return draw_selective(torch.Generator().manual_seed(5), tokens, torch.float32, shape)

    rig = DriftRig(selective_scan_step, selective_scan_chunk, draw, TOKENS)
    errors = rig.errors(state_dtype, device)
    assert max(errors) < bound, errors


@pytest.mark.parametrize("state_dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_other_state_types_are_refused(state_dtype):
    args = build_args(selective_scan_step.cases[0], torch.float32, torch.device("cpu"))
    with pytest.raises(ContractError, match="keeps its state in float32, bfloat16, float16"):
        selective_scan_step.launch(**args | {"arena": args["arena"].to(state_dtype)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"A_log": torch.zeros(24, 8)}, "do not agree"),
        ({"B": torch.zeros(5, 5, 16), "C": torch.zeros(5, 5, 16)}, "multiple of G"),
        ({"x": torch.zeros(24, 5).T}, "adjacent elements"),
        ({"A_log": torch.zeros(16, 24).T}, "contiguous"),
    ],
    ids=["state_size", "groups", "channels_apart", "transposed_decay"],
)
def test_arguments_that_the_kernel_cannot_read_are_refused(changes, message):
    args = build_args(selective_scan_step.cases[0], torch.float32, torch.device("cpu"))
    with pytest.raises(ContractError, match=message):
        selective_scan_step.launch(**args | changes)


@pytest.mark.gpu
def test_pages_behind_two_to_the_31_elements_are_reached():
    device = torch.device("cuda")
    far = torch.zeros((3, 2**30 + 2**29), dtype=torch.float16, device=device)
    near = torch.zeros((3, 512), dtype=torch.float16, device=device)
    args = build_args(selective_scan_step.cases[1], torch.float16, device)
    start, page = element_offset(0).to(device), index(2).to(device)
    far[2, :384] = near[2, :384] = torch.randn(384, device=device).half()
    for arena in (far, near):
        out = torch.empty_like(args["x"])
        pages = {"offset": start, "read_page": page, "write_page": page}
        selective_scan_step(**args | pages | {"arena": arena, "out": out})
    assert torch.equal(far[2, :512], near[2])
    assert far[0].count_nonzero() == 0
