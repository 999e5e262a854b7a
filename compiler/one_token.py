"""
Puts one kernel in place of each projection of a single token, with the norm, gate or sum around it.

Matrix products of one row are bound by their weights, and libraries are far from that bound (ops/gemv.py).
What is replaced in a traced graph, wherever sizes say that there is one row:

    linear(x, W[, b])                          -> gemv
    linear(norm(x), W)                         the norm goes into the kernel
    silu(linear(x, W)) * linear(x, U)          one kernel
    residual + linear(x, W)                    one kernel
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from midstream.compiler import row_norm
from midstream.compiler.row_norm import RowNorm, find_norm, is_row, is_vector
from midstream.compiler.traced import are_known, calls, calls_only, only_user, value_of
from midstream.ops.gemv import MAX_WIDTH, gemv
from midstream.ops.registry import DTYPES

_LINEAR = torch.nn.functional.linear
_SILU = torch.nn.functional.silu
_PURE = {  # between the parts of what is fused nothing may be written
    _LINEAR, row_norm.RMS_NORM, operator.add, operator.mul, operator.getitem, torch.rsqrt, _SILU,
    *row_norm.CASTS, *row_norm.VIEWS, "pow", "mean", "item", "transpose", "new_empty", gemv.overload,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Projection:
    """A part of the graph that one kernel computes; `nodes` in the order of the graph, the result last."""

    nodes: tuple[fx.Node, ...]
    x: fx.Node
    weight: fx.Node
    up: fx.Node | None = None
    norm: RowNorm | None = None
    residual: fx.Node | None = None


def fuse_projections(gm: fx.GraphModule, device_type: str = "cuda") -> int:
    """Replace the projections of single tokens in a graph that Dynamo traced.  Returns their number.

    The graph must need no gradients.
    """
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    found = 0
    linears = calls(gm.graph, _LINEAR)
    for node in sorted(linears, key=lambda node: only_user(node, _SILU) is None):  # gates take two
        projection = _projection(node, device_type) if node.users else None
        if projection is None:
            continue
        for grow in (_with_gate, _with_residual, _with_norm):
            wider = grow(projection)
            if wider is not None and _is_undisturbed(wider, order):
                projection = wider
        _replace(gm.graph, projection)
        found += 1
    if found:
        gm.recompile()
    return found


def inductor_with_projections(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Inductor behind `fuse_projections`; a backend of torch.compile for graphs without gradients."""
    from torch._inductor.compile_fx import compile_fx  # takes seconds to import

    fuse_projections(gm)
    compiled: Any = compile_fx(gm, list(inputs))
    return compiled


def _projection(node: fx.Node, device_type: str) -> _Projection | None:
    """A `linear` of one row that the kernel can compute."""
    if len(node.args) < 2:
        return None
    x, weight, *rest = node.args
    bias = (*rest, node.kwargs.get("bias"))[0]
    vector, matrix, result = value_of(x), value_of(weight), value_of(node)
    if vector is None or matrix is None or result is None or vector.device.type != device_type:
        return None
    if not vector.dtype == matrix.dtype == result.dtype or matrix.dim() != 2:  # e.g. autocast
        return None
    if not are_known(*matrix.shape, *matrix.stride()):
        return None
    if bias is not None and not is_vector(bias, matrix.shape[0]):
        return None
    if not is_row(vector, matrix.shape[1]) or not 0 < vector.numel() <= MAX_WIDTH:
        return None
    if vector.stride(-1) != 1 or matrix.stride(1) != 1 or vector.dtype not in DTYPES:
        return None
    return _Projection((node,), x, weight, residual=bias)  # type: ignore[arg-type]  # nodes with values


def _with_gate(of: _Projection) -> _Projection | None:
    """silu(linear(x, W)) * linear(x, U)"""
    (linear,) = of.nodes
    silu = only_user(linear, _SILU)
    product = only_user(silu, operator.mul)
    if silu is None or product is None or of.residual is not None:
        return None
    (other,) = [arg for arg in product.args if arg is not silu] or [None]
    if not isinstance(other, fx.Node) or other.target is not _LINEAR or len(other.users) != 1:
        return None
    up = _projection(other, value_of(of.x).device.type)
    if up is None or up.x is not of.x or up.residual is not None:
        return None
    if value_of(up.weight).shape != value_of(of.weight).shape:
        return None
    return replace(of, nodes=(linear, silu, other, product), up=up.weight)


def _with_residual(of: _Projection) -> _Projection | None:
    """residual + linear(x, W)"""
    total = only_user(of.nodes[-1], operator.add)
    if total is None or of.residual is not None or of.up is not None:
        return None
    (other,) = [arg for arg in total.args if arg is not of.nodes[-1]] or [None]
    one, product = value_of(other), value_of(of.nodes[-1])
    if one is None or not are_known(*one.shape) or one.dtype != product.dtype:
        return None
    if one.shape != product.shape or not one.is_contiguous():
        return None
    return replace(of, nodes=(*of.nodes, total), residual=other)  # type: ignore[arg-type]  # it has a value


def _with_norm(of: _Projection) -> _Projection | None:
    """linear(norm(h), W)"""
    norm = find_norm(of.x)
    if norm is None:
        return None
    return replace(of, nodes=(*norm.nodes, *of.nodes), x=norm.x, norm=norm)


def _is_undisturbed(projection: _Projection, order: dict[fx.Node, int]) -> bool:
    """Whether nothing between the first and the last part may write what they read."""
    first = min(projection.nodes, key=order.__getitem__)
    return calls_only(first, projection.nodes[-1], _PURE)


def _replace(graph: fx.Graph, projection: _Projection) -> None:
    last = projection.nodes[-1]
    value = value_of(last)
    norm = projection.norm
    weight, eps, shift = (None, 0.0, 0.0) if norm is None else (norm.weight, norm.eps, norm.shift)
    with graph.inserting_before(last):
        like = {"dtype": value.dtype}
        out = graph.call_method("new_empty", (projection.x, tuple(value.shape)), like)
        graph.call_function(
            gemv.overload,
            (out, projection.x, projection.weight, projection.up, weight, projection.residual, eps, shift),
        )  # fmt: skip
    out.meta = dict(last.meta)
    last.replace_all_uses_with(out)
    for node in reversed(projection.nodes):
        if not node.users:
            graph.erase_node(node)
