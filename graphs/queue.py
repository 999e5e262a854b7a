"""
The order in which a device works: copies, launches and the events behind them, all enqueued by the host.

Whoever sends data to the device or waits for it goes through a queue, so that the same code runs on a
CUDA stream, at once on a CPU, and as late as a device may run it (`graphs/emulator.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Work = Callable[[], object]


class Event(Protocol):
    """A place in the queue."""

    def record(self) -> None:
        """Mark the place behind all work enqueued so far."""

    def synchronize(self) -> None:
        """Wait until the work ahead of the last mark is done; returns at once where none was made."""


class DeviceQueue(Protocol):
    """Work in order.  Only `synchronize` of the queue or of an event makes the host wait."""

    def host_zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory that a copy may still read or write while the host goes on."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy; memory of the host must stay as it is until an event behind it has passed."""

    def run(self, work: Work) -> None:
        """Enqueue what `work` enqueues; it may run later than this returns."""

    def new_event(self) -> Event: ...

    def synchronize(self) -> None:
        """Wait until all work is done."""


class StreamQueue:
    """The current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def host_zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def run(self, work: Work) -> None:
        work()

    def new_event(self) -> Event:
        return torch.cuda.Event()

    def synchronize(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()


class ImmediateQueue:
    """A CPU as its own device: work is done when it is enqueued, and events have always passed."""

    def host_zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def run(self, work: Work) -> None:
        work()

    def new_event(self) -> Event:
        return self

    def record(self) -> None:
        """Events of this queue have no state: the queue stands for them."""

    def synchronize(self) -> None:
        """Nothing is ever left to do."""


def queue_of(device: torch.device) -> DeviceQueue:
    """The queue that a device of this type has."""
    return StreamQueue(device) if device.type == "cuda" else ImmediateQueue()
