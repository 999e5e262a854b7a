"""
Puts our kernels in place of the projections of one or a few tokens, with the norm, gate or sum around them.

Matrix products of few rows are bound by their weights, and libraries are far from that bound (ops/gemv.py,
ops/skinny_linear.py).  What is replaced in a traced graph, wherever sizes say that there are few rows:

    linear(x, W[, b])                          one kernel; a bias for one row only
    silu(linear(x, W)) * linear(x, U)          one kernel
    residual + linear(x, W)                    goes into the kernel
    linear(norm(x), W)                         for one row the norm goes into the kernel
    norm(y) of y that a kernel computed        for more rows it goes there, behind the sum
    norm(x), gated or not, in front of one     otherwise a kernel that begins early, as the others do

Letters: R rows, N outputs, K inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from midstream.compiler import row_norm
from midstream.compiler.row_norm import RowNorm, find_gated_norm, is_vector
from midstream.compiler.traced import (
    are_known,
    calls,
    calls_only,
    have_same_shape,
    only_user,
    rows_of,
    value_of,
)
from midstream.ops.finish_rows import MAX_NORMED
from midstream.ops.gemv import MAX_WIDTH, gemv
from midstream.ops.registry import DTYPES
from midstream.ops.rms_norm import rms_norm
from midstream.ops.skinny_linear import MAX_ROWS, skinny_linear

_LINEAR = torch.nn.functional.linear
_SILU = torch.nn.functional.silu
_SKINNY_DTYPES = (torch.bfloat16, torch.float16)  # of matrix units

_decoding: ContextVar[bool] = ContextVar("decoding", default=False)


@contextmanager
def decoding(rows_are_few: bool) -> Iterator[None]:
    """While active, an unknown number of rows in what is traced counts as few, or does not."""
    token = _decoding.set(rows_are_few)
    try:
        yield
    finally:
        _decoding.reset(token)


def fuse_projections(gm: fx.GraphModule, device_type: str = "cuda") -> int:
    """Replace the projections of few tokens in a graph that Dynamo traced.  Returns their number.

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
            if wider is not None and _is_undisturbed(wider.nodes, order):
                projection = wider
        _replace(gm.graph, projection)
        found += 1
    for call in calls(gm.graph, project_rows, gemv.overload):
        _take_norm(gm.graph, call)
    if found:
        gm.recompile()
    return found


