"""
Block keys of requests, hashed as their tokens become known, and where the blocks stand in the tree.

The keys of a request in a slot are kept where compiled code writes them; the request's own are brought up to
date when somebody asks for them.  Letters: S slots, Z columns of a block table.
"""

from __future__ import annotations

import numpy as np

from midstream.runtime.hashing import BlockHasher, Hashes, as_keys, as_words
from midstream.runtime.keys import Keys
from midstream.runtime.live import I32, LiveTable
from midstream.runtime.request import Request
from midstream.runtime.tree import Node


class Chains:
    """`hasher` None: nothing is looked up, exported or published."""

    def __init__(self, hasher: BlockHasher | None, live: LiveTable) -> None:
        self.hasher = hasher
        self.live = live
        num_slots, columns = live.kv_table.shape
        # u64[S, Z + 1, 2]  hash after each number of blocks, from that on with which the request came
        self._hashes: Hashes = np.zeros((num_slots, columns + 1, 2), np.uint64)
        self._num_hashed: I32 = np.zeros(num_slots, np.int32)
        # of each slot: the block that was published last, a hint: it may be out of the tree again
        self.last_node: list[Node | None] = [None] * num_slots

    def enter(self, request: Request) -> None:
        """The request has got a slot."""
        if self.hasher is not None:
            last = request.hashes[-1] if request.hashes else self.hasher.root(request.root)
            num_hashed = self._num_hashed[request.slot] = len(request.hashes)
            self._hashes[request.slot, num_hashed] = as_words(last)
            self.last_node[request.slot] = None

    def next_keys(self, slots: I32, blocks: I32) -> list[int]:
        """Keys of blocks that requests have completed since they got their slots, one block each."""
        num_blocks = blocks + 1
        self._extend(slots, num_blocks)
        return as_keys(self._hashes[slots, num_blocks])

    def of_live(self, request: Request, num_tokens: int) -> Keys:
        """Keys that cover the first `num_tokens` tokens of a request in a slot."""
        assert self.hasher is not None
        slot, num_blocks, done = request.slot, num_tokens // self.hasher.block, len(request.hashes)
        if done < num_blocks:
            if self._num_hashed[slot] < num_blocks:
                self._extend(np.array([slot], np.int32), np.array([num_blocks], np.int32))
            request.hashes.append(self._hashes[slot, done + 1 : num_blocks + 1])
        return request.hashes

    def of_waiting(self, request: Request) -> Keys:
        """Keys of all known tokens of a request without a slot."""
        if self.hasher is not None:
            done, block = len(request.hashes), self.hasher.block
            if done < request.num_known // block:
                parent = request.hashes[-1] if request.hashes else None
                extra = b"" if request.hashes else request.root
                tokens = request.known_tokens()[done * block :]
                request.hashes.append(self.hasher.extend(parent, tokens, extra))
        return request.hashes

    def tail(self, request: Request, num_tokens: int) -> tuple[int, ...]:
        """The tokens of a request in a slot behind its last whole block, up to `num_tokens`."""
        assert self.hasher is not None
        begin = num_tokens // self.hasher.block * self.hasher.block
        return tuple(self.live.tokens[request.slot, begin:num_tokens].tolist())

    def _extend(self, slots: I32, num_blocks: I32) -> None:
        """Hash the blocks of requests in slots up to `num_blocks` each, all at once."""
        assert self.hasher is not None
        self.hasher.extend_rows(self._hashes, self._num_hashed, self.live.tokens, slots, num_blocks)
