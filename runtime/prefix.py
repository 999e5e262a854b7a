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
from midstream.runtime.events import Cleared, EventLog, Removed, Stored
from midstream.runtime.eviction import EVICTIONS, LruEvictor, ValueEvictor
from midstream.runtime.pages import NULL_PAGE, PagePool
from midstream.runtime.tree import Node, Value, cover, is_covered, uncover

_KV = 0  # place of the full attention group in `Node.pages`
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
    >>> hit.num_tokens, hit.kv_pages, hit.state_page, hit.junction
    (16, (1,), 1, 32)
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
        self._groups = [_Group(place, pool) for place, pool in enumerate(pools)]
        self._nodes: dict[int, Node] = {}
        self._roots: dict[bytes, Node] = {}
        self._expected: dict[int, dict[int, int]] = {}  # key -> position, by who computes it
        self._evicted: OrderedDict[int, None] = OrderedDict()
        self._changes = 0
        self._dropped = 0
        self.num_lookups = 0
        self.log: EventLog | None = None
        self._evictor = (
            ValueEvictor(self, page_bytes[1], page_bytes[0])
            if eviction == "value"
            else LruEvictor(self)
        )
        for group in self._groups:
            group.pool.set_evictor(self._evictor)

    # -- what is known ----------------------------------------------------------------------------

    @property
    def evictions(self) -> int:
        """Pages that lookups found and no longer do, so far."""
        return self._dropped

    @property
    def generation(self) -> int:
        """Changes whenever a lookup may answer differently than before, or an expectation ended."""
        return self._changes

    @property
    def state_pages(self) -> int:
        """State pages that are published."""
        return 0 if self.state < 0 else len(self._groups[self.state].nodes_of)

    def has_state(self, key: int) -> bool:
        """Whether a state page is published under `key`."""
        node = self._nodes.get(key)
        return node is not None and self.state >= 0 and node.pages[self.state] > 0

    def status(self, key: int) -> str | None:
        """What became of the checkpoint under a key: expected, published, evicted, or None: never seen."""
        if self.has_state(key):
            return "published"
        if any(key in keys for keys in self._expected.values()):
            return "expected"
        return "evicted" if key in self._evicted else None

    def has_tail(
        self, keys: Sequence[int], root: bytes, tail: tuple[int, ...], position: int
    ) -> bool:
        """Whether a state is published after a prefix that ends inside a block."""
        node = self._node_before(keys, position // self.kv_block, root)
        found = node.tails.get(tail) if node is not None and node.tails else None
        return found is not None and found.pages[self.state] > 0

    def protected(self, page: int) -> int:
        """Tokens of a KV page that must not be written."""
        nodes = self._groups[_KV].nodes_of.get(page, ())
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
        path = self._path(keys, max_tokens)
        start = self._roots.get(root) or Node(0, None, 0, len(self._groups))
        node, blocks = find_resume_point(
            start, path, max(max_tokens, 0), self.kv_block, self.state, self._windows, tokens
        )
        return Hit(
            num_tokens=node.num_tokens,
            kv_pages=tuple(node.pages[_KV] for node in path[:blocks]),
            tail_page=node.pages[_KV] if node.tail else NULL_PAGE,
            state_page=node.pages[self.state] if self.state >= 0 else NULL_PAGE,
            window_pages=tuple(window.row(path, blocks) for window in self._windows),
            kv_match_tokens=max(len(path) * self.kv_block, node.num_tokens),
            node=node if node.num_tokens else None,
            evictions=self._dropped,
        )

    def longest_state(self, keys: Sequence[int], max_tokens: int) -> int:
        """Tokens of the longest prefix of whole blocks with a state, reachable or not."""
        for blocks in range(max(0, min(len(keys), max_tokens // self.kv_block)), 0, -1):
            if self.has_state(keys[blocks - 1]):
                return blocks * self.kv_block
        return 0

    def was_evicted(self, keys: Sequence[int], begin: int, end: int) -> bool:
        """Whether a checkpoint of the prompt in (begin, end] was there and had to go."""
        blocks = range(begin // self.kv_block, min(end // self.kv_block, len(keys)))
        return bool(self._evicted) and any(keys[block] in self._evicted for block in blocks)

    # -- checkpoints under way ----------------------------------------------------------------------

    def expect(self, owner: int, keys: Sequence[int], position: int) -> None:
        """A step that is being planned or run will publish a state after `position` tokens."""
        key = keys[position // self.kv_block - 1]
        self._expected.setdefault(owner, {})[key] = position

    def expect_no_more(self, owner: int, keys: Sequence[int] | None = None) -> None:
        """What `owner` was to publish under these keys, or at all, is published or never will be."""
        expected = self._expected.get(owner)
        if expected is None:
            return
        for key in list(expected) if keys is None else keys:
            if expected.pop(key, None) is not None:
                self._changes += 1
        if not expected:
            del self._expected[owner]

    def expected_beyond(self, keys: Sequence[int], position: int, max_tokens: int) -> int:
        """The longest prefix of a prompt, longer than `position`, whose state is under way; or 0."""
        best, limit = 0, min(max_tokens, len(keys) * self.kv_block)
        for expected in self._expected.values():
            for key, found in expected.items():
                inside = max(position, best) < found <= limit
                if inside and keys[found // self.kv_block - 1] == key:
                    best = found
        return best

    # -- publication ----------------------------------------------------------------------------------

    def publish_kv(self, keys: Sequence[int], block: int, page: int, root: bytes = b"") -> bool:
        """Make the written KV page of a block findable.

        Returns:
            False when the block has a page already (this one stands in when the other goes), or when the
            block before is not known.
        """
        node = self._block_node(keys, block, root)
        return node is not None and self._publish(_KV, node, page)

    def publish_window(self, window: int, keys: Sequence[int], block: int, page: int) -> bool:
        """Make a page of sliding window number `window` findable; `block` is the last that it holds."""
        node = self._nodes.get(keys[block])
        return node is not None and self._publish(1 + window, node, page)

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
        node = self._node_before(keys, position // self.kv_block, root)
        if node is not None and tail:
            node = self._tail_node(node, tail, kv_page)
        if node is None or node.pages[self.state] or (not tail and not node.pages[_KV]):
            return False
        if node.num_tokens != position:
            raise ContractError(
                f"PrefixIndex: a state at position {position}, but its key is that of {node.num_tokens} "
                "tokens; expected one number; pass the length of the hashed prefix"
            )
        node.value = Value() if value is None else value
        self._publish(self.state, node, page)
        cover(node, self.state)
        self._evicted.pop(node.key, None)
        return True

    def hold(self, hit: Hit) -> None:
        """Share the pages of a hit; the caller releases them to their pools.

        Raises:
            ContractError: keys were dropped since the lookup, so the pages may hold something else.
        """
        if hit.evictions != self._dropped:
            raise ContractError(
                f"PrefixIndex: a hit of {hit.num_tokens} tokens is held after "
                f"{self._dropped - hit.evictions} pages were dropped; expected none since its "
                "lookup; look up, hold, and only then take pages"
            )
        rows = [[*hit.kv_pages, hit.tail_page], *hit.window_pages]
        if self.state >= 0:
            rows.append([hit.state_page])
        done = 0
        try:
            for group, row in zip(self._groups, rows, strict=True):
                group.pool.share(row)
                done += 1
        except BaseException:
            for group, row in zip(self._groups[:done], rows, strict=False):
                group.pool.release(row)
            raise
        if hit.node is not None:
            self._evictor.on_used(hit.node)

    def retract(self, key: int, page: int) -> None:
        """Drop a checkpoint that a later one of the same request replaces, unless somebody used it."""
        node = self._nodes.get(key)
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
        for group in self._groups:
            for page in group.nodes_of:
                group.pool.unpublish(page)
            self._dropped += len(group.nodes_of)
            group.nodes_of.clear()
            group.copies.clear()
        self._evictor.clear()
        self._nodes.clear()
        self._roots.clear()
        self._expected.clear()
        self._evicted.clear()
        self._changes += 1
        if self.log is not None:
            self.log.add(Cleared())

    # -- for the eviction policy --------------------------------------------------------------------

    def is_useful(self, page: int) -> bool:
        """Whether a surviving state can use a KV page; without recurrent layers none can say so."""
        nodes = self._groups[_KV].nodes_of.get(page, ())
        return self.state >= 0 and any(is_covered(node, self.state) for node in nodes)

    def node_of_state(self, page: int) -> Node:
        """The prefix of a published state page."""
        return self._groups[self.state].nodes_of[page][0]

    def state_pool_refcount(self, page: int) -> int:
        """How often a state page is held."""
        assert self.state_pool is not None
        return self.state_pool.refcount(page)

    def drop_copies(self, pool: PagePool, pages: Sequence[int]) -> list[int]:
        """Unpublish those of the cached pages whose prefixes have another page; returns the others."""
        group = self._group(pool)
        kept = []
        for page in pages:
            if all(group.has_other(node, page) for node in group.nodes_of[page]):
                self._forget(group, page)
            else:
                kept.append(page)
        return kept

    def drop_page(self, pool: PagePool, page: int) -> None:
        """Unpublish a page, and whatever is of no use without it."""
        group = self._group(pool)
        if self.state >= 0 and pool is self.state_pool:
            self.drop_state(group.nodes_of[page][0])
            return
        for node in self._forget(group, page):
            if group.place == _KV and not node.pages[_KV]:
                self._drop_unreachable(node)

    def drop_state(self, node: Node, remember: bool = True) -> None:
        """Unpublish the state of a prefix; KV pages that it alone could use are bare now."""
        group = self._groups[self.state]
        self._forget(group, node.pages[self.state])
        node.value = None
        if remember and not node.tail:
            self._evicted[node.key] = None
            if len(self._evicted) > _REMEMBERED:
                self._evicted.popitem(last=False)
        self._evictor.on_bare(uncover(node, self.state))
        if node.tail:  # nothing else can use it
            kv_page = node.pages[_KV]
            if kv_page and len(self._groups[_KV].nodes_of[kv_page]) == 1:
                self._forget(self._groups[_KV], kv_page)
            elif kv_page:
                self._groups[_KV].nodes_of[kv_page].remove(node)
            node.pages[_KV] = 0
            self._prune(node)

    # -- books ------------------------------------------------------------------------------------------

    def check_books(self) -> None:
        """Books of all pools balance, exactly the published pages have keys, and each can be reached."""
        reached: list[set[int]] = [set() for _ in self._groups]
        num_nodes = 0
        for root in self._roots.values():
            for node in root.below():
                num_nodes += not node.tail
                self._check_node(node)
                for place, page in enumerate(node.pages):
                    reached[place] |= {page, *self._groups[place].copies.get(node, ())} - {
                        NULL_PAGE
                    }
        for group, pages in zip(self._groups, reached, strict=True):
            group.pool.check_books()
            keyed = set(group.nodes_of)
            flagged = {p for p in range(group.pool.num_pages) if group.pool.is_published(p)}
            if not keyed == flagged == pages:
                raise ContractError(
                    f"PrefixIndex: pool {group.pool.name} has published pages {sorted(flagged)}, keys for "
                    f"{sorted(keyed)}, of which {sorted(pages)} can be reached; expected the same; publish "
                    "through the index only"
                )
        if num_nodes != len(self._nodes):
            raise ContractError(
                f"PrefixIndex: {len(self._nodes)} keys, {num_nodes} of them in the tree; expected all; "
                "this is a bug in the index"
            )

    def _check_node(self, node: Node) -> None:
        below = [*(node.children or ()), *(node.tails or {}).values()]
        covered = 0 if self.state < 0 else sum(is_covered(child, self.state) for child in below)
        without_kv = not node.pages[_KV] and any(node.pages)
        if covered != node.covered_children or without_kv or not (below or any(node.pages)):
            raise ContractError(
                f"PrefixIndex: the prefix of {node.num_tokens} tokens has pages {node.pages}, "
                f"{node.covered_children} covered children of {covered}; expected a KV page under every "
                "other page and equal counts; this is a bug in the index"
            )

    # -- the tree ---------------------------------------------------------------------------------------

    def _path(self, keys: Sequence[int], max_tokens: int) -> list[Node]:
        """Nodes of the first keys, up to the first one without a KV page."""
        path = []
        for key in keys[: max(0, max_tokens // self.kv_block)]:
            node = self._nodes.get(key)
            if node is None or not node.pages[_KV]:
                break
            path.append(node)
        return path

    def _root(self, root: bytes) -> Node:
        found = self._roots.get(root)
        if found is None:
            found = self._roots[root] = Node(0, None, 0, len(self._groups))
        return found

    def _node_before(self, keys: Sequence[int], num_blocks: int, root: bytes) -> Node | None:
        """The prefix of `num_blocks` whole blocks."""
        return self._nodes.get(keys[num_blocks - 1]) if num_blocks else self._root(root)

    def _block_node(self, keys: Sequence[int], block: int, root: bytes) -> Node | None:
        node = self._nodes.get(keys[block])
        if node is None:
            parent = self._node_before(keys, block, root)
            if parent is None:
                return None
            num_tokens = parent.num_tokens + self.kv_block
            node = Node(keys[block], parent, num_tokens, len(self._groups))
            self._nodes[node.key] = node
            node.attach()
        return node

    def _tail_node(self, parent: Node, tail: tuple[int, ...], kv_page: int) -> Node | None:
        """The node of a tail, with its KV page."""
        node = parent.tails.get(tail) if parent.tails else None
        if node is None and kv_page:
            node = Node(parent.key, parent, parent.num_tokens + len(tail), len(self._groups), tail)
            node.attach()
            self._publish(_KV, node, kv_page)
        return node

    def _publish(self, place: int, node: Node, page: int) -> bool:
        group = self._groups[place]
        known = group.nodes_of.get(page)
        if known is not None and any(other is node for other in known):
            return False
        if known is not None and not (place == _KV and all(o.parent is node.parent for o in known)):
            raise ContractError(
                f"PrefixIndex: page {page} of pool {group.pool.name} is published again under "
                "another key; expected further keys for parts of the same block only; "
                "a published page is never written, take a new one"
            )
        group.pool.publish(page)
        group.nodes_of.setdefault(page, []).append(node)
        if node.pages[place]:
            group.copies.setdefault(node, []).append(page)
            return False
        node.pages[place] = page
        self._changes += 1
        if self.log is not None:
            self.log.add(self._stored(place, node))
        return True

    def _forget(self, group: _Group, page: int) -> list[Node]:
        """Take a page out of its prefixes and of what is published; returns the prefixes."""
        nodes = group.nodes_of.pop(page)
        for node in nodes:
            copies = group.copies.get(node)
            if node.pages[group.place] != page:
                assert copies is not None
                copies.remove(page)
            else:
                node.pages[group.place] = copies.pop(0) if copies else NULL_PAGE
                self._dropped += 1  # hits that were found before name the page that goes
                self._changes += 1
                if self.log is not None and not node.pages[group.place]:
                    self.log.add(Removed(self._name(group.place), node.key, node.tail))
            if copies is not None and not copies:
                del group.copies[node]
        group.pool.unpublish(page)
        for node in nodes:
            self._prune(node)
        return nodes

    def _drop_unreachable(self, node: Node) -> None:
        """The KV page of a prefix went: what stands on it or behind it can never be reached again."""
        for lost in [*node.below(), node]:
            if self.state >= 0 and lost.pages[self.state]:
                self.drop_state(lost)
            for group in self._groups:
                while page := lost.pages[group.place]:
                    self._forget(group, page)

    def _prune(self, node: Node) -> None:
        """Take nodes out of the tree that hold nothing, upwards."""
        while node.parent is not None and node.is_leaf and not any(node.pages):
            if not node.tail:
                if self._nodes.pop(node.key, None) is None:
                    return  # taken out before
            elif node.parent.tails is None or node.parent.tails.get(node.tail) is not node:
                return
            node.detach()
            node = node.parent

    def _stored(self, place: int, node: Node) -> Stored:
        parent = 0 if node.parent is None else node.parent.key
        return Stored(self._name(place), node.key, parent, node.num_tokens, node.tail)

    def _name(self, place: int) -> str:
        return self._groups[place].pool.name

    def _group(self, pool: PagePool) -> _Group:
        return next(group for group in self._groups if group.pool is pool)


class _Group:
    """Pages of one kind and the prefixes that they hold."""

    def __init__(self, place: int, pool: PagePool) -> None:
        self.place = place  # in `Node.pages`
        self.pool = pool
        self.nodes_of: dict[int, list[Node]] = {}  # by published page; a KV page may hold several
        self.copies: dict[Node, list[int]] = {}  # further pages of a prefix

    def has_other(self, node: Node, page: int) -> bool:
        """Whether a prefix can do without this page."""
        return node.pages[self.place] != page or node in self.copies


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