def inductor_with_projections(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Inductor behind `fuse_projections`; a backend of torch.compile for graphs without gradients."""
    from torch._inductor.compile_fx import compile_fx  # takes seconds to import

    fuse_projections(gm)
    compiled: Any = compile_fx(gm, list(inputs))
    return compiled


def project_rows(
    x: Tensor,  # [..., R, K]
    weight: Tensor,  # [N, K]
    up: Tensor | None,  # [N, K]
    residual: Tensor | None,  # [..., R, N]
    norm_weight: Tensor | None = None,  # [N]
    eps: float = 0.0,
    norm_shift: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """`skinny_linear` into new tensors: the result, and its norm where there is a weight for it."""
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    normed = None if norm_weight is None else torch.empty_like(out)
    skinny_linear(out, normed, x, weight, up, residual, norm_weight, eps, norm_shift)
    return out, normed


def norm_rows(
    x: Tensor,  # [..., R, N]
    gate: Tensor | None,  # [..., R, N]
    weight: Tensor,  # [N]
    eps: float,
    shift: float,
    gate_first: bool,
    dtype: torch.dtype,
) -> Tensor:
    """`rms_norm` into a new tensor."""
    normed = x.new_empty(x.shape, dtype=dtype)
    rms_norm(normed, x, gate, weight, eps, shift, gate_first)
    return normed


def project_few(x: Tensor, weight: Tensor) -> Tensor:
    """linear(x, weight) of [..., R, K] and [N, K] by the kernel for as many rows as there are."""
    rows, dtype = x.shape[:-1].numel(), x.dtype
    plain = (
        dtype == weight.dtype and dtype in DTYPES and x.is_contiguous() and weight.stride(1) == 1
    )
    if plain and rows == 1 and weight.shape[1] <= MAX_WIDTH:
        out = x.new_empty((*x.shape[:-1], weight.shape[0]))
        gemv(out, x, weight, None, None, None, 0.0, 0.0)
        return out
    if plain and 1 < rows <= MAX_ROWS and dtype in _SKINNY_DTYPES:
        return project_rows(x, weight, None, None)[0]
    return _LINEAR(x, weight)


_PURE = {  # between the parts of what is fused nothing may be written
    _LINEAR, row_norm.RMS_NORM, operator.add, operator.mul, operator.getitem, torch.rsqrt, _SILU,
    *row_norm.CASTS, *row_norm.VIEWS, "pow", "mean", "item", "transpose", "new_empty", gemv.overload,
    project_rows, norm_rows, torch._C._log_api_usage_once,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Projection:
    """A part of the graph that one kernel computes; `nodes` in the order of the graph, the result last."""

    nodes: tuple[fx.Node, ...]
    x: fx.Node
    weight: fx.Node
    one_row: bool
    up: fx.Node | None = None
    norm: RowNorm | None = None  # in front; of one row only
    residual: fx.Node | None = None  # or the bias of one row


def _projection(node: fx.Node, device_type: str) -> _Projection | None:
    """A `linear` of few rows that a kernel can compute."""
    if len(node.args) < 2:
        return None
    x, weight, *rest = node.args
    bias = (*rest, node.kwargs.get("bias"))[0]
    vector, matrix, result = value_of(x), value_of(weight), value_of(node)
    if vector is None or matrix is None or result is None or vector.device.type != device_type:
        return None
    if not vector.dtype == matrix.dtype == result.dtype or matrix.dim() != 2:  # e.g. autocast
        return None
    if not are_known(*matrix.shape, *matrix.stride()) or not matrix.shape[1]:
        return None
    if vector.stride(-1) != 1 or matrix.stride(1) != 1 or vector.dtype not in DTYPES:
        return None
    rows = rows_of(vector, matrix.shape[1])
    one_row = are_known(rows) and rows == 1
    if one_row:
        fits = matrix.shape[1] <= MAX_WIDTH and (bias is None or is_vector(bias, matrix.shape[0]))
    else:
        fits = _are_few(rows) and bias is None and vector.dtype in _SKINNY_DTYPES
    return _Projection((node,), x, weight, one_row, residual=bias) if fits else None  # type: ignore[arg-type]  # nodes with values


def _are_few(rows: Any) -> bool:
    return rows is not None and (1 < rows <= MAX_ROWS if are_known(rows) else _decoding.get())


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
    if one is None or one.dtype != product.dtype or not have_same_shape(one, product):
        return None
    if rows_of(one, product.shape[-1]) is None or one.stride(-1) != 1:
        return None
    return replace(of, nodes=(*of.nodes, total), residual=other)  # type: ignore[arg-type]  # it has a value


def _with_norm(of: _Projection) -> _Projection | None:
    """linear(norm(h), W) of one row, without a gate"""
    norm = find_gated_norm(of.x) if of.one_row else None
    if norm is None or norm.gate is not None:
        return None
    return replace(of, nodes=(*norm.nodes, *of.nodes), x=norm.x, norm=norm)


def _is_undisturbed(nodes: Sequence[fx.Node], order: dict[fx.Node, int]) -> bool:
    """Whether nothing between the first and the last of them may write what they read."""
    return calls_only(min(nodes, key=order.__getitem__), nodes[-1], _PURE)


def _replace(graph: fx.Graph, projection: _Projection) -> None:
    last = projection.nodes[-1]
    with graph.inserting_before(last):
        insert = _insert_gemv if projection.one_row else _insert_project_rows
        out = insert(graph, projection, value_of(last))
    out.meta = dict(last.meta)
    last.replace_all_uses_with(out)
    _erase_unused(graph, projection.nodes)


def _insert_gemv(graph: fx.Graph, of: _Projection, value: Any) -> fx.Node:
    norm = of.norm
    weight, eps, shift = (None, 0.0, 0.0) if norm is None else (norm.weight, norm.eps, norm.shift)
    out = graph.call_method("new_empty", (of.x, tuple(value.shape)), {"dtype": value.dtype})
    graph.call_function(
        gemv.overload, (out, of.x, of.weight, of.up, weight, of.residual, eps, shift)
    )
    return out


def _insert_project_rows(graph: fx.Graph, of: _Projection, value: Any) -> fx.Node:
    call = graph.call_function(project_rows, (of.x, of.weight, of.up, of.residual))
    return graph.call_function(operator.getitem, (call, 0))


def _take_norm(graph: fx.Graph, call: fx.Node) -> None:
    """Replace the norm in front of the projection `call`, for all that read it."""
    result: Any = call.args[1 if call.target is gemv.overload else 0]
    while result.target in row_norm.VIEWS and value_of(result.args[0]) is not None:
        result = result.args[0]
    norm = find_gated_norm(result)
    order = {node: place for place, node in enumerate(graph.nodes)}
    if norm is None or not _is_undisturbed(norm.nodes, order):
        return
    like = value_of(result)
    if like.shape[-1] > MAX_NORMED or not have_same_shape(like, value_of(norm.x)):
        return
    normed = _norm_behind(graph, norm, result, order)
    if normed is None:
        with graph.inserting_before(result):
            scale = (norm.weight, norm.eps, norm.shift, norm.gate_first, like.dtype)
            normed = graph.call_function(norm_rows, (norm.x, norm.gate, *scale))
    normed.meta = dict(result.meta)
    result.replace_all_uses_with(normed)
    _erase_unused(graph, norm.nodes)


def _norm_behind(
    graph: fx.Graph, norm: RowNorm, result: fx.Node, order: dict[fx.Node, int]
) -> fx.Node | None:
    """The norm as a second result of the projection whose first one it reads, where it may go there."""
    source = norm.x
    call = source.args[0] if source.target is operator.getitem else None
    if not isinstance(call, fx.Node) or call.target is not project_rows or len(call.args) != 4:
        return None
    if (
        norm.gate is not None
        or value_of(result).dtype != value_of(source).dtype
        or order[norm.weight] > order[call]
    ):
        return None
    if not calls_only(call, result, _PURE):
        return None
    call.args = (*call.args, norm.weight, norm.eps, norm.shift)
    with graph.inserting_after(source):
        return graph.call_function(operator.getitem, (call, 1))


def _erase_unused(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    for node in reversed(nodes):
        if not node.users:
            graph.erase_node(node)
