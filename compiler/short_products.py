"""
Spells out products that are too short for a library, so that Inductor fuses them with what stands around.

    bmm or matmul with one column or one row in each batch     -> a sum over products
    conv1d of each channel by itself, with few results         -> a sum over taps

So the update of a recurrent state, the read of it, and the convolution before are a few kernels instead of
a chain of small ones.  Products and sums are float32, as those of the library are.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from midstream.compiler.traced import arguments_of, calls, is_on, value_of
from midstream.ops.registry import DTYPES

_MATMULS = (torch.bmm, torch.matmul, operator.matmul)
_FEW = 4  # results of a convolution
_MOST_TAPS = 8  # each is spelled out


def spell_out_short_products(gm: fx.GraphModule, device_type: str = "cuda") -> int:
    """Replace them in a graph that Dynamo traced and that needs no gradients.  Returns their number."""
    found = 0
    for node in calls(gm.graph, *_MATMULS, torch.conv1d):
        by_sums = _by_sums(node, device_type)
        if by_sums is not None:
            function, args = by_sums
            with gm.graph.inserting_before(node):
                spelled_out = gm.graph.call_function(function, args)
            spelled_out.meta = dict(node.meta)
            node.replace_all_uses_with(spelled_out)
            gm.graph.erase_node(node)
            found += 1
    if found:
        gm.recompile()
    return found


def product_by_sums(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of [..., M, K] and [..., K, N], where M or N is 1."""
    wide_a, wide_b = a.float(), b.float()
    if b.shape[-1] == 1:
        product = (wide_a * wide_b.transpose(-1, -2)).sum(-1, keepdim=True)
    else:
        product = (wide_a.transpose(-1, -2) * wide_b).sum(-2, keepdim=True)
    return product.to(a.dtype)


def depthwise_by_sums(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """conv1d(x, weight, bias, groups=C) of [B, C, L] with weights [C, 1, K]: [B, C, L - K + 1]."""
    taps, wide = weight.shape[2], x.float()
    results = x.shape[2] - taps + 1
    total = wide[:, :, :results] * weight[:, :, 0].float()
    for tap in range(1, taps):
        total = total + wide[:, :, tap : tap + results] * weight[:, :, tap].float()
    if bias is not None:
        total = total + bias.float()[:, None]
    return total.to(x.dtype).contiguous()


def _by_sums(node: fx.Node, device_type: str) -> tuple[Any, tuple[Any, ...]] | None:
    """What computes the same, and its arguments; None for what stays as it is."""
    if node.target in _MATMULS:
        return (product_by_sums, node.args) if _is_short_product(node, device_type) else None
    args = arguments_of(
        node, input=None, weight=None, bias=None, stride=1, padding=0, dilation=1, groups=1
    )
    if not _is_short_depthwise(args, node, device_type):
        return None
    return depthwise_by_sums, (args["input"], args["weight"], args["bias"])


def _is_short_product(node: fx.Node, device_type: str) -> bool:
    if len(node.args) != 2 or node.kwargs or not is_on(device_type, *node.args, node):
        return False
    a, b, result = value_of(node.args[0]), value_of(node.args[1]), value_of(node)
    return (
        a.dtype == b.dtype == result.dtype  # another one under autocast
        and a.dtype in DTYPES
        and a.dim() == b.dim() > 2  # a matrix may be weights, which compiler/projections.py reads
        and a.shape[:-2] == b.shape[:-2]
        and 1 in (a.shape[-2], b.shape[-1])
    )


def _is_short_depthwise(args: dict[str, Any], node: fx.Node, device_type: str) -> bool:
    tensors = [args[name] for name in ("input", "weight", "bias") if args[name] is not None]
    if not is_on(device_type, *tensors, node):
        return False
    x, weight = value_of(args["input"]), value_of(args["weight"])
    stride, padding, dilation = (_single(args[n]) for n in ("stride", "padding", "dilation"))
    return (
        len({value_of(tensor).dtype for tensor in (*tensors, node)}) == 1  # another under autocast
        and x.dtype in DTYPES
        and value_of(node).is_contiguous()
        and x.dim() == 3
        and args["groups"] == x.shape[1] == weight.shape[0]
        and (stride, padding, dilation) == (1, 0, 1)
        and 0 <= x.shape[2] - weight.shape[2] < _FEW
        and weight.shape[2] <= _MOST_TAPS
    )


def _single(number: Any) -> Any:
    """A number, also where it stands alone in a list."""
    return number[0] if isinstance(number, (tuple, list)) and len(number) == 1 else number
