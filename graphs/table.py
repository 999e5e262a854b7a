"""
Captured graphs by key, and the count of what ran without one.

Which graph a step replays is a pure function of its key: equal keys replay the same graph.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from midstream.errors import ContractError
from midstream.graphs.capture import Replay

_log = logging.getLogger("midstream.graphs")


@dataclass(frozen=True, slots=True, order=True)
class GraphKey:
    """Padded shape of a step.  Equal keys replay the same graph; nothing else may decide."""

    tokens: int
    rows: int  # requests
    chunks: int  # 0 in a decode step, where each row has one token


def padded_rows(rows: int, sizes: Sequence[int]) -> int | None:
    """Smallest captured size that holds `rows`, None if there is none.  `sizes` ascend.

    >>> [padded_rows(n, (1, 2, 4)) for n in (1, 3, 4, 5)]
    [1, 4, 4, None]
    """
    place = bisect_left(sizes, rows)
    return sizes[place] if place < len(sizes) else None


def decode_key(rows: int) -> GraphKey:
    """Key of a decode step of `rows` padded rows."""
    return GraphKey(tokens=rows, rows=rows, chunks=0)


def smallest_fit(needed: GraphKey, keys: Sequence[GraphKey]) -> GraphKey | None:
    """The first of the ascending `keys` that holds a step with chunks, None if none does.

    >>> keys = (GraphKey(64, 8, 18), GraphKey(128, 8, 20), GraphKey(128, 32, 68))
    >>> smallest_fit(GraphKey(100, 3, 5), keys), smallest_fit(GraphKey(60, 9, 9), keys)
    (GraphKey(tokens=128, rows=8, chunks=20), GraphKey(tokens=128, rows=32, chunks=68))
    """
    for key in keys:
        if key.tokens >= needed.tokens and key.rows >= needed.rows and key.chunks >= needed.chunks:
            return key
    return None


class GraphTable:
    """Looks up the graph for a step.  `capture` is injected, so this file needs no GPU to test."""

    def __init__(self, capture: Callable[[GraphKey], Replay]) -> None:
        self._capture = capture
        self._replays: dict[GraphKey, Replay] = {}
        self.num_replays = 0
        self.fallbacks: Counter[str] = Counter()  # reason -> steps that ran without a graph

    @property
    def keys(self) -> list[GraphKey]:
        return sorted(self._replays)

    def warm_up(self, keys: Sequence[GraphKey], on_captured: Callable[[GraphKey], None]) -> None:
        """Capture all keys, largest first, so that smaller graphs reuse the memory of larger ones.

        Raises:
            ContractError: when a key is captured already.
        """
        for key in sorted(keys, reverse=True):
            if key in self._replays:
                raise ContractError(f"GraphTable: {key} is captured already; clear() first")
            self._replays[key] = self._capture(key)
            on_captured(key)

    def replay(self, key: GraphKey) -> bool:
        """Enqueue the graph of `key`; False, and counted, where none was captured."""
        found = self._replays.get(key)
        if found is None:
            self.count_fallback(f"no graph for {key.rows} rows and {key.tokens} tokens")
            return False
        found()
        self.num_replays += 1
        return True

    def count_fallback(self, reason: str) -> None:
        """A step runs without a graph; the first of each reason is logged."""
        if not self.fallbacks[reason]:
            _log.info("a step runs without a graph: %s", reason)
        self.fallbacks[reason] += 1

    def clear(self) -> None:
        """Drop all graphs and the memory that they hold."""
        self._replays.clear()
