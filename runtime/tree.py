"""
Prefixes as a tree: a node is one block of tokens behind its parent, with the pages that hold it.

A node is covered if a state stands on it or below it: then its KV pages are good for something.  Counts are
kept along the edges, so that a state that comes or goes costs as many steps as blocks change.

Most nodes have one child.  Children are linked to one another: a container in each node would take as long to
make as the node, and the garbage collector would have to look at it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


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
        "child",
        "covered_children",
        "key",
        "newer",
        "num_tokens",
        "older",
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
        self.child: Node | None = None  # of whole blocks, the latest; the others are behind it
        self.older: Node | None = None  # sibling that entered the parent before
        self.newer: Node | None = None  # and after this one
        self.tails: dict[tuple[int, ...], Node] | None = None
        self.covered_children = 0
        self.value: Value | None = None  # of the state that stands here
        if parent is None:
            return
        if not tail:
            self.enter(parent)
        else:
            if parent.tails is None:
                parent.tails = {}
            parent.tails[tail] = self

    def enter(self, parent: Node) -> None:
        """Stand on a prefix from now on; of whole blocks."""
        self.parent = parent
        older = self.older = parent.child
        if older is not None:
            older.newer = self
        parent.child = self

    def detach(self) -> None:
        """Take the node out of its parent."""
        parent = self.parent
        assert parent is not None
        if self.tail:
            assert parent.tails is not None
            del parent.tails[self.tail]
            return
        older, newer = self.older, self.newer
        if older is not None:
            older.newer = newer
        if newer is not None:
            newer.older = older
        else:
            parent.child = older
        self.older = self.newer = None

    @property
    def is_leaf(self) -> bool:
        """Whether nothing is behind it."""
        return self.child is None and not self.tails

    def children(self) -> list[Node]:
        """The nodes that stand on this one, whole blocks first, in the order in which they entered."""
        nodes, child = [], self.child
        while child is not None:
            nodes.append(child)
            child = child.older
        nodes.reverse()
        return nodes + list(self.tails.values()) if self.tails else nodes

    def below(self) -> Iterator[Node]:
        """All nodes behind this one, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            if node is not self:
                yield node
            stack += node.children()

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


@dataclass(slots=True, eq=False)
class Branch:
    """New blocks, each behind the one before, that are not in the tree yet."""

    keys: list[int]
    pages: npt.NDArray[np.int32]  # KV page of each
    nodes: list[Node]

    @staticmethod
    def of(
        keys: list[int], pages: npt.NDArray[np.int32], num_tokens: int, block: int, num_groups: int
    ) -> Branch:
        """`num_tokens`: of the prefix that the first block will stand on."""
        node, nodes = None, []
        for key, page in zip(keys, pages.tolist(), strict=True):
            num_tokens += block
            node = Node(key, node, num_tokens, num_groups)
            node.pages[0] = page
            nodes.append(node)
        return Branch(keys, pages, nodes)


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
