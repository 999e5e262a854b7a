"""gated_delta_step: kernel against float64, padding, and who may write what."""

import pytest
import torch
import triton.language as tl

from midstream.errors import ContractError
from midstream.ops import gated_delta_step as source
from midstream.ops.gated_delta_step import gated_delta_step
from midstream.ops.testing import build_args, check_kernel, op_suite

BASE = gated_delta_step.cases[0]  # rows: in place, to another page, without history, padding
IN_PLACE, TO_OTHER, FRESH, PADDED = range(4)


@pytest.mark.parametrize("check", op_suite(gated_delta_step), ids=str)
def test_obeys_its_declaration(check):
    check.run()


@pytest.mark.parametrize(
    "case", [c for c in gated_delta_step.cases if "K5" in c.id], ids=lambda c: c.id
)
def test_sums_that_the_gpu_takes_together_are_right(case, monkeypatch, device):
    monkeypatch.setattr(source, "_INTERPRETED", tl.constexpr(False))
    check_kernel(gated_delta_step, case, torch.float32, device)


def test_padded_rows_touch_no_page_and_their_output_is_zero(device):
    args = build_args(BASE, torch.float32, device)
    args["write_page"][:] = 0
    args["q"][:] = args["k"][:] = args["v"][:] = float("nan")
    before = args["arena"].clone()
    gated_delta_step.launch(**args)
    assert same_bytes(args["arena"], before)
    assert args["out"].count_nonzero() == 0


def test_a_read_page_that_is_not_written_keeps_its_bytes(device):
    args = build_args(BASE, torch.float32, device)
    page = args["read_page"][TO_OTHER].item()
    assert page != args["write_page"][TO_OTHER].item()
    before = args["arena"][page].clone()
    gated_delta_step.launch(**args)
    assert same_bytes(args["arena"][page], before)


def test_in_place_equals_to_another_page_bit_for_bit(device):
    away, home = (build_args(BASE, torch.float32, device) for _ in range(2))
    home["read_page"][TO_OTHER] = home["write_page"][TO_OTHER]
    read, write = (away[name][TO_OTHER].item() for name in ("read_page", "write_page"))
    home["arena"][write] = home["arena"][read]
    gated_delta_step.launch(**away)
    gated_delta_step.launch(**home)
    assert same_bytes(home["arena"][write], patched(away["arena"][write], home["arena"][write]))
    assert torch.equal(home["out"], away["out"])


def test_no_history_equals_a_page_of_zeros(device):
    null, zeros = (build_args(BASE, torch.float32, device) for _ in range(2))
    page = zeros["write_page"][FRESH].item()
    zeros["read_page"][FRESH] = page
    zeros["arena"][page] = 0.0
    gated_delta_step.launch(**null)
    gated_delta_step.launch(**zeros)
    assert torch.equal(null["out"], zeros["out"])


def test_heads_that_do_not_share_evenly_are_refused(device):
    args = build_args(BASE, torch.float32, device)
    with pytest.raises(ContractError, match="v's heads a multiple"):
        gated_delta_step.launch(**{**args, "v": args["v"][:, :3]})


def test_unaligned_pages_are_refused(device):
    args = build_args(BASE, torch.float32, device)
    with pytest.raises(ContractError, match="multiple of 128"):
        gated_delta_step.launch(**{**args, "arena": args["arena"][:, :-1].contiguous()})


def patched(page: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The page, with what lies outside of the region taken from another one."""
    return torch.where(page.isnan(), like, page)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
