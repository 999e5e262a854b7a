"""gated_delta_step: its declaration, and what is refused."""

import pytest
import torch

from midstream.errors import ContractError
from midstream.ops.gated_delta_step import gated_delta_step
from midstream.ops.testing import build_args, op_suite

BASE = gated_delta_step.cases[0]


@pytest.mark.parametrize("check", op_suite(gated_delta_step), ids=str)
def test_obeys_its_declaration(check):
    check.run()


def test_heads_that_do_not_share_evenly_are_refused(device):
    args = build_args(BASE, torch.float32, device)
    with pytest.raises(ContractError, match="v's heads a multiple"):
        gated_delta_step.launch(**{**args, "v": args["v"][:, :3]})


def test_unaligned_pages_are_refused(device):
    args = build_args(BASE, torch.float32, device)
    with pytest.raises(ContractError, match="multiple of 128"):
        gated_delta_step.launch(**{**args, "arena": args["arena"][:, :-1].contiguous()})
