"""The requests in slots, in order: as a list, and as an array of their slots for the passes over rows."""

from __future__ import annotations

from bisect import bisect

import numpy as np
import numpy.typing as npt

from midstream.runtime.request import Request


class Running:
    """Ordered by `Request.order`.

    >>> running = Running(4)
    >>> len(running.requests), running.slots.tolist()
    (0, [0, 0, 0, 0])
    """

    def __init__(self, num_slots: int) -> None:
        self.requests: list[Request] = []
        self.slots: npt.NDArray[np.int32] = np.zeros(
            num_slots, np.int32
        )  # of `requests`, then junk

    def add(self, request: Request) -> None:
        """Enter a request that has got a slot."""
        place, end = bisect(self.requests, request.order, key=_order), len(self.requests)
        self.requests.insert(place, request)
        self.slots[place + 1 : end + 1] = self.slots[place:end]
        self.slots[place] = request.slot

    def remove(self, request: Request) -> None:
        """Take out a request that leaves its slot."""
        place = self.requests.index(request)
        del self.requests[place]
        self.slots[place:-1] = self.slots[place + 1 :]


def _order(request: Request) -> tuple[int, int]:
    return request.order
