"""
Passes over the books of a pool, and over KV pages of which each stands on another, compiled by Numba.

Shared prefixes have hundreds of pages; a request takes hold of all of them at once, and lets go at once.

    books   i32[5, N]  HELD and FREE as in ops/host_decode.py; PUBLISHED: 1 of a page that is, behind the
                       number of cached pages; OLDER and NEWER: neighbours of a cached page in the order of
                       release, a ring through the null page
    above   i32[N]     KV page before that of each published KV page, the null page at the beginning
    pages   i32[n]     null pages among them are ignored

Letters: N pages.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from midstream.ops.host_compile import compiled, inlined
from midstream.ops.host_decode import FREE, HELD

I32 = npt.NDArray[np.int32]

PUBLISHED, OLDER, NEWER = 2, 3, 4  # of books
NUM_BOOKS = 5
DONE = -1  # result of a pass that refuses nothing


@inlined
def _link(books: I32, page: int) -> None:
    """A page is cached, and the newest of them."""
    newest = books[OLDER, 0]
    books[OLDER, page] = newest
    books[NEWER, page] = 0
    books[NEWER, newest] = page
    books[OLDER, 0] = page
    books[PUBLISHED, 0] += 1


@inlined
def unlink(books: I32 | memoryview, page: int) -> None:
    """A page is cached no longer."""
    older, newer = books[OLDER, page], books[NEWER, page]
    books[NEWER, older] = newer
    books[OLDER, newer] = older
    books[PUBLISHED, 0] -= 1


@inlined
def push_free(books: I32 | memoryview, page: int) -> None:
    """A page holds nothing."""
    height = books[FREE, 0] + 1
    books[FREE, height] = page
    books[FREE, 0] = height


@compiled
def take_pages(books: I32, pages: I32) -> None:
    """Fill `pages` with free pages, each held once now; there are as many."""
    height = books[FREE, 0]
    for place in range(pages.shape[0]):
        page = books[FREE, height - place]
        pages[place] = page
        books[HELD, page] = 1
    books[FREE, 0] = height - pages.shape[0]


@compiled
def share_pages(books: I32, pages: I32) -> int:
    """Hold pages once more.  Returns DONE, or the place of one that is free or unknown: nothing changed."""
    for place in range(pages.shape[0]):
        page = pages[place]
        if page < 0 or page >= books.shape[1]:
            return place
        if page and not books[HELD, page] and not books[PUBLISHED, page]:
            return place
    for place in range(pages.shape[0]):
        page = pages[place]
        if page:
            if not books[HELD, page]:
                unlink(books, page)
            books[HELD, page] += 1
    return DONE


@compiled
def release_pages(books: I32, pages: I32, cached: I32, num_cached: I32) -> int:
    """Give back one hold for each entry, from the last to the first.

    Pages that nobody holds then are free, or cached if they are published: `cached` [N] gets these, and
    `num_cached` [1] their number.

    Returns:
        DONE, or the place of one that is held less often than it is released: nothing changed.
    """
    num_cached[0] = 0
    for place in range(pages.shape[0] - 1, -1, -1):
        page = pages[place]
        known = 0 <= page < books.shape[1]
        if page and not (known and books[HELD, page]):
            _hold_again(books, pages, place + 1)
            return place
        if page:
            books[HELD, page] -= 1
    _hold_again(books, pages, 0)
    count = 0
    for place in range(pages.shape[0] - 1, -1, -1):
        page = pages[place]
        if not page:
            continue
        books[HELD, page] -= 1
        if books[HELD, page]:
            continue
        if books[PUBLISHED, page]:
            _link(books, page)
            cached[count] = page
            count += 1
        else:
            push_free(books, page)
    num_cached[0] = count
    return DONE


@inlined
def _hold_again(books: I32, pages: I32, first: int) -> None:
    for place in range(first, pages.shape[0]):
        if pages[place]:
            books[HELD, pages[place]] += 1


@compiled
def publish_pages(books: I32, pages: I32) -> int:
    """Publish held pages.  Returns DONE, or the place of one that nobody holds: nothing changed."""
    for place in range(pages.shape[0]):
        if not books[HELD, pages[place]]:
            return place
    for place in range(pages.shape[0]):
        books[PUBLISHED, pages[place]] = 1
    return DONE


@compiled
def unpublish_pages(books: I32, pages: I32) -> None:
    """Cached pages become free."""
    for place in range(pages.shape[0]):
        page = pages[place]
        books[PUBLISHED, page] = 0
        unlink(books, page)
        push_free(books, page)


@compiled
def fill_chain(above: I32, page: int, pages: I32) -> int:
    """`pages` gets a page and, before it, all that it stands on; returns what the first stands on."""
    for place in range(pages.shape[0] - 1, -1, -1):
        pages[place] = page
        page = above[page]
    return page


@compiled
def end_of_chain(above: I32, pages: I32, first: int) -> int:
    """From `first` on each page stands on the one after it, up to the place that is returned."""
    place = first + 1
    while place < pages.shape[0] and above[pages[place - 1]] == pages[place]:
        place += 1
    return place
