"""Why a call cannot be recorded, found from its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from midstream.graphs.input_buffers import is_copyable
from midstream.graphs.memory import storage_address
from midstream.graphs.roles import Places

_PLAIN = (Tensor, nn.Parameter)  # what lies behind a subclass, only the subclass knows


def find_obstacle(flat: Sequence[Any], places: Places) -> str | None:
    """The first reason against recording; None where there is none."""
    tensors = places.pick_tensors(flat)
    if not tensors:
        return "it has no tensor among its arguments"
    device = tensors[0].device
    for place, tensor in zip(places.tensors, tensors, strict=True):
        reason = _obstacle_in(tensor, device)
        if reason is not None:
            return f"argument {place} {reason}"
    if needs_gradients(flat, places):
        return "an argument requires gradients"
    written = {storage_address(state) for state in places.pick_states(flat) if state.numel()}
    for place, tensor in zip(places.inputs, places.pick_inputs(flat), strict=True):
        if storage_address(tensor) in written:
            return f"argument {place} shares memory with a state tensor, but is none"
        if not is_copyable(tensor):
            return f"argument {place} overlaps itself"
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "the current stream is being captured"
    return None


def needs_gradients(flat: Sequence[Any], places: Places) -> bool:
    """Whether autograd would record the call."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in places.pick_tensors(flat))


def _obstacle_in(tensor: Tensor, device: torch.device) -> str | None:
    if type(tensor) not in _PLAIN:
        return f"is a {type(tensor).__name__}, no plain tensor"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"has the layout {tensor.layout}, dtype {tensor.dtype}"
    if tensor.is_conj() or tensor.is_neg():
        return "is a lazy conjugate or negative"
    if tensor.device != device:
        return f"lies on {tensor.device}, others on {device}"
    return None
