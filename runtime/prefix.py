"""
Which published pages hold which prefix, and where a new prompt can resume.

Groups of pages, each in a pool of its own: one KV page per `kv_block` tokens of full attention, pages of
sliding windows, and state pages, each of them the recurrent state after all tokens of a prefix.

    expected ----> published ----> evicted      a checkpoint: its key is expected while the step that writes
       |               |                        it is under way, and can be read only once that step is
       +-> nothing     +-> reset                committed; abort, preemption and failure end expectation

Keys are chained hashes (`hashing.as_keys`), so a key stands for a whole prefix.  A prefix that ends inside a
block is found by the key of its whole blocks and the tokens behind them.  What of a page was published is
never written again; a KV page may get further tokens behind its published ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from midstream.errors import ConfigError, ContractError
from midstream.runtime.coordinator import Hit, Tokens, Window, find_resume_point
from midstream.runtime.events import EventLog
from midstream.runtime.eviction import EVICTIONS, LruEvictor, ValueEvictor
from midstream.runtime.expected import Expectations
from midstream.runtime.paged_tree import KV, PagedTree
from midstream.runtime.pages import I32, NULL_PAGE, PagePool, Pages
from midstream.runtime.tree import Node, Value, cover, is_covered, uncover

_REMEMBERED = 4096  # keys of dropped checkpoints, to say "evicted" where nothing hits


class PrefixIndex:
    """Keys of the pages of all groups.  `state_pool` None: the model has no recurrent layers.

    >>> kv, state = PagePool(8, "kv"), PagePool(8, "state")
    >>> index = PrefixIndex(kv, state, kv_block=16)
    >>> pages, (checkpoint,) = kv.take(2), state.take(1)
    >>> [index.publish_kv((71, 72), block, page) for block, page in enumerate(pages)]
    [True, True]
    >>> index.publish_state((71, 72), checkpoint, position=16)
    True
    >>> hit = index.lookup([71, 72, 99], max_tokens=47)
    >>> hit.num_tokens, hit.kv_pages.tolist(), hit.state_page, hit.junction
    (16, [1], 1, 32)
    """

    def __init__(
        self,
        kv_pool: PagePool,
        state_pool: PagePool | None,
        kv_block: int,
        *,
        windows: Sequence[tuple[PagePool, int, int]] = (),
        eviction: str = "value",
        page_bytes: tuple[int, int] = (1, 1),
    ) -> None:
        """
        Args:
            windows: pool, tokens of a page and length of the window of each such group.
            eviction: see `eviction.py`.
            page_bytes: of a KV page and a state page, to weigh one against the other.
        """
        _check(kv_block, windows, eviction)
        self.kv_block = kv_block
        self.kv_pool = kv_pool
        self.state_pool = state_pool
        self._windows = [
            Window(place, tokens // kv_block, -(-(length - 1) // tokens))
            for place, (_, tokens, length) in enumerate(windows, start=1)
        ]
        pools = [kv_pool, *(pool for pool, _, _ in windows)]
        self.state = -1 if state_pool is None else len(pools)
        pools += [] if state_pool is None else [state_pool]
        self.tree = PagedTree(pools, self.state, kv_block)
        self.expected = Expectations()
        self._evicted: OrderedDict[int, None] = OrderedDict()
        self.num_lookups = 0
        self._evictor = (
            ValueEvictor(self, page_bytes[1], page_bytes[0])
            if eviction == "value"
            else LruEvictor(self)
        )
        for pool in pools:
            pool.set_evictor(self._evictor)

    # -- what is known ----------------------------------------------------------------------------

    @property
    def log(self) -> EventLog | None:
        """What a router must know, if somebody wants it."""
        return self.tree.log

    @log.setter
    def log(self, log: EventLog | None) -> None:
        self.tree.log = log

    @property
    def evictions(self) -> int:
        """Pages that lookups found and no longer do, so far."""
        return self.tree.num_dropped

    @property
    def generation(self) -> int:
        """Changes whenever a lookup may answer differently than before, or an expectation ended."""
        return self.tree.num_changes + self.expected.num_ended

    @property
    def state_pages(self) -> int:
        """State pages that are published."""
        return 0 if self.state < 0 else len(self.tree.groups[self.state].node_of)

    def has_state(self, key: int) -> bool:
        """Whether a state page is published under `key`."""
        node = self.tree.nodes.get(key)
        return node is not None and self.state >= 0 and node.pages[self.state] > 0

    def status(self, key: int) -> str | None:
        """What became of the checkpoint under a key: expected, published, evicted, or None: never seen."""
        if self.has_state(key):
            return "published"
        if key in self.expected:
            return "expected"
        return "evicted" if key in self._evicted else None

    def has_tail(
        self, keys: Sequence[int], root: bytes, tail: tuple[int, ...], position: int
    ) -> bool:
        """Whether a state is published after a prefix that ends inside a block."""
        node = self.tree.node_before(keys, position // self.kv_block, root)
        found = node.tails.get(tail) if node is not None and node.tails else None
        return found is not None and found.pages[self.state] > 0

    def protected(self, page: int) -> int:
        """Tokens of a KV page that must not be written."""
        nodes = self.tree.groups[KV].nodes(page)
        return max((len(node.tail) or self.kv_block for node in nodes), default=0)

    def lookup(
        self, keys: Sequence[int], max_tokens: int, root: bytes = b"", tokens: Tokens | None = None
    ) -> Hit:
        """Find the resume point of a prompt.  Changes nothing, holds nothing.

        Args:
            keys: one per full block of the prompt.
            max_tokens: the hit is not longer; prompt length - 1, since one token must be computed.
            root: the prompt's extra keys.
            tokens: reads the prompt; without it prefixes that end inside a block are not found.
        """
        self.num_lookups += 1
        matched, blocks = self.tree.longest_known(keys, max_tokens, root)
        node, blocks = find_resume_point(
            matched, blocks, max(max_tokens, 0), self.kv_block, self.state, self._windows, tokens
        )
        return Hit(
            num_tokens=node.num_tokens,
            node=node if node.num_tokens else None,
            tail_page=node.pages[KV] if node.tail else NULL_PAGE,
            state_page=node.pages[self.state] if self.state >= 0 else NULL_PAGE,
            window_pages=tuple(window.row(node, blocks) for window in self._windows),
            kv_match_tokens=max(matched.num_tokens, node.num_tokens),
            evictions=self.tree.num_dropped,
            kv_above=self.tree.above,
            num_blocks=blocks,
        )

    def longest_state(self, keys: Sequence[int], max_tokens: int) -> int:
        """Tokens of the longest prefix of whole blocks with a state."""
        node, _ = self.tree.longest_known(keys, max_tokens)
        while node.parent is not None and not (self.state >= 0 and node.pages[self.state]):
            node = node.parent
        return node.num_tokens

    def was_evicted(self, keys: Sequence[int], begin: int, end: int) -> bool:
        """Whether a checkpoint of the prompt in (begin, end] was there and had to go."""
        blocks = keys[begin // self.kv_block : max(end, 0) // self.kv_block]
        return bool(self._evicted) and not self._evicted.keys().isdisjoint(blocks)

    # -- publication ----------------------------------------------------------------------------------

    def publish_kv(self, keys: Sequence[int], block: int, page: int, root: bytes = b"") -> bool:
        """Make the written KV page of a block findable.

        Returns:
            False when the block has a page already (this one stands in when the other goes), or when the
            block before is not known.
        """
        return self.tree.publish_kv(keys, block, page, root)

    def publish_window(self, window: int, keys: Sequence[int], block: int, page: int) -> bool:
        """Make a page of sliding window number `window` findable; `block` is the last that it holds."""
        node = self.tree.nodes.get(keys[block])
        return node is not None and self.tree.publish(1 + window, node, page)

    def publish_state(
        self,
        keys: Sequence[int],
        page: int,
        position: int,
        *,
        root: bytes = b"",
        tail: tuple[int, ...] = (),
        kv_page: int = NULL_PAGE,
        value: Value | None = None,
    ) -> bool:
        """Make a written state page findable.

        Args:
            position: tokens that the state was computed from; whole blocks, unless there is a tail.
            tail: tokens behind the last whole block.
            kv_page: holds the tail.
        Returns:
            False when the prefix has a state already, or its KV pages are not known: the page stays private.
        """
        if position < 1 or position % self.kv_block != len(tail) or self.state < 0:
            raise ContractError(
                f"PrefixIndex: a state at position {position} with {len(tail)} tokens behind the last whole "
                f"block of {self.kv_block}, state pool {self.state_pool}; expected as many as the position "
                "leaves over; pass the tail with it"
            )
        node = self.tree.node_before(keys, position // self.kv_block, root)
        if node is not None and tail:
            node = self.tree.tail_node(node, tail, kv_page)
        if node is None or node.pages[self.state] or (not tail and not node.pages[KV]):
            return False
        if node.num_tokens != position:
            raise ContractError(
                f"PrefixIndex: a state at position {position}, but its key is that of {node.num_tokens} "
                "tokens; expected one number; pass the length of the hashed prefix"
            )
        return self._enter_state(node, page, value)

    def publish_state_on(self, node: Node, page: int) -> bool:
        """`publish_state` for a prefix of whole blocks whose node in the tree the caller has."""
        return not node.pages[self.state] and self._enter_state(node, page, None)

    def _enter_state(self, node: Node, page: int, value: Value | None) -> bool:
        node.value = Value() if value is None else value
        self.tree.publish(self.state, node, page)
        cover(node, self.state)
        self._evicted.pop(node.key, None)
        return True

    def hold(self, hit: Hit) -> None:
        """Share the pages of a hit; the caller releases them to their pools.

        Raises:
            ContractError: keys were dropped since the lookup, so the pages may hold something else.
        """
        if hit.evictions != self.tree.num_dropped:
            raise ContractError(
                f"PrefixIndex: a hit of {hit.num_tokens} tokens is held after "
                f"{self.tree.num_dropped - hit.evictions} pages were dropped; expected none since its "
                "lookup; look up, hold, and only then take pages"
            )
        pools = [group.pool for group in self.tree.groups]
        rows: list[tuple[PagePool, Pages]] = [
            (self.kv_pool, hit.kv_pages),
            (self.kv_pool, hit.tail_page),
        ]
        rows += zip(pools[1:], [*hit.window_pages, hit.state_page], strict=False)
        done = 0
        try:
            for pool, row in rows:
                pool.share(row)
                done += 1
        except BaseException:
            for pool, row in rows[:done]:
                pool.release(row)
            raise
        if hit.node is not None:
            self._evictor.on_used(hit.node)

    def retract(self, key: int, page: int) -> None:
        """Drop a checkpoint that a later one of the same request replaces, unless somebody used it."""
        node = self.tree.nodes.get(key)
        if (
            node is not None
            and self.state >= 0
            and node.pages[self.state] == page
            and (
                node.value is not None
                and not node.value.uses
                and not self.state_pool_refcount(page)
            )
        ):
            self.drop_state(node, remember=False)

    def reset(self) -> None:
        """Drop all keys.  Cached pages become free; owned pages stay with their owners, private."""
        self.tree.clear()
        self._evictor.clear()
        self.expected.clear()
        self._evicted.clear()

    def check_books(self) -> None:
        """Books of all pools balance, exactly the published pages have keys, and each can be reached."""
        self.tree.check_books()

    # -- for the eviction policy --------------------------------------------------------------------

    def is_useful(self, page: int) -> bool:
        """Whether a surviving state can use a KV page; without recurrent layers none can say so."""
        group, state = self.tree.groups[KV], self.state
        node = group.node_of.get(page)
        if state < 0 or node is None:
            return False
        if is_covered(node, state):
            return True
        others = group.more_of.get(page)
        return others is not None and any(is_covered(other, state) for other in others)

    def node_of_state(self, page: int) -> Node:
        """The prefix of a published state page."""
        return self.tree.groups[self.state].node_of[page]

    def state_pool_refcount(self, page: int) -> int:
        """How often a state page is held."""
        assert self.state_pool is not None
        return self.state_pool.refcount(page)

    def drop_copies(self, pool: PagePool, pages: I32) -> I32:
        """Unpublish those of the cached pages whose prefixes have another page; returns the others."""
        return self.tree.drop_copies(pool, pages)

    def drop_page(self, pool: PagePool, page: int) -> None:
        """Unpublish a page, and whatever is of no use without it."""
        group = self.tree.group_of(pool)
        if self.state >= 0 and pool is self.state_pool:
            self.drop_state(group.node_of[page])
            return
        for node in self.tree.forget(group, page):
            if group.place == KV and not node.pages[KV]:
                self._drop_unreachable(node)

    def drop_state(self, node: Node, remember: bool = True) -> None:
        """Unpublish the state of a prefix; KV pages that it alone could use are bare now."""
        group = self.tree.groups[self.state]
        self.tree.forget(group, node.pages[self.state])
        node.value = None
        if remember and not node.tail:
            self._evicted[node.key] = None
            if len(self._evicted) > _REMEMBERED:
                self._evicted.popitem(last=False)
        if bare := uncover(node, self.state):
            self._evictor.on_bare(bare)
        if node.tail:  # nothing else can use it
            kv_page, kv = node.pages[KV], self.tree.groups[KV]
            if kv_page and kv_page not in kv.more_of:
                self.tree.forget(kv, kv_page)
            elif kv_page:
                kv.remove_node(kv_page, node)
            node.pages[KV] = 0
            self.tree.prune(node)

    def _drop_unreachable(self, node: Node) -> None:
        """The KV page of a prefix went: what stands on it or behind it can never be reached again."""
        for lost in [*node.below(), node]:
            if self.state >= 0 and lost.pages[self.state]:
                self.drop_state(lost)
            for group in self.tree.groups:
                while page := lost.pages[group.place]:
                    self.tree.forget(group, page)


def _check(kv_block: int, windows: Sequence[tuple[PagePool, int, int]], eviction: str) -> None:
    if kv_block < 1 or any(tokens % kv_block for _, tokens, _ in windows):
        raise ConfigError(
            f"PrefixIndex: kv_block {kv_block}, pages of sliding windows hold "
            f"{[tokens for _, tokens, _ in windows]} tokens; expected a block of 1 or more tokens and "
            "multiples of it; choose block sizes that divide one another"
        )
    if eviction not in EVICTIONS:
        raise ConfigError(
            f"PrefixIndex: eviction={eviction!r}; expected one of {', '.join(map(repr, EVICTIONS))}"
        )
