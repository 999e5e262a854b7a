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
    MADE,
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
from midstream.ops.registry import DTYPES, OpSpec
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
    for call in calls(gm.graph, gemv.overload, skinny_linear.overload):
        if MADE in call.meta:
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


def project_few(x: Tensor, weight: Tensor) -> Tensor:
    """linear(x, weight) of [..., R, K] and [N, K] by the kernel for as many rows as there are."""
    rows = x.shape[:-1].numel()
    one_row = rows == 1 and weight.shape[1] <= MAX_WIDTH
    few = 1 < rows <= MAX_ROWS and x.dtype in _SKINNY_DTYPES
    if not (one_row or few) or not _are_plain(x, weight):
        return _LINEAR(x, weight)
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    if one_row:
        gemv(out, x, weight, None, None, None, 0.0, 0.0)
    else:
        skinny_linear(out, None, x, weight, None, None, None, 0.0, 0.0)
    return out


def _are_plain(x: Tensor, weight: Tensor) -> bool:
    """Whether kernels compute what `linear` does: no other dtype, layout, class or derivative is asked."""
    asked = torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type)
    known = type(x) is Tensor and type(weight) in (Tensor, torch.nn.Parameter)
    fits = x.dtype == weight.dtype and x.dtype in DTYPES and weight.layout is torch.strided
    return known and fits and not asked and x.is_contiguous() and weight.stride(1) == 1


_PURE = {  # between the parts of what is fused nothing may be written
    _LINEAR, row_norm.RMS_NORM, operator.add, operator.mul, operator.getitem, torch.rsqrt, _SILU,
    *row_norm.CASTS, *row_norm.VIEWS, "pow", "mean", "item", "transpose", "new_empty", "size",
    torch._C._log_api_usage_once,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Projection:
    """A part of the graph that one kernel computes.

    `nodes` come each behind those that it reads, the result last.
    """

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
    rows, matrix, result = value_of(x), value_of(weight), value_of(node)
    if rows is None or matrix is None or result is None or rows.device.type != device_type:
        return None
    if not rows.dtype == matrix.dtype == result.dtype or rows.dtype not in DTYPES:  # e.g. autocast
        return None
    if matrix.layout is not torch.strided or matrix.dim() != 2:
        return None
    if (
        not are_known(*matrix.shape, *matrix.stride())
        or not matrix.shape[1]
        or matrix.stride(1) != 1
    ):
        return None
    count = rows_of(rows, matrix.shape[1])
    one_row = are_known(count) and count == 1
    if one_row:
        fits = matrix.shape[1] <= MAX_WIDTH and (bias is None or is_vector(bias, matrix.shape[0]))
    else:
        fits = _are_few(count) and bias is None and rows.dtype in _SKINNY_DTYPES
    return _Projection((node,), x, weight, one_row, residual=bias) if fits else None  # type: ignore[arg-type]  # nodes with values


def _are_few(rows: Any) -> bool:
    return rows is not None and (rows <= MAX_ROWS if are_known(rows) else _decoding.get())


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
    if total is None or of.residual is not None:
        return None
    (other,) = [arg for arg in total.args if arg is not of.nodes[-1]] or [None]
    one, product = value_of(other), value_of(of.nodes[-1])
    if one is None or one.dtype != product.dtype or not have_same_shape(one, product):
        return None
    if rows_of(one, product.shape[-1]) is None:
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
        insert = _insert_gemv if projection.one_row else _insert_skinny
        out = insert(graph, projection, value_of(last))
    out.meta = dict(last.meta)
    last.replace_all_uses_with(out)
    _erase_unused(graph, projection.nodes)


def _insert_gemv(graph: fx.Graph, of: _Projection, value: Any) -> fx.Node:
    norm = of.norm
    weight, eps, shift = (None, 0.0, 0.0) if norm is None else (norm.weight, norm.eps, norm.shift)
    out = _new_empty(graph, of.x, value)
    args = (of.x, of.weight, of.up, weight, of.residual, eps, shift)
    _call(graph, gemv, out, *args)
    return out


def _insert_skinny(graph: fx.Graph, of: _Projection, value: Any) -> fx.Node:
    out = _new_empty(graph, of.x, value)
    _call(graph, skinny_linear, out, None, of.x, of.weight, of.up, of.residual, None, 0.0, 0.0)
    return out


def _new_empty(graph: fx.Graph, like: fx.Node, value: Any) -> fx.Node:
    """A tensor like `value`, whose sizes, but for the last, are those of the node `like`."""
    *outer, width = value.shape
    sizes = [
        size if are_known(size) else graph.call_method("size", (like, axis))
        for axis, size in enumerate(outer)
    ]
    return graph.call_method("new_empty", (like, (*sizes, width)), {"dtype": value.dtype})


def _call(graph: fx.Graph, op: OpSpec, *args: Any) -> None:
    graph.call_function(op.overload, args).meta[MADE] = True


def _take_norm(graph: fx.Graph, call: fx.Node) -> None:
    """Replace the norm in front of the projection `call`, for all that read it."""
    result: Any = call.args[1 if call.target is gemv.overload else 2]
    while row_norm.is_other_name(result):
        result = result.args[0]
    norm = find_gated_norm(result)
    if norm is None:
        return
    order = {node: place for place, node in enumerate(graph.nodes)}
    like = value_of(result)
    read = [value_of(rows) for rows in (norm.x, norm.gate or norm.x)]
    fits = like.shape[-1] <= MAX_NORMED and all(have_same_shape(like, rows) for rows in read)
    if not fits or not _is_undisturbed(norm.nodes, order):
        return
    normed = _norm_behind(graph, norm, result, order) or _norm_apart(graph, norm, result)
    normed.meta = dict(result.meta)
    result.replace_all_uses_with(normed)
    _erase_unused(graph, norm.nodes)


def _norm_behind(
    graph: fx.Graph, norm: RowNorm, result: fx.Node, order: dict[fx.Node, int]
) -> fx.Node | None:
    """The norm as a second result of the projection whose first one it reads, where it may go there."""
    made = (user for user in norm.x.users if MADE in user.meta)
    call = next((user for user in made if user.args[:2] == (norm.x, None)), None)
    if call is None or norm.gate is not None:
        return None
    if order[norm.weight] > order[call] or not calls_only(call, result, _PURE):
        return None
    out, _, *product, _, _, _ = call.args
    with graph.inserting_before(call):
        normed = _new_empty(graph, product[0], value_of(result))  # type: ignore[arg-type]  # x
    call.args = (out, normed, *product, norm.weight, norm.eps, norm.shift)
    return normed


def _norm_apart(graph: fx.Graph, norm: RowNorm, result: fx.Node) -> fx.Node:
    with graph.inserting_before(result):
        normed = _new_empty(graph, norm.x, value_of(result))
        args = (norm.x, norm.gate, norm.weight, norm.eps, norm.shift, norm.gate_first)
        _call(graph, rms_norm, normed, *args)
    return normed


def _erase_unused(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    for node in reversed(nodes):
        if not node.users:
            graph.erase_node(node)
