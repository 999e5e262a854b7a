"""host_decode: the passes over the rows of a step, compiled and plain, against lists, dicts and NumPy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.ops import host_decode
from midstream.ops.host_decode import COMPUTED, FREE, HELD, NEW, SAMPLES, SLOT
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
    rows = plan.StepPlan(plan.PlanRows(3), num_rows=1)
    rows.arrays.rows[[SLOT, COMPUTED, NEW, SAMPLES], 0] = 5, 6, 7, 8
    fields = (rows.slot, rows.num_computed, rows.num_new, rows.samples)
    assert [field.tolist() for field in fields] == [[5], [6], [7], [8]] and page == 1


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


class Host:
    """Slots whose requests decode: `tokens` of each are computed, and all pages up to there are theirs."""

    def __init__(self, tokens, free_kv=20, free_state=20, relocate=()):
        self.order = ints([*range(len(tokens))] + [0] * (S - len(tokens)))
        self.end = len(tokens)
        self.decodes = np.ones(S, np.bool_)
        self.computed = ints([*tokens] + [1] * (S - len(tokens)))
        self.last_computed = np.full(S, 1000, np.int32)
        self.relocate = np.zeros(S, np.bool_)
        self.relocate[list(relocate)] = True
        self.num_kv_pages = -(-self.computed // KV)
        self.running_page = ints(range(50, 50 + S))
        self.resume_page = np.zeros(S, np.int32)
        self.epoch = np.arange(70, 70 + S)
        self.kv_table, self.state_table = np.zeros((2, S, COLS), np.int32)
        self.deltas, self.num_deltas = np.zeros((3, 1000), np.int32), ints([0])
        self.kv_books, self.state_books = self.books(free_kv), self.books(free_state)
        self.moves, self.tally = np.zeros((2, S), np.int32), np.zeros(4, np.int32)
        self.rows, self.row_epoch = np.zeros((4, S), np.int32), np.zeros(S, np.int64)

    @staticmethod
    def books(free) -> np.ndarray:
        books = np.zeros((2, 60), np.int32)
        books[HELD, 1:] = 9
        books[HELD, 1 : free + 1] = 0
        books[FREE, : free + 1] = [free, *range(free, 0, -1)]  # page 1 is on top
        return books

    def plan(self, suffix="", begin=0, served=-1, num_rows=0, most_rows=S):
        """Returns the place where the pass stopped, and the slots that have rows."""
        place = kernel("plan_decode", suffix)(
            self.order, self.decodes, self.computed, self.last_computed, self.relocate, self.num_kv_pages,
            self.running_page, self.resume_page, self.epoch, self.kv_table, self.state_table, self.deltas,
            self.num_deltas, KV_AT, STATE_AT, RESUME_AT, self.kv_books, self.state_books, KV, BLOCK,
            self.moves, self.tally, begin, self.end, served, self.rows, self.row_epoch, num_rows, most_rows,
        )  # fmt: skip
        return place, self.rows[SLOT, : self.tally[host_decode.ROWS]].tolist()

    def changes(self) -> dict[int, int]:
        return dict(self.deltas[:2, : self.num_deltas[0]].T.tolist())

    def moved(self) -> list[list[int]]:
        return self.moves[:, : self.tally[host_decode.MOVES]].T.tolist()


@both
def test_a_row_without_need_takes_nothing(suffix):
    host = Host([5, 9, 14])
    before = host.kv_books.copy()
    assert host.plan(suffix) == (3, [0, 1, 2])
    assert host.rows[:, :3].tolist() == [[0, 1, 2], [5, 9, 14], [1] * 3, [1] * 3]
    assert host.row_epoch[:3].tolist() == [70, 71, 72]
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
    assert host.moved() == [[0, 50]] and host.running_page[0] == host.state_table[0, 2] == 1
    assert host.changes() == {STATE_AT + 2: 1} and host.resume_page[0] == 0


@both
def test_a_page_that_became_a_checkpoint_is_left_and_named(suffix):
    host = Host([5, 13], relocate=[1])
    assert host.plan(suffix) == (2, [0, 1])
    assert host.moved() == [[1, 51]] and host.resume_page[1] == 51 and not host.relocate.any()
    assert host.changes() == {RESUME_AT + 1: 51, STATE_AT + COLS + 1: 1}


@both
def test_who_does_not_decode_or_is_done_gets_no_row(suffix):
    host = Host([5, 6, 7, 9])
    host.decodes[1] = False
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
    assert Host([5, 6], free_kv=0).plan(suffix, num_rows=2, most_rows=2) == (2, [0, 0])


@quick
@given(
    st.lists(st.integers(1, 40), max_size=S), st.integers(0, 6), st.integers(0, 4),
    st.sets(st.integers(0, S - 1)), st.sets(st.integers(0, S - 1)), st.integers(0, S),
)  # fmt: skip
def test_compiled_and_plain_plan_alike(tokens, free_kv, free_state, relocate, idle, most_rows):
    hosts = []
    for suffix in ("", "_py"):
        host = Host(tokens, free_kv, free_state, relocate)
        host.decodes[list(idle)] = False
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


# -- counting -------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("block", "interval", "due"), [(8, 0, [2, 4]), (0, 0, []), (8, 12, [2, 3, 4]), (0, 12, [3])]
)
def test_the_tokens_of_a_plan_are_counted_and_boundaries_named(suffix, block, interval, due):
    rows = ints([[3, 1, 5, 0, 2], [0, 8, 15, 11, 7], [8, 3, 1, 1, 1], [1] * 5])
    computed, epoch, logprobs = (
        np.zeros(S, np.int32),
        np.arange(70, 70 + S),
        ints([0, 9, 2, 4, 8, 1, 9, 9]),
    )
    found, tally, row_epoch = np.zeros(S, np.int32), np.zeros(4, np.int32), np.zeros(5, np.int64)
    kernel("advance_rows", suffix)(
        computed, epoch, logprobs, block, interval, found, tally, rows, row_epoch, 5, 2
    )  # the first two rows are chunks
    assert computed.tolist() == [12, 11, 8, 8, 0, 16, 0, 0]
    assert row_epoch.tolist() == [73, 71, 75, 70, 72]
    assert found[: tally[host_decode.DUE]].tolist() == due and tally[host_decode.LOGPROBS] == 9


# -- commit ---------------------------------------------------------------------------------------------


class Results:
    """A step whose rows are drawn, and the slots behind it."""

    def __init__(self, seed: int, rows: int) -> None:
        draw = np.random.default_rng(seed)
        self.epoch = np.arange(70, 70 + S)
        self.tokens = np.zeros((S, 64), np.int32)
        self.prompt_len = draw.integers(1, 9, S).astype(np.int32)
        self.num_outputs = np.zeros(S, np.int32)
        self.max_tokens = draw.integers(1, 9, S).astype(np.int32)
        self.watched = draw.random(S) < 0.2
        self.stop_id = draw.integers(-1, 4, (S, 3)).astype(np.int32)
        slot = draw.permutation(S)[:rows]
        new = draw.integers(1, 4, rows)
        computed = np.maximum(self.prompt_len[slot] - new + draw.integers(0, 5, rows), 0)
        self.rows = ints([slot, computed, new, draw.integers(0, 2, rows)])
        self.row_epoch = self.epoch[slot] + (draw.random(rows) < 0.2)
        self.token = draw.integers(0, 9, rows + 2).astype(np.int32)  # longer than the step
        self.logprob = np.where(draw.random(rows + 2) < 0.1, np.nan, -1).astype(np.float32)
        self.heeded, self.filled = np.zeros((2, S), np.int32), np.zeros(S, np.int32)
        self.tally = np.zeros(5, np.int32)

    def commit(self, suffix: str) -> None:
        kernel("commit_rows", suffix)(
            self.epoch, self.tokens, self.prompt_len, self.num_outputs, self.max_tokens, self.watched,
            self.stop_id, KV, self.heeded, self.filled, self.tally, self.rows, self.row_epoch,
            self.rows.shape[1], self.token, self.logprob,
        )  # fmt: skip


@both
@quick
@given(seed=st.integers(0, 2**32), num_rows=st.integers(0, S))
def test_a_commit_stores_and_names_what_numpy_does(suffix, seed, num_rows):
    got, want = Results(seed, num_rows), Results(seed, num_rows)
    got.commit(suffix)
    slot, computed, new, samples = want.rows
    token, logprob = want.token[:num_rows], want.logprob[:num_rows]
    alive, after = want.epoch[slot] == want.row_epoch, computed + new
    rows = np.nonzero(alive & (samples != 0))[0]
    slots, tokens = slot[rows], token[rows]
    want.tokens[slots, after[rows]] = tokens
    want.num_outputs[slots] = outputs = after[rows] + 1 - want.prompt_len[slots]
    stopped = (want.stop_id[slots] == tokens[:, None]).any(axis=1)
    ended = outputs >= want.max_tokens[slots]
    heeded = stopped | ended | (outputs == 1) | want.watched[slots] | np.isnan(logprob[rows])
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
