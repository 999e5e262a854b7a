"""
The keys of one sequence, block after block: numbers of the hasher until somebody asks for one.

A lookup asks for a dozen of hundreds; making a Python int of each would take longer than hashing the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from midstream.runtime.hashing import KEY_BYTES, Hashes, as_keys

_ROOM = 16  # blocks that a sequence has room for at first


class Keys(Sequence[int]):
    """Grows at its end.

    >>> keys = Keys()
    >>> keys.append(np.array([[71, 0], [72, 1]], np.uint64))
    >>> len(keys), keys[0], keys[-1] - (1 << 64), keys[:1]
    (2, 71, 72, [71])
    """

    __slots__ = ("_asked", "_bytes", "_count", "_hashes")

    def __init__(self) -> None:
        self._make_room(_ROOM)
        self._count = 0
        self._asked: dict[int, int] = {}  # a waiting request asks for the same ones again

    def append(self, hashes: Hashes) -> None:
        """The next blocks."""
        first, self._count = self._count, self._count + len(hashes)
        if self._count > len(self._hashes):
            known = self._hashes[:first]
            self._make_room(max(self._count, 2 * first))
            self._hashes[:first] = known
        self._hashes[first : self._count] = hashes

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> list[int]: ...
    def __getitem__(self, place: int | slice) -> int | list[int]:
        if isinstance(place, slice):
            return as_keys(self._hashes[: self._count][place])
        known = self._asked.get(place)
        if known is not None:
            return known
        block = place if place >= 0 else place + self._count
        if not 0 <= block < self._count:
            raise IndexError(f"Keys: block {place} of {self._count}")
        begin = block * KEY_BYTES
        key = int.from_bytes(self._bytes[begin : begin + KEY_BYTES], "little")
        if place >= 0:  # from the end it is another one later
            self._asked[place] = key
        return key

    def _make_room(self, num_blocks: int) -> None:
        self._hashes: Hashes = np.empty((num_blocks, 2), "<u8")
        self._bytes = self._hashes.data.cast("B")
