"""Block keys of requests, hashed as their tokens become known."""

from __future__ import annotations

import numpy as np

from midstream.runtime.hashing import BlockHasher, as_keys, as_words
from midstream.runtime.live import I32, LiveTable
from midstream.runtime.request import Request


class Chains:
    """`hasher` None: nothing is looked up, exported or published."""

    def __init__(self, hasher: BlockHasher | None, live: LiveTable) -> None:
        self.hasher = hasher
        self.live = live
        num_slots = len(live.request)
        # of each slot: hash of the last hashed block, and how many are hashed: the request's keys
        self._last = np.zeros((num_slots, 2), np.uint64)
        self._num_hashed: I32 = np.zeros(num_slots, np.int32)

    def enter(self, request: Request) -> None:
        """The request has got a slot."""
        if self.hasher is not None:
            last = request.hashes[-1] if request.hashes else self.hasher.root(request.root)
            self._last[request.slot] = as_words(last)
            self._num_hashed[request.slot] = len(request.hashes)

    def extend_rows(self, slots: I32, num_blocks: I32) -> None:
        """Bring the keys of requests in slots to `num_blocks` each, all at once."""
        assert self.hasher is not None
        more = np.maximum(num_blocks - self._num_hashed[slots], 0)
        hashes = self.hasher.extend_rows(
            self._last, self._num_hashed, self.live.tokens, slots, num_blocks, int(more.sum())
        )
        keys, end = as_keys(hashes), 0
        for slot, count in zip(slots.tolist(), more.tolist(), strict=True):
            request = self.live.request[slot]
            assert request is not None
            begin, end = end, end + count
            request.hashes += keys[begin:end]

    def of_live(self, request: Request, num_tokens: int) -> list[int]:
        """Keys that cover the first `num_tokens` tokens of a request in a slot."""
        assert self.hasher is not None
        num_blocks = num_tokens // self.hasher.block
        if len(request.hashes) < num_blocks:
            self.extend_rows(np.array([request.slot], np.int32), np.array([num_blocks], np.int32))
        return request.hashes

    def of_waiting(self, request: Request) -> list[int]:
        """Keys of all known tokens of a request without a slot."""
        if self.hasher is not None:
            done, block = len(request.hashes), self.hasher.block
            if done < request.num_known // block:
                parent = request.hashes[-1] if request.hashes else None
                extra = b"" if request.hashes else request.root
                tokens = request.known_tokens()[done * block :]
                request.hashes += as_keys(self.hasher.extend(parent, tokens, extra))
        return request.hashes

    def tail(self, request: Request, num_tokens: int) -> tuple[int, ...]:
        """The tokens of a request in a slot behind its last whole block, up to `num_tokens`."""
        assert self.hasher is not None
        begin = num_tokens // self.hasher.block * self.hasher.block
        return tuple(self.live.tokens[request.slot, begin:num_tokens].tolist())
