"""The kernel behind all steps of linear attention: who may write what, and equal bits in any company."""

import pytest
import torch

from midstream.ops.gated_delta_step import gated_delta_step
from midstream.ops.guarded_memory import same_bits
from midstream.ops.kda_step import draw_kda_gates, kda_step
from midstream.ops.lightning_step import draw_decays, lightning_step
from midstream.ops.linear_heads import draw_gates, step_case
from midstream.ops.linear_step import launch_linear_step
from midstream.ops.testing import build_args, check_kernel, expected

SPECS = (gated_delta_step, kda_step, lightning_step)
GATES = {
    "gated_delta_step": draw_gates,
    "kda_step": draw_kda_gates,
    "lightning_step": draw_decays,
}
BOTH_TYPES = [torch.float32, torch.float16]
IN_PLACE, TO_OTHER, FRESH, PADDED = range(4)  # rows of the base case
PER_ROW = ("q", "k", "v", "read_page", "write_page")

each_op = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
each_type = pytest.mark.parametrize("dtype", BOTH_TYPES, ids=["float32", "float16"])


@each_op
def test_is_what_the_op_says(spec, device):
    check_kernel(spec, spec.cases[0], torch.float32, device)


@each_op
def test_sums_over_states_of_16_bits_are_as_exact_as_fp32(spec, device):
    args = build_args(own_pages(spec), torch.float16, device)
    args["out"] = args["out"].float()
    want = expected(spec, args)["out"]
    launch_linear_step(**{"beta": None, **args})
    error = (args["out"].cpu().double() - want).abs().max() / want.abs().max()
    assert error < 2e-6


@each_op
@each_type
def test_the_widest_keys_that_are_accepted_are_summed_whole(spec, dtype, device):
    case = step_case(
        GATES[spec.name],
        rows=2,
        heads=1,
        key_heads=1,
        key_width=256,
        value_width=9,
        state_dtype=None,
    )
    check_kernel(spec, case, dtype, device)


@each_op
@each_type
def test_a_row_alone_equals_the_same_row_among_others_bit_for_bit(spec, dtype, device):
    together, alone = (build_args(own_pages(spec), dtype, device) for _ in range(2))
    spec.launch(**together)
    split = ["out", *PER_ROW] + ["g", "beta"] * (spec is not lightning_step)  # its g is of all rows
    for row in range(alone["q"].shape[0]):
        spec.launch(**{**alone, **{name: alone[name][row : row + 1] for name in split}})
    assert same_bits(alone["arena"], together["arena"])
    assert same_bits(alone["out"], together["out"])


@each_op
@each_type
def test_padded_rows_touch_no_page_and_their_output_is_zero(spec, dtype, device):
    args = build_args(own_pages(spec), dtype, device)
    args["write_page"][:] = 0
    for name in ("q", "k", "v", "g"):
        args[name][:] = float("nan")
    before = args["arena"].clone()
    spec.launch(**args)
    assert same_bits(args["arena"], before)
    assert args["out"].count_nonzero() == 0


@each_op
def test_a_read_page_that_is_not_written_keeps_its_bytes(spec, device):
    args = build_args(spec.cases[0], torch.float32, device)
    page = args["read_page"][TO_OTHER].item()
    assert page != args["write_page"][TO_OTHER].item()
    before = args["arena"][page].clone()
    spec.launch(**args)
    assert same_bits(args["arena"][page], before)


@each_op
def test_in_place_equals_to_another_page_bit_for_bit(spec, device):
    away, home = (build_args(spec.cases[0], torch.float32, device) for _ in range(2))
    home["read_page"][TO_OTHER] = home["write_page"][TO_OTHER]
    read, write = (away[name][TO_OTHER].item() for name in ("read_page", "write_page"))
    home["arena"][write] = home["arena"][read]
    spec.launch(**away)
    spec.launch(**home)
    region = ~away["arena"][write].isnan()
    assert region.any()
    assert torch.equal(home["arena"][write][region], away["arena"][write][region])
    assert torch.equal(home["out"], away["out"])


def test_the_keys_of_a_value_are_neighbours_in_the_page(device):
    args = build_args(lightning_step.cases[0], torch.float32, device)
    lightning_step.launch(**args)
    page, start = args["write_page"][FRESH].item(), int(args["offset"])
    state = args["arena"][page, start : start + 4 * 32 * 16].view(4, 32, 16)
    key = args["k"][FRESH].repeat_interleave(2, dim=0)
    assert torch.equal(state, args["v"][FRESH][:, :, None] * key[:, None, :])


@each_op
def test_no_history_equals_a_page_of_zeros(spec, device):
    null, zeros = (build_args(spec.cases[0], torch.float32, device) for _ in range(2))
    page = zeros["write_page"][FRESH].item()
    zeros["read_page"][FRESH] = page
    zeros["arena"][page] = 0.0
    spec.launch(**null)
    spec.launch(**zeros)
    assert torch.equal(null["out"], zeros["out"])


def own_pages(spec):
    """The case with pages of the activations' type, whose sums tensor cores take in 16 bits."""
    return next(case for case in spec.cases if case.id == "R4-H4-G2-K16-V32-own")
