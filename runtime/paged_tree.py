"""
The tree of prefixes with the pages that hold them: what is published, in every group of pages.

Every prefix in the tree has a KV page, and so have all that it stands on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from midstream.errors import ContractError
from midstream.runtime import page_passes
from midstream.runtime.events import Cleared, EventLog, Removed, Stored
from midstream.runtime.pages import I32, NULL_PAGE, PagePool
from midstream.runtime.tree import Branch, Node, is_covered

KV = 0  # place of the full attention group in `Node.pages`


class PageGroup:
    """Pages of one kind and the prefixes that they hold."""

    def __init__(self, place: int, pool: PagePool) -> None:
        self.place = place  # in `Node.pages`
        self.pool = pool
        self.node_of: dict[int, Node] = {}  # by published page
        self.more_of: dict[int, list[Node]] = {}  # further prefixes of a KV page
        self.copies: dict[Node, list[int]] = {}  # further pages of a prefix

    def share_page(self, page: int, node: Node) -> bool:
        """Enter a further prefix of a page; False when it is entered already.

        Raises:
            ContractError: the page holds no part of the block.
        """
        known = self.nodes(page)
        if any(other is node for other in known):
            return False
        if self.place != KV or any(other.parent is not node.parent for other in known):
            raise ContractError(
                f"PagedTree: page {page} of pool {self.pool.name} is published again under "
                "another key; expected further keys for parts of the same block only; "
                "a published page is never written, take a new one"
            )
        self.more_of.setdefault(page, []).append(node)
        return True

    def nodes(self, page: int) -> list[Node]:
        """The prefixes that a page holds."""
        node = self.node_of.get(page)
        return [] if node is None else [node, *self.more_of.get(page, ())]

    def pages(self, node: Node) -> list[int]:
        """The pages of a prefix."""
        page = node.pages[self.place]
        return [page, *self.copies.get(node, ())] if page else []

    def pop_nodes(self, page: int) -> list[Node]:
        """The prefixes of a published page, which is entered no longer."""
        first = self.node_of.pop(page)
        return [first, *self.more_of.pop(page)] if page in self.more_of else [first]

    def remove_node(self, page: int, node: Node) -> None:
        """Take one of several prefixes out of a page."""
        first, *rest = [other for other in self.nodes(page) if other is not node]
        self.node_of[page] = first
        self.more_of[page] = rest
        if not rest:
            del self.more_of[page]

    def clear(self) -> None:
        """Forget all prefixes."""
        self.node_of.clear()
        self.more_of.clear()
        self.copies.clear()

    def has_other(self, node: Node, page: int) -> bool:
        """Whether a prefix can do without this page."""
        return node.pages[self.place] != page or node in self.copies


class PagedTree:
    """Who is published where.  Knows no policy and no resume points."""

    def __init__(self, pools: Sequence[PagePool], state: int, kv_block: int) -> None:
        """`pools`: of the groups, full attention first; `state`: place of the recurrent one, -1 for none."""
        self.groups = [PageGroup(place, pool) for place, pool in enumerate(pools)]
        self._kv = self.groups[KV]
        self.state = state
        self.kv_block = kv_block
        self.nodes: dict[int, Node] = {}  # of whole blocks, by key
        self.log: EventLog | None = None
        self.num_changes = 0  # of what lookups find
        self.num_dropped = 0  # pages that lookups found and no longer do
        self._roots: dict[bytes, Node] = {}
        # i32[N]  KV page before that of each published KV page, so that a prefix is read without its nodes
        self.above: I32 = np.zeros(pools[KV].num_pages, np.int32)
        self._above: memoryview = self.above.data  # faster to index from Python

    # -- prefixes -----------------------------------------------------------------------------------

    def longest_known(
        self, keys: Sequence[int], max_tokens: int, root: bytes = b""
    ) -> tuple[Node, int]:
        """The longest prefix of whole blocks with KV pages, and their number.

        By bisection: what is in the tree has a KV page, and so has all that it stands on.
        """
        nodes, known, end = self.nodes, 0, min(len(keys), max_tokens // self.kv_block)
        while known < end:
            middle = (known + end + 1) // 2
            if keys[middle - 1] in nodes:
                known = middle
            else:
                end = middle - 1
        if known:
            return nodes[keys[known - 1]], known
        return self._roots.get(root) or Node(0, None, 0, len(self.groups)), 0

    def node_before(self, keys: Sequence[int], num_blocks: int, root: bytes) -> Node | None:
        """The prefix of `num_blocks` whole blocks."""
        return self.nodes.get(keys[num_blocks - 1]) if num_blocks else self._root(root)

    def tail_node(self, parent: Node, tail: tuple[int, ...], kv_page: int) -> Node | None:
        """The node of a tail, with its KV page."""
        node = parent.tails.get(tail) if parent.tails else None
        if node is None and kv_page:
            node = Node(parent.key, parent, parent.num_tokens + len(tail), len(self.groups), tail)
            self.publish(KV, node, kv_page)
        return node

    # -- pages ---------------------------------------------------------------------------------------

    def publish_kv(self, keys: Sequence[int], block: int, page: int, root: bytes) -> bool:
        """See `PrefixIndex.publish_kv`."""
        node = self.nodes.get(keys[block])
        if node is None:
            parent = self.node_before(keys, block, root)
            if parent is None:
                return False
            num_tokens = parent.num_tokens + self.kv_block
            node = self.nodes[keys[block]] = Node(keys[block], parent, num_tokens, len(self.groups))
        return self.publish(KV, node, page)

    def publish_next(
        self, parent: Node | None, key: int, num_tokens: int, page: int
    ) -> Node | None:
        """`publish_kv` of a new block behind the prefix `parent`, if that is known and the page is new.

        Returns:
            The prefix with the block, of `num_tokens` tokens; None where the caller must look closer.
        """
        node_of = self._kv.node_of
        if (
            parent is None
            or not parent.pages[KV]  # out of the tree
            or parent.num_tokens + self.kv_block != num_tokens
            or key in self.nodes
            or page in node_of
            or self.log is not None
        ):
            return None
        self._kv.pool.publish(page)
        self._above[page] = parent.pages[KV]
        node = self.nodes[key] = node_of[page] = Node(key, parent, num_tokens, len(self.groups))
        node.pages[KV] = page
        self.num_changes += 1
        return node

    def new_branch(self, keys: list[int], pages: I32, num_tokens: int) -> Branch:
        """For `graft`: blocks behind a prefix of `num_tokens` tokens that are not to be seen yet."""
        return Branch.of(keys, pages, num_tokens, self.kv_block, len(self.groups))

    def graft(self, parent: Node, branch: Branch) -> bool:
        """Publish a whole branch behind a known prefix.

        Returns:
            False, and nothing changes, where a block or a page is known: the caller must look closer.
        """
        kv, pages = self._kv, branch.pages.tolist()
        if (
            not parent.pages[KV]  # out of the tree
            or parent.num_tokens + self.kv_block != branch.nodes[0].num_tokens
            or not self.nodes.keys().isdisjoint(branch.keys)
            or not kv.node_of.keys().isdisjoint(pages)
            or self.log is not None
        ):
            return False
        kv.pool.publish_all(branch.pages)
        self.above[branch.pages[1:]] = branch.pages[:-1]
        self.above[branch.pages[0]] = parent.pages[KV]
        self.nodes.update(zip(branch.keys, branch.nodes, strict=True))
        kv.node_of.update(zip(pages, branch.nodes, strict=True))
        branch.nodes[0].enter(parent)
        self.num_changes += len(branch.nodes)
        return True

    def publish(self, place: int, node: Node, page: int) -> bool:
        """Make the page of a group findable under a prefix; False when the prefix has one already."""
        group = self.groups[place]
        try:
            if page not in group.node_of:
                group.pool.publish(page)
                group.node_of[page] = node
                if place == KV:
                    self._above[page] = _page_above(node)
            elif not group.share_page(page, node):
                return False
        except ContractError:
            self.prune(node)  # every prefix in the tree has a KV page
            raise
        if node.pages[place]:
            group.copies.setdefault(node, []).append(page)
            return False
        node.pages[place] = page
        self.num_changes += 1
        if self.log is not None:
            self.log.add(self._stored(place, node))
        return True

    def forget(self, group: PageGroup, page: int) -> list[Node]:
        """Take a page out of its prefixes and of what is published; returns the prefixes."""
        nodes = group.pop_nodes(page)
        for node in nodes:
            copies = group.copies.get(node) if group.copies else None
            if node.pages[group.place] != page:
                assert copies is not None
                copies.remove(page)
            else:
                node.pages[group.place] = copies.pop(0) if copies else NULL_PAGE
                if group.place == KV and node.pages[KV]:
                    self._move_above(node)
                self.num_dropped += 1  # hits that were found before name the page that goes
                self.num_changes += 1
                if self.log is not None and not node.pages[group.place]:
                    self.log.add(Removed(self._name(group.place), node.key, node.tail))
            if copies is not None and not copies:
                del group.copies[node]
        group.pool.unpublish(page)
        for node in nodes:
            self.prune(node)
        return nodes

    def forget_leaves(self, pages: Sequence[int]) -> list[int]:
        """`forget` cached KV pages at the ends of branches that hold nothing else: most that are evicted.

        Returns:
            The other pages; the caller must look closer.
        """
        kv, nodes, gone, others = self._kv, self.nodes, list[int](), list[int]()
        for page in pages:
            node = kv.node_of.get(page)
            if (
                node is None
                or not node.is_leaf
                or node.tail
                or sum(node.pages) != page
                or kv.pool.refcount(page)
                or page in kv.more_of
                or node in kv.copies
                or self.log is not None
            ):
                others.append(page)
                continue
            del kv.node_of[page], nodes[node.key]
            node.pages[KV] = NULL_PAGE
            node.detach()  # what it stands on has a KV page, or is a root
            gone.append(page)
        kv.pool.unpublish_cached(gone)
        self.num_dropped += len(gone)
        self.num_changes += len(gone)
        return others

    def group_of(self, pool: PagePool) -> PageGroup:
        """The group whose pages are in `pool`."""
        return next(group for group in self.groups if group.pool is pool)

    def drop_copies(self, pool: PagePool, pages: I32) -> I32:
        """Unpublish those of the cached pages whose prefixes have another page; returns the others."""
        group = self.group_of(pool)
        if not group.copies:
            return pages
        kept = []
        for page in pages.tolist():
            if all(group.has_other(node, page) for node in group.nodes(page)):
                self.forget(group, page)
            else:
                kept.append(page)
        return np.array(kept, np.int32)

    def end_of_chain(self, pages: I32, first: int) -> int:
        """From place `first` on each KV page stands on the one after it, up to the place returned."""
        return page_passes.end_of_chain(self.above, pages, first)

    def clear(self) -> None:
        """Forget all prefixes.  Cached pages become free; owned pages stay with their owners, private."""
        for group in self.groups:
            for page in group.node_of:
                group.pool.unpublish(page)
                for node in group.nodes(page):
                    node.pages[group.place] = (
                        NULL_PAGE  # who still knows the node sees that it went
                    )
            self.num_dropped += len(group.node_of)
            group.clear()
        self.nodes.clear()
        self._roots.clear()
        self.num_changes += 1
        if self.log is not None:
            self.log.add(Cleared())

    def prune(self, node: Node) -> None:
        """Take nodes out of the tree that hold nothing, upwards."""
        while (
            not node.pages[KV] and node.parent is not None and node.is_leaf and not any(node.pages)
        ):
            if not node.tail:
                if self.nodes.pop(node.key, None) is None:
                    return  # taken out before
            elif node.parent.tails is None or node.parent.tails.get(node.tail) is not node:
                return
            node.detach()
            node = node.parent

    # -- books ------------------------------------------------------------------------------------------

    def check_books(self) -> None:
        """Books of all pools balance, exactly the published pages have keys, and each can be reached."""
        reached: list[set[int]] = [set() for _ in self.groups]
        num_nodes = 0
        for root in self._roots.values():
            for node in root.below():
                num_nodes += not node.tail
                self._check_node(node)
                self._check_above(node)
                for place, page in enumerate(node.pages):
                    reached[place] |= {page, *self.groups[place].copies.get(node, ())} - {NULL_PAGE}
        for group, pages in zip(self.groups, reached, strict=True):
            group.pool.check_books()
            keyed = set(group.node_of)
            flagged = {p for p in range(group.pool.num_pages) if group.pool.is_published(p)}
            if not keyed == flagged == pages:
                raise ContractError(
                    f"PagedTree: pool {group.pool.name} has published pages {sorted(flagged)}, keys for "
                    f"{sorted(keyed)}, of which {sorted(pages)} can be reached; expected the same; publish "
                    "through the index only"
                )
        if num_nodes != len(self.nodes):
            raise ContractError(
                f"PagedTree: {len(self.nodes)} keys, {num_nodes} of them in the tree; expected all; "
                "this is a bug in the index"
            )

    def _check_node(self, node: Node) -> None:
        below = node.children()
        covered = 0 if self.state < 0 else sum(is_covered(child, self.state) for child in below)
        without_kv = not node.pages[KV] and any(node.pages)
        if covered != node.covered_children or without_kv or not (below or any(node.pages)):
            raise ContractError(
                f"PagedTree: the prefix of {node.num_tokens} tokens has pages {node.pages}, "
                f"{node.covered_children} covered children of {covered}; expected a KV page under every "
                "other page and equal counts; this is a bug in the index"
            )

    def _check_above(self, node: Node) -> None:
        for page in self._kv.pages(node):
            if self._above[page] != _page_above(node):
                raise ContractError(
                    f"PagedTree: KV page {page} of {node.num_tokens} tokens is noted behind page "
                    f"{self._above[page]}; expected {_page_above(node)}; this is a bug in the index"
                )

    def _move_above(self, node: Node) -> None:
        """A prefix has got another KV page: note it with the pages that stand on it."""
        for child in node.children():
            for page in self._kv.pages(child):
                self._above[page] = node.pages[KV]

    def _root(self, root: bytes) -> Node:
        found = self._roots.get(root)
        if found is None:
            found = self._roots[root] = Node(0, None, 0, len(self.groups))
        return found

    def _stored(self, place: int, node: Node) -> Stored:
        parent = 0 if node.parent is None else node.parent.key
        return Stored(self._name(place), node.key, parent, node.num_tokens, node.tail)

    def _name(self, place: int) -> str:
        return self.groups[place].pool.name


def _page_above(node: Node) -> int:
    return 0 if node.parent is None else node.parent.pages[KV]
