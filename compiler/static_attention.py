"""
Puts one kernel in place of attention of one query over a static cache.

What transformers writes for it repeats keys and values for every query head, and libraries then read the
whole cache, however little of it is filled.  `static_attention_decode` reads what the mask shows, once:

    scaled_dot_product_attention(q, k, v, mask)     q of one position; k and v repeated or not
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from midstream.compiler.traced import arguments_of, calls, calls_only, is_on, value_of
from midstream.ops.registry import DTYPES
from midstream.ops.static_attention_decode import MAX_ROWS, MAX_WIDTH, static_attention_decode

_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_PURE = (operator.getitem, "expand", "reshape")  # between the repetition and the attention
_HEAD_AXIS = (slice(None), slice(None), None, slice(None), slice(None))


@dataclass(frozen=True, slots=True)
class _Attention:
    """A call that the kernel can compute."""

    q: fx.Node  # [B, H, 1, D]
    k: fx.Node  # [B, G, L, D]
    v: fx.Node
    mask: fx.Node | None  # bool, for all heads
    scale: float


def fuse_static_attention(gm: fx.GraphModule, device_type: str = "cuda") -> int:
    """Replace it in a graph that Dynamo traced and that needs no gradients.  Returns how often."""
    found = 0
    for node in calls(gm.graph, _ATTENTION):
        attention = _attention(node, device_type)
        if attention is not None:
            _replace(gm.graph, node, attention)
            found += 1
    if found:
        gm.recompile()
    return found


def _attention(node: fx.Node, device_type: str) -> _Attention | None:
    args = arguments_of(
        node, query=None, key=None, value=None, attn_mask=None, dropout_p=0.0, is_causal=False,
        scale=None, enable_gqa=False,
    )  # fmt: skip
    q, mask = args["query"], args["attn_mask"]
    if not is_on(device_type, q, args["key"], args["value"], node):
        return None
    if args["dropout_p"] or args["is_causal"] or not isinstance(args["scale"], (float, type(None))):
        return None
    k, v = (_before_repetition(args[name], node) for name in ("key", "value"))
    query, keys, values = value_of(q), value_of(k), value_of(v)
    alike = query.dtype == keys.dtype == values.dtype == value_of(node).dtype
    if not alike or query.dtype not in DTYPES or query.dim() != 4 or keys.dim() != 4:
        return None
    rows, heads, tokens, width = query.shape
    fits = (
        tokens == 1
        and rows <= MAX_ROWS
        and 0 < width <= MAX_WIDTH
        and keys.shape == values.shape
        and keys.shape[0] == rows
        and keys.shape[2] > 0
        and keys.shape[3] == width
        and keys.shape[1] > 0
        and heads % keys.shape[1] == 0
        and all(value.stride(-1) == 1 for value in (query, keys, values))
    )
    if not fits or not _is_for_all_heads(mask, rows, keys.shape[2], device_type):
        return None
    scale = width**-0.5 if args["scale"] is None else args["scale"]
    return _Attention(q, k, v, mask, scale)


def _is_for_all_heads(mask: Any, rows: int, length: int, device_type: str) -> bool:
    """Whether this is no mask, or one of true and false that all heads share."""
    if mask is None:
        return True
    if not is_on(device_type, mask):
        return False
    value = value_of(mask)
    shapes = ((rows, 1, 1, length), (1, 1, 1, length))
    return value.dtype == torch.bool and tuple(value.shape) in shapes and value.stride(-1) == 1


def _before_repetition(node: fx.Node, attention: fx.Node) -> fx.Node:
    """The keys or values [B, G, L, D] whose heads `node` repeats n times; `node` where it does not.

        x[:, :, None].expand(B, G, n, L, D).reshape(B, G * n, L, D)
    This is a copy: nothing may write the cache between it and the attention.
    """
    expanded = node.args[0] if node.target == "reshape" else None
    if not isinstance(expanded, fx.Node) or expanded.target != "expand":
        return node
    viewed = expanded.args[0]
    if not isinstance(viewed, fx.Node) or viewed.target is not operator.getitem:
        return node
    source, index = viewed.args
    whole, wide, repeated = value_of(source), value_of(expanded), value_of(node)
    if whole is None or wide is None or index != _HEAD_AXIS or whole.dim() != 4:
        return node
    rows, heads, length, width = whole.shape
    repeats = tuple(wide.shape) == (rows, heads, wide.shape[2], length, width)
    joined = tuple(repeated.shape) == (rows, heads * wide.shape[2], length, width)
    undisturbed = calls_only(node, attention, _PURE)
    return source if repeats and joined and undisturbed else node  # type: ignore[return-value]


def _replace(graph: fx.Graph, node: fx.Node, attention: _Attention) -> None:
    value = value_of(node)
    rows, heads, _, width = value.shape
    with graph.inserting_before(node):
        q = graph.call_function(operator.getitem, (attention.q, (slice(None), slice(None), 0)))
        visible = None
        if attention.mask is not None:
            length = value_of(attention.k).shape[2]
            shown = graph.call_method("expand", (attention.mask, rows, 1, 1, length))
            visible = graph.call_function(operator.getitem, (shown, (slice(None), 0, 0)))
        out = graph.call_method("new_empty", (attention.q, (rows, heads, width)))
        graph.call_function(
            static_attention_decode.overload,
            (out, q, attention.k, attention.v, visible, attention.scale),
        )
        result = graph.call_method("unsqueeze", (out, 2))
    result.meta = dict(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
