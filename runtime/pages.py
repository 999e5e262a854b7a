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

import numpy as np
import numpy.typing as npt

from midstream.errors import CapacityError, ConfigError, ContractError

NULL_PAGE = 0  # equals ops.registry.NULL_PAGE; this file does without torch

Pages = int | Sequence[int]  # one page or several; null pages among them are ignored


class Evictor(Protocol):
    """Knows what cached pages are good for."""

    def make_room(self, pool: PagePool, wanted: int) -> None:
        """Unpublish cached pages of the pool, one at least, and better as many as `take` lacks."""

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
        self.books = np.zeros((2, num_pages), np.int32)  # as in ops/host_decode.py
        # faster to index from Python
        self._refcount: memoryview = memoryview(self.books[0])
        self._free: memoryview = memoryview(self.books[1])
        self.books[1] = range(num_pages, 0, -1)  # a stack behind its height: taken from the end
        self._free[0] = num_pages - 1
        self._published = bytearray(num_pages)
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._evictor: Evictor | None = None

    @property
    def num_free(self) -> int:
        return self._free[0]

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_owned(self) -> int:
        return self.num_pages - 1 - self._free[0] - len(self._cached)

    @property
    def available(self) -> int:
        """Pages that `take` can hand out now."""
        return self._free[0] + len(self._cached)

    def free_pages(self) -> list[int]:
        """Pages that hold nothing."""
        return self._free[1 : self._free[0] + 1].tolist()

    def refcount(self, page: int) -> int:
        return self._refcount[page]

    def num_unheld(self, pages: npt.NDArray[np.int32]) -> int:
        """How many of the pages are held by nobody."""
        return len(pages) - int(np.count_nonzero(self.books[0].take(pages)))

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
        while self._free[0] < count:
            self._evict(count - self.num_free)
        # made before anything changes: what raises here takes nothing
        height = self._free[0]
        taken: list[int] = self._free[height - count + 1 : height + 1].tolist()[::-1]
        for page in taken:
            self._refcount[page] = 1
        self._free[0] = height - count
        return taken

    def share(self, pages: Pages) -> None:
        """Hold owned or cached pages once more; a cached page can no longer be evicted.

        Raises:
            ContractError: a page is free, so its content belongs to nobody; nothing changed.
        """
        held, refcount, published = self._without_null(pages), self._refcount, self._published
        for page in held:
            if not refcount[page] and not published[page]:
                raise ContractError(
                    f"PagePool {self.name}: page {page} is free and cannot be shared; expected an "
                    "owned or cached page; look the prefix up again, its page was evicted"
                )
        for page in held:
            if not refcount[page]:
                del self._cached[page]
            refcount[page] += 1

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
        cached, refcount, published = [], self._refcount, self._published
        for page in reversed(held):
            left = refcount[page] = refcount[page] - 1
            if not left:
                if published[page]:
                    self._cached[page] = None
                    cached.append(page)
                else:
                    self._push_free(page)
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
            self._push_free(page)

    def check_books(self) -> None:
        """Prove in O(pages) that every page is in exactly one place and flagged for it.

        Raises:
            ContractError: with the numbers, or the first page that is wrong.
        """
        free, cached = set(self.free_pages()), set(self._cached)
        owned = {page for page, count in enumerate(self._refcount) if count}
        total = self.num_free + len(cached) + len(owned)
        if total != self.num_pages - 1 or NULL_PAGE in free | cached | owned:
            raise ContractError(
                f"PagePool {self.name}: {self.num_free} free, {len(cached)} cached and "
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

    def _evict(self, wanted: int) -> None:
        before = self.num_free
        if self._evictor is None:
            self.unpublish(self.oldest_cached())
        else:
            self._evictor.make_room(self, wanted)
        if self.num_free <= before:
            raise ContractError(
                f"PagePool {self.name}: {self.num_cached} pages are cached and none was evicted; "
                "expected one at least; this is a bug in the evictor"
            )

    def _push_free(self, page: int) -> None:
        height = self._free[0] + 1
        self._free[height] = page
        self._free[0] = height

    def _without_null(self, pages: Pages) -> list[int]:
        listed = (pages,) if isinstance(pages, int) else pages
        held = [page for page in listed if page != NULL_PAGE]
        if held and not 0 < min(held) <= max(held) < self.num_pages:
            raise ContractError(
                f"PagePool {self.name}: pages {min(held)} to {max(held)}; expected 0 to "
                f"{self.num_pages - 1}; is this a page of another pool?"
            )
        return held
