"""
Which cached page goes when room is needed.

`value` (the default) keeps groups coherent.  KV pages that no surviving state can use go first; then whole
checkpoints, the least valuable first, and with a checkpoint go the KV pages that only it could use.  What a
checkpoint is worth depends on what is short:

    state pages     uses x tokens that its loss would have computed again, per byte that it frees
    KV pages        uses: each KV page saves as many tokens as any other

In both orders the value at which the last one went is added when it is used, so that what is not used again
ages (Greedy-Dual-Size-Frequency: Cherkasova, "Improving WWW proxies performance with
Greedy-Dual-Size-Frequency caching policy", HP Labs 1998).  Who uses a checkpoint uses the KV pages of all
before it: where the last checkpoint of a branch goes, the one before it takes over its age.

`lru`: the page that was released longest ago, with what only it made reachable.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

from midstream.runtime.pages import I32, PagePool
from midstream.runtime.tree import Node, Value

if TYPE_CHECKING:
    from midstream.runtime.prefix import PrefixIndex

EVICTIONS = ("value", "lru")
_FAR = 8192  # tokens; a gap is not counted beyond
_GUESS = 0.25  # uses of a checkpoint made in the hope of a shared prefix, until its first
_STATE, _KV = 0, 1  # the two orders


class LruEvictor:
    """Plain order of release."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def make_room(self, pool: PagePool, wanted: int) -> None:
        self._index.drop_page(pool, pool.oldest_cached())

    def on_cached(self, pool: PagePool, pages: I32) -> None:
        self._index.drop_copies(pool, pages)

    def on_bare(self, nodes: Sequence[Node]) -> None:
        """Nodes without cover: nothing follows."""

    def on_used(self, node: Node) -> None:
        """A request resumes from the checkpoint."""
        if node.value is not None:
            node.value.uses += 1

    def clear(self) -> None:
        """Nothing is cached any more."""


