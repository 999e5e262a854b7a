"""Memory of a recording for arguments that are copied in before each replay."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_Narrow = Callable[[Tensor], Tensor]


class InputBuffers:
    """One buffer for each input, with its shape and strides."""

    def __init__(self, inputs: tuple[Tensor, ...]) -> None:
        with torch.inference_mode(False):  # may be written in every mode
            self.tensors = [
                torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
                for like in inputs
            ]
        self._narrow = [narrowing(tensor) for tensor in self.tensors]
        self._targets = [narrow(t) for narrow, t in zip(self._narrow, self.tensors, strict=True)]
        self._is_plain = all(narrow is _as_it_is for narrow in self._narrow)

    def fill(self, inputs: tuple[Tensor, ...]) -> None:
        """Enqueue the copies."""
        if not self._targets:
            return
        if not self._is_plain:
            inputs = tuple(narrow(t) for narrow, t in zip(self._narrow, inputs, strict=True))
        torch._foreach_copy_(self._targets, inputs)


def is_copyable(tensor: Tensor) -> bool:
    """Whether no two elements share memory, but those along dimensions of stride 0."""
    end = 1  # elements that the dimensions of smaller strides span
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 or size == 1:
            continue
        if stride < end:
            return False
        end += (size - 1) * stride
    return True


def narrowing(tensor: Tensor) -> _Narrow:
    """What makes tensors like a broadcast one small: one element for each dimension of stride 0."""
    pairs = list(zip(tensor.shape, tensor.stride(), strict=True))
    if not any(stride == 0 and size > 1 for size, stride in pairs):
        return _as_it_is
    shape = [1 if stride == 0 else size for size, stride in pairs]
    return lambda given: given.as_strided(shape, given.stride())


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
