"""A device's queue on the CPU, whose work is done as late as the host can find out."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from midstream.errors import ContractError
from midstream.graphs.queue import Event, Work

Pace = Literal["late", "early"] | int


class EmulatedQueue:
    """Work in order: done when the host waits for it ("late"), at once ("early"), or now and then (a seed).

    What is freed or overwritten too early shows in the late queue; what is read from a place that later work
    uses again shows in the early one.
    """

    def __init__(self, pace: Pace = "late") -> None:
        self.num_enqueued = 0
        self.num_done = 0
        self.waited_for = 0  # the latest place that the host waited for
        self._work: deque[Work] = deque()
        self._turns = _turns(pace)
        self._at_once = False  # inside of work, or while a step is recorded

    def host_zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def copy(self, target: Tensor, source: Tensor) -> None:
        if target.shape != source.shape:  # which the copy itself would say too late
            raise ContractError(
                f"EmulatedQueue: a copy of shape {tuple(source.shape)} into {tuple(target.shape)}; expected "
                "equal shapes"
            )
        self.run(lambda: target.copy_(source))

    def run(self, work: Callable[[], object]) -> None:
        if self._at_once:
            work()
            return
        self._work.append(work)
        self.num_enqueued += 1
        self._advance(self.num_done + self._turns(len(self._work)))

    @property
    def is_idle(self) -> bool:
        """Whether all work has begun."""
        return self.num_done == self.num_enqueued

    def new_event(self) -> Event:
        return EmulatedEvent(self)

    def synchronize(self) -> None:
        self.wait_for(self.num_enqueued)

    def wait_for(self, place: int) -> None:
        """Do the work up to a place; the host stands still meanwhile."""
        if self._at_once:
            raise ContractError(
                "EmulatedQueue: a step waits for the device, which a captured graph cannot do; expected "
                "device work only; wait between steps"
            )
        self.waited_for = max(self.waited_for, place)
        self._advance(place)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A step is recorded: what it enqueues happens at once, and it must not wait."""
        self.synchronize()
        with self._all_at_once():
            yield

    @contextmanager
    def _all_at_once(self) -> Iterator[None]:
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def _advance(self, place: int) -> None:
        with self._all_at_once():
            while self.num_done < place:
                self.num_done += 1  # work that raises is over, as on a device
                self._work.popleft()()


class EmulatedEvent:
    """A place in an emulated queue."""

    def __init__(self, queue: EmulatedQueue) -> None:
        self._queue = queue
        self._place = 0

    def record(self) -> None:
        self._place = self._queue.num_enqueued

    def synchronize(self) -> None:
        self._queue.wait_for(self._place)


def _turns(pace: Pace) -> Callable[[int], int]:
    """How many pieces of waiting work are done whenever one is enqueued."""
    if pace == "late":
        return lambda waiting: 0
    if pace == "early":
        return lambda waiting: waiting
    draw = random.Random(pace)
    return lambda waiting: draw.randint(0, waiting)
