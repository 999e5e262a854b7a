"""
Puts one kernel in place of each projection of a single token, with the norm, gate or sum around it.

Matrix products of one row are bound by their weights, and libraries are far from that bound (ops/gemv.py).
What is replaced in a traced graph, wherever sizes say that there is one row:

    linear(x, W[, b])                          -> gemv
    linear(norm(x), W)                         the norm goes into the kernel, as RMSNorm of Llama writes it
    silu(linear(x, W)) * linear(x, U)          one kernel
    residual + linear(x, W)                    one kernel
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.nn import Parameter

from midstream.ops.gemv import MAX_WIDTH, gemv

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CASTS = ("to", "float", "type_as")
_LINEAR = torch.nn.functional.linear
_SILU = torch.nn.functional.silu
_PURE = {  # between the parts of what is fused nothing may be written
    _LINEAR, operator.add, operator.mul, operator.getitem, torch.rsqrt, _SILU,
    *_CASTS, "pow", "mean", "item", "view", "reshape", "transpose", "new_empty", gemv.overload,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Projection:
    """A part of the graph that one kernel computes; `nodes` in the order of the graph, the result last."""

    nodes: tuple[fx.Node, ...]
    x: fx.Node
    weight: fx.Node
    up: fx.Node | None = None
    norm_weight: fx.Node | None = None
    residual: fx.Node | None = None
    eps: float = 0.0


def fuse_projections(gm: fx.GraphModule, device_type: str = "cuda") -> int:
    """Replace the projections of single tokens in a graph that Dynamo traced.  Returns their number.

    The graph must need no gradients.
    """
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    found = 0
    for node in list(gm.graph.find_nodes(op="call_function", target=_LINEAR)):
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
    vector, matrix, result = _value(x), _value(weight), _value(node)
    if vector is None or matrix is None or result is None or vector.device.type != device_type:
        return None
    if not vector.dtype == matrix.dtype == result.dtype or matrix.dim() != 2:  # e.g. autocast
        return None
    if bias is not None and (_value(bias) is None or not _value(bias).is_contiguous()):
        return None
    sizes = (*vector.shape, *matrix.shape, *matrix.stride())
    if not all(isinstance(size, int) for size in sizes):
        return None
    one_row = vector.numel() == vector.shape[-1] <= MAX_WIDTH and vector.stride(-1) == 1
    if not one_row or matrix.stride(1) != 1 or vector.dtype not in _DTYPES:
        return None
    return _Projection((node,), x, weight, residual=bias)  # type: ignore[arg-type]  # nodes with values


def _with_gate(of: _Projection) -> _Projection | None:
    """silu(linear(x, W)) * linear(x, U)"""
    (linear,) = of.nodes
    silu = _only_user(linear, _SILU)
    product = _only_user(silu, operator.mul)
    if silu is None or product is None or of.residual is not None:
        return None
    (other,) = [arg for arg in product.args if arg is not silu] or [None]
    if not isinstance(other, fx.Node) or other.target is not _LINEAR or len(other.users) != 1:
        return None
    up = _projection(other, _value(of.x).device.type)
    if up is None or up.x is not of.x or up.residual is not None:
        return None
    if _value(up.weight).shape != _value(of.weight).shape:
        return None
    return replace(of, nodes=(linear, silu, other, product), up=up.weight)


def _with_residual(of: _Projection) -> _Projection | None:
    """residual + linear(x, W)"""
    total = _only_user(of.nodes[-1], operator.add)
    if total is None or of.residual is not None or of.up is not None:
        return None
    (other,) = [arg for arg in total.args if arg is not of.nodes[-1]] or [None]
    one, product = _value(other), _value(of.nodes[-1])
    if one is None or one.shape != product.shape or one.dtype != product.dtype:
        return None
    if not one.is_contiguous():
        return None
    return replace(of, nodes=(*of.nodes, total), residual=other)  # type: ignore[arg-type]  # it has a value


def _with_norm(of: _Projection) -> _Projection | None:
    """linear(weight * cast(h * rsqrt(mean(h^2, -1) + eps)), W)"""
    dtype = _value(of.x).dtype
    scaled, last_casts = _uncast(of.x, dtype)
    weight, normed = scaled.args if scaled.target is operator.mul else (None, None)
    if not (isinstance(weight, fx.Node) and isinstance(normed, fx.Node)):
        return None
    product, more = _uncast(normed, dtype)
    if product.target is not operator.mul or not all(isinstance(a, fx.Node) for a in product.args):
        return None
    wide, inverse = product.args
    chain = _chain(inverse, torch.rsqrt, operator.add, "mean", "pow")
    if chain is None or chain[-1].args[0] is not wide or chain[-1].args[1] != 2:
        return None
    eps, mean = chain[1].args[1], chain[2]
    h, casts = _uncast(wide, dtype)
    if type(eps) is not float or mean.args[1:] != (-1,) or mean.kwargs != {"keepdim": True}:
        return None
    if not _fits(h, weight, of.x):
        return None
    before = (*casts, *reversed(chain), product, *more, scaled, *last_casts)
    return replace(of, nodes=(*before, *of.nodes), x=h, norm_weight=weight, eps=eps)


def _fits(h: fx.Node, weight: fx.Node, x: fx.Node) -> bool:
    """The norm reads and writes one dtype, and scales each input."""
    one, scale, result = _value(h), _value(weight), _value(x)
    return (
        one is not None
        and scale is not None
        and one.shape == result.shape
        and one.dtype == result.dtype == scale.dtype
        and one.stride(-1) == 1
        and scale.shape == one.shape[-1:]
        and scale.is_contiguous()
    )


def _is_undisturbed(projection: _Projection, order: dict[fx.Node, int]) -> bool:
    """Whether nothing between the first and the last part may write what they read."""
    first = min(projection.nodes, key=order.__getitem__)
    node = first
    while node is not projection.nodes[-1]:
        in_place = node.target is _SILU and (node.args[1:] == (True,) or node.kwargs.get("inplace"))
        if node.target not in _PURE or in_place:
            return False
        node = node.next
    return True


def _replace(graph: fx.Graph, projection: _Projection) -> None:
    last = projection.nodes[-1]
    value = _value(last)
    with graph.inserting_before(last):
        out = graph.call_method("new_empty", (projection.x, tuple(value.shape)))
        graph.call_function(
            gemv.overload,
            (out, projection.x, projection.weight, projection.up, projection.norm_weight,
             projection.residual, projection.eps),
        )  # fmt: skip
    out.meta = dict(last.meta)
    last.replace_all_uses_with(out)
    for node in reversed(projection.nodes):
        if not node.users:
            graph.erase_node(node)


def _value(node: Any) -> Any:
    """What stands for the node's result; None for subclasses, whose products may mean something else."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if type(value) in (FakeTensor, Tensor, Parameter) else None


def _only_user(node: fx.Node | None, target: Any) -> fx.Node | None:
    """The user of `node`, if there is one and it calls `target`."""
    users = list(node.users) if node is not None else []
    return users[0] if len(users) == 1 and users[0].target is target else None


def _uncast(node: Any, dtype: torch.dtype) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """What `node` is a cast of, and the casts in the order of the graph.

    The kernel computes in float32 and rounds to `dtype` at its end; other roundings mean something.
    """
    casts: list[fx.Node] = []
    while node.op == "call_method" and node.target in _CASTS:
        if getattr(_value(node), "dtype", None) not in (torch.float32, dtype):
            break
        casts.append(node)
        node = node.args[0]
    return node, tuple(reversed(casts))


def _chain(node: Any, *targets: Any) -> list[fx.Node] | None:
    """Nodes that call these targets, each on the result of the next."""
    found: list[fx.Node] = []
    for target in targets:
        if not isinstance(node, fx.Node) or node.target != target:
            return None
        found.append(node)
        node = node.args[0]
    return found
