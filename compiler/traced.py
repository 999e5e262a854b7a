"""What is known of a node in a graph that Dynamo traced, and of what happens between two of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import fx
from torch._subclasses import FakeTensor

_RESHAPING = frozenset(  # in place
    f"{name}_"
    for name in (
        "as_strided", "resize", "resize_as", "set", "squeeze", "swapaxes", "swapdims", "t", "transpose",
        "unsqueeze",
    )
)  # fmt: skip

MADE = "midstream"  # in the meta of calls that passes made: they write tensors of their own


def calls(graph: fx.Graph, *targets: Any) -> list[fx.Node]:
    """The calls of these functions, in order: what a pass may replace.

    None where a tensor gets another shape in place, for `value_of` says what it is at the end of the graph.
    """
    if any(getattr(node.target, "__name__", node.target) in _RESHAPING for node in graph.nodes):
        return []
    return [node for node in graph.nodes if node.op == "call_function" and node.target in targets]


def value_of(node: Any) -> Any:
    """What stands for the node's result; None for subclasses, whose products may mean something else.

    So may those of what torch.func wraps, whose type is Tensor: e.g. our kernels have no derivatives.
    """
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if type(value) is FakeTensor else None


def are_known(*sizes: Any) -> bool:
    """Numbers, not symbols: comparing those would bind them."""
    return all(isinstance(size, int) for size in sizes)


def rows_of(value: FakeTensor, width: int, *, apart: bool = False) -> Any:
    """How many rows of this width a tensor is: a number or a symbol; None for others.

    They have no gaps, and one follows the other, unless they may lie `apart`.  All but one of its outer
    axes are known to be of length one.
    """
    if not value.dim() or not are_known(value.shape[-1], value.stride(-1), width):
        return None
    if value.shape[-1] != width or value.stride(-1) != 1:
        return None
    if are_known(*value.shape) and value.numel() == width:
        return 1
    axes = [n for n, size in enumerate(value.shape[:-1]) if not (are_known(size) and size == 1)]
    pitch = value.stride(axes[0]) if len(axes) == 1 else None
    follow = apart or (are_known(pitch) and pitch == width)
    return value.shape[axes[0]] if len(axes) == 1 and follow else None


def have_same_shape(one: FakeTensor, other: FakeTensor) -> bool:
    """Whether all sizes are equal; symbols are where they stand for the same expression."""
    return one.dim() == other.dim() and all(
        a == b if are_known(a, b) else not are_known(a) and not are_known(b) and _same_symbol(a, b)
        for a, b in zip(one.shape, other.shape, strict=True)
    )


def _same_symbol(one: Any, other: Any) -> bool:
    return bool(one.node.expr == other.node.expr)  # as expressions: comparing symbols binds them


def is_on(device_type: str, *nodes: Any) -> bool:
    """Whether all nodes are tensors of known sizes on such a device."""
    values = [value_of(node) for node in nodes]
    return all(
        value is not None and value.device.type == device_type and are_known(*value.shape)
        for value in values
    )


def only_user(node: fx.Node | None, target: Any) -> fx.Node | None:
    """The user of `node`, if there is one and it calls `target`."""
    users = list(node.users) if node is not None else []
    return users[0] if len(users) == 1 and users[0].target is target else None


def calls_only(first: fx.Node, last: fx.Node, allowed: Collection[Any]) -> bool:
    """Whether what stands from `first` up to `last`, but for `last` itself, calls these, writing nothing.

    What passes made may stand there too.
    """
    node = first
    while node is not last:
        # activations take `inplace` in the second place
        in_place = node.kwargs.get("inplace") or (len(node.args) == 2 and node.args[1] is True)
        writes = node.target not in allowed or in_place or "out" in node.kwargs
        if writes and MADE not in node.meta:
            return False
        node = node.next
    return True


def arguments_of(node: fx.Node, **defaults: Any) -> dict[str, Any]:
    """The arguments of a call by the names of `defaults`, in the order of the function's own."""
    return defaults | dict(zip(defaults, node.args, strict=False)) | node.kwargs
