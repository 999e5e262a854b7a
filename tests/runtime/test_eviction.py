"""What goes when room is needed: useless pages first, then whole checkpoints by value; or plain age."""

from midstream.runtime.eviction import speculative
from midstream.runtime.pages import PagePool
from midstream.runtime.prefix import PrefixIndex


def index_of(
    eviction: str = "value", pages: int = 40, page_bytes: tuple[int, int] = (1, 10)
) -> PrefixIndex:
    kv, state = PagePool(pages, "kv"), PagePool(pages, "state")
    return PrefixIndex(kv, state, 1, eviction=eviction, page_bytes=page_bytes)


def put(
    index: PrefixIndex,
    name: str,
    length: int,
    states: tuple[int, ...],
    guesses: tuple[int, ...] = (),
) -> list[int]:
    """Cache a prefix of `length` blocks; returns its keys."""
    keys = [hash((name, n)) for n in range(length)]
    assert index.state_pool is not None
    pages = index.kv_pool.take(length)
    for block, page in enumerate(pages):
        index.publish_kv(keys, block, page)
    for position in states + guesses:
        (page,) = index.state_pool.take(1)
        value = speculative() if position in guesses else None
        index.publish_state(keys, page, position, value=value)
        index.state_pool.release(page)
    index.kv_pool.release(pages)
    return keys


def states_left(index: PrefixIndex, keys: list[int]) -> list[int]:
    return [n + 1 for n, key in enumerate(keys) if index.has_state(key)]


def use(index: PrefixIndex, keys: list[int]) -> None:
    """A request resumes there and ends."""
    hit = index.lookup(keys, len(keys))
    index.hold(hit)
    index.kv_pool.release(hit.kv_pages.tolist())
    assert index.state_pool is not None
    index.state_pool.release(hit.state_page)


def evict_states(index: PrefixIndex, count: int) -> None:
    pool = index.state_pool
    assert pool is not None
    pool.release(pool.take(pool.num_free + count))
    index.check_books()


def evict_kv(index: PrefixIndex, count: int) -> None:
    index.kv_pool.release(index.kv_pool.take(index.kv_pool.num_free + count))
    index.check_books()


def test_kv_pages_that_no_state_can_use_go_first_leaves_before_what_they_stand_on() -> None:
    index = index_of()
    useful, beyond = put(index, "a", 6, (6,)), put(index, "b", 8, (3,))
    evict_kv(index, 2)
    assert index.lookup(beyond, 8).kv_match_tokens == 6
    evict_kv(index, 3)
    assert index.lookup(beyond, 8).num_tokens == 3
    assert index.lookup(useful, 6).num_tokens == 6 and index.evictions == 5


def test_a_checkpoint_that_goes_takes_the_kv_pages_that_only_it_could_use() -> None:
    index = index_of()
    keys = put(index, "a", 9, (3, 9))
    evict_kv(index, 1)
    assert states_left(index, keys) == [3]
    evict_kv(index, 5)  # bare since then
    hit = index.lookup(keys, 9)
    assert (hit.num_tokens, hit.kv_match_tokens) == (3, 3)
    evict_kv(index, 1)
    assert states_left(index, keys) == [] and index.state_pool is not None
    assert index.state_pool.num_cached == 0


def test_little_saved_work_goes_before_much_and_unasked_before_asked() -> None:
    index = index_of()
    long, short = put(index, "a", 12, (12,)), put(index, "b", 4, (4,))
    guess = put(index, "c", 12, (), (12,))
    order = []
    for _ in range(3):
        evict_states(index, 1)
        order.append([bool(states_left(index, keys)) for keys in (long, short, guess)])
    assert order == [[True, True, False], [True, False, False], [False] * 3]


def test_where_kv_pages_are_short_age_decides_and_not_the_tokens_that_a_state_saves() -> None:
    index = index_of()
    old, new = put(index, "a", 12, (12,)), put(index, "b", 3, (3,))
    evict_kv(index, 1)
    assert (states_left(index, old), states_left(index, new)) == ([], [3])


def test_the_checkpoint_before_one_that_goes_takes_over_its_age() -> None:
    index = index_of()
    put(index, "first", 2, (2,))
    turns = put(index, "a", 6, (3, 6))
    use(index, turns[:3])
    use(index, turns[:3])
    evict_kv(index, 1)  # the first: from now on age counts
    use(index, turns)
    other = put(index, "b", 2, (2,))
    evict_kv(index, 1 + 3)
    assert (states_left(index, turns), states_left(index, other)) == ([3], [2])
    evict_kv(index, 1)
    assert (states_left(index, turns), states_left(index, other)) == ([3], [])


def test_use_keeps_a_checkpoint_and_no_use_for_long_lets_it_go() -> None:
    index = index_of()
    old, used = put(index, "a", 5, (5,)), put(index, "b", 5, (5,))
    for _ in range(3):
        use(index, used)
    evict_states(index, 1)
    assert states_left(index, used) == [5] and not states_left(index, old)
    # others of the same worth come and go: in the end age outweighs its uses
    for turn in range(30):
        put(index, f"n{turn}", 5, (5,))
        use(index, [hash((f"n{turn}", n)) for n in range(5)])
        evict_states(index, 1)
        evict_kv(index, 5)
    assert not states_left(index, used)


def test_a_checkpoint_is_worth_more_once_the_one_below_it_went() -> None:
    index = index_of(page_bytes=(0, 10))
    keys = put(index, "a", 12, (6, 7, 12))
    other = put(index, "b", 3, (3,))
    evict_states(index, 1)
    assert states_left(index, keys) == [6, 12]  # 7 saves one token
    evict_states(index, 1)
    assert not states_left(index, other) and states_left(index, keys) == [6, 12]


def test_lru_takes_what_was_released_longest_ago_and_what_stands_on_it() -> None:
    index = index_of("lru")
    first, second = put(index, "a", 4, (2, 4)), put(index, "b", 1, (1,))
    use(index, first[:2])
    evict_states(index, 1)
    assert (states_left(index, first), states_left(index, second)) == ([2], [1])
    evict_states(index, 1)
    assert (states_left(index, first), states_left(index, second)) == ([2], [])
    evict_kv(index, 4)
    assert index.lookup(first, 4).kv_match_tokens < 3


def test_mode_of_many_uses_keeps_the_heap_small() -> None:
    index = index_of()
    keys = put(index, "a", 3, (3,))
    for _ in range(500):
        use(index, keys)
    assert all(len(heap) <= 2 + 64 + 1 for heap in index._evictor._heaps)  # type: ignore[union-attr]


def test_pages_of_two_prefixes_that_are_released_at_once_are_told_apart() -> None:
    index = index_of()
    assert index.state_pool is not None
    keys = {name: [hash((name, n)) for n in range(3)] for name in ("useful", "bare")}
    pages = {name: index.kv_pool.take(3) for name in keys}
    for name, of_name in keys.items():
        for block, page in enumerate(pages[name]):
            index.publish_kv(of_name, block, page)
    (state,) = index.state_pool.take(1)
    index.publish_state(keys["useful"], state, 2)
    index.state_pool.release(state)
    index.kv_pool.release([*pages["bare"], *pages["useful"]])
    evict_kv(index, 4)  # all but what the state needs
    assert index.lookup(keys["useful"], 3).num_tokens == 2
    assert not index.lookup(keys["bare"], 3).kv_match_tokens
