"""
Which published pages hold which prefix, and where a new prompt can resume.

Two groups of pages, each in a pool of its own: one KV page per `kv_block` tokens, and state pages,
each of them the recurrent state after all tokens before its position.  A prompt resumes at the
largest position at which *every* group can: all KV pages up to there, and one state page exactly
there.  State hits are not monotonic: a state at 5 says nothing about 4.

    prompt            |--------|--------|--------|--------|
    KV pages          |   x    |   x    |   x    |             kv_match     3 blocks
    state pages at             x                          x    state_match  4 blocks, unreachable
    hit                        ^                               num_tokens   1 block, junction 3

Keys are chained hashes (`hashing.as_keys`), so a key stands for a whole prefix.  Callers publish
after the step that wrote the page is committed; a published page is never written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from midstream.errors import ConfigError, ContractError
from midstream.runtime.pages import NULL_PAGE, PagePool


@dataclass(frozen=True, slots=True)
class Hit:
    """Where a prompt resumes and what it resumes from.  Valid until the next eviction."""

    num_tokens: int  # resume point: tokens that need no computing
    kv_pages: tuple[int, ...]  # page of each block before the resume point; empty without attention
    state_page: int  # state after `num_tokens`; NULL_PAGE: fresh start, or no recurrent layers
    kv_match_tokens: int  # longest match of the KV pages alone
    state_match_tokens: int  # largest position with a state page, reachable or not
    evictions: int  # the index's count of dropped keys when this was found

    @property
    def junction(self) -> int:
        """Length of the known prefix where it has no state to resume from; 0 if nothing is lost."""
        return self.kv_match_tokens if self.kv_match_tokens > self.num_tokens else 0


class PrefixIndex:
    """Keys of the pages of two pools.  None for a pool: the model has no such layers.

    >>> kv, state = PagePool(8, "kv"), PagePool(8, "state")
    >>> index = PrefixIndex(kv, state, kv_block=16)
    >>> pages, (checkpoint,) = kv.take(2), state.take(1)
    >>> [index.publish_kv(key, page) for key, page in zip((71, 72), pages)]
    [True, True]
    >>> index.publish_state(71, checkpoint, position=16)
    True
    >>> hit = index.lookup([71, 72, 99], max_tokens=47)
    >>> hit.num_tokens, hit.kv_pages, hit.state_page, hit.junction
    (16, (1,), 1, 32)
    """

    def __init__(
        self, kv_pool: PagePool | None, state_pool: PagePool | None, kv_block: int
    ) -> None:
        if kv_block < 1 or (kv_pool is None and state_pool is None):
            raise ConfigError(
                f"PrefixIndex: kv_block {kv_block}, KV pool {kv_pool}, state pool {state_pool}; "
                "expected a block of 1 or more tokens and at least one pool; "
                "turn prefix caching off instead"
            )
        self.kv_block = kv_block
        self._kv = None if kv_pool is None else _Group(kv_pool)
        self._state = None if state_pool is None else _Group(state_pool)
        self._groups = [group for group in (self._kv, self._state) if group is not None]

    @property
    def evictions(self) -> int:
        """Keys dropped so far."""
        return sum(group.dropped for group in self._groups)

    @property
    def generation(self) -> int:
        """Changes whenever a lookup may answer differently than before."""
        return self.evictions + sum(group.published for group in self._groups)

    def publish_kv(self, key: int, page: int) -> bool:
        """Make a written KV page findable.

        Returns:
            False when the key has a page already; this one stays private.
        Raises:
            ContractError: nobody holds the page, or it is published under another key.
        """
        return _require(self._kv, "KV").publish(key, page, self.kv_block)

    def publish_state(self, key: int, page: int, position: int) -> bool:
        """Make a written state page findable, as `publish_kv` does.

        `position`: the tokens that `key` stands for and the state was computed from, a multiple of
        `kv_block`.
        """
        if position < 1 or position % self.kv_block:
            raise ContractError(
                f"PrefixIndex: a state at position {position}; expected a positive multiple of "
                f"{self.kv_block}; publish states at block boundaries only"
            )
        return _require(self._state, "state").publish(key, page, position)

    def has_state(self, key: int) -> bool:
        """Whether a state page is published under `key`."""
        return _require(self._state, "state").page_of.get(key) is not None

    def lookup(self, keys: Sequence[int], max_tokens: int) -> Hit:
        """Find the resume point of a prompt.  Changes nothing, holds nothing.

        Args:
            keys: one per full block of the prompt.
            max_tokens: the hit is not longer; prompt length - 1, since one token must be computed.
        """
        limit = max(0, min(len(keys), max_tokens // self.kv_block))
        kv_pages = [] if self._kv is None else self._kv.leading_pages(keys, limit)
        reachable = limit if self._kv is None else len(kv_pages)
        state_blocks, blocks, state_page = 0, reachable, NULL_PAGE
        if self._state is not None:
            state_blocks, _ = self._last_state(keys, limit)
            blocks, state_page = self._last_state(keys, min(reachable, state_blocks))
        return Hit(
            num_tokens=blocks * self.kv_block,
            kv_pages=tuple(kv_pages[:blocks]),
            state_page=state_page,
            kv_match_tokens=len(kv_pages) * self.kv_block,
            state_match_tokens=state_blocks * self.kv_block,
            evictions=self.evictions,
        )

    def hold(self, hit: Hit) -> None:
        """Share the pages of a hit; the caller releases them to their pools.

        Raises:
            ContractError: keys were dropped since the lookup, so the pages may hold something else.
        """
        if hit.evictions != self.evictions:
            raise ContractError(
                f"PrefixIndex: a hit of {hit.num_tokens} tokens is held after "
                f"{self.evictions - hit.evictions} keys were dropped; expected none since its "
                "lookup; look up, hold, and only then take pages"
            )
        if self._kv is not None:
            self._kv.pool.share(hit.kv_pages)
        if self._state is not None:
            self._state.pool.share(hit.state_page)

    def reset(self) -> None:
        """Drop all keys.  Cached pages become free; owned pages stay with their owners, private."""
        for group in self._groups:
            group.reset()

    def check_books(self) -> None:
        """Books of both pools balance, and exactly the published pages have keys."""
        for group in self._groups:
            group.check_books()

    def _last_state(self, keys: Sequence[int], limit: int) -> tuple[int, int]:
        """Most blocks, up to `limit`, that a state stands for, and its page; or 0, NULL_PAGE."""
        assert self._state is not None
        for blocks in range(limit, 0, -1):
            page = self._state.page_of.get(keys[blocks - 1])
            if page is not None:
                position = self._state.key_of[page].num_tokens
                if position != blocks * self.kv_block:
                    raise ContractError(
                        f"PrefixIndex: state page {page} was published at position {position}, "
                        f"its key is that of {blocks * self.kv_block} tokens; expected one number; "
                        "pass publish_state the length of the hashed prefix"
                    )
                return blocks, page
        return 0, NULL_PAGE


@dataclass(frozen=True, slots=True)
class _Key:
    """What a published page is found under."""

    hash: int
    num_tokens: int  # KV: tokens in the page; state: tokens before the state


class _Group:
    """Keys of one pool: a bijection between keys and published pages."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.page_of: dict[int, int] = {}
        self.key_of: dict[int, _Key] = {}
        self.published = 0  # keys added so far
        self.dropped = 0  # keys dropped so far
        pool.on_evict(self._drop)

    def publish(self, key: int, page: int, num_tokens: int) -> bool:
        if key in self.page_of:
            return False
        if page in self.key_of:
            raise ContractError(
                f"PrefixIndex: page {page} of pool {self.pool.name} is published again under "
                "another key; expected one key per page; "
                "a published page is never written, take a new one"
            )
        self.pool.publish(page)
        self.page_of[key] = page
        self.key_of[page] = _Key(key, num_tokens)
        self.published += 1
        return True

    def leading_pages(self, keys: Sequence[int], limit: int) -> list[int]:
        """Pages of the first keys, up to the first one without a page."""
        pages = []
        for key in keys[:limit]:
            page = self.page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def reset(self) -> None:
        for page in self.key_of:
            self.pool.unpublish(page)
        self.dropped += len(self.key_of)
        self.page_of.clear()
        self.key_of.clear()

    def check_books(self) -> None:
        self.pool.check_books()
        keyed = {page for page in range(self.pool.num_pages) if self.pool.is_published(page)}
        if keyed != set(self.key_of) or keyed != set(self.page_of.values()):
            raise ContractError(
                f"PrefixIndex: pool {self.pool.name} has published pages {sorted(keyed)} and keys "
                f"for {sorted(self.key_of)}; expected the same; publish through the index only"
            )

    def _drop(self, page: int) -> None:
        del self.page_of[self.key_of.pop(page).hash]
        self.dropped += 1


def _require(group: _Group | None, kind: str) -> _Group:
    if group is None:
        raise ContractError(
            f"PrefixIndex: a {kind} page is published, but the model has no {kind} layers; "
            "expected pages of its own groups; give the index the pool it needs"
        )
    return group
