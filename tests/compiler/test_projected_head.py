"""The logits of a lowered model come from the kernel for as many rows as there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from projection_rig import HIDDEN, IN, UP, WIDTH, X
from rewrite_rig import random
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.testing._internal.two_tensor import TwoTensor

from midstream.compiler import projections
from midstream.ops.gemv import MAX_WIDTH, gemv
from midstream.ops.registry import OpSpec
from midstream.ops.skinny_linear import MAX_ROWS, skinny_linear


@pytest.mark.parametrize(
    ("x", "kernel"),
    [
        (random(1, 1, WIDTH), gemv),
        (random(WIDTH).bfloat16(), gemv),
        (random(1, 5, WIDTH).bfloat16(), skinny_linear),
        (random(2, 3, WIDTH).bfloat16(), skinny_linear),
        (random(1, 5, WIDTH), None),
        (random(MAX_ROWS, WIDTH).bfloat16(), skinny_linear),
        (random(MAX_ROWS + 1, WIDTH).bfloat16(), None),
        (random(5, 2 * WIDTH).bfloat16()[:, ::2], None),
        (random(0, WIDTH).bfloat16(), None),
        (random(1, WIDTH).double(), None),
    ],
)
def test_the_head_takes_the_kernel_for_its_rows(
    x: Tensor, kernel: OpSpec | None, monkeypatch: Any
) -> None:
    taken: list[OpSpec] = []
    for op in (gemv, skinny_linear):
        spied = lambda *args, op=op: (taken.append(op), op.overload(*args))[1]  # noqa: E731
        monkeypatch.setattr(projections, op.name, spied)
    weight = nn.Parameter(IN.to(x.dtype))
    with torch.no_grad():
        found = projections.project_few(x, weight)
    torch.testing.assert_close(found, linear(x, weight), rtol=1e-2, atol=1e-2)
    assert taken == ([] if kernel is None else [kernel])


def _head_kernels(monkeypatch: Any) -> list[str]:
    taken: list[str] = []
    for op in (gemv, skinny_linear):
        monkeypatch.setattr(projections, op.name, lambda *_, name=op.name: taken.append(name))
    return taken


def test_the_head_leaves_what_asks_for_more_to_torch(monkeypatch: Any) -> None:
    taken = _head_kernels(monkeypatch)
    weight = nn.Parameter(IN.clone())
    projections.project_few(X, weight).sum().backward()
    assert weight.grad is not None
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert projections.project_few(X, weight).dtype == torch.bfloat16
        found = projections.project_few(X, TwoTensor(IN.clone(), UP.clone()))
        assert type(found) is TwoTensor
        found = projections.project_few(TwoTensor(X.clone(), X.clone()), IN)
        assert type(found) is TwoTensor
        transposed = random(WIDTH, HIDDEN).T
        torch.testing.assert_close(projections.project_few(X, transposed), linear(X, transposed))
        found = projections.project_few(X[0], IN.to_sparse_csr())
        torch.testing.assert_close(found, linear(X[0], IN))
        with pytest.raises(RuntimeError, match="dtype"):
            projections.project_few(X, IN.bfloat16())
        wide = random(1, MAX_WIDTH + 1), random(2, MAX_WIDTH + 1)
        torch.testing.assert_close(projections.project_few(*wide), linear(*wide))
    assert not taken
