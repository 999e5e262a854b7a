"""Block keys of requests, hashed as their tokens become known."""

from __future__ import annotations

from midstream.runtime.hashing import BlockHasher, as_keys
from midstream.runtime.live import I32, LiveTable
from midstream.runtime.request import Request


class Chains:
    """`hasher` None: nothing is looked up, exported or published."""

    def __init__(self, hasher: BlockHasher | None, live: LiveTable) -> None:
        self.hasher = hasher
        self.live = live

    def of_live(self, request: Request, num_tokens: int) -> list[int]:
        """Keys that cover the first `num_tokens` tokens of a request in a slot."""
        assert self.hasher is not None
        done, block = len(request.hashes), self.hasher.block
        if done < num_tokens // block:
            self._extend(request, self.live.tokens[request.slot, done * block : num_tokens])
        return request.hashes

    def of_waiting(self, request: Request) -> list[int]:
        """Keys of all known tokens of a request without a slot."""
        if self.hasher is not None:
            done, block = len(request.hashes), self.hasher.block
            if done < request.num_known // block:
                self._extend(request, request.known_tokens()[done * block :])
        return request.hashes

    def tail(self, request: Request, num_tokens: int) -> tuple[int, ...]:
        """The tokens of a request in a slot behind its last whole block, up to `num_tokens`."""
        assert self.hasher is not None
        begin = num_tokens // self.hasher.block * self.hasher.block
        return tuple(self.live.tokens[request.slot, begin:num_tokens].tolist())

    def _extend(self, request: Request, tokens: I32) -> None:
        assert self.hasher is not None
        parent = request.hashes[-1] if request.hashes else None
        extra = b"" if request.hashes else request.root
        request.hashes += as_keys(self.hasher.extend(parent, tokens, extra))
