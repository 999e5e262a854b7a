"""Claims about the page pool: books balance, refusals change nothing, tails are evicted first."""

import random

import numpy as np
import pytest

from midstream.errors import CapacityError, ConfigError, ContractError
from midstream.ops import registry
from midstream.ops.host_decode import HELD
from midstream.runtime.page_passes import NEWER, OLDER, PUBLISHED, push_free, unlink
from midstream.runtime.pages import I32, NULL_PAGE, PagePool


def books(pool: PagePool) -> tuple[int, int, int]:
    pool.check_books()
    return pool.num_free, pool.num_cached, pool.num_owned


def cached_pool(num_pages: int, count: int) -> tuple[PagePool, list[int]]:
    """A pool with `count` cached pages, least recently used last in the list."""
    pool = PagePool(num_pages)
    pages = pool.take(count)
    for page in pages:
        pool.publish(page)
    pool.release(pages)
    return pool, pages


class Recorder:
    """Evicts the page that was released longest ago, and writes it down."""

    def __init__(self, pool: PagePool) -> None:
        self.evicted: list[int] = []
        self.cached: list[list[int]] = []
        pool.set_evictor(self)

    def make_room(self, pool: PagePool, wanted: int) -> None:
        self.evicted.append(pool.oldest_cached())
        pool.unpublish(self.evicted[-1])

    def on_cached(self, pool: PagePool, pages: I32) -> None:
        self.cached.append(pages.tolist())


def test_the_null_page_is_the_one_that_ops_know() -> None:
    assert NULL_PAGE == registry.NULL_PAGE


def test_the_null_page_is_never_handed_out() -> None:
    pool = PagePool(10)
    assert sorted(pool.take(9)) == list(range(1, 10))
    assert books(pool) == (0, 0, 9)
    with pytest.raises(CapacityError):
        pool.take(1)


def test_a_fresh_pool_hands_out_ascending_pages() -> None:
    pool = PagePool(10)
    assert pool.take(4) == [1, 2, 3, 4]
    assert pool.take(0) == []


def test_pages_without_a_key_go_before_cached_ones_and_the_tail_goes_first() -> None:
    pool = PagePool(10)
    evicted = Recorder(pool).evicted
    pages = pool.take(4)
    pool.publish(pages[0])
    pool.publish(pages[1])
    pool.release(pages)
    assert books(pool) == (7, 2, 0)
    pool.take(2)
    pool.share(2)
    pool.share(2)
    assert pool.refcount(2) == 2 and not evicted
    assert 1 in pool.take(6)  # five free pages and the only cached one
    assert evicted == [1]
    with pytest.raises(CapacityError, match="1 pages asked, 0 free and 0 cached of 9"):
        pool.take(1)


def test_the_least_recently_released_page_is_evicted_first() -> None:
    pool = PagePool(6)
    evicted = Recorder(pool).evicted
    a, b = pool.take(3), pool.take(2)
    for page in a + b:
        pool.publish(page)
    pool.release(a)
    pool.release(b)
    pool.share([1, 2])
    pool.release([1, 2])
    pool.take(5)
    assert evicted == [3, 5, 4, 2, 1]


def test_a_failed_take_changes_nothing() -> None:  # L1
    pool, _ = cached_pool(6, 3)
    evicted = Recorder(pool).evicted
    before = books(pool)
    with pytest.raises(CapacityError):
        pool.take(6)
    assert books(pool) == before and not evicted
    with pytest.raises(ContractError, match="-1 pages asked"):
        pool.take(-1)


def test_a_published_page_is_cached_until_its_last_holder_releases_it() -> None:
    pool = PagePool(4)
    (page,) = pool.take(1)
    pool.publish(page)
    pool.share(page)
    pool.release(page)
    assert books(pool) == (2, 0, 1)
    pool.release(page)
    assert books(pool) == (2, 1, 0) and pool.available == 3


def test_a_shared_cached_page_is_not_evicted() -> None:
    pool, (page, other) = cached_pool(3, 2)
    pool.share(page)
    assert pool.take(1) == [other]
    assert pool.refcount(page) == 1 and pool.is_published(page)


def test_null_pages_are_ignored() -> None:  # L1
    pool, (page, _) = cached_pool(4, 2)
    pool.share([NULL_PAGE, page, NULL_PAGE])
    pool.share(NULL_PAGE)
    pool.release([NULL_PAGE, page, NULL_PAGE])
    pool.release(NULL_PAGE)
    assert books(pool) == (1, 2, 0)


def test_repeated_pages_are_released_as_often_as_they_are_held() -> None:  # L1
    pool = PagePool(4)
    (page,) = pool.take(1)
    pool.share([page, page])
    pool.release([page, page, NULL_PAGE, page])
    assert books(pool) == (3, 0, 0)


