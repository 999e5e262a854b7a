"""skinny_linear: obeys its declaration, treats rows alike, and refuses what its kernels could not read."""

import pytest
import torch

from midstream.errors import ContractError
from midstream.ops.finish_rows import MAX_NORMED
from midstream.ops.skinny_linear import MAX_ROWS, skinny_linear
from midstream.ops.testing import Check, build_args, op_suite

CPU = torch.device("cpu")


@pytest.mark.parametrize("check", op_suite(skinny_linear, CPU), ids=str)
def test_obeys_its_declaration(check: Check) -> None:
    check.run()


def _rows_together_and_alone(device: torch.device, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(3)
    x, weight = (
        torch.randn(size, generator=draw).to(device, dtype) for size in ((MAX_ROWS, 300), (72, 300))
    )
    together = torch.empty(MAX_ROWS, 72, dtype=dtype, device=device)
    skinny_linear.launch(together, None, x, weight, None, None, None, 0.0, 0.0)
    for rows in (1, 2, 17, 33):
        alone = torch.empty(rows, 72, dtype=dtype, device=device)
        skinny_linear.launch(alone, None, x[:rows], weight, None, None, None, 0.0, 0.0)
        assert torch.equal(alone, together[:rows])


def test_a_row_alone_equals_the_row_among_others() -> None:
    _rows_together_and_alone(CPU, torch.float16)


@pytest.mark.gpu
def test_a_row_alone_equals_the_row_among_others_on_a_gpu() -> None:
    _rows_together_and_alone(torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("x", torch.zeros(64), r"x has shape \(64,\)"),
        ("x", torch.zeros(5, 63), r"x has shape \(5, 63\)"),
        ("x", torch.zeros(64, 5).T, "x has strides"),
        ("x", torch.zeros(5, 64, dtype=torch.float16), "one dtype"),
        ("out", torch.zeros(5, 71), r"out is .* of shape \(5, 71\)"),
        ("out", torch.zeros(72, 5).T, "out has strides"),
        ("out", torch.zeros(5, 72, dtype=torch.int32), "torch.int32"),
        ("weight", torch.zeros(64, 72).T, "rows without gaps"),
        ("up", torch.zeros(72, 63), r"up is .* of shape \(72, 63\)"),
        ("residual", torch.zeros(5, 1), r"residual is .* of shape \(5, 1\)"),
        ("norm_weight", torch.zeros(72), "both or neither"),
        ("normed", torch.zeros(5, 72), "both or neither"),
    ],
)
def test_refuses_rows_and_matrices_that_do_not_fit(name, value, says) -> None:
    args = build_args(skinny_linear.cases[0], torch.float32, CPU) | {name: value}
    with pytest.raises(ContractError, match=says):
        skinny_linear.launch(**args)


def test_refuses_a_norm_of_rows_that_no_program_can_hold() -> None:
    outputs = MAX_NORMED + 1
    rows, weight = torch.zeros(2, outputs), torch.zeros(outputs, 4)
    with pytest.raises(ContractError, match="at most"):
        skinny_linear.launch(
            rows, rows, torch.zeros(2, 4), weight, None, None, rows[0], 1e-5, 0.0
        )  # fmt: skip
