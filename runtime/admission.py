"""
Who of the waiting requests may start: in order, but one that cannot move does not stop those behind it.

A request waits for room, or for a state that a step under way will publish: computing the same prefix beside
it would cost more.  Whoever was passed by too often has everything kept free until it starts.  When all that
wait were refused for want of room, nobody is asked again before there is more of it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from midstream.runtime.chains import Chains
from midstream.runtime.coordinator import Hit
from midstream.runtime.explain import CacheCounters
from midstream.runtime.ownership import PageOwnership
from midstream.runtime.request import Request

_ASK_AGAIN = 16  # passes after which those that had no room are asked again in any case
_PATIENCE = 64  # requests that may start before one that came first and has no room


@dataclass(frozen=True, slots=True)
class _Refusal:
    """All that wait were refused for want of room."""

    kv_available: int
    state_available: int
    scan: int


class Admission:
    """Owner of the queue."""

    def __init__(
        self,
        ownership: PageOwnership,
        chains: Chains,
        waits: bool = True,
        patience: int = _PATIENCE,
    ) -> None:
        """`waits`: whether a request waits for a state under way."""
        self.ownership = ownership
        self.chains = chains
        self.waits = waits
        self.patience = patience
        self.waiting: list[Request] = []  # in order
        self.counters = CacheCounters()
        self._scan = 0
        self._refusal: _Refusal | None = None

    def add(self, request: Request) -> None:
        """Queue a request."""
        insort(self.waiting, request, key=lambda r: r.order)
        self._refusal = None

    def remove(self, request: Request) -> None:
        """Take a request out of the queue."""
        self.waiting.remove(request)
        request.found = None
        self._refusal = None

    def candidates(self, pass_number: int) -> Iterator[tuple[Request, Hit]]:
        """Requests that may start now, each with its hit; the caller admits it or stops asking."""
        self._scan += 1
        if self._refusal is not None and self._still_refused(self._refusal):
            return
        first_blocked: Request | None = None
        only_room = True
        for request in list(self.waiting):
            if not self.ownership.can_admit_any():
                break
            if request.preempted_in == pass_number:
                only_room = False
                continue
            hit: Hit | None = self._find(request)
            assert hit is not None
            if self._is_worth_waiting(request, hit):
                only_room = False
                continue
            hit = self._fitting(request, hit)
            if hit is None:
                first_blocked = first_blocked or request
                if first_blocked.passed_by >= self.patience:
                    return
            else:
                if first_blocked is not None:
                    first_blocked.passed_by += 1
                only_room = False
                yield request, hit
        if only_room and self.waiting:
            own = self.ownership
            self._refusal = _Refusal(own.kv_pool.available, own.state_pool.available, self._scan)

    def _still_refused(self, refusal: _Refusal) -> bool:
        own = self.ownership
        return (
            own.kv_pool.available <= refusal.kv_available
            and own.state_pool.available <= refusal.state_available
            and self._scan - refusal.scan < _ASK_AGAIN
        )

    def _find(self, request: Request) -> Hit:
        """The resume point; a lookup only when something has changed since the last."""
        index = self.ownership.index
        if request.found is not None and request.found[0] == index.generation:
            return request.found[1]
        keys = self.chains.of_waiting(request)
        hit = index.lookup(keys, request.num_known - 1, request.root, request.known)
        if request.found is not None:
            hit.take_pages_of(request.found[1])
        request.found = (index.generation, hit)
        return hit

    def _fitting(self, request: Request, hit: Hit) -> Hit | None:
        """The hit if there is room for what it leaves to compute, else a shorter one that fits."""
        own = self.ownership
        if own.can_admit(hit, request.num_known):
            return hit
        if hit.tail_page:  # it takes a page for the copy while the original is held
            shorter = own.index.lookup(request.hashes, request.num_known - 1, request.root)
            if own.can_admit(shorter, request.num_known):
                return shorter
        return None

    def _is_worth_waiting(self, request: Request, hit: Hit) -> bool:
        """Whether a step under way will publish a state that saves a block or more."""
        if not self.waits:
            return False
        index = self.ownership.index
        beyond = index.expected.beyond(
            hit.num_tokens, request.hashes, request.num_known - 1, index.kv_block
        )
        if beyond - hit.num_tokens < index.kv_block:
            return False
        if not request.has_waited:
            request.has_waited = True
            self.counters.waits += 1
        return True
