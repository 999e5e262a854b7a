"""Norms with a gate become one kernel in front of the projection that reads them."""

from __future__ import annotations

import pytest
import torch
from projection_rig import HIDDEN, IN, OUT, ROWS, SCALE, WIDTH, X, check, check_rows, norm, normed
from rewrite_rig import random
from torch import Tensor
from torch.nn.functional import linear, silu

from midstream.ops.rms_norm import rms_norm as rms_norm_op


def mamba_norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    wide = x.float() * silu(gate.float())
    return weight * normed(wide).to(x.dtype)


def gated_delta_norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return (norm(x, weight) * silu(gate.float())).to(x.dtype)


GATED_NORMS = {
    "first": mamba_norm,
    "last": gated_delta_norm,
    "last, exchanged": lambda x, gate, w: silu(gate) * norm(x, w),
}


@pytest.mark.parametrize("way", GATED_NORMS)
def test_a_gated_norm_of_rows_is_one_kernel(way: str) -> None:
    def project(both: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        x, gate = both.chunk(2, -1)  # rows lie apart
        return linear(GATED_NORMS[way](x.contiguous(), gate, scale), w)

    fused = check_rows(project, random(1, 5, 2 * WIDTH), SCALE, IN, kernels=1, norms=1)
    assert fused.left(torch.rsqrt) == fused.left(silu) == 0


@pytest.mark.parametrize("way", GATED_NORMS)
def test_a_gated_norm_of_one_row_is_a_kernel_in_front_of_the_projection(way: str) -> None:
    def project(x: Tensor, gate: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        return linear(GATED_NORMS[way](x, gate, scale), w)

    fused = check(project, X, X.flip(-1), SCALE, IN, kernels=1)
    assert fused.left(torch.rsqrt) == fused.left(silu) == 0
    assert len(fused.calls(rms_norm_op.overload)) == 1


@pytest.mark.parametrize("gate", [random(1, 1, WIDTH), random(WIDTH)], ids=["row", "vector"])
def test_a_gate_that_broadcasts_is_left_apart(gate: Tensor) -> None:
    def project(x: Tensor, gate: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        return linear(gated_delta_norm(x, gate, scale), w)

    fused = check_rows(project, ROWS["tokens"], gate, SCALE, IN, kernels=1)
    assert fused.left(torch.rsqrt) == 1


def test_a_gate_with_more_axes_than_the_rows_is_left_apart() -> None:
    def project(x: Tensor, gate: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        h = norm(x.view(1, 5, WIDTH), scale) * silu(gate.float())
        return linear(h.view(5, WIDTH).to(w.dtype), w)

    fused = check_rows(project, random(5, WIDTH), ROWS["tokens"], SCALE, IN, kernels=1)
    assert fused.left(silu) == 1


def test_a_gated_norm_of_a_projection_is_no_second_result_of_it() -> None:
    def project(y: Tensor, gate: Tensor, out: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        return linear(gated_delta_norm(linear(y, out), gate, scale), w)

    y = random(1, 5, HIDDEN)
    check_rows(project, y, ROWS["tokens"], OUT, SCALE, IN, kernels=2, norms=1)


GATES = {
    "gaps": lambda both: both[..., ::2],
    "one for all": lambda both: both[..., :1].expand(1, 1, WIDTH),
    "float64": lambda both: both[..., :WIDTH].double(),
    "numbers": lambda both: both[..., :WIDTH].int(),
}


@pytest.mark.parametrize("way", GATES)
def test_a_gate_that_the_kernel_cannot_read_is_left_apart(way: str) -> None:
    def project(x: Tensor, gate: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        return linear((norm(x, scale) * silu(gate.float())).to(x.dtype), w)

    fused = check(project, X, GATES[way](random(1, 1, 2 * WIDTH)), SCALE, IN, kernels=1)
    assert not fused.calls(rms_norm_op.overload)


@pytest.mark.parametrize("way", GATES)
def test_gated_rows_that_the_kernel_cannot_read_are_left_apart(way: str) -> None:
    def project(x: Tensor, gate: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        return linear(scale * normed(x.float() * silu(gate)), w)

    fused = check(project, GATES[way](random(1, 1, 2 * WIDTH)), X, SCALE, IN, kernels=1)
    assert not fused.calls(rms_norm_op.overload)
