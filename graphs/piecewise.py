"""
Captures a step as several graphs with op calls between, split where the ops are called.

While the step is recorded, a call of a splitting op ends the current graph, is remembered with its
arguments instead of being run, and the next graph begins in the same pool.  A replay runs graph, op, graph,
op, and so on.  No other tool takes the step apart, so that any callable can be captured, compiled or not.

Memory: a piece may take what the pieces in front of it have given back, because replays keep the order of
the recording.  So the memory of an op's arguments holds the right values from the piece that writes them to
the op's place and no longer, and a remembered call owns none of it (`unowned`).  Arguments that no graph
writes, such as pools and stage buffers, belong to whoever bound them, as with whole graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from midstream.errors import ContractError
from midstream.graphs.addresses import check_addresses
from midstream.graphs.captured import Addresses, Captured, Recorder, Step
from midstream.graphs.unowned import unowned
from midstream.ops.interception import Implementation, intercepting

# ops whose grids or work depend on the step's rows: state, convolution, attention
SPLITTING_OPS = frozenset(
    f"{name}_{form}"
    for name in (
        "causal_conv", "gated_delta", "kda", "lightning", "rg_lru", "selective_scan", "ssd",
    )
    for form in ("chunk", "step")
) | {"kv_write", "paged_attention_chunk", "paged_attention_decode"}  # fmt: skip


class Pieces:
    """One recorded step: graphs and the op calls between them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.memory_bytes = 0
        self.seconds = 0.0
        self.num_nodes = 0
        self.num_graphs = 0
        self.num_calls = 0
        self._work: list[Callable[[], None]] = []
        self._graphs: list[Captured] = []
        self._is_released = False

    @property
    def graphs(self) -> tuple[Captured, ...]:
        """In order, for audits."""
        return tuple(self._graphs)

    def replay(self) -> None:
        if self._is_released:
            raise ContractError(
                f"{self.name}: these graphs were released, expected live ones; capture them again"
            )
        for work in self._work:
            work()

    def release(self) -> None:
        self._is_released = True
        self._work.clear()
        for graph in self._graphs:
            graph.release()
        self._graphs.clear()

    def add_graph(self, graph: Captured) -> None:
        """An empty graph may still own memory that an op writes: it is kept, but not replayed."""
        self._graphs.append(graph)
        self.memory_bytes += graph.memory_bytes
        if graph.num_nodes:
            self.num_graphs += 1
            self.num_nodes += graph.num_nodes
            self._work.append(graph.replay)

    def add_call(self, call: Step) -> None:
        self.num_calls += 1
        self._work.append(call)


class PiecewiseCapture:
    """Captures in pieces through any recorder."""

    def __init__(self, recorder: Recorder, ops: Collection[str] = SPLITTING_OPS) -> None:
        """`ops`: names as in their schema, such as `ssd_chunk` or `acme::leaky_step`."""
        self.recorder = recorder
        self.ops = frozenset(ops)

    def capture(self, step: Step, addresses: Addresses, name: str) -> Pieces:
        """Run `step` to warm it up, record it, and return what replays it.

        Raises:
            ContractError: as `Capturer.capture`.
        """
        begin, before = time.perf_counter(), dict(addresses())
        recorder, pieces = self.recorder, Pieces(name)

        def see(
            op: str, implementation: Implementation, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> None:
            if op not in self.ops:
                implementation(*args, **kwargs)
                return
            pieces.add_graph(recorder.end(f"{name}, piece {len(pieces._graphs)}"))
            args, kwargs = tree_map_only(torch.Tensor, unowned, (args, kwargs))
            pieces.add_call(recorder.enqueuing(partial(implementation, *args, **kwargs)))
            recorder.begin()

        try:
            with recorder.recording(name):
                recorder.warm_up(step)
                with intercepting(see):
                    recorder.begin()
                    step()
                    pieces.add_graph(recorder.end(f"{name}, last piece"))
            check_addresses(before, addresses(), name)
        except BaseException:
            pieces.release()
            raise
        pieces.seconds = time.perf_counter() - begin
        return pieces

    def release(self) -> None:
        self.recorder.release()
