"""Changes of the device's slot memory that it has not got yet: a set of elements, each with its new value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from midstream.ops import host_decode

I32 = npt.NDArray[np.int32]


class Deltas:
    """Filled while steps are planned, emptied by the stage.  An element that changes again keeps its place.

    >>> deltas = Deltas(100)
    >>> deltas.put({7: 1, 8: 2})
    >>> deltas.put_row(8, [5, 6])
    >>> deltas.items()
    [(7, 1), (8, 5), (9, 6)]
    """

    def __init__(self, num_elements: int) -> None:
        # i32[3, E]  index, value, and where an index stands; not cleared: only used parts take memory
        self.table: I32 = np.zeros((3, num_elements), np.int32)
        self.count: I32 = np.zeros(1, np.int32)

    def __len__(self) -> int:
        return int(self.count[0])

    def put(self, changes: Mapping[int, int]) -> None:
        """Change elements, by index."""
        self._put(np.fromiter(changes, np.int32), np.fromiter(changes.values(), np.int32))

    def put_row(self, first: int, values: Sequence[int] | I32) -> None:
        """Change the elements from `first` on."""
        value = np.asarray(values, np.int32)
        self._put(np.arange(first, first + len(value), dtype=np.int32), value)

    def items(self) -> list[tuple[int, int]]:
        """Index and value of each change."""
        index, value = self.table[:2, : len(self)].tolist()
        return list(zip(index, value, strict=True))

    def clear(self) -> None:
        """The device has them."""
        self.count[0] = 0

    def _put(self, index: I32, value: I32) -> None:
        host_decode.put_deltas(self.table, self.count, index, value)
