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

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from midstream.errors import CapacityError, ConfigError, ContractError
from midstream.ops.host_decode import FREE, HELD
from midstream.runtime import page_passes
from midstream.runtime.page_passes import DONE, NEWER, PUBLISHED

NULL_PAGE = 0  # equals ops.registry.NULL_PAGE; this file does without torch

I32 = npt.NDArray[np.int32]
Pages = int | Sequence[int] | I32  # one page or several; null pages among them are ignored


class Evictor(Protocol):
    """Knows what cached pages are good for."""

    def make_room(self, pool: PagePool, wanted: int) -> None:
        """Unpublish cached pages of the pool, one at least, and better as many as `take` lacks."""

    def on_cached(self, pool: PagePool, pages: I32) -> None:
        """Published pages have lost their last holder.  Some of them may be unpublished here.

        `pages` is used again for the next release.
        """


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
        self.books: I32 = np.zeros((page_passes.NUM_BOOKS, num_pages), np.int32)
        # faster to index from Python
        self._refcount: memoryview = memoryview(self.books[HELD])
        self._free: memoryview = memoryview(self.books[FREE])
        self._published: memoryview = memoryview(self.books[PUBLISHED])
        self._books: memoryview = self.books.data
        self.books[FREE] = range(num_pages, 0, -1)  # a stack behind its height: taken from the end
        self._free[0] = num_pages - 1
        self._just_cached: I32 = np.zeros(num_pages, np.int32)
        self._num_just_cached: I32 = np.zeros(1, np.int32)
        self._evictor: Evictor | None = None

    @property
    def num_free(self) -> int:
        return self._free[0]

    @property
    def num_cached(self) -> int:
        return self._published[0]

    @property
    def num_owned(self) -> int:
        return self.num_pages - 1 - self.available

    @property
    def available(self) -> int:
        """Pages that `take` can hand out now."""
        return self._free[0] + self._published[0]

    def free_pages(self) -> list[int]:
        """Pages that hold nothing."""
        return self._free[1 : self._free[0] + 1].tolist()

    def refcount(self, page: int) -> int:
        return self._refcount[page]

    def num_unheld(self, pages: I32) -> int:
        """How many of the pages are held by nobody."""
        return len(pages) - int(np.count_nonzero(self.books[HELD].take(pages)))

    def is_published(self, page: int) -> bool:
        return page != NULL_PAGE and bool(self._published[page])

    def oldest_cached(self) -> int:
        """The cached page that was released longest ago; NULL_PAGE if none is cached."""
        return self._books[NEWER, NULL_PAGE]

    def cached_pages(self) -> Iterator[int]:
        """Cached pages, least recently released first."""
        page = self.oldest_cached()
        while page != NULL_PAGE:
            yield page
            page = self._books[NEWER, page]

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
        taken = np.empty(count, np.int32)
        page_passes.take_pages(self.books, taken)
        return taken.tolist()

    def share(self, pages: Pages) -> None:
        """Hold owned or cached pages once more; a cached page can no longer be evicted.

        Raises:
            ContractError: a page is free, so its content belongs to nobody; nothing changed.
        """
        listed = _array_of(pages)
        place = page_passes.share_pages(self.books, listed)
        if place != DONE:
            page = self._check_known(int(listed[place]))
            raise ContractError(
                f"PagePool {self.name}: page {page} is free and cannot be shared; expected an "
                "owned or cached page; look the prefix up again, its page was evicted"
            )

    def release(self, pages: Pages) -> None:
        """Give back one hold per entry; a list from its end, so that tails are evicted first.

        Raises:
            ContractError: a page is held less often than it is released; nothing changed.
        """
        listed, cached, num_cached = _array_of(pages), self._just_cached, self._num_just_cached
        place = page_passes.release_pages(self.books, listed, cached, num_cached)
        if place != DONE:
            page = self._check_known(int(listed[place]))
            raise ContractError(
                f"PagePool {self.name}: page {page} is released {np.count_nonzero(listed == page)} times, "
                f"but held {self._refcount[page]} times; expected at most as many; "
                "whoever released it before was not its owner or released it twice"
            )
        if num_cached[0] and self._evictor is not None:
            self._evictor.on_cached(self, cached[: num_cached[0]])

    def publish(self, page: int) -> None:
        """Keep the content of an owned page after its last release.  It is never written again."""
        if not self._refcount[page]:
            raise ContractError(
                f"PagePool {self.name}: page {page} is published, but nobody holds it; expected an "
                "owned page; publish before release, never page 0"
            )
        self._published[page] = 1

    def publish_all(self, pages: I32) -> None:
        """`publish` of many pages; nothing changes if it raises."""
        place = page_passes.publish_pages(self.books, pages)
        if place != DONE:
            self.publish(int(pages[place]))

    def unpublish(self, page: int) -> None:
        """Forget that a page is published; a cached page becomes free."""
        if not self.is_published(page):
            return
        self._published[page] = 0
        if not self._refcount[page]:
            page_passes.unlink(self._books, page)
            page_passes.push_free(self._books, page)

    def unpublish_cached(self, pages: Sequence[int]) -> None:
        """`unpublish` of many pages, all of them cached."""
        page_passes.unpublish_pages(self.books, _array_of(pages))

    def check_books(self) -> None:
        """Prove in O(pages) that every page is in exactly one place and flagged for it.

        Raises:
            ContractError: with the numbers, or the first page that is wrong.
        """
        free, cached = set(self.free_pages()), set(self.cached_pages())
        owned = {page for page, count in enumerate(self._refcount) if count}
        total = self.num_free + self.num_cached + len(owned)
        is_whole = total == self.num_pages - 1 and len(cached) == self.num_cached
        if not is_whole or NULL_PAGE in free | cached | owned:
            raise ContractError(
                f"PagePool {self.name}: {self.num_free} free, {self.num_cached} cached and "
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

    def _check_known(self, page: int) -> int:
        """The page.  Raises ContractError if the pool has none of that number."""
        if not 0 <= page < self.num_pages:
            raise ContractError(
                f"PagePool {self.name}: page {page}; expected 0 to {self.num_pages - 1}; is this a page of "
                "another pool?"
            )
        return page


def _array_of(pages: Pages) -> I32:
    return np.asarray([pages] if isinstance(pages, int) else pages, np.int32)
