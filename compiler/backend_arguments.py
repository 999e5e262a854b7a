"""What each argument of a traced graph is: a weight, state, an input or a number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from midstream.compiler.fallbacks import Reason
from midstream.graphs.recorded import InputRole

_NUMBERS = (bool, int, float, str, type(None), torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, slots=True)
class Argument:
    """What is known of an argument before any call."""

    name: str
    role: InputRole
    num_bytes: int


def arguments_of(
    gm: fx.GraphModule, inputs: Sequence[Any], attributes: Sequence[Tensor], written: set[int]
) -> tuple[Argument, ...]:
    """The placeholders of `gm` in order, then tensors that it holds itself.

    Args:
        written: places of those whose memory the graph writes, by whatever name.
    """
    nodes = gm.graph.find_nodes(op="placeholder")
    roles = [_role(node, value) for node, value in zip(nodes, inputs, strict=True)]
    roles += [InputRole.PARAMETER] * len(attributes)
    names = [node.name for node in nodes] + [f"attribute_{n}" for n in range(len(attributes))]
    return tuple(
        Argument(name, InputRole.STATE if place in written else role, _num_bytes(value))
        for place, (name, role, value) in enumerate(
            zip(names, roles, [*inputs, *attributes], strict=True)
        )
    )


def unknown_argument(values: Sequence[Any]) -> Reason | None:
    """Why arguments cannot be told apart, None if they can."""
    for value in values:
        if is_traceable_wrapper_subclass(value) or not isinstance(value, (Tensor, *_NUMBERS)):
            return Reason(
                f"an argument of type {type(value).__name__}",
                "pass plain tensors and numbers to what is compiled",
            )
    return None


def _role(node: fx.Node, value: Any) -> InputRole:
    if not isinstance(value, Tensor):
        return InputRole.NUMBER
    # set by torch for tensors that modules own and for those that were marked by mark_static_address
    is_static = "_dynamo_static_input_type" in node.meta.get("tensor_dict", ())
    return InputRole.PARAMETER if is_static or isinstance(value, nn.Parameter) else InputRole.INPUT


def _num_bytes(value: Any) -> int:
    """As the example has it: sizes that change are not known before a call."""
    return int(value.numel()) * value.element_size() if isinstance(value, Tensor) else 0
