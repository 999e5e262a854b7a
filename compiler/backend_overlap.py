"""Tells calls whose arguments overlap otherwise than when the graph was compiled."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch._subclasses import FakeTensor

Range = tuple[int, int, int]  # memory, first byte in it, byte behind the last


class OverlapCheck:
    """Compilers assume that a written argument overlaps those that it overlapped when they compiled."""

    def __init__(self, inputs: Sequence[Any], written: set[int]) -> None:
        self._written = sorted(written)
        self._tensors = [place for place, value in enumerate(inputs) if isinstance(value, Tensor)]
        self._expected = self._overlaps(inputs)

    def holds(self, inputs: Sequence[Any]) -> bool:
        """Whether arguments overlap as they did."""
        return not self._written or self._overlaps(inputs) == self._expected

    def _overlaps(self, inputs: Sequence[Any]) -> set[tuple[int, int, int]]:
        """Pairs of a written argument and one that it overlaps, with the bytes between their beginnings."""
        if not self._written:
            return set()
        ranges = {place: _range(inputs[place]) for place in self._tensors if inputs[place].numel()}
        ordered = sorted(ranges.values())
        if all(not _meet(one, other) for one, other in pairwise(ordered)):
            return set()
        return {
            (place, other, range_[1] - ranges[place][1])
            for place in self._written
            for other, range_ in ranges.items()
            if other != place and place in ranges and _meet(ranges[place], range_)
        }


def _meet(one: Range, other: Range) -> bool:
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]


def _range(tensor: Tensor) -> Range:
    """Views with gaps count whole.  Fake tensors have no address, but a storage."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    num_bytes = (int(last) + 1) * tensor.element_size()
    if isinstance(tensor, FakeTensor):
        begin = int(tensor.storage_offset()) * tensor.element_size()
        return tensor.untyped_storage()._cdata, begin, begin + num_bytes
    return 0, tensor.data_ptr(), tensor.data_ptr() + num_bytes