@pytest.mark.parametrize("pages", [[1, 2, 3], [2, 2], [3], 3, [1, 2, 4], [1, -1], [1, 9]])
def test_a_wrong_release_changes_nothing(pages: list[int] | int) -> None:  # L1
    pool = PagePool(5)
    pool.take(2)
    with pytest.raises(ContractError):
        pool.release(pages)
    assert books(pool) == (2, 0, 2)
    assert [pool.refcount(page) for page in range(5)] == [0, 1, 1, 0, 0]


def test_a_double_free_says_so() -> None:
    pool = PagePool(5, name="state")
    (page,) = pool.take(1)
    pool.release(page)
    with pytest.raises(
        ContractError, match="PagePool state: page 1 is released 1 times, but held 0"
    ):
        pool.release(page)
    pool, (page, _) = cached_pool(4, 2)
    with pytest.raises(ContractError):
        pool.release(page)


def test_a_free_page_cannot_be_shared_or_published() -> None:
    pool, (page, _) = cached_pool(4, 2)
    with pytest.raises(ContractError, match="page 3 is free and cannot be shared"):
        pool.share([page, 3])
    assert books(pool) == (1, 2, 0)
    for unheld in (NULL_PAGE, page, 3):
        with pytest.raises(ContractError, match="nobody holds it"):
            pool.publish(unheld)


def test_an_unpublished_page_loses_its_place_in_the_cache() -> None:
    pool, (page, other) = cached_pool(4, 2)
    pool.unpublish(page)
    assert books(pool) == (2, 1, 0)
    pool.share(other)
    pool.unpublish(other)
    pool.release(other)
    pool.unpublish(NULL_PAGE)
    assert books(pool) == (3, 0, 0)


def test_an_evicted_page_comes_back_unpublished() -> None:
    pool, _ = cached_pool(3, 2)
    (page,) = pool.take(1)
    assert not pool.is_published(page)
    pool.release(page)
    assert books(pool) == (1, 1, 0)


def test_an_evictor_is_told_what_is_cached_and_may_unpublish_more_than_one_page() -> None:
    pool = PagePool(5)
    recorder = Recorder(pool)
    pages = pool.take(4)
    for page in pages:
        pool.publish(page)
    pool.release([NULL_PAGE, *pages])
    assert recorder.cached == [[4, 3, 2, 1]]
    recorder.make_room = lambda pool, wanted: [pool.unpublish(p) for p in pages] and None
    assert len(pool.take(1)) == 1
    assert books(pool) == (3, 0, 1)
    with pytest.raises(ContractError, match="a second evictor"):
        pool.set_evictor(recorder)


def test_an_evictor_is_asked_for_all_pages_that_are_short() -> None:
    pool, asked = PagePool(6), []

    def make_room(pool: PagePool, wanted: int) -> None:
        asked.append(wanted)
        for _ in range(min(wanted, 2)):  # as many as it can
            pool.unpublish(pool.oldest_cached())

    Recorder(pool).make_room = make_room
    pages = pool.take(4)
    for page in pages:
        pool.publish(page)
    pool.release(pages)
    assert len(pool.take(4)) == 4
    assert asked == [3, 1]


def test_an_evictor_that_evicts_nothing_is_named_and_nothing_is_taken() -> None:
    pool = PagePool(5)
    Recorder(pool).make_room = lambda pool, wanted: None
    pages = pool.take(4)
    pool.publish(pages[0])
    pool.release(pages[0])
    with pytest.raises(ContractError, match="1 pages are cached and none was evicted"):
        pool.take(1)
    assert books(pool) == (0, 1, 3)


def test_an_error_inside_an_eviction_leaves_the_books_balanced() -> None:
    def failing(pool: PagePool, wanted: int) -> None:
        pool.unpublish(pool.oldest_cached())
        raise MemoryError("injected")

    pool = PagePool(5)
    Recorder(pool).make_room = failing
    pages = pool.take(4)
    for page in pages:
        pool.publish(page)
    pool.release(pages)
    with pytest.raises(MemoryError):
        pool.take(2)
    assert books(pool) == (1, 3, 0)


