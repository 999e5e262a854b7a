"""
Finds the RMSNorm of rows in a traced graph, however models write it.

    weight * cast(h * rsqrt(mean(h^2, -1) + eps))     Llama
    cast((1 + weight) * (h * rsqrt(...)))             Gemma, Qwen3-Next
    rms_norm(h, sizes, weight, eps)                   torch
    cast(norm(h) * silu(gate)), norm(h * silu(gate))  gated

Casts may stand anywhere between float32 and the dtype of the result, and so may views that keep the rows.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor

from midstream.compiler.traced import are_known, have_same_shape, rows_of, value_of
from midstream.ops.registry import DTYPES

CASTS = ("to", "float", "type_as")
VIEWS = ("view", "reshape")
RMS_NORM = torch.rms_norm


@dataclass(frozen=True, slots=True)
class RowNorm:
    """x * rsqrt(mean(x^2) + eps) * (weight + shift); `nodes` compute it, each behind those that it reads.

    With a gate it is that of x * silu(gate), or it is times silu(gate).
    """

    nodes: tuple[fx.Node, ...]
    x: fx.Node
    weight: fx.Node
    eps: float
    shift: float = 0.0
    gate: fx.Node | None = None
    gate_first: bool = False


def find_norm(result: fx.Node) -> RowNorm | None:
    """The norm that `result`, rows, is of other rows; None if it is none.

    It computes in float32 and rounds to the dtype of `result` only; other roundings mean something.
    """
    like = value_of(result)
    node, casts = _uncast(result, like)
    found = _norm_of_torch(node, casts) or _written_norm(node, casts, like)
    return found if found is not None and _fits(found, like) else None


def find_gated_norm(result: fx.Node) -> RowNorm | None:
    """As `find_norm`, with a gate where there is one."""
    like = value_of(result)
    if not like.dim():  # a number that is viewed as a row
        return None
    norm = find_norm(result)
    if norm is not None:
        gated = _gated(norm.x, like)
        if gated is None:
            return norm
        h, gate, nodes = gated
        return replace(norm, nodes=(*nodes, *norm.nodes), x=h, gate=gate, gate_first=True)
    product, casts = _uncast(result, like)
    gated = _gated(product, like)
    norm = find_norm(gated[0]) if gated is not None else None
    if gated is None or norm is None:
        return None
    return replace(norm, nodes=(*norm.nodes, *gated[2], *casts), gate=gated[1])


def _gated(
    product: fx.Node, like: FakeTensor
) -> tuple[fx.Node, fx.Node, tuple[fx.Node, ...]] | None:
    """h * silu(gate): h and the gate, and what computes it of them."""
    if product.target is not operator.mul or not _are_nodes(*product.args):
        return None
    factors: Any = product.args
    for normed, factor in permutations(factors):
        if factor.target is torch.nn.functional.silu:
            h, casts = _uncast(normed, like)
            gate, more = _uncast(factor.args[0], like)
            width, value, gates = like.shape[-1], value_of(h), value_of(gate)
            fits = value is not None and gates is not None and have_same_shape(value, gates)
            if fits and all(_is_readable(v, width) for v in (value, gates)):
                return h, gate, (*casts, *more, factor, product)
    return None


def is_other_name(node: fx.Node) -> bool:
    """Whether this views other rows, or casts them to the dtype that they have: it is the same memory."""
    if node.op != "call_method" or node.target not in (*CASTS, *VIEWS):
        return False
    source = value_of(node.args[0])
    return source is not None and source.dtype == value_of(node).dtype


def _is_readable(value: FakeTensor, width: int) -> bool:
    """Rows of this width as kernels read them, which may lie apart."""
    return rows_of(value, width, apart=True) is not None and value.dtype in DTYPES


def is_vector(node: Any, size: int) -> bool:
    """A tensor of one axis, of this size and without gaps."""
    value = value_of(node)
    if value is None or value.dim() != 1 or not are_known(*value.shape):
        return False
    return value.shape[0] == size and bool(value.is_contiguous())


def _written_norm(scaled: fx.Node, casts: tuple[fx.Node, ...], like: FakeTensor) -> RowNorm | None:
    """(weight + shift) * cast(h * rsqrt(mean(h^2, -1) + eps)), or the factors exchanged"""
    if scaled.target is not operator.mul or not _are_nodes(*scaled.args):
        return None
    for scale, normed in permutations(scaled.args):
        product, last_casts = _uncast(normed, like)
        found = _normalized(product)
        if found is not None:
            wide, eps, parts = found
            h, first_casts = _uncast(wide, like)
            weight, shift, scaling = _shifted(scale, like)  # type: ignore[arg-type]  # are nodes
            nodes = (*scaling, *first_casts, *parts, *last_casts, scaled, *casts)
            return RowNorm(nodes, h, weight, eps, shift)
    return None


def _norm_of_torch(node: fx.Node, casts: tuple[fx.Node, ...]) -> RowNorm | None:
    """rms_norm(h, sizes, weight, eps)"""
    if node.target is not RMS_NORM or len(node.args) != 4:
        return None
    h, _, weight, eps = node.args  # the sizes are those of the weight
    if not _are_nodes(h, weight) or type(eps) is not float:
        return None
    return RowNorm((node, *casts), h, weight, eps)  # type: ignore[arg-type]  # nodes


def _normalized(product: fx.Node) -> tuple[fx.Node, float, tuple[fx.Node, ...]] | None:
    """h * rsqrt(mean(h^2, -1) + eps): h, eps and what computes it"""
    if product.target is not operator.mul or not _are_nodes(*product.args):
        return None
    h, inverse = product.args
    chain = _chain(inverse, torch.rsqrt, operator.add, "mean", "pow")
    if chain is None or chain[-1].args != (h, 2):
        return None
    eps, mean = chain[1].args[1], chain[2]
    axes = dict(zip(("dim", "keepdim"), mean.args[1:], strict=False)) | mean.kwargs
    if type(eps) is not float or axes != {"dim": -1, "keepdim": True}:
        return None
    return h, eps, (*reversed(chain), product)  # type: ignore[return-value]  # h is a node


def _shifted(node: fx.Node, like: FakeTensor) -> tuple[fx.Node, float, tuple[fx.Node, ...]]:
    """The vector and the number whose sum `node` is, as in `1 + weight`, and what computes it."""
    total, casts = _uncast(node, like)
    numbers = [arg for arg in total.args if type(arg) in (int, float)]
    if total.target is not operator.add or len(numbers) != 1:
        return total, 0.0, casts
    (vector,) = [arg for arg in total.args if arg is not numbers[0]]
    weight, more = _uncast(vector, like)
    return weight, float(numbers[0]), (*more, total, *casts)  # type: ignore[arg-type]  # a number


def _fits(norm: RowNorm, like: FakeTensor) -> bool:
    """It reads rows, scales each element, and rounds to nothing else than its result does."""
    x, weight = value_of(norm.x), value_of(norm.weight)
    width, dtypes = like.shape[-1], (torch.float32, like.dtype)
    return (
        x is not None
        and rows_of(x, width) is not None
        and x.dtype in dtypes
        and is_vector(norm.weight, width)
        and weight.dtype in dtypes
    )


def _uncast(node: Any, like: FakeTensor) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """What `node` is a cast or a view of, and these in the order of the graph."""
    casts: list[fx.Node] = []
    while _keeps_rows(node, like):
        casts.append(node)
        node = node.args[0]
    return node, tuple(reversed(casts))


def _keeps_rows(node: fx.Node, like: FakeTensor) -> bool:
    """Whether this casts or views rows, on one device."""
    sizes_only = not node.kwargs and not any(isinstance(arg, torch.dtype) for arg in node.args)
    value, source = value_of(node), value_of(node.args[0]) if node.args else None
    return (
        node.op == "call_method"
        and (node.target in CASTS or (node.target in VIEWS and sizes_only))
        and value is not None
        and source is not None
        and value.dtype in (torch.float32, like.dtype)
        and value.device == source.device
        and rows_of(value, like.shape[-1]) is not None
    )


def _chain(node: Any, *targets: Any) -> list[fx.Node] | None:
    """Nodes that call these targets, each on the result of the next."""
    found: list[fx.Node] = []
    for target in targets:
        if not isinstance(node, fx.Node) or node.target != target or not node.args:
            return None
        found.append(node)
        node = node.args[0]
    return found


def _are_nodes(*args: Any) -> bool:
    return all(isinstance(arg, fx.Node) for arg in args)
