"""Claims about the prefix index: hits are the largest resumable position, keys die with their pages."""

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from midstream.errors import CapacityError, ConfigError, ContractError
from midstream.runtime.hashing import BlockHasher, as_keys, encode_extra
from midstream.runtime.pages import NULL_PAGE, PagePool
from midstream.runtime.prefix import Hit, PrefixIndex

HASHER_KEY = bytes(16)


def prompt_keys(prompt: object, block: int, extra: bytes = b"") -> list[int]:
    hasher = BlockHasher(block=block, key=HASHER_KEY)
    return as_keys(hasher.extend(None, np.asarray(prompt, np.int32), extra))


def index_with(block: int, keys: list[int], kv_tokens: int, states: set[int]) -> PrefixIndex:
    """Index in which a prompt's first `kv_tokens` and the states at these positions are cached."""
    kv, state = PagePool(64, "kv"), PagePool(64, "state")
    index = PrefixIndex(kv, state, block)
    pages = kv.take(kv_tokens // block)
    for key, page in zip(keys, pages, strict=False):
        assert index.publish_kv(key, page)
    kv.release(pages)
    for position in sorted(states):
        (page,) = state.take(1)
        assert index.publish_state(keys[position // block - 1], page, position)
        state.release(page)
    return index


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
    assert found.state_match_tokens == max(states, default=0)
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
    assert index.lookup([], 15) == Hit(0, (), NULL_PAGE, 0, 0, 0)


def test_salts_and_adapters_share_nothing_in_either_group() -> None:  # D10
    salted = encode_extra({"salt": "tenant"})
    index = index_with(4, prompt_keys(range(16), 4, salted), 16, {8, 16})
    for extra in (b"", encode_extra({"salt": "other"}), encode_extra({"adapter": "tenant"})):
        found = index.lookup(prompt_keys(range(16), 4, extra), 15)
        assert found.kv_match_tokens == found.state_match_tokens == 0
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
        for i, key in enumerate(keys):
            (kv_page,), (page,) = kv.take(1), state.take(1)
            written[page] = prompt[: 2 * i + 2]
            index.publish_kv(key, kv_page)
            index.publish_state(key, page, 2 * i + 2)
            kv.release(kv_page)
            state.release(page)
    index.check_books()


def test_the_first_page_of_a_key_stays_and_a_second_one_stays_private() -> None:  # A-9, ours
    kv = PagePool(4, "kv")
    index = PrefixIndex(kv, None, 4)
    first, second = kv.take(2)
    assert index.publish_kv(7, first) and not index.publish_kv(7, second)
    assert not index.publish_kv(7, first)
    assert index.lookup([7], 4).kv_pages == (first,)
    kv.release([first, second])
    assert (kv.num_free, kv.num_cached) == (2, 1)
    kv.take(3)  # evicts the first: nobody else has the key
    assert index.lookup([7], 4).num_tokens == 0
    index.check_books()


def test_an_evicted_page_loses_its_key_and_the_chain_is_cut_there() -> None:  # ours
    kv = PagePool(10, "kv")
    index = PrefixIndex(kv, None, 4)
    pages = kv.take(4)
    for key, page in zip((70, 71), pages, strict=False):
        index.publish_kv(key, page)
    kv.release(pages)
    assert index.lookup([70, 71], 8).kv_pages == (1, 2)
    taken = kv.take(8)  # the tail goes first
    assert 2 in taken and index.lookup([70, 71], 8).kv_pages == (1,)
    assert kv.take(1) == [1]
    assert index.lookup([70, 71], 8).kv_match_tokens == 0


def test_blocks_behind_a_hole_are_out_of_reach() -> None:
    kv, state = PagePool(8, "kv"), PagePool(8, "state")
    index = PrefixIndex(kv, state, 4)
    for key, page in zip((70, 72), kv.take(2), strict=True):
        index.publish_kv(key, page)
    for key, page, position in zip((70, 72), state.take(2), (4, 12), strict=True):
        index.publish_state(key, page, position)
    assert index.lookup([70, 71, 72], 12) == Hit(4, (1,), 1, 4, 12, 0)


def test_a_held_hit_survives_pressure_and_is_released_by_its_caller() -> None:
    keys = prompt_keys(range(12), 4)
    index = index_with(4, keys, 12, {4, 8})
    kv, state = index._kv.pool, index._state.pool
    found = index.lookup(keys, 11)
    index.hold(found)
    kv.take(kv.available)
    state.take(state.available)
    again = index.lookup(keys, 11)
    assert (again.num_tokens, again.kv_pages) == (8, found.kv_pages)
    assert again.state_page == found.state_page
    kv.release(found.kv_pages)
    state.release(found.state_page)
    assert kv.num_cached == 2 and state.num_cached == 1
    index.check_books()


def test_a_hit_cannot_be_held_after_its_pages_may_have_gone() -> None:
    keys = prompt_keys(range(12), 4)
    index = index_with(4, keys, 12, {8})
    found, before = index.lookup(keys, 11), index.generation
    kv = index._kv.pool
    kv.take(kv.available)
    assert index.generation != before
    with pytest.raises(ContractError, match="8 tokens is held after 3 keys were dropped"):
        index.hold(found)
    index.check_books()


def test_a_miss_can_be_held_too() -> None:
    index = index_with(4, prompt_keys(range(8), 4), 8, {8})
    index.hold(index.lookup([1, 2], 8))
    index.check_books()
    assert index._kv.pool.num_owned == index._state.pool.num_owned == 0


def test_a_missing_group_does_not_limit_the_hit() -> None:
    keys = prompt_keys(range(16), 4)
    state, kv = PagePool(4, "state"), PagePool(8, "kv")
    recurrent, attention = PrefixIndex(None, state, 4), PrefixIndex(kv, None, 4)
    (page,) = state.take(1)
    recurrent.publish_state(keys[1], page, 8)
    for key, kv_page in zip(keys, kv.take(3), strict=False):
        attention.publish_kv(key, kv_page)
    assert recurrent.lookup(keys, 15) == Hit(8, (), page, 0, 8, 0)
    assert attention.lookup(keys, 15) == Hit(12, (1, 2, 3), NULL_PAGE, 12, 0, 0)
    recurrent.hold(recurrent.lookup(keys, 15))
    assert state.refcount(page) == 2
    with pytest.raises(ContractError, match="no KV layers"):
        recurrent.publish_kv(1, 1)
    with pytest.raises(ContractError, match="no state layers"):
        attention.publish_state(1, 1, 4)


def test_only_an_owned_page_is_published_and_only_under_one_key() -> None:
    kv, state = PagePool(4, "kv"), PagePool(4, "state")
    index = PrefixIndex(kv, state, 4)
    for page in (NULL_PAGE, 1):
        with pytest.raises(ContractError, match="nobody holds it"):
            index.publish_kv(7, page)
    assert index.lookup([7], 4).kv_match_tokens == 0
    (page,) = kv.take(1)
    index.publish_kv(7, page)
    with pytest.raises(ContractError, match="page 1 of pool kv is published again"):
        index.publish_kv(8, page)
    for position in (0, 6, -4):
        with pytest.raises(ContractError, match=f"a state at position {position}"):
            index.publish_state(7, state.take(1)[0], position)
    with pytest.raises(ConfigError):
        PrefixIndex(None, None, 4)
    index.check_books()


def test_a_state_published_at_a_wrong_position_is_never_resumed_from() -> None:  # D2, D3
    state = PagePool(4, "state")
    index = PrefixIndex(None, state, 4)
    index.publish_state(7, *state.take(1), position=8)
    with pytest.raises(ContractError, match="published at position 8, its key is that of 4 tokens"):
        index.lookup([7], 4)


def test_a_reset_drops_all_keys_and_frees_what_nobody_holds() -> None:
    keys = prompt_keys(range(12), 4)
    index = index_with(4, keys, 12, {4, 8})
    found = index.lookup(keys, 11)
    index.hold(found)
    index.reset()
    kv, state = index._kv.pool, index._state.pool
    assert index.lookup(keys, 11).kv_match_tokens == 0
    assert kv.num_cached == state.num_cached == 0
    assert kv.num_owned == 2 and state.num_owned == 1
    kv.release(found.kv_pages)
    state.release(found.state_page)
    index.check_books()
    assert kv.num_free == state.num_free == 63


def test_check_books_finds_a_page_published_behind_the_index() -> None:
    kv = PagePool(4, "kv")
    index = PrefixIndex(kv, None, 4)
    kv.publish(*kv.take(1))
    with pytest.raises(ContractError, match="publish through the index only"):
        index.check_books()


class NaivePool:
    """The same books with lists and dictionaries, written for reading."""

    def __init__(self, num_pages: int) -> None:
        self.holds = dict.fromkeys(range(1, num_pages), 0)
        self.content: dict[int, tuple[int, ...]] = {}  # published page -> the prefix it stands for
        self.unused: list[int] = []  # published pages that nobody holds, longest unused first

    @property
    def available(self) -> int:
        return sum(count == 0 for count in self.holds.values())

    def take(self, pages: list[int]) -> None:
        """The pool has chosen `pages`: check that it was allowed to, then follow."""
        assert all(self.holds[page] == 0 for page in pages) and len(set(pages)) == len(pages)
        free = self.available - len(self.unused)
        evicted = [page for page in pages if page in self.content]
        assert sorted(evicted) == sorted(self.unused[: max(0, len(pages) - free)])
        for page in evicted:
            self.unused.remove(page)
            del self.content[page]
        for page in pages:
            self.holds[page] = 1

    def share(self, page: int) -> None:
        if page in self.unused:
            self.unused.remove(page)
        self.holds[page] += 1

    def release(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self.holds[page] -= 1
            if self.holds[page] == 0 and page in self.content:
                self.unused.append(page)

    def publish(self, page: int, prefix: tuple[int, ...]) -> bool:
        if prefix in self.content.values():
            return False
        self.content[page] = prefix
        return True


class PrefixMachine(RuleBasedStateMachine):
    """Requests come, take pages, publish, and end in any order; one token is one block."""

    def __init__(self) -> None:
        super().__init__()
        self.kv, self.state = PagePool(9, "kv"), PagePool(5, "state")
        self.index = PrefixIndex(self.kv, self.state, kv_block=1)
        self.naive_kv, self.naive_state = NaivePool(9), NaivePool(5)
        self.live: list[tuple[tuple[int, ...], list[int], list[int]]] = []

    def keys(self, prompt: tuple[int, ...]) -> list[int]:
        return [hash(prompt[: i + 1]) for i in range(len(prompt))]

    def naive_hit(self, prompt: tuple[int, ...]) -> tuple[int, int]:
        """(longest hit, longest KV match) by trying every length."""
        kv, state = self.naive_kv.content.values(), self.naive_state.content.values()
        lengths = range(len(prompt))
        matched = [n for n in lengths if all(prompt[:m] in kv for m in range(1, n + 1))]
        return max(n for n in matched if n == 0 or prompt[:n] in state), max(matched)

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple))
    def admit(self, prompt: tuple[int, ...]) -> None:
        hit = self.index.lookup(self.keys(prompt), len(prompt) - 1)
        assert (hit.num_tokens, hit.kv_match_tokens) == self.naive_hit(prompt)
        for n, page in enumerate(hit.kv_pages, 1):
            assert self.naive_kv.content[page] == prompt[:n]
        assert self.naive_state.content.get(hit.state_page, ()) == prompt[: hit.num_tokens]
        self.index.hold(hit)
        for page in hit.kv_pages:
            self.naive_kv.share(page)
        held = [hit.state_page] if hit.state_page else []
        for page in held:
            self.naive_state.share(page)
        kv_pages, state_pages = list(hit.kv_pages), held
        try:
            for pool, naive, pages, count in (
                (self.kv, self.naive_kv, kv_pages, len(prompt) - hit.num_tokens),
                (self.state, self.naive_state, state_pages, 1),
            ):
                assert pool.available == naive.available
                taken = pool.take(count)
                naive.take(taken)
                pages += taken
        except CapacityError:
            self.finish((prompt, kv_pages, state_pages))
            return
        self.live.append((prompt, kv_pages, state_pages))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        prompt, kv_pages, state_pages = data.draw(st.sampled_from(self.live))
        length = data.draw(st.integers(0, len(prompt)))
        for n in range(1, length + 1):
            self.publish_kv(prompt[:n], kv_pages[n - 1])
        if length and state_pages[-1] not in self.naive_state.content:
            published = self.index.publish_state(hash(prompt[:length]), state_pages[-1], length)
            assert published == self.naive_state.publish(state_pages[-1], prompt[:length])

    def publish_kv(self, prefix: tuple[int, ...], page: int) -> None:
        published = self.index.publish_kv(hash(prefix), page)
        assert published == self.naive_kv.publish(page, prefix)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.finish(self.live.pop(data.draw(st.integers(0, len(self.live) - 1))))

    def finish(self, request: tuple[tuple[int, ...], list[int], list[int]]) -> None:
        _, kv_pages, state_pages = request
        self.kv.release([NULL_PAGE, *kv_pages])
        self.naive_kv.release(kv_pages)
        self.state.release(state_pages)
        self.naive_state.release(state_pages)

    @rule()
    def reset(self) -> None:
        self.index.reset()
        for naive in (self.naive_kv, self.naive_state):
            naive.content.clear()
            naive.unused.clear()

    @invariant()
    def books_equal_the_naive_ones(self) -> None:
        self.index.check_books()
        for pool, naive in ((self.kv, self.naive_kv), (self.state, self.naive_state)):
            assert {page: pool.refcount(page) for page in naive.holds} == naive.holds
            assert pool.num_cached == len(naive.unused)
            published = {page for page in naive.holds if pool.is_published(page)}
            assert published == set(naive.content)


PrefixMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, derandomize=True
)
test_pools_and_index_equal_a_naive_model = PrefixMachine.TestCase
