"""Captured graphs by key, and the count of what ran without one."""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from midstream.errors import ContractError
from midstream.graphs.captured import Captured
from midstream.graphs.dispatch import GraphKey as GraphKey  # public from here too
from midstream.graphs.dispatch import decode_key as decode_key
from midstream.graphs.dispatch import smallest_fit as smallest_fit

_SLACK = 1.2  # a ladder takes at most this part of what its largest graph takes

_log = logging.getLogger("midstream.graphs")


class GraphTable:
    """Looks up the graph for a step.  `capture` is injected, so this file needs no GPU to test.

    Graphs are captured in `warm_up`, or when a step needs them first: those of `late` keys, of which the
    `max_late` last used are kept, and those that `release` took.
    """

    def __init__(
        self,
        capture: Callable[[GraphKey], Captured],
        late: Iterable[GraphKey] = (),
        max_late: int = 32,
    ) -> None:
        self._capture = capture
        self._late = frozenset(late if max_late else ())
        self._max_late = max_late
        self._graphs: dict[GraphKey, Captured] = {}
        self._used: OrderedDict[GraphKey, None] = OrderedDict()  # late ones, longest unused first
        self._released: set[GraphKey] = set()
        self._refused: set[GraphKey] = set()  # there was no memory for them
        self._largest: GraphKey | None = None
        self.num_replays = 0
        self.num_captured_late = 0
        self.num_evicted = 0
        self.memory_bytes = 0  # of the pool, by what captures made it grow
        self.predicted_bytes = 0  # of the pool once all is captured; known after the largest
        self.capture_seconds = 0.0
        self.fallbacks: Counter[str] = Counter()  # reason -> steps that ran without a graph

    @property
    def keys(self) -> list[GraphKey]:
        return sorted(self._graphs)

    @property
    def captured(self) -> dict[GraphKey, Captured]:
        """All graphs, for reports and audits."""
        return dict(self._graphs)

    def stats(self) -> dict[str, Any]:
        """What captures took, and how they went."""
        return {
            "live": len(self._graphs),
            "captured_late": self.num_captured_late,
            "evicted": self.num_evicted,
            "memory_bytes": self.memory_bytes,
            "predicted_bytes": self.predicted_bytes,
            "capture_seconds": round(self.capture_seconds, 3),
        }

    def warm_up(self, keys: Sequence[GraphKey], on_captured: Callable[[GraphKey], None]) -> None:
        """Capture all keys, largest first, so that smaller graphs reuse the memory of larger ones.

        Raises:
            ContractError: when a key is captured already.
        """
        begin = time.perf_counter()
        for key in sorted(keys, reverse=True):
            if key in self._graphs:
                raise ContractError(f"GraphTable: {key} is captured already; clear() first")
            self._add(key)
            on_captured(key)
        if not keys:
            return
        _log.info(
            "captured %d graphs in %.1f s: %.1f MB, %.1f MB predicted after the largest",
            len(keys), time.perf_counter() - begin, self.memory_bytes / 1e6, self.predicted_bytes / 1e6,
        )  # fmt: skip

    def replay(self, key: GraphKey) -> bool:
        """Enqueue the graph of `key`, captured first if it may be; False, and counted, if there is none."""
        found = self._graphs.get(key) or self._capture_late(key)
        if found is None:
            self.count_fallback(f"no graph for {key.rows} rows and {key.tokens} tokens")
            return False
        if key in self._used:
            self._used.move_to_end(key)
        found.replay()
        self.num_replays += 1
        return True

    def count_fallback(self, reason: str) -> None:
        """A step runs without a graph; the first of each reason is logged."""
        if not self.fallbacks[reason]:
            _log.info("a step runs without a graph: %s", reason)
        self.fallbacks[reason] += 1

    def release(self) -> None:
        """Give all graphs up; a step that needs one captures it again.  Nothing may be under way."""
        keys = self._released | set(self._graphs) - set(self._used)
        self.clear()
        self._released = keys

    def clear(self) -> None:
        """Give all graphs up and forget them.  Nothing may be under way."""
        for graph in self._graphs.values():
            graph.release()
        self._graphs.clear()
        self._used.clear()
        self._released.clear()
        self._refused.clear()
        self._largest = None
        self.memory_bytes = self.predicted_bytes = 0

    def _add(self, key: GraphKey) -> Captured:
        graph = self._graphs[key] = self._capture(key)
        self._released.discard(key)
        self.memory_bytes += graph.memory_bytes
        self.capture_seconds += graph.seconds
        if self._largest is None or key > self._largest:
            self._largest = key
            self.predicted_bytes = int(_SLACK * self.memory_bytes)
        return graph

    def _capture_late(self, key: GraphKey) -> Captured | None:
        if key in self._refused or (key not in self._released and key not in self._late):
            return None
        is_late = key not in self._released
        while is_late and len(self._used) >= self._max_late:
            oldest, _ = self._used.popitem(last=False)
            self._graphs.pop(oldest).release()  # a replay under way ends undisturbed
            self.num_evicted += 1
        _log.info("capturing a %s, about %.1f MB more", key, self._growth_of(key) / 1e6)
        try:
            graph = self._add(key)
        except torch.OutOfMemoryError as error:
            self._refused.add(key)
            _log.warning(
                "no memory for the graph of a %s, which runs eagerly from now on: %s", key, error
            )
            return None
        self.num_captured_late += 1
        if is_late:
            self._used[key] = None
        return graph

    def _growth_of(self, key: GraphKey) -> int:
        """Bytes that the pool is expected to grow by: memory goes with tokens, smaller graphs reuse it."""
        if self._largest is None:
            return 0
        return max(0, self.memory_bytes * key.tokens // self._largest.tokens - self.memory_bytes)
