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

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from midstream.runtime.pages import NULL_PAGE
from midstream.runtime.tree import Node

Tokens = Callable[[int, int], tuple[int, ...]]  # known tokens [begin, end) of a prompt


@dataclass(frozen=True, slots=True)
class Hit:
    """Where a prompt resumes and what it resumes from.  Valid until the next eviction."""

    num_tokens: int  # resume point: tokens that need no computing
    kv_pages: tuple[int, ...]  # page of each whole block before the resume point
    tail_page: (
        int  # KV page that holds the tokens behind the last whole block: copied, never adopted
    )
    state_page: int  # state after `num_tokens`; NULL_PAGE: fresh start, or no recurrent layers
    window_pages: tuple[
        tuple[int, ...], ...
    ]  # of each window: NULL_PAGE where it no longer reaches
    kv_match_tokens: int  # longest match of full attention alone
    node: Node | None  # the prefix resumed from
    evictions: int  # the index's count of dropped keys when this was found

    @property
    def junction(self) -> int:
        """Length of the known prefix where it has no state to resume from; 0 if nothing is lost."""
        return self.kv_match_tokens if self.kv_match_tokens > self.num_tokens else 0


@dataclass(frozen=True, slots=True)
class Window:
    """A group of sliding-window attention: its place among the pages of a node, and what it reaches."""

    place: int
    blocks_per_page: int
    num_pages: int  # that must be there to resume: ceil((window - 1) / tokens of a page)

    def accepts(self, path: Sequence[Node], num_blocks: int) -> bool:
        """Whether the window can resume after `num_blocks` blocks of the path."""
        if num_blocks % self.blocks_per_page:
            return False
        return all(path[col].pages[self.place] for col in self._cols(num_blocks))

    def row(self, path: Sequence[Node], num_blocks: int) -> tuple[int, ...]:
        """Pages of the block table up to the resume point."""
        row = [NULL_PAGE] * (num_blocks // self.blocks_per_page)
        for col in self._cols(num_blocks):
            row[col // self.blocks_per_page] = path[col].pages[self.place]
        return tuple(row)

    def _cols(self, num_blocks: int) -> range:
        """Last block of each page that the window reaches."""
        step = self.blocks_per_page
        return range(num_blocks - 1, max(num_blocks - 1 - step * self.num_pages, -1), -step)


def find_resume_point(
    root: Node,
    path: Sequence[Node],
    max_tokens: int,
    block: int,
    state: int,
    windows: Sequence[Window],
    tokens: Tokens | None,
) -> tuple[Node, int]:
    """The prefix to resume from and its number of whole blocks; the root and 0 where there is none.

    Args:
        root: what all prompts with these extra keys begin with.
        path: the prompt's whole blocks that full attention has, without a gap.
        max_tokens: no resume point is longer.
        block: tokens of a block.
        state: place of the recurrent group in `Node.pages`, -1 without recurrent layers.
        tokens: reads the prompt, to compare tails; None: whole blocks only.
    """
    for num_blocks in range(len(path), -1, -1):
        node = path[num_blocks - 1] if num_blocks else root
        if node.tails and tokens is not None and not windows:
            tail = _longest_tail(node, max_tokens, block, state, tokens)
            if tail is not None:
                return tail, num_blocks
        if (
            num_blocks
            and (state < 0 or node.pages[state])
            and all(window.accepts(path, num_blocks) for window in windows)
        ):
            return node, num_blocks
    return root, 0


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
