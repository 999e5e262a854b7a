"""Which operators no CUDA graph can hold, and what to do about each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from midstream.compiler.fallbacks import Reason, source_line

_HOST_READS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
_MOVES_MEMORY = (
    "aten::set_",
    "aten::resize_",
    "aten::resize_as_",
    "inductor::resize_storage_bytes_",
)
_COLLECTIVES = ("c10d", "_c10d_functional", "_dtensor")
_NEEDS_MASK = (torch.bool, torch.uint8)


def find_obstacle(op: Any, args: Sequence[Any], node: fx.Node) -> Reason | None:
    """Why a call of `op` cannot be recorded, None if it can."""
    found = _what_and_advice(op, args)
    return found and Reason(*found, op=str(op), line=source_line(node))


def _what_and_advice(op: Any, args: Sequence[Any]) -> tuple[str, str] | None:
    name, tags = op._schema.name, op.tags
    if name in _HOST_READS or torch.Tag.data_dependent_output in tags:
        return "a device value that the host reads", "keep it a tensor, or read it outside"
    if _shape_depends_on_data(name, tags, args):
        return "a result whose shape depends on data", "use a mask of fixed shape instead"
    if name in _MOVES_MEMORY:
        return "memory that is moved or resized", "write into tensors in place"
    if name.partition("::")[0] in _COLLECTIVES:
        return "communication between devices", "compile what lies between the collectives"
    if torch.Tag.cudagraph_unsafe in tags:
        return (
            "an operator that is marked unsafe for graphs",
            "leave it outside of the compiled function",
        )
    return None


def _shape_depends_on_data(name: str, tags: Sequence[torch.Tag], args: Sequence[Any]) -> bool:
    if name == "aten::index":  # only masks do
        return any(isinstance(i, Tensor) and i.dtype in _NEEDS_MASK for i in args[1])
    return torch.Tag.dynamic_output_shape in tags