class ValueEvictor:
    """Coherent over the groups."""

    def __init__(self, index: PrefixIndex, state_bytes: int, kv_bytes: int) -> None:
        """`state_bytes`, `kv_bytes`: of one page."""
        self._index = index
        self._state_bytes = max(state_bytes, 1)
        self._kv_bytes = kv_bytes
        self._bare: OrderedDict[int, None] = (
            OrderedDict()
        )  # cached KV pages of no use, leaves first
        self._heaps: tuple[list[tuple[float, int, Node]], ...] = ([], [])
        self._turn = count()
        self._age = [0.0, 0.0]
        self._age_below = 0.0  # of the checkpoint that goes

    def make_room(self, pool: PagePool, wanted: int) -> None:
        index, before = self._index, pool.num_free
        if pool is index.state_pool:
            self._drop_checkpoint(_STATE)
        elif pool is index.kv_pool:
            # the last tokens of a checkpoint come free with it; the other pages are bare then
            while not self._drop_bare(wanted) and self._drop_checkpoint(_KV):
                if pool.num_free > before:
                    break
        if pool.num_free == before:
            index.drop_page(pool, pool.oldest_cached())

    def on_cached(self, pool: PagePool, pages: I32) -> None:
        index = self._index
        pages = index.drop_copies(pool, pages)
        if pool is index.kv_pool:
            place = 0
            while place < len(pages):
                page = int(pages[place])
                if index.is_useful(page):  # and so is what it stands on
                    place = index.tree.end_of_chain(pages, place)
                else:
                    self._mark_bare(page)
                    place += 1
        elif pool is index.state_pool:
            for page in pages.tolist():
                node = index.node_of_state(page)
                assert node.value is not None
                node.value.age = (self._age[_STATE], self._age[_KV])
                self._push(node)

    def on_bare(self, nodes: Sequence[Node]) -> None:
        """Nodes lost their cover: their cached KV pages go first from now on."""
        pool = self._index.kv_pool
        for node in nodes:
            page = node.pages[0]
            if page and not pool.refcount(page):
                self._mark_bare(page)
        above = nodes[-1].parent if nodes else None
        if above is not None and above.value is not None and above.value.turn >= 0:
            # it is the last of its branch now, and its pages were used with those behind them
            state_age, age = above.value.age
            above.value.age = (state_age, max(age, self._age_below))
            self._enter(_KV, above)

    def on_used(self, node: Node) -> None:
        """A request resumes from the checkpoint."""
        if node.value is not None:
            node.value.uses += 1
            node.value.is_guess = False

    def clear(self) -> None:
        """Nothing is cached any more."""
        self._bare.clear()
        for heap in self._heaps:
            heap.clear()

    def _mark_bare(self, page: int) -> None:
        self._bare.pop(page, None)
        self._bare[page] = None

    def _drop_bare(self, wanted: int) -> bool:
        """Drop KV pages that are of no use, longest so first, until `wanted` more are free."""
        pool, index, bare = self._index.kv_pool, self._index, self._bare
        before = pool.num_free
        while bare and (missing := before + wanted - pool.num_free) > 0:
            oldest = [bare.popitem(last=False)[0] for _ in range(min(missing, len(bare)))]
            for page in index.tree.forget_leaves(oldest):
                # it may have been used, covered or dropped since
                if (
                    pool.is_published(page)
                    and not pool.refcount(page)
                    and not index.is_useful(page)
                ):
                    index.drop_page(pool, page)
        return pool.num_free > before

    def _drop_checkpoint(self, order: int) -> bool:
        """Drop the cached checkpoint that comes first in an order; False when there is none."""
        heap = self._heaps[order]
        passed: list[tuple[float, int, Node]] = []
        found = False
        while heap and not found:
            entry = heapq.heappop(heap)
            node = entry[2]
            if not self._is_current(entry) or (order == _KV and node.covered_children):
                continue  # `on_bare` enters it again when it is the last
            if order == _KV and self._index.kv_pool.refcount(node.pages[0]):
                passed.append(entry)
            elif (worth := self._worth(order, node)) > entry[0] * (1 + 1e-9):  # its neighbours went
                self._enter(order, node)
            else:
                self._age[order] = max(self._age[order], worth)
                assert node.value is not None
                self._age_below = node.value.age[_KV]
                self._index.drop_state(node)
                found = True
        for entry in passed:
            heapq.heappush(heap, entry)
        return found

    def _is_current(self, entry: tuple[float, int, Node]) -> bool:
        """False for what has been used or dropped since it was entered."""
        _, turn, node = entry
        page = node.pages[self._index.state]
        return (
            page > 0
            and node.value is not None
            and node.value.turn == turn
            and not self._index.state_pool_refcount(page)
        )

    def _worth(self, order: int, node: Node) -> float:
        value, index = node.value, self._index
        assert value is not None
        if order == _KV:
            return value.age[_KV] + max(value.uses, 1)
        gap = node.gap(index.state, _FAR)
        size = float(self._state_bytes)
        if not node.covered_children:
            size += gap / index.kv_block * self._kv_bytes
        uses = _GUESS if value.is_guess else 1 + value.uses
        return value.age[_STATE] + uses * gap / size * self._state_bytes

    def _push(self, node: Node) -> None:
        """Enter a checkpoint that was cached just now; older entries count no more."""
        assert node.value is not None
        node.value.turn = next(self._turn)
        self._enter(_STATE, node)
        if not node.covered_children:
            self._enter(_KV, node)

    def _enter(self, order: int, node: Node) -> None:
        heap = self._heaps[order]
        assert node.value is not None
        heapq.heappush(heap, (self._worth(order, node), node.value.turn, node))
        if len(heap) > 2 * self._index.state_pages + 64:
            heap[:] = [entry for entry in heap if self._is_current(entry)]
            heapq.heapify(heap)


def speculative() -> Value:
    """For a checkpoint that nobody asked for yet."""
    return Value(is_guess=True)
