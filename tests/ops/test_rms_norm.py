"""rms_norm: obeys its declaration, and refuses what its kernel could not read."""

import pytest
import torch

from midstream.errors import ContractError
from midstream.ops.finish_rows import MAX_NORMED
from midstream.ops.rms_norm import rms_norm
from midstream.ops.testing import Check, build_args, op_suite

CPU = torch.device("cpu")


@pytest.mark.parametrize("check", op_suite(rms_norm, CPU), ids=str)
def test_obeys_its_declaration(check: Check) -> None:
    check.run()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("normed", torch.zeros(1, 5, 63), "normed is .* of shape"),
        ("normed", torch.zeros(1, 5, 65)[..., :64], "follow each other"),
        ("gate", torch.zeros(5, 64), "gate is .* of shape"),
        ("weight", torch.zeros(63), "weight is .* of shape"),
        ("x", torch.zeros(1, 64, 5).mT, "x has strides"),
        ("weight", torch.zeros(128)[::2], "weight has strides"),
        ("x", torch.zeros(1, 5, 64, dtype=torch.float64), "torch.float64"),
    ],
)
def test_refuses_rows_that_do_not_fit(name, value, says) -> None:
    args = build_args(rms_norm.cases[0], torch.float32, CPU) | {name: value}
    with pytest.raises(ContractError, match=says):
        rms_norm.launch(**args)


def test_refuses_rows_of_two_axes_that_do_not_follow_each_other() -> None:
    rows = torch.zeros(2, 3, 8)[:, :2]
    with pytest.raises(ContractError, match="equally far apart"):
        rms_norm.launch(rows.clone(), rows, None, torch.zeros(8), 1e-5, 0.0, False)


@pytest.mark.parametrize("shape", [(2, 0), (2, MAX_NORMED + 1), ()], ids=str)
def test_refuses_rows_that_no_program_can_hold(shape: tuple[int, ...]) -> None:
    rows = torch.zeros(shape)
    with pytest.raises(ContractError, match="at most"):
        rms_norm.launch(rows, rows, None, torch.zeros(1), 1e-5, 0.0, False)
