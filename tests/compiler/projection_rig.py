"""What tests of rewritten projections share: models in small, and counts of the calls that are left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rewrite_rig import Rewritten, random
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from midstream.compiler.projections import fuse_projections
from midstream.ops.gemv import gemv
from midstream.ops.rms_norm import rms_norm as rms_norm_op
from midstream.ops.skinny_linear import MAX_ROWS, skinny_linear

WIDTH, HIDDEN = 16, 24
EPS = 1e-5


class Fused(Rewritten):
    def __init__(self, function: Callable[..., Any], **compile_args: Any) -> None:
        super().__init__(function, fuse_projections, **compile_args)

    @property
    def kernels(self) -> list[torch.fx.Node]:
        return self.calls(gemv.overload)

    def left(self, target: Any) -> int:
        return len(self.calls(target))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """As transformers writes it."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def check(function: Callable[..., Any], *args: Any, kernels: int, linears: int = 0) -> Fused:
    """Equal results, and so many kernels and products left."""
    fused = Fused(function)
    with torch.no_grad():
        want, found = function(*args), fused.call(*args)
    torch.testing.assert_close(found, want, rtol=2e-5, atol=2e-5)
    assert (len(fused.kernels), fused.left(linear)) == (kernels, linears)
    return fused


def check_rows(
    function: Callable[..., Any], *args: Tensor, kernels: int, norms: int = 0, linears: int = 0
) -> Fused:
    """As near to float64 as the unfused function, and so many calls left; in bfloat16."""
    narrow = [arg.bfloat16() for arg in args]
    fused = Fused(function)
    with torch.no_grad():
        exact, plain = function(*(arg.double() for arg in narrow)), function(*narrow)
        found = fused.call(*narrow)
    assert found.dtype == torch.bfloat16
    assert (found - exact).abs().mean() <= 1.1 * (plain - exact).abs().mean()
    ops = (skinny_linear.overload, rms_norm_op.overload, linear)
    counts = [len(fused.calls(target)) for target in ops]
    assert counts == [kernels, norms, linears]
    return fused


X, SCALE = random(1, 1, WIDTH), random(WIDTH)
IN, UP, OUT = random(HIDDEN, WIDTH), random(HIDDEN, WIDTH) / 2, random(WIDTH, HIDDEN)


def mlp(x: Tensor, scale: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    h = norm(x, scale)
    return x + linear(silu(linear(h, gate)) * linear(h, up), down)


def normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def gemma_norm(x: Tensor, weight: Tensor) -> Tensor:
    return (normed(x.float()) * (1.0 + weight.float())).type_as(x)


NORMS = {
    "shifted": gemma_norm,
    "shifted by an int": lambda x, w: (w + 1) * normed(x),
    "scaled in float32": lambda x, w: (w.float() * normed(x.float())).to(x.dtype),
    "exchanged": lambda x, w: x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + EPS) * w,
    "viewed": lambda x, w: norm(x.reshape(1, WIDTH), w).view(-1, WIDTH),
    "of torch": lambda x, w: rms_norm(x, (WIDTH,), w, EPS),
    "of torch, viewed": lambda x, w: rms_norm(x, (WIDTH,), w, EPS).view(1, 1, WIDTH),
}


ROWS = {
    "tokens": random(1, 5, WIDTH),
    "rows": random(5, WIDTH),
    "one token of each row": random(5, 1, WIDTH),
    "as many as a kernel takes": random(1, MAX_ROWS, WIDTH),
}
