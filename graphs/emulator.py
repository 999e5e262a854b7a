"""
Capture and replay of CUDA graphs on a CPU, at its most adversarial: for tests and to debug without a GPU.

A replay keeps to what was recorded (`ops/tape.py`).  All graphs of a capturer share one pool: a replay first
fills with NaN what it may overwrite there, all but what somebody held when its recording began.  With an
`EmulatedQueue` work is done as late as a device may do it.  So a step that relies on an earlier replay, on
Python running again, on a copy that has already been made, or on an address that changed gives wrong results
here, or an error that says which.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from midstream.errors import ContractError
from midstream.graphs.captured import Addresses, Captured, Step, capture_whole
from midstream.graphs.emulated_queue import EmulatedQueue
from midstream.ops.tape import Memory, Tape
from midstream.ops.tape_recorder import Recorder

_WARM_UPS = 2  # as many as a first capture on the GPU makes


class EmulatedCapture:
    """Records steps as `GraphCapture` does, into one pool of memory."""

    def __init__(self, queue: EmulatedQueue | None = None) -> None:
        self.queue = queue or EmulatedQueue("early")
        self._memory = Memory()
        self._graphs: list[EmulatedGraph] = []
        self._recorder = Recorder()
        self._kept: frozenset[int] = frozenset()  # memory that the open recording must leave alone

    def capture(self, step: Step, addresses: Addresses, name: str) -> Captured:
        """Run `step` to warm it up, record it, and return what replays it.

        Raises:
            ContractError: when a bound buffer moved, or the step does what a captured graph cannot hold.
        """
        return capture_whole(self, step, addresses, name)

    @contextmanager
    def recording(self, name: str) -> Iterator[None]:
        """Where the other methods are called.  A failure inside forgets what was recorded since `begin`."""
        self.queue.synchronize()  # nothing else runs meanwhile
        self._recorder = Recorder()
        with self.queue.recording(), self._recorder:
            yield

    def warm_up(self, step: Step) -> None:
        """Run `step`, so that nothing happens for the first time while recording."""
        for _ in range(_WARM_UPS):
            step()

    def begin(self) -> None:
        """Record from here on."""
        self._kept = self._memory.held
        self._recorder.begin(Tape(self._memory))

    def end(self, name: str) -> EmulatedGraph:
        """Stop, and return what was recorded since `begin`."""
        before = self.memory_bytes
        graph = EmulatedGraph(self, self._recorder.end(), self._kept, name)
        self._graphs.append(graph)
        graph.memory_bytes = self.memory_bytes - before
        return graph

    def enqueuing(self, work: Step) -> Step:
        """What runs `work` in order with the graphs: the work between them."""
        return lambda: self.queue.run(work)

    @property
    def memory_bytes(self) -> int:
        """Of the pool: what somebody holds, and the most that any one graph needs besides."""
        memory, held = self._memory, self._memory.held
        passing = (memory.num_bytes(graph.taken - held) for graph in self._graphs)
        return memory.num_bytes(held) + max(passing, default=0)

    def release(self) -> None:
        """Release every graph; the next capture starts a new pool."""
        while self._graphs:
            self._graphs[-1].release()

    def overwrite_pool(self, graph: EmulatedGraph) -> None:
        """A replay begins."""
        self._memory.poison(graph.kept)

    def forget(self, graph: EmulatedGraph) -> None:
        """A graph was released."""
        self._graphs.remove(graph)


class EmulatedGraph:
    """One recorded step."""

    def __init__(self, owner: EmulatedCapture, tape: Tape, kept: frozenset[int], name: str) -> None:
        """`kept`: memory of the pool that replays leave alone, by address of the storage."""
        self.name = name
        self.memory_bytes = 0
        self.seconds = 0.0
        self.num_nodes = len(tape.nodes)
        self.kept = kept
        self.taken = frozenset(tape.taken)
        self._owner = owner
        self._tape: Tape | None = tape  # None: released

    @property
    def node_names(self) -> list[str]:
        """Operations in order, ours by the name of their schema."""
        return [node.name for node in self._held().nodes]

    @property
    def bound(self) -> list[tuple[int, int]]:
        """Address and bytes of the memory that it did not take itself, for audits."""
        return self._held().bound

    def replay(self) -> None:
        """Enqueue the recorded work.

        Raises:
            ContractError: after `release`; once the work is done, also when memory that it reads was freed.
        """
        tape = self._held()
        self._owner.queue.run(lambda: self._replay(tape))

    def release(self) -> None:
        """Give the memory back; may be repeated."""
        tape, self._tape = self._tape, None
        if tape is not None:
            if not self._owner.queue.is_idle:  # a collector may come here while a step is recorded
                self._owner.queue.synchronize()
            self._owner.forget(self)
            tape.drop()

    @torch.inference_mode()  # may write what any mode has made
    def _replay(self, tape: Tape) -> None:
        self._owner.overwrite_pool(self)
        tape.replay()

    def _held(self) -> Tape:
        if self._tape is None:
            raise ContractError(
                f"{self.name}: this graph was released, expected a live one; capture it again"
            )
        return self._tape
