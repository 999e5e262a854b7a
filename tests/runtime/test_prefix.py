"""Claims about the prefix index: hits are the largest resumable position, keys die with their pages."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from midstream.errors import CapacityError, ConfigError, ContractError
from midstream.runtime.events import Cleared, EventLog, Stored
from midstream.runtime.hashing import BlockHasher, as_keys, encode_extra
from midstream.runtime.pages import NULL_PAGE, PagePool
from midstream.runtime.prefix import PrefixIndex

HASHER_KEY = bytes(16)


def prompt_keys(prompt: object, block: int, extra: bytes = b"") -> list[int]:
    hasher = BlockHasher(block=block, key=HASHER_KEY)
    return as_keys(hasher.extend(None, np.asarray(prompt, np.int32), extra))


def index_with(block: int, keys: list[int], kv_tokens: int, states: set[int]) -> PrefixIndex:
    """Index in which a prompt's first `kv_tokens` and the states at these positions were cached.

    What lies behind was there too, and lost a KV page.
    """
    kv, state = PagePool(64, "kv"), PagePool(64, "state")
    index = PrefixIndex(kv, state, block)
    pages = kv.take(max(kv_tokens, *states, 0) // block)
    for number, page in enumerate(pages):
        assert index.publish_kv(keys, number, page)
    kv.release(pages)
    for position in sorted(states):
        (page,) = state.take(1)
        assert index.publish_state(keys, page, position)
        state.release(page)
    if kv_tokens // block < len(pages):
        index.drop_page(kv, pages[kv_tokens // block])
    index.check_books()
    return index


def put(index: PrefixIndex, keys: list[int], kv_tokens: int, states: tuple[int, ...] = ()) -> None:
    """Cache a prefix."""
    pages = index.kv_pool.take(kv_tokens // index.kv_block)
    for number, page in enumerate(pages):
        index.publish_kv(keys, number, page)
    for position in states:
        (page,) = index.state_pool.take(1)
        index.publish_state(keys, page, position)
        index.state_pool.release(page)
    index.kv_pool.release(pages)


# (KV length, state positions) -> (hit, junction).  C-2: 200 tokens; C-3: 300 tokens
COARSE = [
    (128, {128}, 128, 0),
    (128, {64}, 64, 128),
    (64, {128}, 0, 64),
    (128, set(), 0, 128),
    (0, {128}, 0, 0),
    (128, {64, 128}, 128, 0),
]
FINE = [
    (128, {96}, 96, 128),
    (224, {96, 224}, 224, 0),
    (224, {192}, 192, 224),
    (96, {128}, 0, 96),
    (128, {64, 160}, 64, 128),
]


@pytest.mark.parametrize(
    ("block", "length", "kv_tokens", "states", "hit", "junction"),
    [(64, 200, *row) for row in COARSE] + [(32, 300, *row) for row in FINE],
)
def test_a_hit_is_the_largest_position_where_every_group_resumes(
    block: int, length: int, kv_tokens: int, states: set[int], hit: int, junction: int
) -> None:  # C-2, C-3
    keys = prompt_keys(range(length), block)
    index = index_with(block, keys, kv_tokens, states)
    found = index.lookup(keys, length - 1)
    assert (found.num_tokens, found.junction) == (hit, junction)
    assert found.kv_match_tokens == kv_tokens
    reachable = [position for position in states if position <= kv_tokens]
    assert index.longest_state(keys, length - 1) == max(reachable, default=0)
    assert len(found.kv_pages) == hit // block
    assert (found.state_page != NULL_PAGE) == (hit > 0)


SHARED = (640, 641, 600, 512, 513, 300, 129, 128, 65, 64)
REUSED = (576, 640, 576, 448, 512, 256, 128, 64, 64, 0)


@pytest.mark.parametrize(
    ("shared", "hit"),
    list(zip(SHARED, REUSED, strict=True)),
)
def test_a_shared_prefix_is_reused_up_to_its_last_full_block(shared: int, hit: int) -> None:
    """B-3: all states of a 640-token prompt are kept; the consumer shares `shared` tokens of 641."""
    prompt = list(range(641))
    index = index_with(64, prompt_keys(prompt, 64), 640, set(range(64, 641, 64)))
    consumer = prompt[:shared]
    assert index.lookup(prompt_keys(consumer, 64), len(consumer) - 1).num_tokens == hit


def test_state_hits_are_not_monotonic_and_page_lists_are_cut_to_the_hit() -> None:  # E2
    keys = list(range(100, 109))
    index = index_with(1, keys, 7, {2, 5, 8})
    found = index.lookup(keys, 9)
    assert (found.num_tokens, len(found.kv_pages)) == (5, 5)
    assert index.lookup(keys, 4).num_tokens == 2
    assert index.lookup(keys, 1).num_tokens == 0


def test_an_identical_prompt_leaves_a_token_to_compute() -> None:  # D1, E3 (b)
    keys = prompt_keys(range(16), 4)
    index = index_with(4, keys, 16, {4, 8, 12, 16})
    assert index.lookup(keys, 15).num_tokens == 12
    assert index.lookup(keys, 0).num_tokens == index.lookup(keys, -1).num_tokens == 0
    assert index.lookup(keys, 10**9).num_tokens == 16
    hit = index.lookup([], 15)
    assert (hit.num_tokens, hit.node, hit.tail_page, hit.state_page) == (
        0,
        None,
        NULL_PAGE,
        NULL_PAGE,
    )
    assert not len(hit.kv_pages) and not hit.window_pages and not hit.kv_match_tokens


def test_salts_and_adapters_share_nothing_in_either_group() -> None:  # D10
    salted = encode_extra({"salt": "tenant"})
    index = index_with(4, prompt_keys(range(16), 4, salted), 16, {8, 16})
    for extra in (b"", encode_extra({"salt": "other"}), encode_extra({"adapter": "tenant"})):
        found = index.lookup(prompt_keys(range(16), 4, extra), 15)
        assert found.kv_match_tokens == found.num_tokens == 0
    assert index.lookup(prompt_keys(range(16), 4, salted), 15).num_tokens == 8


def test_a_thousand_random_prompts_reuse_only_their_own_prefixes() -> None:  # D9
    rng = random.Random(20)
    kv, state = PagePool(4000, "kv"), PagePool(4000, "state")
    index = PrefixIndex(kv, state, 2)
    written: dict[int, tuple[int, ...]] = {}  # state page -> the tokens it stands for
    for _ in range(1000):
        prompt = tuple(rng.randrange(3) for _ in range(8))
        keys = prompt_keys(prompt, 2)
        found = index.lookup(keys, 7)
        assert found.num_tokens == 0 or written[found.state_page] == prompt[: found.num_tokens]
        for i in range(4):
            (kv_page,), (page,) = kv.take(1), state.take(1)
            index.publish_kv(keys, i, kv_page)
            if index.publish_state(keys, page, 2 * i + 2):
                written[page] = prompt[: 2 * i + 2]
            kv.release(kv_page)
            state.release(page)
    index.check_books()


def test_an_evicted_page_loses_its_key_and_the_chain_is_cut_there() -> None:  # ours
    kv = PagePool(10, "kv")
    index = PrefixIndex(kv, None, 4)
    put(index, [70, 71], 8)
    assert index.lookup([70, 71], 8).kv_pages.tolist() == [1, 2]
    taken = kv.take(8)  # the tail goes first
    assert 2 in taken and index.lookup([70, 71], 8).kv_pages.tolist() == [1]
    assert kv.take(1) == [1]
    assert index.lookup([70, 71], 8).kv_match_tokens == 0


def test_without_recurrent_layers_the_leaf_that_was_used_longest_ago_goes_first() -> None:
    kv = PagePool(9, "kv")
    index = PrefixIndex(kv, None, 4)
    put(index, [1, 2, 3], 12)
    put(index, [11, 12], 8)
    hit = index.lookup([1, 2], 8)
    index.hold(hit)
    kv.release(hit.kv_pages.tolist())
    lengths = []
    while kv.available:
        kv.take(1)
        lengths.append([index.lookup(keys, 12).num_tokens for keys in ([1, 2, 3], [11, 12])])
    assert lengths[3:] == [[8, 8], [8, 4], [8, 0], [4, 0], [0, 0]]


def test_a_block_whose_parent_is_unknown_is_not_published() -> None:
    index = PrefixIndex(PagePool(8, "kv"), PagePool(8, "state"), 4)
    put(index, [70], 4, (4,))
    (page,), (state,) = index.kv_pool.take(1), index.state_pool.take(1)
    assert not index.publish_kv([70, 71, 72], 2, page)
    assert not index.publish_state([70, 71, 72], state, 12)
    assert index.lookup([70, 71, 72], 12).num_tokens == 4
    index.check_books()


def test_a_held_hit_survives_pressure_and_is_released_by_its_caller() -> None:
    keys = prompt_keys(range(12), 4)
    index = index_with(4, keys, 12, {4, 8})
    kv, state = index.kv_pool, index.state_pool
    found = index.lookup(keys, 11)
    index.hold(found)
    kv.take(kv.available)
    state.take(state.available)
    again = index.lookup(keys, 11)
    assert (again.num_tokens, again.kv_pages.tolist()) == (8, found.kv_pages.tolist())
    assert again.state_page == found.state_page
    kv.release(found.kv_pages.tolist())
    state.release(found.state_page)
    assert kv.num_cached == 2 and state.num_cached == 1
    index.check_books()


def test_a_hit_cannot_be_held_after_its_pages_may_have_gone() -> None:
    keys = prompt_keys(range(12), 4)
    index = index_with(4, keys, 12, {8})
    found, before = index.lookup(keys, 11), index.generation
    kv = index.kv_pool
    kv.take(kv.available)
    assert index.generation != before
    with pytest.raises(ContractError, match="8 tokens is held after 4 pages were dropped"):
        index.hold(found)
    index.check_books()


def test_a_miss_can_be_held_too() -> None:
    index = index_with(4, prompt_keys(range(8), 4), 8, {8})
    index.hold(index.lookup([1, 2], 8))
    index.check_books()
    assert index.kv_pool.num_owned == index.state_pool.num_owned == 0


def test_without_recurrent_layers_every_block_is_a_resume_point() -> None:
    keys = prompt_keys(range(16), 4)
    index = PrefixIndex(PagePool(8, "kv"), None, 4)
    put(index, keys, 12)
    hit = index.lookup(keys, 15)
    assert (hit.num_tokens, hit.kv_pages.tolist(), hit.state_page, hit.junction) == (
        12,
        [1, 2, 3],
        0,
        0,
    )
    with pytest.raises(ContractError, match="state pool None"):
        index.publish_state(keys, 1, 4)


def test_only_an_owned_page_is_published_and_only_under_keys_of_one_block() -> None:
    kv, state = PagePool(5, "kv"), PagePool(5, "state")
    index = PrefixIndex(kv, state, 4)
    for page in (NULL_PAGE, 1):
        with pytest.raises(ContractError, match="nobody holds it"):
            index.publish_kv([7], 0, page)
    assert index.lookup([7], 4).kv_match_tokens == 0
    first, second = kv.take(2)
    index.publish_kv([7], 0, first)
    with pytest.raises(ContractError, match="page 1 of pool kv is published again"):
        index.publish_kv([7, 8], 1, first)
    index.publish_kv([7, 8], 1, second)
    (page,) = state.take(1)
    for position, tail in ((0, ()), (6, ()), (-4, ()), (8, (1,)), (6, (1,))):
        with pytest.raises(ContractError, match=f"a state at position {position} with {len(tail)}"):
            index.publish_state([7, 8], page, position, tail=tail)
    assert index.publish_state([7, 8], page, 8)
    with pytest.raises(ContractError, match="page 1 of pool state is published again"):
        index.publish_state([7, 8], page, 4)


def test_a_pool_has_one_index_and_a_policy_must_exist() -> None:
    kv = PagePool(5, "kv")
    PrefixIndex(kv, None, 4)
    with pytest.raises(ContractError, match="one index per pool"):
        PrefixIndex(kv, None, 4)
    with pytest.raises(ConfigError, match="kv_block 0"):
        PrefixIndex(kv, None, 0)
    with pytest.raises(ConfigError, match="eviction='fifo'"):
        PrefixIndex(kv, None, 4, eviction="fifo")


def test_a_hit_that_cannot_be_held_whole_holds_nothing() -> None:
    keys = prompt_keys(range(12), 4)
    index = index_with(4, keys, 12, {8})
    hit = index.lookup(keys, 11)
    broken = replace(hit, state_page=63)  # nobody's: as if it had been evicted unnoticed
    with pytest.raises(ContractError, match="page 63 is free"):
        index.hold(broken)
    assert index.kv_pool.num_owned == index.state_pool.num_owned == 0
    index.check_books()


# -- expectation ----------------------------------------------------------------------------------------


def test_a_checkpoint_is_expected_then_published_then_evicted() -> None:
    index = PrefixIndex(PagePool(8, "kv"), PagePool(8, "state"), 4)
    assert index.status(71) is None
    index.expected.add(5, 71, 8)
    index.expected.add(6, 90, 8)
    assert index.status(71) == "expected" and not index.has_state(71)
    assert index.lookup([70, 71], 8).num_tokens == 0
    assert index.expected.beyond(0, [70, 71, 72], 12, 4) == 8
    assert (
        index.expected.beyond(8, [70, 71], 12, 4) == index.expected.beyond(0, [70, 71], 7, 4) == 0
    )
    assert index.expected.beyond(0, [70], 12, 4) == index.expected.beyond(0, [70, 72], 12, 4) == 0
    put(index, [70, 71], 8, (8,))
    before = index.generation
    index.expected.end(5, [71])
    assert index.status(71) == "published" and index.generation == before + 1
    index.state_pool.release(index.state_pool.take(7))
    assert index.status(71) == "evicted" and index.was_evicted([70, 71], 4, 8)
    assert not index.was_evicted([70, 71], 8, 12)
    index.expected.end(6)
    index.expected.end(6)
    assert index.status(90) is None and index.generation > before + 1
    index.expected.add(7, 70, 4)
    index.reset()
    assert index.status(70) is index.status(71) is None


def test_a_new_engine_expects_nothing() -> None:
    """Restart: expectations live in the index, and the index with its engine."""
    index = PrefixIndex(PagePool(8, "kv"), PagePool(8, "state"), 4)
    assert index.expected.beyond(0, [70, 71], 100, 4) == 0


def test_a_reset_drops_all_keys_and_frees_what_nobody_holds() -> None:
    keys = prompt_keys(range(12), 4)
    index = index_with(4, keys, 12, {4, 8})
    found = index.lookup(keys, 11)
    index.hold(found)
    index.reset()
    kv, state = index.kv_pool, index.state_pool
    assert index.lookup(keys, 11).kv_match_tokens == 0
    assert kv.num_cached == state.num_cached == 0
    assert kv.num_owned == 2 and state.num_owned == 1
    kv.release(found.kv_pages.tolist())
    state.release(found.state_page)
    index.check_books()
    assert kv.num_free == state.num_free == 63


def test_check_books_finds_a_page_published_behind_the_index() -> None:
    kv = PagePool(4, "kv")
    index = PrefixIndex(kv, None, 4)
    kv.publish(*kv.take(1))
    with pytest.raises(ContractError, match="publish through the index only"):
        index.check_books()


class PrefixMachine(RuleBasedStateMachine):
    """Requests come, take pages, publish, and end in any order; one token is one block.

    A router that follows the events knows what is cached, and finds the resume point by trying every length.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kv, self.state = PagePool(9, "kv"), PagePool(5, "state")
        self.index = PrefixIndex(self.kv, self.state, kv_block=1)
        self.index.log = EventLog()
        self.cached: dict[str, dict[int, int]] = {"kv": {}, "state": {}}  # key -> length
        self.live: list[tuple[tuple[int, ...], list[int], list[int]]] = []

    def keys(self, prompt: tuple[int, ...]) -> list[int]:
        return [hash(prompt[: i + 1]) for i in range(len(prompt))]

    def follow(self) -> None:
        """What a router does."""
        assert self.index.log is not None
        for event in self.index.log.take():
            if isinstance(event, Cleared):
                self.cached = {"kv": {}, "state": {}}
            elif isinstance(event, Stored):
                self.cached[event.group][event.key] = event.num_tokens
            else:
                del self.cached[event.group][event.key]

    def naive_hit(self, prompt: tuple[int, ...]) -> tuple[int, int]:
        """(longest hit, longest KV match) by trying every length."""
        keys = [0, *self.keys(prompt)]
        kv, state = self.cached["kv"], self.cached["state"]
        lengths = range(len(prompt))
        matched = [n for n in lengths if all(keys[m] in kv for m in range(1, n + 1))]
        return max(n for n in matched if n == 0 or keys[n] in state), max(matched)

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple))
    def admit(self, prompt: tuple[int, ...]) -> None:
        self.follow()
        hit = self.index.lookup(self.keys(prompt), len(prompt) - 1)
        assert (hit.num_tokens, hit.kv_match_tokens) == self.naive_hit(prompt)
        self.index.hold(hit)
        kv_pages, state_pages = hit.kv_pages.tolist(), [hit.state_page] if hit.state_page else []
        try:
            kv_pages += self.kv.take(len(prompt) - hit.num_tokens)
            state_pages += self.state.take(1)
        except CapacityError:
            self.finish((prompt, kv_pages, state_pages))
            return
        self.live.append((prompt, kv_pages, state_pages))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        prompt, kv_pages, state_pages = data.draw(st.sampled_from(self.live))
        length = data.draw(st.integers(0, len(prompt)))
        keys = self.keys(prompt)
        for n in range(length):
            self.index.publish_kv(keys, n, kv_pages[n])
        if length and not self.state.is_published(state_pages[-1]):
            self.index.publish_state(keys, state_pages[-1], length)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.finish(self.live.pop(data.draw(st.integers(0, len(self.live) - 1))))

    def finish(self, request: tuple[tuple[int, ...], list[int], list[int]]) -> None:
        _, kv_pages, state_pages = request
        self.kv.release([NULL_PAGE, *kv_pages])
        self.state.release(state_pages)

    @rule()
    def reset(self) -> None:
        self.index.reset()

    @invariant()
    def events_tell_what_is_cached(self) -> None:
        self.index.check_books()
        self.follow()
        for pool, cached in ((self.kv, self.cached["kv"]), (self.state, self.cached["state"])):
            published = sum(pool.is_published(page) for page in range(pool.num_pages))
            assert len(cached) <= published <= len(cached) + pool.num_owned


PrefixMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, derandomize=True
)
test_a_router_that_follows_the_events_finds_what_the_index_finds = PrefixMachine.TestCase
