"""Why a request reused no more than it did: one word for counters, one sentence for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from midstream.runtime.coordinator import Hit
from midstream.runtime.prefix import PrefixIndex
from midstream.runtime.request import Lookup, Request

REASONS = {
    "all": "all of it, but for less than one KV page (kv_block tokens)",
    "longest": "no more of this beginning was ever computed here",
    "unknown": "nothing of this beginning is saved",
    "no state": "attention knows more, but no state was ever saved there",
    "evicted": "a state was saved further on, and had to make room: raise memory to keep more",
    "no attention": "a state is saved further on, but its KV pages are gone",
    "off": "cache_mode is 'none'",
}

NOT_YET = "waiting: not looked up yet"
NOTHING_TO_REUSE = (
    "nothing to reuse in a prompt of one token, because the last token is always computed"
)


def look_back(index: PrefixIndex, keys: Sequence[int], hit: Hit, asked: int, is_on: bool) -> Lookup:
    """What an admission found, with the reason for what it did not."""
    if not is_on:
        return Lookup(asked, 0, 0, 0, "off")
    state = max(index.longest_state(keys, asked), hit.num_tokens)
    return Lookup(
        asked,
        hit.kv_match_tokens,
        state,
        hit.num_tokens,
        _reason(index, keys, hit, asked, state),
    )


def _reason(index: PrefixIndex, keys: Sequence[int], hit: Hit, asked: int, state: int) -> str:
    if hit.num_tokens >= asked // index.kv_block * index.kv_block:
        return "all"
    if index.was_evicted(keys, hit.num_tokens, asked):
        return "evicted"
    if hit.junction:
        return "no state"
    if state > hit.num_tokens:
        return "no attention"
    return "longest" if hit.num_tokens else "unknown"


def sentence(lookup: Lookup) -> str:
    """One sentence on what a request reused, and what was lost for want of a state."""
    if lookup.reason == "off":
        return f"nothing reused: {REASONS['off']}"
    if not lookup.asked:
        return NOTHING_TO_REUSE
    lost = lookup.kv_match - lookup.reused
    text = (
        f"reused {lookup.reused} of {lookup.asked} tokens; attention matches {lookup.kv_match}, "
        f"the longest saved state is at {lookup.state_match}; {REASONS[lookup.reason]}"
    )
    return f"{text}; {lost} tokens lost for want of a state" if lost > 0 else text


def never_looked_up(request: Request) -> str:
    """What is said of a request that ended before it was admitted."""
    if request.finish_reason == "abort":
        return "aborted while waiting: it was not looked up"
    return f"failed while waiting: it was not looked up; {request.error}"


@dataclass(slots=True)
class CacheCounters:
    """Sums over admissions (tokens); those that come back after a preemption are counted apart."""

    requests: int = 0
    asked: int = 0
    reused: int = 0
    lost_for_state: int = 0  # matched by attention, computed again for want of a state
    matched_kv: int = 0
    matched_state: int = 0
    resumed_requests: int = 0
    resumed_asked: int = 0
    resumed_reused: int = 0
    waits: int = 0  # requests that waited for a state under way
    reasons: Counter[str] = field(default_factory=Counter)

    def count(self, lookup: Lookup, is_resumed: bool) -> None:
        """Add one admission."""
        if is_resumed:
            self.resumed_requests += 1
            self.resumed_asked += lookup.asked
            self.resumed_reused += lookup.reused
            return
        self.requests += 1
        self.asked += lookup.asked
        self.reused += lookup.reused
        self.lost_for_state += max(0, lookup.kv_match - lookup.reused)
        self.matched_kv += lookup.kv_match
        self.matched_state += lookup.state_match
        self.reasons[lookup.reason] += 1

    def as_dict(self) -> dict[str, Any]:
        """For `Engine.stats`."""
        names = [name for name in self.__slots__ if name != "reasons"]
        return {name: getattr(self, name) for name in names} | {"reasons": dict(self.reasons)}
