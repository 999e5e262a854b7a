"""
A model whose state is the exact hash of all tokens so far: serving it costs almost nothing, and a wrong page,
position or token changes what it says, or is named at once.

A state page holds [tokens, hash]; a KV page holds [token, hash after it] for each place.  The next token is a
function of the hash.  Letters: N pages, B tokens of a KV page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from midstream.runtime.pages import NULL_PAGE, PagePool

VOCAB = 32
_PRIME = 2**31 - 1  # hashes are whole numbers that float64 holds exactly
_START = 1

F64 = npt.NDArray[np.float64]


def absorb(state: int, tokens: Sequence[int]) -> int:
    """The hash after `tokens`."""
    for token in tokens:
        state = (state * 48271 + token + 7) % _PRIME
    return state


def next_token(state: int) -> int:
    """What the model says after the tokens of a hash."""
    return 3 + state // 16 % (VOCAB - 3)


def answer(prompt: Sequence[int], count: int, stop: Sequence[int] = ()) -> list[int]:
    """What a request must bring, whatever was cached, batched, cut or preempted."""
    state, tokens = absorb(_START, prompt), []
    while len(tokens) < count:
        tokens.append(next_token(state))
        if tokens[-1] in stop:
            break
        state = absorb(state, tokens[-1:])
    return tokens


@dataclass(frozen=True, slots=True)
class HashRow:
    """One row of a step as the device sees it."""

    begin: int  # tokens before the step
    tokens: Sequence[int]
    read_page: int
    kv_pages: Sequence[int]  # of the row's slot, up to its last token
    cuts: Sequence[tuple[int, int]]  # (tokens after the cut, state page written there); ascending


class HashMemory:
    """Runs steps over two arenas.  Raises AssertionError where a row touches what is not its own."""

    def __init__(self, state: F64, kv: F64, kv_block: int) -> None:
        self.state = state  # f64[N, 2]
        self.kv = kv.reshape(len(kv), kv_block, 2)  # f64[N, B, 2]
        self.kv_block = kv_block
        self.books: tuple[PagePool, PagePool] | None = (
            None  # state, KV: what is published stays as it is
        )
        self.protected: Callable[[int], int] | None = None  # published tokens of a KV page

    @staticmethod
    def allocate(num_state_pages: int, num_kv_pages: int, kv_block: int) -> HashMemory:
        state, kv = np.zeros((num_state_pages, 2)), np.zeros((num_kv_pages, 2 * kv_block))
        return HashMemory(state, kv, kv_block)

    def poison(self) -> None:
        """NaN in the null pages and in all that is free."""
        assert self.books is not None
        for arena, pool in zip((self.state, self.kv), self.books, strict=True):
            arena[[NULL_PAGE, *pool.free_pages()]] = np.nan

    def run(self, rows: Sequence[HashRow]) -> list[int]:
        """Next token of each row.  All rows read before any row writes."""
        self._check_sharing(rows)
        states = [self._read(row) for row in rows]
        return [self._write(row, state) for row, state in zip(rows, states, strict=True)]

    def _check_sharing(self, rows: Sequence[HashRow]) -> None:
        """Rows of a step run at once: nobody writes what another row reads or writes."""
        writes = [page for row in rows for _, page in row.cuts if page]
        assert len(writes) == len(set(writes)), f"state pages written twice: {writes}"
        for row in rows:
            others = set(writes) - {page for _, page in row.cuts}
            assert row.read_page not in others, f"state page {row.read_page} is read and written"
        kv_writes = [page for row in rows for page in row.kv_pages[row.begin // self.kv_block :]]
        assert len(kv_writes) == len(set(kv_writes)), f"KV pages written twice: {kv_writes}"
        if self.books is not None and self.protected is not None:
            published = [page for page in writes if self.books[0].is_published(page)]
            assert not published, f"published state pages are written: {published}"
            for row in rows:
                first = row.begin // self.kv_block
                for block, page in enumerate(row.kv_pages[first:], start=first):
                    begin = max(row.begin - block * self.kv_block, 0)
                    assert begin >= self.protected(page), (
                        f"published tokens of KV page {page} are written"
                    )

    def _read(self, row: HashRow) -> int:
        """The hash before the step, the same in the state page and in the KV pages."""
        if row.read_page == NULL_PAGE:
            assert row.begin == 0, "a row with history reads no state"
            return _START
        num_tokens, state = self.state[row.read_page]
        assert num_tokens == row.begin, f"a row of {row.begin} tokens reads a state of {num_tokens}"
        entries = self.kv[list(row.kv_pages)].reshape(-1, 2)[: row.begin]
        assert absorb(_START, entries[:, 0].astype(int).tolist()) == state == entries[-1, 1]
        return int(state)

    def _write(self, row: HashRow, state: int) -> int:
        ends = dict(row.cuts)
        assert max(ends) == row.begin + len(row.tokens) and NULL_PAGE not in row.kv_pages
        for position, token in enumerate(row.tokens, start=row.begin):
            state = absorb(state, [token])
            page = row.kv_pages[position // self.kv_block]
            self.kv[page, position % self.kv_block] = token, state
            if ends.get(position + 1):
                self.state[ends[position + 1]] = position + 1, state
        return next_token(state)