def test_a_pool_needs_a_page_besides_the_null_page() -> None:
    with pytest.raises(ConfigError, match="PagePool kv: 1 pages; expected"):
        PagePool(1, name="kv")


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._free.__setitem__(0, pool._free[0] - 1),
        lambda pool: push_free(pool.books, NULL_PAGE),
        lambda pool: pool._free.__setitem__(1, pool._free[2]),
        lambda pool: unlink(pool.books, pool.oldest_cached()),
        lambda pool: pool.books[NEWER].__setitem__(pool.books[OLDER, pool.books[OLDER, 0]], 0),
        lambda pool: pool.books[PUBLISHED].__setitem__(0, 1),
        lambda pool: pool._refcount.__setitem__(pool._free[1], 1),
        lambda pool: pool._published.__setitem__(pool._free[1], 1),
        lambda pool: pool._published.__setitem__(pool.oldest_cached(), 0),
    ],
    ids=[
        "lost",
        "null",
        "twice",
        "uncached",
        "unlinked",
        "miscounted",
        "held",
        "flagged",
        "unflagged",
    ],
)
def test_check_books_finds_every_kind_of_damage(damage) -> None:
    pool, _ = cached_pool(9, 3)
    pool.take(2)
    pool.check_books()
    damage(pool)
    with pytest.raises(ContractError):
        pool.check_books()


class PlainBooks:
    """The pool in plain Python: pages by holders, a stack of free ones, cached ones in order."""

    def __init__(self, num_pages: int) -> None:
        self.held = [0] * num_pages
        self.free = list(range(num_pages - 1, 0, -1))
        self.published: set[int] = set()
        self.cached: list[int] = []

    def take(self, count: int) -> list[int]:
        taken = [self.free.pop() for _ in range(count)]
        for page in taken:
            self.held[page] = 1
        return taken

    def share(self, pages: list[int]) -> None:
        for page in filter(None, pages):
            if page in self.cached:
                self.cached.remove(page)
            self.held[page] += 1

    def release(self, pages: list[int]) -> None:
        for page in filter(None, reversed(pages)):
            self.held[page] -= 1
            if not self.held[page]:
                (self.cached if page in self.published else self.free).append(page)

    def unpublish(self, page: int) -> None:
        self.published.discard(page)
        if page in self.cached:
            self.cached.remove(page)
            self.free.append(page)


@pytest.mark.parametrize("seed", range(4))
def test_passes_over_many_pages_do_what_plain_python_does(seed: int) -> None:
    draw = np.random.default_rng(seed)
    pool, plain = PagePool(30), PlainBooks(30)
    for _ in range(400):
        name = draw.choice(["take", "share", "release", "publish", "unpublish"])
        held = [page for page in range(30) for _ in range(plain.held[page])]
        some = draw.permutation(held)[: draw.integers(0, 9)].astype(np.int32)
        if name == "take":
            count = int(draw.integers(0, min(len(plain.free), 5) + 1))
            assert pool.take(count) == plain.take(count)
        elif name == "share":
            pages = draw.permutation([*held, *plain.cached])[:6].astype(np.int32)
            pool.share(np.append(pages, np.int32(0)))
            plain.share(pages.tolist())
        elif name == "release":
            pool.release(some if draw.random() < 0.5 else [0, *some.tolist()])
            plain.release(some.tolist())
        elif name == "publish":
            pool.publish_all(some)
            plain.published |= set(some.tolist())
        else:
            several = draw.permutation(np.array(plain.cached, np.int32))[: draw.integers(0, 4)]
            if draw.random() < 0.5:
                pool.unpublish_cached(several)
            else:
                for page in several.tolist():
                    pool.unpublish(page)
            for page in several.tolist():
                plain.unpublish(page)
        pool.check_books()
        assert pool.books[HELD].tolist() == plain.held
        assert pool.free_pages() == plain.free and list(pool.cached_pages()) == plain.cached


def test_books_balance_when_requests_end_at_any_stage() -> None:  # L1, oracle 6
    """Two pools, as a request uses them; the second allocation fails often and the first is undone."""
    rng = random.Random(20)
    kv, state = PagePool(12, "kv"), PagePool(4, "state")
    live: list[tuple[list[int], list[int]]] = []
    failures = 0
    for _ in range(500):
        if live and rng.random() < 0.5:
            kv_pages, state_pages = live.pop(rng.randrange(len(live)))
            for pool, pages in ((kv, kv_pages), (state, state_pages)):
                for page in pages[: rng.randrange(len(pages) + 1)]:
                    pool.publish(page)
                pool.release([NULL_PAGE, *pages])
        else:
            try:
                kv_pages = kv.take(rng.randint(1, 4))
                try:
                    live.append((kv_pages, state.take(rng.randint(1, 2))))
                except CapacityError:
                    kv.release(kv_pages)
                    raise
            except CapacityError:
                failures += 1
        kv.check_books()
        state.check_books()
    for kv_pages, state_pages in live:
        kv.release(kv_pages)
        state.release(state_pages)
    assert failures > 20
    assert kv.available == 11 and state.available == 3 and books(state)[2] == books(kv)[2] == 0
