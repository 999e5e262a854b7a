"""unit_lower_inverse: error against float64, also where the powers of the matrix explode."""

import pytest
import torch
import triton
import triton.language as tl

from midstream.ops.unit_lower_inverse import unit_lower_inverse


@triton.jit
def _inverse_kernel(out_ptr, lower_ptr, SIZE: tl.constexpr):
    line = tl.arange(0, SIZE)
    place = line[:, None] * SIZE + line[None, :]
    inverse = unit_lower_inverse(tl.load(lower_ptr + place), SIZE, 16, "ieee")
    tl.store(out_ptr + place, inverse)


def random_lower() -> torch.Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(3)).div(8).tril(-1)


@pytest.mark.parametrize(
    "lower", [random_lower(), torch.ones(64, 64).tril(-1)], ids=["random", "equal keys"]
)
def test_error_is_a_few_eps(lower, device):
    out = torch.empty(64, 64, device=device)
    _inverse_kernel[(1,)](out, lower.to(device), 64)
    goal = torch.linalg.inv(torch.eye(64).double() + lower.double())
    assert (out.cpu().double() - goal).abs().max() <= 4e-6 * goal.abs().max()
