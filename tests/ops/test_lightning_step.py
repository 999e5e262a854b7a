"""lightning_step: its declaration, drift over thousands of steps, what is refused."""

import pytest
import torch
from linear_rig import drift, far_page

from midstream.errors import ContractError
from midstream.ops.lightning_step import lightning_step
from midstream.ops.paged_state import linear_states
from midstream.ops.testing import build_args, op_suite

BASE = lightning_step.cases[0]  # rows: in place, to another page, without history, padding
IN_PLACE = 0


@pytest.mark.parametrize("check", op_suite(lightning_step), ids=str)
def test_obeys_its_declaration(check):
    check.run()


def test_a_head_without_memory_forgets_and_the_others_do_not(device):
    args = build_args(BASE, torch.float32, device)
    args["k"].zero_()  # nothing is added
    args["g"].zero_()
    args["g"][3] = float("-inf")
    page = args["write_page"][IN_PLACE].item()
    region = linear_states(args["arena"], args["offset"], 4, 16, 32)[page]
    want = region.clone()
    want[3] = 0.0
    lightning_step.launch(**args)
    assert torch.equal(region, want)


def test_equals_the_lightning_layer_of_transformers(device):
    """One step from zero, then one more: k v^T is added after the decay, and q sees the sum."""
    args = build_args(lightning_step.cases[1], torch.float32, device)  # one row, in place
    slope = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    args["g"] = -slope
    page = args["write_page"][0].item()
    before = linear_states(args["arena"], args["offset"], 4, 16, 32)[page].clone()
    q, k = (args[name][0].repeat_interleave(2, 0)[:, None] for name in ("q", "k"))  # [H, 1, K]
    kv = torch.exp(-slope)[:, None, None] * before + k.transpose(-1, -2) @ args["v"][0][:, None]
    lightning_step.launch(**args)
    torch.testing.assert_close(args["out"][0], (q @ kv)[:, 0], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state_dtype", "bound"),
    [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)],
    ids=["float32", "bfloat16", "float16"],
)
def test_thousands_of_steps_drift_by_the_rounding_of_the_state_only(state_dtype, bound):
    """The decay forgets old rounding: over a memory of 20 tokens a few eps of the state, at any length."""
    assert drift(lightning_step, gates, state_dtype) < bound


@pytest.mark.parametrize("state_dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_other_state_types_are_refused(state_dtype, device):
    args = build_args(BASE, torch.float32, device)
    with pytest.raises(ContractError, match="float32, bfloat16 or float16"):
        lightning_step.launch(**{**args, "arena": args["arena"].to(state_dtype)})


def test_a_decay_of_another_shape_is_refused(device):
    args = build_args(BASE, torch.float32, device)
    with pytest.raises(ContractError, match="one log decay for each of 4 heads"):
        lightning_step.launch(**{**args, "g": args["g"][:3]})


def test_mixed_dtypes_are_refused(device):
    args = build_args(BASE, torch.float32, device)
    with pytest.raises(ContractError, match="cast them"):
        lightning_step.launch(**{**args, "k": args["k"].half()})


@pytest.mark.gpu
def test_pages_behind_two_to_the_31_elements_are_reached():
    near = build_args(BASE, torch.float16, torch.device("cuda"))
    near["arena"] = near["arena"].half()
    far = {**near, **far_page(near, IN_PLACE)}
    lightning_step(**far)
    lightning_step(**near)
    assert torch.equal(far["out"][0], near["out"][IN_PLACE])


def gates(rng, tokens, shape):
    return {"g": torch.full((1,), -0.05)}
