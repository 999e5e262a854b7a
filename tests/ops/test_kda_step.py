"""kda_step: its declaration, drift over thousands of steps, what is refused."""

import pytest
import torch
from linear_rig import drift, far_page

from midstream.errors import ContractError
from midstream.ops.gated_delta_step import gated_delta_step
from midstream.ops.kda_step import draw_kda_gates, kda_step
from midstream.ops.paged_state import linear_states
from midstream.ops.testing import build_args, op_suite

BASE = kda_step.cases[0]  # rows: in place, to another page, without history, padding
IN_PLACE = 0


@pytest.mark.parametrize("check", op_suite(kda_step), ids=str)
def test_obeys_its_declaration(check):
    check.run()


def test_equal_decay_of_all_channels_is_the_gated_delta_rule(device):
    args, plain = (build_args(BASE, torch.float32, device) for _ in range(2))
    plain["g"] = plain["g"][..., 0].contiguous()
    args["g"] = plain["g"][..., None].expand_as(args["g"]).contiguous()
    kda_step.launch(**args)
    gated_delta_step.launch(**plain)
    torch.testing.assert_close(args["out"], plain["out"], rtol=0, atol=1e-6)
    torch.testing.assert_close(args["arena"], plain["arena"], rtol=0, atol=1e-6, equal_nan=True)


def test_a_channel_without_memory_forgets_and_the_others_do_not(device):
    args = build_args(BASE, torch.float32, device)
    args["beta"].zero_()  # nothing is added
    args["g"].zero_()
    args["g"][..., 3] = float("-inf")
    page = args["write_page"][IN_PLACE].item()
    region = linear_states(args["arena"], args["offset"], 4, 16, 32)[page]
    want = region.clone()
    want[:, 3] = 0.0
    kda_step.launch(**args)
    assert torch.equal(region, want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state_dtype", "bound"),
    [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)],
    ids=["float32", "bfloat16", "float16"],
)
def test_thousands_of_steps_drift_by_the_rounding_of_the_state_only(state_dtype, bound):
    """Decay and deletion forget old rounding, so the bound is some eps of the state at any length."""
    assert drift(kda_step, gates, state_dtype) < bound


@pytest.mark.parametrize("state_dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_other_state_types_are_refused(state_dtype, device):
    args = build_args(BASE, torch.float32, device)
    with pytest.raises(ContractError, match="float32, bfloat16 or float16"):
        kda_step.launch(**{**args, "arena": args["arena"].to(state_dtype)})


def test_a_decay_of_another_shape_is_refused(device):
    args = build_args(BASE, torch.float32, device)
    with pytest.raises(ContractError, match=r"g must be \[n, H, K\]"):
        kda_step.launch(**{**args, "g": args["g"][..., 0]})


def test_mixed_dtypes_are_refused(device):
    args = build_args(BASE, torch.float32, device)
    with pytest.raises(ContractError, match="cast them"):
        kda_step.launch(**{**args, "k": args["k"].half()})


@pytest.mark.gpu
def test_pages_behind_two_to_the_31_elements_are_reached():
    near = build_args(BASE, torch.float16, torch.device("cuda"))
    near["arena"] = near["arena"].half()
    far = {**near, **far_page(near, IN_PLACE)}
    kda_step(**far)
    kda_step(**near)
    assert torch.equal(far["out"][0], near["out"][IN_PLACE])


def gates(rng, tokens, shape):
    return draw_kda_gates(rng, tokens, torch.float32, shape)
