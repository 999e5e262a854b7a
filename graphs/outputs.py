"""
What a recorded call hands out: fresh copies of what lies in graph memory, and the caller's own tensors.

The next replay overwrites graph memory, so nobody else may hold it.  An output that aliases an argument
in the recorded run aliases the caller's argument.  Outputs that share memory go on sharing it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from midstream.errors import ContractError
from midstream.graphs.memory import storage_address

_Make = Callable[
    [Sequence[Any], Sequence[Tensor]], Any
]  # caller's arguments, fresh copies -> output


class Outputs:
    """Results of one recording.  `bound` are the arguments that the recorded run saw."""

    def __init__(self, results: Sequence[Any], bound: Sequence[Any], device: torch.device) -> None:
        tensors = [item for item in bound if isinstance(item, Tensor)]
        self._argument_at = {id(item): place for place, item in enumerate(bound)}
        self._storage_at = {
            storage_address(tensor): self._argument_at[id(tensor)]
            for tensor in tensors
            if tensor.numel()
        }
        self._uses = Counter(storage_address(item) for item in results if isinstance(item, Tensor))
        self._device = device
        self._sources: list[Tensor] = []  # in graph memory; copied after each replay
        self._source_at: dict[int, int] = {}
        self._makers = [self._maker(result, bound) for result in results]
        del self._argument_at, self._storage_at, self._uses, self._source_at

    def hand_out(self, arguments: Sequence[Any]) -> list[Any]:
        """Outputs of the replay that was enqueued last."""
        copies = [source.clone() for source in self._sources]
        return [make(arguments, copies) for make in self._makers]

    def _maker(self, result: Any, bound: Sequence[Any]) -> _Make:
        if not isinstance(result, Tensor):
            return lambda arguments, copies: result
        same = self._argument_at.get(id(result))
        if same is not None:
            return lambda arguments, copies: arguments[same]
        place = self._storage_at.get(storage_address(result))
        if place is not None and result.numel():
            return _view_of_argument(result, bound[place], place)
        if result.device != self._device:
            raise ContractError(
                f"recorded call: an output lies on {result.device}, the recording on {self._device}; a graph "
                "would give its value of the recorded run for ever; move it to the device, or leave this "
                "function uncaptured"
            )
        return self._copy(result)

    def _copy(self, result: Tensor) -> _Make:
        address = storage_address(result)
        if self._uses[address] == 1 and _is_dense(result):
            self._sources.append(result)
            at = len(self._sources) - 1
            return lambda arguments, copies: copies[at]
        if address not in self._source_at:
            self._source_at[address] = len(self._sources)
            self._sources.append(_whole_storage(result))
        return _view_of_copy(result, self._source_at[address])


def _view_of_copy(result: Tensor, at: int) -> _Make:
    dtype, place = result.dtype, (result.storage_offset(), result.shape, result.stride())
    with_bits = _lazy_bits(result)

    def make(arguments: Sequence[Any], copies: Sequence[Tensor]) -> Tensor:
        fresh = copies[at]
        view = torch.empty(0, dtype=dtype, device=fresh.device)
        return with_bits(view.set_(fresh.untyped_storage(), *place))

    return make


def _view_of_argument(result: Tensor, bound: Tensor, at: int) -> _Make:
    dtype, shape, stride = result.dtype, result.shape, result.stride()
    with_bits = _lazy_bits(result)
    ahead_bytes = result.data_ptr() - bound.data_ptr()

    def make(arguments: Sequence[Any], copies: Sequence[Tensor]) -> Tensor:
        argument: Tensor = arguments[at]
        offset_bytes = argument.storage_offset() * argument.element_size() + ahead_bytes
        offset = offset_bytes // dtype.itemsize
        if argument.dtype == dtype:
            return with_bits(argument.as_strided(shape, stride, offset))
        storage = argument.untyped_storage()
        view = torch.empty(0, dtype=dtype, device=argument.device)
        return with_bits(view.set_(storage, offset, shape, stride))

    return make


def _lazy_bits(like: Tensor) -> Callable[[Tensor], Tensor]:
    """What makes plain memory a lazy conjugate, or a lazy negative, where `like` is one."""
    if not (like.is_conj() or like.is_neg()):
        return lambda tensor: tensor

    def apply(tensor: Tensor) -> Tensor:
        tensor = torch._conj(tensor) if like_is_conj else tensor
        return torch._neg_view(tensor) if like_is_neg else tensor

    like_is_conj, like_is_neg = like.is_conj(), like.is_neg()
    return apply


def _whole_storage(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _is_dense(tensor: Tensor) -> bool:
    """Whether a clone has the same strides."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
