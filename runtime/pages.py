"""
Who holds each page of a pool, and which page goes next when room is needed.

        take            release (not published)
    free ----> owned ---------------------------> free
                 |  ^
         release |  | share
     (published) v  |
               cached ----> free      by `take` when nothing is free, or by `unpublish`

A page is free, cached (published under a key, held by nobody) or owned (held `refcount` times,
published or not).  Page 0 is the null page: it belongs to the pool, is never handed out and is
ignored wherever pages are shared or released.  The pool knows no keys: whoever does decides which
cached page goes (`Evictor`); without one it is the page that was released longest ago.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Protocol

from midstream.errors import CapacityError, ConfigError, ContractError

NULL_PAGE = 0  # equals ops.registry.NULL_PAGE; this file does without torch

Pages = int | Sequence[int]  # one page or several; null pages among them are ignored


class Evictor(Protocol):
    """Knows what cached pages are good for."""

    def make_room(self, pool: PagePool) -> None:
        """Unpublish cached pages of the pool, one at least; called when `take` finds none free."""

    def on_cached(self, pool: PagePool, pages: Sequence[int]) -> None:
        """Published pages have lost their last holder.  Some of them may be unpublished here."""


class PagePool:
    """Books of `num_pages` pages, null page included.  Not thread-safe: one scheduler owns it.

    Every method is O(1) per page and leaves the books unchanged when it raises.

    >>> pool = PagePool(4, name="state")
    >>> first, second = pool.take(2)
    >>> pool.publish(first)
    >>> pool.release([first, second])
    >>> pool.num_free, pool.num_cached, pool.num_owned
    (2, 1, 0)
    """

    def __init__(self, num_pages: int, name: str = "pages") -> None:
        if num_pages < 2:
            raise ConfigError(
                f"PagePool {name}: {num_pages} pages; expected the null page and at least one "
                "more; give the pool more memory"
            )
        self.num_pages = num_pages
        self.name = name
        self._refcount = [0] * num_pages
        self._published = bytearray(num_pages)
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))  # a stack: taken from the end
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._evictor: Evictor | None = None

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_owned(self) -> int:
        return self.num_pages - 1 - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Pages that `take` can hand out now."""
        return len(self._free) + len(self._cached)

    def free_pages(self) -> list[int]:
        """Pages that hold nothing."""
        return list(self._free)

    def refcount(self, page: int) -> int:
        return self._refcount[page]

    def is_published(self, page: int) -> bool:
        return bool(self._published[page])

    def oldest_cached(self) -> int:
        """The cached page that was released longest ago; NULL_PAGE if none is cached."""
        return next(iter(self._cached), NULL_PAGE)

    def set_evictor(self, evictor: Evictor) -> None:
        """Let `evictor` choose what goes.  Raises ContractError when there is one already."""
        if self._evictor is not None:
            raise ContractError(
                f"PagePool {self.name}: a second evictor; expected one owner of the keys; "
                "make one index per pool"
            )
        self._evictor = evictor

    def take(self, count: int) -> list[int]:
        """Hand out `count` pages, each held once: free ones, after evictions where they are short.

        Raises:
            CapacityError: fewer than `count` pages are free or cached; none was taken.
        """
        if count > self.available:
            raise CapacityError(
                f"PagePool {self.name}: {count} pages asked, {self.num_free} free and "
                f"{self.num_cached} cached of {self.num_pages - 1}; expected at least {count}; "
                "release pages (preempt a request) or give the pool more memory"
            )
        if count < 0:
            raise ContractError(
                f"PagePool {self.name}: {count} pages asked; expected 0 or more; "
                "check the caller's sum"
            )
        while len(self._free) < count:
            self._evict()
        # made before anything changes: what raises here takes nothing
        keep = len(self._free) - count
        taken = self._free[keep:][::-1]
        for page in taken:
            self._refcount[page] = 1
        del self._free[keep:]
        return taken

    def share(self, pages: Pages) -> None:
        """Hold owned or cached pages once more; a cached page can no longer be evicted.

        Raises:
            ContractError: a page is free, so its content belongs to nobody; nothing changed.
        """
        held = self._without_null(pages)
        for page in held:
            if not self._refcount[page] and not self._published[page]:
                raise ContractError(
                    f"PagePool {self.name}: page {page} is free and cannot be shared; expected an "
                    "owned or cached page; look the prefix up again, its page was evicted"
                )
        for page in held:
            if not self._refcount[page]:
                del self._cached[page]
            self._refcount[page] += 1

    def release(self, pages: Pages) -> None:
        """Give back one hold per entry; a list from its end, so that tails are evicted first.

        Raises:
            ContractError: a page is held less often than it is released; nothing changed.
        """
        held = self._without_null(pages)
        for page, count in Counter(held).items():
            if count > self._refcount[page]:
                raise ContractError(
                    f"PagePool {self.name}: page {page} is released {count} times, but held "
                    f"{self._refcount[page]} times; expected at most as many; "
                    "whoever released it before was not its owner or released it twice"
                )
        cached = []
        for page in reversed(held):
            self._refcount[page] -= 1
            if not self._refcount[page]:
                if self._published[page]:
                    self._cached[page] = None
                    cached.append(page)
                else:
                    self._free.append(page)
        if cached and self._evictor is not None:
            self._evictor.on_cached(self, cached)

    def publish(self, page: int) -> None:
        """Keep the content of an owned page after its last release.  It is never written again."""
        if not self._refcount[page]:
            raise ContractError(
                f"PagePool {self.name}: page {page} is published, but nobody holds it; expected an "
                "owned page; publish before release, never page 0"
            )
        self._published[page] = True

    def unpublish(self, page: int) -> None:
        """Forget that a page is published; a cached page becomes free."""
        self._published[page] = False
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def check_books(self) -> None:
        """Prove in O(pages) that every page is in exactly one place and flagged for it.

        Raises:
            ContractError: with the numbers, or the first page that is wrong.
        """
        free, cached = set(self._free), set(self._cached)
        owned = {page for page, count in enumerate(self._refcount) if count}
        total = len(self._free) + len(cached) + len(owned)
        if total != self.num_pages - 1 or NULL_PAGE in free | cached | owned:
            raise ContractError(
                f"PagePool {self.name}: {len(self._free)} free, {len(cached)} cached and "
                f"{len(owned)} owned pages; expected {self.num_pages - 1} in all and no page 0; "
                "pages leaked"
            )
        for page in range(1, self.num_pages):
            if (page in free) + (page in cached) + (page in owned) != 1 or (
                page not in owned and (page in cached) != self.is_published(page)
            ):
                raise ContractError(
                    f"PagePool {self.name}: page {page} has free={page in free}, "
                    f"cached={page in cached}, refcount={self._refcount[page]}, "
                    f"published={self.is_published(page)}; expected one place; "
                    "this is a bug in the pool"
                )

    def _evict(self) -> None:
        before = len(self._free)
        if self._evictor is None:
            self.unpublish(self.oldest_cached())
        else:
            self._evictor.make_room(self)
        if len(self._free) <= before:
            raise ContractError(
                f"PagePool {self.name}: {self.num_cached} pages are cached and none was evicted; "
                "expected one at least; this is a bug in the evictor"
            )

    def _without_null(self, pages: Pages) -> list[int]:
        listed = (pages,) if isinstance(pages, int) else pages
        held = [page for page in listed if page != NULL_PAGE]
        if held and not 0 < min(held) <= max(held) < self.num_pages:
            raise ContractError(
                f"PagePool {self.name}: pages {min(held)} to {max(held)}; expected 0 to "
                f"{self.num_pages - 1}; is this a page of another pool?"
            )
        return held
