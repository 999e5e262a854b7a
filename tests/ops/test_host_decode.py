"""host_decode: the passes over the rows of a step, compiled and plain, against lists, dicts and NumPy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.ops import host_decode
from midstream.ops.host_decode import COMPUTED, FREE, HELD, NEW, OCCUPANT, SAMPLES, SLOT
from midstream.runtime import pages, plan

NAMES = ["put_deltas", "plan_decode", "advance_rows", "commit_rows"]
both = pytest.mark.parametrize("suffix", ["", "_py"], ids=["compiled", "plain"])
quick = settings(max_examples=60, deadline=None)  # the first call of a kernel compiles it

S, KV, BLOCK, COLS = 8, 4, 8, 16  # slots, tokens of a KV page and of a state block, columns
KV_AT, STATE_AT, RESUME_AT = 100, 300, 500  # where the tables and resume_page begin in slot memory


def kernel(name, suffix):
    return getattr(host_decode, name + suffix)


def ints(values) -> np.ndarray:
    return np.array(values, np.int32)


def junk(size) -> np.ndarray:
    return np.full(size, -7, np.int32)


@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_has_a_plain_twin(name):
    assert kernel(name, "").nopython_signatures is not None
    assert not hasattr(kernel(name, "_py"), "nopython_signatures")


def test_pools_and_plans_are_laid_out_as_the_kernels_expect():
    pool = pages.PagePool(5)
    (page,) = pool.take(1)
    assert pool.books[HELD].tolist() == [0, 1, 0, 0, 0] and pool.books[FREE, :4].tolist() == [
        3,
        4,
        3,
        2,
    ]
    rows = plan.StepPlan(plan.new_rows(3), num_rows=1)
    rows.rows[[SLOT, COMPUTED, NEW, SAMPLES, OCCUPANT], 0] = 5, 6, 7, 8, 9
    fields = (rows.slot, rows.num_computed, rows.num_new, rows.samples, rows.epoch)
    assert [field.tolist() for field in fields] == [[5], [6], [7], [8], [9]] and page == 1


# -- deltas -------------------------------------------------------------------------------------------


@both
@quick
@given(
    changes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=30),
    junk=st.integers(0, 40),
)
def test_deltas_are_a_set_with_the_latest_values(suffix, changes, junk):
    deltas, count = np.full((3, 10), junk, np.int32), ints([0])
    index, value = ints([i for i, _ in changes]), ints([v for _, v in changes])
    kernel("put_deltas", suffix)(deltas, count, index, value)
    entries = deltas[:2, : count[0]].T.tolist()
    assert len(entries) == len(dict(changes)) and dict(entries) == dict(changes)


# -- planning -----------------------------------------------------------------------------------------


class Slots:
    """The numbers of S slots, and by name as `LiveTable` has them."""

    def __init__(self) -> None:
        self.slots = np.zeros((host_decode.SLOT_FIELDS, S + 3), np.int32)

    def __getattr__(self, name) -> np.ndarray:
        return self.slots[getattr(host_decode, name.upper()), :S]


class Host(Slots):
    """Slots whose requests decode: `tokens` of each are computed, and all pages up to there are theirs."""

    def __init__(self, tokens, free_kv=20, free_state=20, relocate=()):
        super().__init__()
        self.order = ints([*range(len(tokens))] + [0] * (S - len(tokens)))
        self.end = len(tokens)
        self.decodes[:] = 1
        self.counted[:] = [*tokens] + [1] * (S - len(tokens))
        self.last_computed[:] = 1000
        self.relocate[list(relocate)] = 1
        self.num_kv_pages[:] = -(-self.counted // KV)
        self.running_page[:] = range(50, 50 + S)
        self.epoch[:] = range(70, 70 + S)
        self.kv_table = np.arange(S * COLS, dtype=np.int32).reshape(S, COLS)
        self.deltas, self.num_deltas = np.zeros((3, 1000), np.int32), ints([0])
        self.kv_books, self.state_books = self.books(free_kv), self.books(free_state)
        self.moves, self.due = np.zeros((2, S), np.int32), junk(S)
        self.tally = np.zeros(4, np.int32)
        self.rows = np.full((host_decode.ROW_FIELDS, S + 3), -7, np.int32)

    @staticmethod
    def books(free) -> np.ndarray:
        books = np.zeros((2, 60), np.int32)
        books[HELD, 1:] = 9
        books[HELD, 1 : free + 1] = 0
        books[FREE, : free + 1] = [free, *range(free, 0, -1)]  # page 1 is on top
        return books

    def plan(
        self, suffix="", begin=0, served=-1, num_rows=0, most_rows=S, grids=(0, 0), block=BLOCK
    ):
        """Returns the place where the pass stopped, and the slots that have rows."""
        place = kernel("plan_decode", suffix)(
            self.order, self.slots, self.kv_table, self.deltas, self.num_deltas, KV_AT,
            STATE_AT, COLS, RESUME_AT, self.kv_books, self.state_books, KV, block, *grids, self.moves,
            self.tally, begin, self.end, served, self.rows, num_rows, most_rows,
        )  # fmt: skip
        return place, self.rows[SLOT, : self.tally[host_decode.ROWS]].tolist()

    def count(self, suffix="") -> list[int]:
        """Count the planned tokens; the slots whose state stands on a boundary then."""
        num_rows = self.tally[host_decode.ROWS]
        kernel("advance_rows", suffix)(self.slots, self.due, self.tally, self.rows, num_rows, 0)
        return self.due[: self.tally[host_decode.NUM_DUE]].tolist()

    def changes(self) -> dict[int, int]:
        return dict(self.deltas[:2, : self.num_deltas[0]].T.tolist())

    def moved(self) -> list[list[int]]:
        return self.moves[:, : self.tally[host_decode.MOVES]].T.tolist()


@both
def test_a_row_without_need_takes_nothing(suffix):
    host = Host([5, 9, 14])
    before = host.kv_books.copy()
    assert host.plan(suffix) == (3, [0, 1, 2])
    places = [1 * 4 + 1, (COLS + 2) * 4 + 1, (2 * COLS + 3) * 4 + 2]  # page and place in it
    assert host.rows[:, :4].T.tolist()[:3] == [
        [slot, tokens, 1, 1, 70 + slot, 50 + slot, place, 0]
        for slot, tokens, place in zip(range(3), [5, 9, 14], places, strict=True)
    ]
    assert (host.rows[: host_decode.DUE, 3:] == -7).all()
    assert not host.changes() and not host.moved() and (host.kv_books == before).all()


@both
def test_a_token_that_begins_a_page_gets_one(suffix):
    host = Host([5, 12, 20])
    assert host.plan(suffix) == (3, [0, 1, 2])
    assert host.kv_table[1, 3] == 1 and host.kv_table[2, 5] == 2
    assert host.num_kv_pages[:3].tolist() == [2, 4, 6]
    assert host.kv_books[HELD, 1:4].tolist() == [1, 1, 0] and host.kv_books[FREE, 0] == 18
    assert host.changes() == {KV_AT + COLS + 3: 1, KV_AT + 2 * COLS + 5: 2}
    assert not host.moved()


@both
def test_a_token_that_begins_a_state_block_moves_the_running_page(suffix):
    host = Host([16, 9])
    host.num_kv_pages[0] = 5  # the place of its token is there
    assert host.plan(suffix) == (2, [0, 1])
    assert host.moved() == [[0, 50]] and host.running_page[0] == 1
    assert host.changes() == {STATE_AT + 2: 1}


@both
def test_a_page_that_became_a_checkpoint_is_left_and_named(suffix):
    host = Host([5, 13], relocate=[1])
    assert host.plan(suffix) == (2, [0, 1])
    assert host.moved() == [[1, 51]] and not host.relocate.any()
    assert host.changes() == {RESUME_AT + 1: 51, STATE_AT + COLS + 1: 1}


@both
def test_who_does_not_decode_or_is_done_gets_no_row(suffix):
    host = Host([5, 6, 7, 9])
    host.decodes[1] = 0
    host.last_computed[2] = 7
    assert host.plan(suffix) == (4, [0, 3])


@both
@pytest.mark.parametrize(("free_kv", "free_state"), [(1, 20), (20, 1), (0, 0)])
def test_the_pass_stops_where_a_page_is_missing_and_takes_none_for_that_request(
    suffix, free_kv, free_state
):
    host = Host([5, 16, 24, 6], free_kv, free_state)
    stop = 1 if free_kv == 0 else 2
    assert host.plan(suffix) == (stop, [0, 1][:stop])
    taken = free_kv - host.kv_books[FREE, 0], free_state - host.state_books[FREE, 0]
    assert taken == (stop - 1, stop - 1) and len(host.changes()) == 2 * (stop - 1)
    # the caller has served it
    assert host.plan(suffix, stop, stop, stop)[1][: stop + 1] == [0, 1, 2][: stop + 1]


@both
def test_the_pass_ends_when_the_step_is_full(suffix):
    host = Host([5, 6, 7, 8], free_kv=0)
    assert host.plan(suffix, most_rows=2) == (4, [0, 1])
    assert Host([5, 6], free_kv=0).plan(suffix, num_rows=2, most_rows=2) == (2, [-7, -7])


@quick
@given(
    st.lists(st.integers(1, 40), max_size=S), st.integers(0, 6), st.integers(0, 4),
    st.sets(st.integers(0, S - 1)), st.sets(st.integers(0, S - 1)), st.integers(0, S),
)  # fmt: skip
def test_compiled_and_plain_plan_alike(tokens, free_kv, free_state, relocate, idle, most_rows):
    hosts = []
    for suffix in ("", "_py"):
        host = Host(tokens, free_kv, free_state, relocate)
        host.decodes[list(idle)] = 0
        place, served = 0, -1
        stops = []
        while place < host.end:
            place, rows = host.plan(suffix, place, served, host.tally[0], most_rows)
            stops.append((place, rows, host.moved()))
            served = place
        hosts.append((host, stops))
    (one, stops), (other, same) = hosts
    assert stops == same
    np.testing.assert_equal(vars(one), vars(other))


@both
@quick
@given(
    tokens=st.lists(st.integers(1, 12), min_size=1, max_size=S), seed=st.integers(0, 2**32),
    grids=st.sampled_from([(0, 0), (BLOCK, 0), (0, 6), (BLOCK, 12), (BLOCK, 1)]),
    block=st.sampled_from([BLOCK, 6]),
)  # fmt: skip
def test_a_row_is_looked_into_in_time(suffix, tokens, seed, grids, block):
    """A slot that is looked into in every step, because its LOOK_AT is 0, gives the same rows."""
    draw, host, watched = np.random.default_rng(seed), Host(tokens, 59, 59), Host(tokens, 59, 59)
    host.last_computed[:] = watched.last_computed[:] = draw.integers(12, 45, S)
    for _ in range(45):
        watched.look_at[:] = 0
        rows = [h.plan(s, grids=grids, block=block) for h, s in ((host, suffix), (watched, ""))]
        assert rows[0] == rows[1]
        assert host.moved() == watched.moved() and host.changes() == watched.changes()
        due = host.count(suffix)
        assert due == watched.count("")
        counted = host.counted[due].tolist()
        assert counted == [n for n in counted if any(grid and n % grid == 0 for grid in grids)]
        for slot in due:  # its page may be left, but need not
            host.relocate[slot] = watched.relocate[slot] = draw.integers(0, 2)
        np.testing.assert_equal(host.rows, watched.rows)
    assert (host.counted[: len(tokens)] == host.last_computed[: len(tokens)]).all() or (
        host.kv_books[FREE, 0] == 0 or host.state_books[FREE, 0] == 0
    )


# -- counting -------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("grids", "due"), [((8, 0), [2, 4]), ((0, 0), []), ((8, 12), [2, 3, 4]), ((0, 12), [3])]
)
def test_boundaries_are_named(suffix, grids, due):
    host = Host([3, 6, 7, 11, 15, 8, 12])
    assert host.plan(suffix, grids=grids)[0] == 7
    assert host.count(suffix) == due
    assert host.counted.tolist() == [4, 7, 8, 12, 16, 9, 13, 1]


@both
def test_the_tokens_of_a_plan_are_counted(suffix):
    host = Slots()
    host.num_logprobs[:] = [0, 9, 2, 4, 8, 1, 99, 99]
    host.rows, host.tally = np.zeros((host_decode.ROW_FIELDS, 9), np.int32), np.zeros(4, np.int32)
    found = junk(S)
    host.rows[:3, :5] = [[3, 1, 5, 0, 2], [0, 8, 15, 11, 7], [8, 3, 1, 1, 1]]
    host.rows[host_decode.DUE, :5] = [0, 0, 1, 0, 1]
    kernel("advance_rows", suffix)(host.slots, found, host.tally, host.rows, 5, 2)
    assert host.counted.tolist() == [12, 11, 8, 8, 0, 16, 0, 0]
    assert found[: host.tally[host_decode.NUM_DUE]].tolist() == [5, 2]
    assert host.tally[host_decode.LOGPROBS] == 9


# -- commit ---------------------------------------------------------------------------------------------


class Results(Slots):
    """A step whose rows are drawn, and the slots behind it."""

    def __init__(self, seed: int, rows: int) -> None:
        super().__init__()
        draw = np.random.default_rng(seed)
        self.epoch[:] = range(70, 70 + S)
        self.tokens = np.zeros((S, 64), np.int32)
        self.prompt_len[:] = draw.integers(1, 9, S)
        self.max_tokens[:] = draw.integers(1, 9, S)
        self.watched[:] = draw.random(S) < 0.2
        self.stop_id = np.sort(draw.integers(-1, 4, (S, 3)).astype(np.int32))[:, ::-1].copy()
        slot = draw.permutation(S)[:rows]
        new = draw.integers(1, 4, rows)
        computed = np.maximum(self.prompt_len[slot] - new + draw.integers(0, 5, rows), 0)
        self.rows = np.zeros((host_decode.ROW_FIELDS, rows + 2), np.int32)
        self.rows[:4, :rows] = slot, computed, new, draw.integers(0, 2, rows)
        self.num_rows = rows
        self.rows[OCCUPANT, :rows] = self.epoch[slot] + (draw.random(rows) < 0.2)
        self.token = draw.integers(0, 9, rows + 2).astype(np.int32)  # longer than the step
        self.logprob = np.where(draw.random(rows + 2) < 0.1, np.nan, -1).astype(np.float32)
        self.heeded, self.filled = np.zeros((2, S), np.int32), np.zeros(S, np.int32)
        self.tally = np.zeros(5, np.int32)

    def commit(self, suffix: str) -> None:
        kernel("commit_rows", suffix)(
            self.slots, self.tokens, self.stop_id, KV, self.heeded, self.filled, self.tally, self.rows,
            self.num_rows, self.token, self.logprob,
        )  # fmt: skip


@both
@quick
@given(seed=st.integers(0, 2**32), num_rows=st.integers(0, S))
def test_a_commit_stores_and_names_what_numpy_does(suffix, seed, num_rows):
    got, want = Results(seed, num_rows), Results(seed, num_rows)
    got.commit(suffix)
    slot, computed, new, samples = want.rows[:4, :num_rows]
    token, logprob = want.token[:num_rows], want.logprob[:num_rows]
    alive, after = want.epoch[slot] == want.rows[OCCUPANT, :num_rows], computed + new
    rows = np.nonzero(alive & (samples != 0))[0]
    slots, tokens = slot[rows], token[rows]
    want.tokens[slots, after[rows]] = tokens
    want.num_outputs[slots] = outputs = after[rows] + 1 - want.prompt_len[slots]
    stopped = (want.stop_id[slots] == tokens[:, None]).any(axis=1)
    ended = outputs >= want.max_tokens[slots]
    heeded = stopped | ended | (outputs == 1) | (want.watched[slots] != 0) | np.isnan(logprob[rows])
    reason = np.where(stopped, host_decode.STOPPED, np.where(ended, host_decode.TOO_LONG, 0))
    np.testing.assert_equal(got.tokens, want.tokens)
    np.testing.assert_equal(got.num_outputs, want.num_outputs)
    num_heeded, num_filled, broken, lost, stored = got.tally.tolist()
    assert got.heeded[:, :num_heeded].tolist() == [rows[heeded].tolist(), reason[heeded].tolist()]
    assert (
        got.filled[:num_filled].tolist()
        == np.nonzero(alive & (after // KV > computed // KV))[0].tolist()
    )
    assert broken == np.isnan(logprob).sum() and stored == len(rows)
    assert lost == np.count_nonzero(~alive & (samples != 0))


@both
@quick
@given(seed=st.integers(0, 2**32), num_rows=st.integers(0, S))
def test_a_row_is_heeded_in_time(suffix, seed, num_rows):
    """A slot that is looked into in every step, because its HEED_AT is 0, gives the same."""
    got, want = Results(seed, num_rows), Results(seed, num_rows)
    draw = np.random.default_rng(seed)
    for _ in range(20):
        token = draw.integers(0, 50, S + 2)
        logprob = np.where(draw.random(S + 2) < 0.02, np.nan, -1)
        for host in (got, want):
            host.token[:], host.logprob[:] = token[: num_rows + 2], logprob[: num_rows + 2]
        want.heed_at[:] = 0
        got.commit(suffix)
        want.commit("")
        assert got.tally.tolist() == want.tally.tolist()
        for name, end in (("heeded", got.tally[0]), ("filled", got.tally[1])):
            mine, other = getattr(got, name), getattr(want, name)
            assert mine[..., :end].tolist() == other[..., :end].tolist()
        for host in (got, want):
            rows = host.rows[:, :num_rows]
            rows[COMPUTED] += rows[NEW]
            rows[[NEW, SAMPLES]] = 1
    np.testing.assert_equal(got.tokens, want.tokens)
    np.testing.assert_equal(got.num_outputs, want.num_outputs)
