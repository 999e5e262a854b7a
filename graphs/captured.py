"""What a capture gives back, whoever captured: CUDA, the CPU emulator, or pieces with eager work between."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from midstream.errors import ContractError
from midstream.graphs.addresses import check_addresses

Addresses = Callable[[], Mapping[str, int]]  # of all buffers that a graph binds, by name
Step = Callable[[], None]  # enqueues work of fixed shapes on the current stream; waits for nothing


class Captured(Protocol):
    """One recorded step.  Released graphs refuse to be replayed."""

    name: str
    memory_bytes: int  # by which its capture made the pool grow
    seconds: float  # that warm-up and capture took
    num_nodes: int  # device operations recorded

    def replay(self) -> None:
        """Enqueue the recorded work on the current stream.  Waits for nothing."""

    def release(self) -> None:
        """Give its memory back to the pool; may be repeated."""


class Capturer(Protocol):
    """Records steps into one memory pool.

    `capture` runs `step` to warm it up, records it and returns what replays it.  A failure inside leaves
    no open capture and gives back all memory that it took.
    """

    def capture(self, step: Step, addresses: Addresses, name: str) -> Captured:
        """
        Raises:
            ContractError: when a bound buffer moved, or the step reads a device value.
        """

    def release(self) -> None:
        """Release every graph and the pool; the next capture starts a new one."""


class Recorder(Capturer, Protocol):
    """A capturer that can also be told where to begin and to end, for a step that is recorded in pieces.

        with recorder.recording(name):
            recorder.warm_up(step)
            recorder.begin()
            step()  # whose parts may call end() and begin() again, from inside of an op
            graph = recorder.end(name)

    Between `end` and `begin` work runs eagerly.  `ops/interception.py` says where an op is called.
    """

    def recording(self, name: str) -> AbstractContextManager[None]:
        """Where the other methods are called.  A failure inside forgets what was recorded since `begin`."""

    def warm_up(self, step: Step) -> None:
        """Run `step` where it will be recorded: what happens once must not happen while recording."""

    def begin(self) -> None:
        """Record from here on."""

    def end(self, name: str) -> Captured:
        """Stop, and return what was recorded since `begin`."""

    def enqueuing(self, work: Step) -> Step:
        """What runs `work` in order with the graphs of this recorder: the work between them."""


def capture_whole(recorder: Recorder, step: Step, addresses: Addresses, name: str) -> Captured:
    """`Capturer.capture` of a recorder that records a step as one graph."""
    begin, before = time.perf_counter(), dict(addresses())
    with recorder.recording(name):
        recorder.warm_up(step)
        recorder.begin()
        step()
        graph = recorder.end(name)
    try:
        check_addresses(before, addresses(), name)
    except ContractError:
        graph.release()
        raise
    graph.seconds = time.perf_counter() - begin
    return graph
