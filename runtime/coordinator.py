"""
One resume point for groups of pages that keep different things of a prefix.

    full attention    needs every block up to the point
    sliding window    needs the blocks that its window still reaches back to from there
    recurrent         needs one state, exactly there

State hits are not monotonic (a state at 5 says nothing about 4), so points are tried from the longest match
of full attention downwards, and the first one that every group accepts is the largest.  No order of groups
enters.

    prompt            |--------|--------|--------|--------|
    KV pages          |   x    |   x    |   x    |             kv_match   3 blocks
    state pages at             x                          x    4 blocks: out of reach
    hit                        ^                               1 block, junction 3
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from midstream.runtime.page_passes import I32, fill_chain
from midstream.runtime.pages import NULL_PAGE
from midstream.runtime.tree import Node

Tokens = Callable[[int, int], tuple[int, ...]]  # known tokens [begin, end) of a prompt


@dataclass(slots=True, eq=False)
class Hit:
    """Where a prompt resumes and what it resumes from.  Valid until the next eviction."""

    num_tokens: int  # resume point: tokens that need no computing
    node: Node | None  # the prefix resumed from; None: from the beginning
    tail_page: (
        int  # KV page that holds the tokens behind the last whole block: copied, never adopted
    )
    state_page: int  # state after `num_tokens`; NULL_PAGE: fresh start, or no recurrent layers
    window_pages: tuple[
        tuple[int, ...], ...
    ]  # of each window: NULL_PAGE where it no longer reaches
    kv_match_tokens: int  # longest match of full attention alone
    evictions: int  # the index's count of dropped keys when this was found
    kv_above: I32  # i32[N]  KV page before that of each published KV page
    num_blocks: int  # whole blocks before the resume point
    _kv_pages: I32 | None = None

    @property
    def junction(self) -> int:
        """Length of the known prefix where it has no state to resume from; 0 if nothing is lost."""
        return self.kv_match_tokens if self.kv_match_tokens > self.num_tokens else 0

    @property
    def kv_pages(self) -> I32:
        """i32[n]  page of each whole block before the resume point; found at the first call."""
        if self._kv_pages is None:
            pages, node = np.empty(self.num_blocks, np.int32), self.node
            last = node.parent if node is not None and node.tail else node
            if last is not None:
                fill_chain(self.kv_above, last.pages[0], pages)
            self._kv_pages = pages
        return self._kv_pages

    def take_pages_of(self, earlier: Hit) -> None:
        """Spare the walk if nothing that an earlier hit named has gone since."""
        if earlier.node is self.node and earlier.evictions == self.evictions:
            self._kv_pages = earlier._kv_pages


@dataclass(frozen=True, slots=True)
class Window:
    """A group of sliding-window attention: its place among the pages of a node, and what it reaches."""

    place: int
    blocks_per_page: int
    num_pages: int  # that must be there to resume: ceil((window - 1) / tokens of a page)

    def accepts(self, node: Node, num_blocks: int) -> bool:
        """Whether the window can resume at a prefix of `num_blocks` blocks."""
        if num_blocks % self.blocks_per_page:
            return False
        return all(page for _, page in self._reached(node, num_blocks))

    def row(self, node: Node, num_blocks: int) -> tuple[int, ...]:
        """Pages of the block table up to the resume point."""
        row = [NULL_PAGE] * (num_blocks // self.blocks_per_page)
        for col, page in self._reached(node, num_blocks):
            row[col] = page
        return tuple(row)

    def _reached(self, node: Node, num_blocks: int) -> Iterator[tuple[int, int]]:
        """Column and page of each page that the window reaches, backwards; a page is on its last block."""
        last = num_blocks // self.blocks_per_page - 1
        for col in range(last, max(last - self.num_pages, -1), -1):
            yield col, node.pages[self.place]
            node = node.above(self.blocks_per_page)


def find_resume_point(
    node: Node,
    num_blocks: int,
    max_tokens: int,
    block: int,
    state: int,
    windows: Sequence[Window],
    tokens: Tokens | None,
) -> tuple[Node, int]:
    """The prefix to resume from and its number of whole blocks; the root and 0 where there is none.

    Args:
        node: the longest prefix of the prompt, of `num_blocks` whole blocks, that full attention has.
        max_tokens: no resume point is longer.
        block: tokens of a block.
        state: place of the recurrent group in `Node.pages`, -1 without recurrent layers.
        tokens: reads the prompt, to compare tails; None: whole blocks only.
    """
    while True:
        if node.tails and tokens is not None and not windows:
            tail = _longest_tail(node, max_tokens, block, state, tokens)
            if tail is not None:
                return tail, num_blocks
        if node.parent is None or (
            (state < 0 or node.pages[state])
            and all(window.accepts(node, num_blocks) for window in windows)
        ):
            return node, num_blocks
        node, num_blocks = node.parent, num_blocks - 1


def _longest_tail(
    node: Node, max_tokens: int, block: int, state: int, tokens: Tokens
) -> Node | None:
    """The longest saved prefix that ends inside the block behind `node` and agrees with the prompt."""
    assert node.tails is not None
    begin = node.num_tokens
    behind = tokens(begin, min(max_tokens, begin + block - 1))
    for length in range(len(behind), 0, -1):
        tail = node.tails.get(behind[:length])
        if tail is not None and (state < 0 or tail.pages[state]):
            return tail
    return None
