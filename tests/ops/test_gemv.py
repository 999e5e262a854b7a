"""gemv: obeys its declaration, and refuses what its kernel could not read."""

import pytest
import torch

from midstream.errors import ContractError
from midstream.ops.gemv import MAX_WIDTH, gemv
from midstream.ops.testing import Check, build_args, op_suite

CPU = torch.device("cpu")


@pytest.mark.parametrize("check", op_suite(gemv, CPU), ids=str)
def test_obeys_its_declaration(check: Check) -> None:
    check.run()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("x", torch.zeros(2, 64), "128 elements"),
        ("x", torch.zeros(128)[::2], "without gaps"),
        ("out", torch.zeros(23), "23"),
        ("weight", torch.zeros(64, 24).T, "rows without gaps"),
        ("up", torch.zeros(24, 63), "up has shape"),
        ("norm_weight", torch.zeros(63), "norm_weight has shape"),
        ("residual", torch.zeros(1), "residual has 1"),
        ("x", torch.zeros(64, dtype=torch.float64), "torch.float64"),
        ("residual", torch.zeros(24, dtype=torch.int32), "torch.int32"),
    ],
)
def test_refuses_vectors_and_matrices_that_do_not_fit(name, value, says) -> None:
    args = build_args(gemv.cases[0], torch.float32, CPU) | {name: value}
    with pytest.raises(ContractError, match=says):
        gemv.launch(**args)


@pytest.mark.parametrize("width", [0, MAX_WIDTH + 1])
def test_refuses_rows_that_no_program_can_hold(width: int) -> None:
    args = build_args(gemv.cases[0], torch.float32, CPU)
    args |= {"x": torch.zeros(width), "weight": torch.zeros(24, width)}
    with pytest.raises(ContractError, match="at most"):
        gemv.launch(**args)
