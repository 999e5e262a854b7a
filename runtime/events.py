"""
What a router outside of the engine must know of the cache: which prefixes came and which went.

A key is the chained hash of whole blocks (`hashing.BlockHasher`; with a fixed `hash_key` others can compute
it).  A prefix that ends inside a block has the key of its last whole block and the tokens behind that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stored:
    """A page became findable."""

    group: str  # "kv" or "state"
    key: int  # of the whole blocks; 0 where there is none
    parent: int  # key of one block less; 0 for the first
    num_tokens: int  # of the prefix
    tail: tuple[int, ...] = ()  # tokens behind the last whole block


@dataclass(frozen=True, slots=True)
class Removed:
    """The last page of a prefix went."""

    group: str
    key: int
    tail: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Cleared:
    """All prefixes went, or events were lost: forget all."""


Event = Stored | Removed | Cleared


class EventLog:
    """Events in order, for one reader.

    >>> log = EventLog(limit=2)
    >>> for key in (1, 2, 3):
    ...     log.add(Removed("kv", key))
    >>> log.take()
    [Cleared(), Removed(group='kv', key=3, tail=())]
    """

    def __init__(self, limit: int = 100_000) -> None:
        self._limit = limit
        self._events: deque[Event] = deque()

    def add(self, event: Event) -> None:
        """Append; when nobody reads, all that is there is replaced by `Cleared`."""
        if len(self._events) >= self._limit or isinstance(event, Cleared):
            self._events.clear()
            self._events.append(Cleared())
        if not isinstance(event, Cleared):
            self._events.append(event)

    def take(self) -> list[Event]:
        """The events since the last call."""
        events = list(self._events)
        self._events.clear()
        return events
