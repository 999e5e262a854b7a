"""
Which cached page goes when room is needed.

`value` (the default) keeps groups coherent.  KV pages that no surviving state can use go first; then whole
checkpoints, the least valuable first, and with a checkpoint go the KV pages that only it could use.  The
value of a checkpoint is the tokens that its loss would have computed again, per byte that its loss frees,
times its uses; the value at which the last one went is added when it is used, so that what is not used again
ages (Greedy-Dual-Size-Frequency: Cherkasova, "Improving WWW proxies performance with
Greedy-Dual-Size-Frequency caching policy", HP Labs 1998).

`lru`: the page that was released longest ago, with what only it made reachable.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

from midstream.runtime.pages import PagePool
from midstream.runtime.tree import Node, Value

if TYPE_CHECKING:
    from midstream.runtime.prefix import PrefixIndex

EVICTIONS = ("value", "lru")
_FAR = 8192  # tokens; a gap is not counted beyond
_SPECULATIVE = (
    0.25  # weight of a checkpoint made in the hope of a shared prefix, until its first use
)


class LruEvictor:
    """Plain order of release."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def make_room(self, pool: PagePool) -> None:
        self._index.drop_page(pool, pool.oldest_cached())

    def on_cached(self, pool: PagePool, pages: Sequence[int]) -> None:
        self._index.drop_copies(pool, pages)

    def on_bare(self, nodes: Sequence[Node]) -> None:
        """Nodes without cover: nothing follows."""

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
        self._heap: list[tuple[float, int, Node]] = []
        self._turn = count()
        self._age = 0.0

    def make_room(self, pool: PagePool) -> None:
        index, before = self._index, pool.num_free
        if pool is index.state_pool:
            self._drop_checkpoint(leaf=False)
        elif pool is index.kv_pool:
            # the last tokens of a checkpoint come free with it; the other pages are bare then
            while not self._drop_bare() and self._drop_checkpoint(leaf=True):
                if pool.num_free > before:
                    break
        if pool.num_free == before:
            index.drop_page(pool, pool.oldest_cached())

    def on_cached(self, pool: PagePool, pages: Sequence[int]) -> None:
        index = self._index
        pages = index.drop_copies(pool, pages)
        if pool is index.kv_pool:
            for page in pages:
                if not index.is_useful(page):
                    self._mark_bare(page)
        elif pool is index.state_pool:
            for page in pages:
                self._push(index.node_of_state(page), self._age)

    def on_bare(self, nodes: Sequence[Node]) -> None:
        """Nodes lost their cover: their cached KV pages go first from now on."""
        pool = self._index.kv_pool
        for node in nodes:
            page = node.pages[0]
            if page and not pool.refcount(page):
                self._mark_bare(page)

    def clear(self) -> None:
        """Nothing is cached any more."""
        self._bare.clear()
        self._heap.clear()

    def _mark_bare(self, page: int) -> None:
        self._bare.pop(page, None)
        self._bare[page] = None

    def _drop_bare(self) -> bool:
        """Drop the KV page that has been of no use for longest."""
        pool, index = self._index.kv_pool, self._index
        while self._bare:
            page, _ = self._bare.popitem(last=False)
            # it may have been used, covered or dropped since
            if pool.is_published(page) and not pool.refcount(page) and not index.is_useful(page):
                index.drop_page(pool, page)
                return True
        return False

    def _drop_checkpoint(self, leaf: bool) -> bool:
        """Drop the least valuable cached checkpoint; `leaf`: one whose KV pages are of no other use."""
        passed: list[tuple[float, int, Node]] = []
        found = False
        while self._heap and not found:
            entry = heapq.heappop(self._heap)
            node = entry[2]
            if not self._is_current(entry):
                continue
            if leaf and not self._frees_kv(node):
                passed.append(entry)
            elif (value := self._worth(node)) > entry[0] * (1 + 1e-9):  # its neighbours went
                self._push(node)
            else:
                self._age = max(self._age, value)
                self._index.drop_state(node)
                found = True
        for entry in passed:
            heapq.heappush(self._heap, entry)
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

    def _frees_kv(self, node: Node) -> bool:
        page = node.pages[0]
        return not node.covered_children and page > 0 and not self._index.kv_pool.refcount(page)

    def _worth(self, node: Node) -> float:
        value = node.value
        assert value is not None
        index = self._index
        gap = node.gap(index.state, _FAR)
        size = float(self._state_bytes)
        if not node.covered_children:
            size += gap / index.kv_block * self._kv_bytes
        return value.age + value.weight * (1 + value.uses) * gap / size * self._state_bytes

    def _push(self, node: Node, age: float | None = None) -> None:
        value = node.value
        assert value is not None
        value.age = value.age if age is None else age
        value.turn = next(self._turn)
        heapq.heappush(self._heap, (self._worth(node), value.turn, node))
        if len(self._heap) > 2 * self._index.state_pages + 64:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)


def used(node: Node) -> None:
    """A request resumes from the checkpoint."""
    if node.value is not None:
        node.value.uses += 1
        node.value.weight = 1.0


def speculative() -> Value:
    """For a checkpoint that nobody asked for yet."""
    return Value(weight=_SPECULATIVE)
