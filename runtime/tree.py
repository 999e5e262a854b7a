"""
Prefixes as a tree: a node is one block of tokens behind its parent, with the pages that hold it.

A node is covered if a state stands on it or below it: then its KV pages are good for something.  Counts are
kept along the edges, so that a state that comes or goes costs as many steps as blocks change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class Value:
    """What the eviction policy knows of a checkpoint."""

    is_guess: bool = False  # made in the hope of a shared prefix, and not used yet
    uses: int = 0
    age: tuple[float, float] = (0.0, 0.0)  # of the policy's two orders, when it was last used
    turn: int = -1  # its entries in them


class Node:
    """A prefix of whole blocks, or of whole blocks and a tail shorter than a block.  Enters its parent."""

    __slots__ = (
        "children",
        "covered_children",
        "key",
        "num_tokens",
        "pages",
        "parent",
        "tail",
        "tails",
        "value",
    )

    def __init__(
        self, key: int, parent: Node | None, num_tokens: int, num_groups: int,
        tail: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.key = key  # hash of the whole blocks; 0 of a root
        self.parent = parent
        self.num_tokens = num_tokens
        self.tail = tail  # tokens behind the last whole block
        self.pages = [0] * num_groups  # page that a lookup gets, by place of the group; 0 if none
        self.children: dict[Node, None] | None = None  # of whole blocks
        self.tails: dict[tuple[int, ...], Node] | None = None
        self.covered_children = 0
        self.value: Value | None = None  # of the state that stands here
        if parent is None:
            return
        if not tail:
            if parent.children is None:
                parent.children = {}
            parent.children[self] = None
        else:
            if parent.tails is None:
                parent.tails = {}
            parent.tails[tail] = self

    def detach(self) -> None:
        """Take the node out of its parent."""
        parent = self.parent
        assert parent is not None
        if self.tail:
            assert parent.tails is not None
            del parent.tails[self.tail]
        else:
            assert parent.children is not None
            del parent.children[self]

    @property
    def is_leaf(self) -> bool:
        """Whether nothing is behind it."""
        return not self.children and not self.tails

    def below(self) -> Iterator[Node]:
        """All nodes behind this one, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            if node is not self:
                yield node
            stack += node.children or ()
            stack += (node.tails or {}).values()

    def above(self, blocks: int) -> Node:
        """The prefix that is some blocks shorter; the root where there are no more."""
        node = self
        while blocks and node.parent is not None:
            node, blocks = node.parent, blocks - 1
        return node

    def gap(self, state: int, most: int) -> int:
        """Tokens from the next state above to this prefix, counted no further than `most`."""
        node = self.parent
        while (
            node is not None and not node.pages[state] and self.num_tokens - node.num_tokens < most
        ):
            node = node.parent
        return self.num_tokens - (0 if node is None else node.num_tokens)


def cover(node: Node, state: int) -> None:
    """A state came to stand on the node (its page is entered already)."""
    if node.covered_children:
        return
    above = node.parent
    while above is not None:
        above.covered_children += 1
        if above.covered_children > 1 or above.pages[state]:
            return
        above = above.parent


def uncover(node: Node, state: int) -> list[Node]:
    """The state went from the node (its page is taken out already); nodes without cover now, last first."""
    bare: list[Node] = []
    above: Node | None = node
    while above is not None and not above.covered_children and not above.pages[state]:
        bare.append(above)
        above = above.parent
        if above is not None:
            above.covered_children -= 1
    return bare


def is_covered(node: Node, state: int) -> bool:
    """Whether a state stands on the node or below it."""
    return bool(node.covered_children or node.pages[state])
