"""host_rows: compiled kernels against plain loops over lists, and against the device op."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from midstream.ops import host_rows
from midstream.ops.advance import advance, running_col
from midstream.ops.host_rows import REFUSED
from midstream.ops.testing import build_args

NAMES = [
    "fill_row_starts",
    "fill_positions",
    "fill_kv_slots",
    "fill_pages",
    "fill_chunks",
    "pad_rows",
    "pad_chunks",
    "fill_deltas",
    "fill_decode_rows",
]
ROW_FIELDS = (
    "row_slot",
    "row_start",
    "position",
    "kv_slot",
    "token_id",
    "read_page",
    "write_page",
)
both = pytest.mark.parametrize("suffix", ["", "_py"], ids=["compiled", "plain"])
quick = settings(max_examples=60, deadline=None)  # the first call of a kernel compiles it

rows_of_tokens = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 150)), max_size=6)


def kernel(name, suffix):
    return getattr(host_rows, name + suffix)


def ints(values) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def junk(*shape) -> np.ndarray:
    return np.full(shape, -77, dtype=np.int32)


def starts_of(lengths) -> np.ndarray:
    return ints([0, *itertools.accumulate(lengths)])


@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_has_a_plain_twin(name):
    assert callable(kernel(name, "_py"))
    assert kernel(name, "").nopython_signatures is not None
    assert not hasattr(kernel(name, "_py"), "nopython_signatures")


@both
@quick
@given(lengths=st.lists(st.integers(0, 99), max_size=9))
def test_row_starts_are_prefix_sums(suffix, lengths):
    row_start = junk(len(lengths) + 1)
    total = kernel("fill_row_starts", suffix)(ints(lengths), row_start)
    assert row_start.tolist() == starts_of(lengths).tolist()
    assert total == sum(lengths)


@both
@quick
@given(rows=rows_of_tokens)
def test_positions_count_on_from_the_computed_tokens(suffix, rows):
    computed, lengths = ints([n for n, _ in rows]), ints([m for _, m in rows])
    position = junk(sum(m for _, m in rows) + 2)
    kernel("fill_positions", suffix)(computed, lengths, starts_of(lengths), position)
    assert position.tolist() == [n + i for n, m in rows for i in range(m)] + [-77, -77]


@both
@quick
@given(rows=rows_of_tokens, kv_block=st.integers(1, 40), seed=st.integers(0, 9))
def test_kv_slots_follow_the_table(suffix, rows, kv_block, seed):
    rng = np.random.default_rng(seed)
    slots = rng.permutation(8)[: len(rows)]
    table = rng.integers(1, 5000, (8, 350 // kv_block + 1)).astype(np.int32)
    computed, lengths = ints([n for n, _ in rows]), ints([m for _, m in rows])
    kv_slot = junk(int(lengths.sum()) + 1)
    kernel("fill_kv_slots", suffix)(
        ints(slots), computed, lengths, starts_of(lengths), table, kv_block, kv_slot
    )
    want = [
        table[slot, p // kv_block] * kv_block + p % kv_block
        for slot, (n, m) in zip(slots, rows, strict=True)
        for p in range(n, n + m)
    ]
    assert kv_slot.tolist() == [*want, -77]


def plain_state(precopy: bool) -> dict:
    """Inputs of `advance` without drafts, as arrays; live rows only."""
    case = next(c for c in advance.cases if "k0" in c.id)
    args = build_args(case, torch.float32, torch.device("cpu")) | {"precopy": precopy}
    args["accepted"].fill_(1)
    return args


@both
@pytest.mark.parametrize("precopy", [True, False])
def test_pages_equal_those_of_advance(suffix, precopy):
    args = plain_state(precopy)
    live = (args["row_slot"] >= 0).numpy()
    lengths = args["row_start"].diff().numpy()[live]
    slot = args["row_slot"].numpy()[live]
    computed = args["computed"].numpy()[slot]
    state_col, resume = args["state_col"].numpy().copy(), args["resume_page"].numpy().copy()
    read_page, write_page = junk(len(slot)), junk(len(slot))
    table, block = args["state_table"].numpy(), args["block"]
    moves = kernel("fill_pages", suffix)(
        slot, computed, lengths, state_col, resume, table, block, precopy, read_page, write_page
    )
    advance.reference(**args)
    assert read_page.tolist() == args["read_page"].numpy()[: len(live)][live].tolist()
    assert write_page.tolist() == args["write_page"].numpy()[: len(live)][live].tolist()
    assert state_col.tolist() == args["state_col"].tolist()
    assert resume.tolist() == args["resume_page"].tolist()
    sources_elsewhere = plain_state(True)
    advance.reference(**sources_elsewhere)
    assert moves == int(sources_elsewhere["num_moves"]) > 2


@both
@pytest.mark.parametrize("precopy", [True, False])
@pytest.mark.parametrize(("block", "kv_block"), [(4, 3), (64, 16), (7, 7)])
def test_decode_rows_equal_the_separate_kernels(suffix, precopy, block, kv_block):
    rng = np.random.default_rng(block)
    slots, rows, padded = 20, 13, 16
    slot = rng.permutation(slots)[:rows].astype(np.int32)
    computed = rng.integers(0, 200, rows).astype(np.int32)
    computed[3] = 0
    state_col = junk(slots)
    state_col[slot] = [running_col(int(n), block) for n in computed]
    state_col[slot[5]] -= 1 if state_col[slot[5]] > 0 else 0  # a row that crosses a boundary
    resume = np.zeros(slots, np.int32)
    resume[slot[7]] = 4000
    state_table = rng.integers(1, 999, (slots, 201 // block + 1)).astype(np.int32)
    kv_table = rng.integers(1, 999, (slots, 201 // kv_block + 1)).astype(np.int32)
    ones, start = np.ones(rows, np.int32), starts_of([1] * rows)

    outs = [junk(padded + (name == "row_start")) for name in ROW_FIELDS]
    cols, used = state_col.copy(), resume.copy()
    moves = kernel("fill_decode_rows", suffix)(
        slot, computed, cols, used, state_table, kv_table, block, kv_block, precopy, *outs
    )
    got = dict(zip(ROW_FIELDS, outs, strict=True))

    position, kv_slot, read_page, write_page = (junk(rows) for _ in range(4))
    host_rows.fill_positions_py(computed, ones, start, position)
    host_rows.fill_kv_slots_py(slot, computed, ones, start, kv_table, kv_block, kv_slot)
    want_moves = host_rows.fill_pages_py(
        slot, computed, ones, state_col, resume, state_table, block, precopy, read_page, write_page
    )
    pad = padded - rows
    assert got["row_slot"].tolist() == [*slot, *[-1] * pad]
    assert got["row_start"].tolist() == [*start, *[rows] * pad]
    assert got["position"].tolist() == [*position, *[0] * pad]
    assert got["kv_slot"].tolist() == [*kv_slot, *[-1] * pad]
    assert got["token_id"].tolist() == [*[-1] * rows, *[0] * pad]
    assert got["read_page"].tolist() == [*read_page, *[0] * pad]
    assert got["write_page"].tolist() == [*write_page, *[0] * pad]
    assert (moves, cols.tolist(), used.tolist()) == (
        want_moves,
        state_col.tolist(),
        resume.tolist(),
    )


@pytest.mark.parametrize("block", [1, 3, 7, 49, 64, 1312])
def test_columns_are_exact_without_a_division(block):
    compiled = njit(host_rows._col_of)
    counts = [n for k in (1, 2, 999, (2**31 - 2) // block) for n in (k * block - 1, k * block)]
    for tokens in [0, *counts]:
        assert host_rows._col_of(tokens, 1.0 / block) == tokens // block
        assert compiled(tokens, 1.0 / block) == tokens // block


@st.composite
def rows_with_exports(draw):
    """Rows of (computed, length, write page, exports); exports ascend, the last may end the row."""
    rows = []
    for row in range(draw(st.integers(0, 4))):
        computed, length = draw(st.integers(0, 300)), draw(st.integers(0, 300))
        inside = st.integers(computed + 1, computed + max(length, 1))
        places = sorted(draw(st.sets(inside, max_size=4))) if length else []
        write = 1000 + row
        exports = [(p, write if p == computed + length else 2000 + p) for p in places]
        rows.append((computed, length, write, exports))
    return rows


def chunk_args(rows, capacity):
    exports = [e for row in rows for e in row[3]]
    inputs = [
        starts_of([r[1] for r in rows]),
        *(ints([r[i] for r in rows]) for i in range(3)),
        starts_of([len(r[3]) for r in rows]),
        ints([p for p, _ in exports]),
        ints([page for _, page in exports]),
    ]
    outs = [junk(capacity + 1), junk(capacity), junk(capacity), junk(len(rows) + 1)]
    return inputs, outs


@both
@quick
@given(rows=rows_with_exports(), chunk=st.sampled_from([64, 1, 50]))
def test_chunks_cover_rows_and_end_at_exports(suffix, rows, chunk):
    inputs, outs = chunk_args(rows, 2000)
    count = kernel("fill_chunks", suffix)(*inputs, chunk, *outs)
    chunk_start, chunk_row, chunk_page, row_chunk = (out.tolist() for out in outs)
    first_token = 0
    for row, (computed, length, write, exports) in enumerate(rows):
        chunks = range(row_chunk[row], row_chunk[row + 1])
        bounds = [chunk_start[c] for c in chunks]
        bounds.append(chunk_start[row_chunk[row + 1]])
        assert bounds[0] == first_token and bounds[-1] == first_token + length
        assert all(0 < b - a <= chunk for a, b in itertools.pairwise(bounds))
        assert [chunk_row[c] for c in chunks] == [row] * len(chunks)
        ends = [computed + b - first_token for b in bounds[1:]]
        written = {e: chunk_page[c] for e, c in zip(ends, chunks, strict=True) if chunk_page[c]}
        assert written == dict(exports) | ({computed + length: write} if length else {})
        first_token += length
    assert count == row_chunk[-1]


@both
@pytest.mark.parametrize(
    ("exports", "why"),
    [
        ([(10, 5)], "at the tokens before the row"),
        ([(9, 5)], "before the row"),
        ([(31, 5)], "behind the row"),
        ([(20, 5), (15, 6)], "descending"),
        ([(20, 5), (20, 6)], "twice"),
        ([(30, 5)], "at the end, to another page than the row's"),
    ],
)
def test_chunks_refuse_exports_that_cannot_be_cut(suffix, exports, why):
    inputs, outs = chunk_args([(10, 20, 1000, exports)], 50)
    assert kernel("fill_chunks", suffix)(*inputs, 64, *outs) == REFUSED


@both
def test_chunks_beyond_the_capacity_are_refused(suffix):
    inputs, outs = chunk_args([(0, 200, 1000, [])], 3)
    assert kernel("fill_chunks", suffix)(*inputs, 64, *outs) == REFUSED
    inputs, outs = chunk_args([(0, 192, 1000, [])], 3)
    assert kernel("fill_chunks", suffix)(*inputs, 64, *outs) == 3


@both
def test_padding_fills_every_tail(suffix):
    rows, tokens = 2, 3
    row_slot, read, write = ints([7, 8, 9, 9]), ints([5, 5, 5, 5]), ints([6, 6, 6, 6])
    row_start, token_id = ints([0, 1, 3, 9, 9]), ints([4, 4, 4, 9, 9])
    position, kv_slot = ints([1, 1, 1, 9, 9]), ints([2, 2, 2, 9, 9])
    kernel("pad_rows", suffix)(
        rows, tokens, row_slot, row_start, read, write, token_id, position, kv_slot
    )
    assert row_slot.tolist() == [7, 8, -1, -1]
    assert row_start.tolist() == [0, 1, 3, 3, 3]
    assert read.tolist() == [5, 5, 0, 0] and write.tolist() == [6, 6, 0, 0]
    assert token_id.tolist() == [4, 4, 4, 0, 0]
    assert position.tolist() == [1, 1, 1, 0, 0]
    assert kv_slot.tolist() == [2, 2, 2, -1, -1]

    chunk_start, chunk_row = ints([0, 64, 99, 9, 9]), ints([0, 1, 9, 9])
    chunk_page, row_chunk = ints([0, 3, 9, 9]), ints([0, 1, 2, 9])
    kernel("pad_chunks", suffix)(rows, 2, chunk_start, chunk_row, chunk_page, row_chunk)
    assert chunk_start.tolist() == [0, 64, 99, 99, 99]
    assert chunk_row.tolist() == [0, 1, -1, -1]
    assert chunk_page.tolist() == [0, 3, 0, 0]
    assert row_chunk.tolist() == [0, 1, 2, 2]


@both
def test_deltas_name_word_and_value_of_every_changed_column(suffix):
    table = np.arange(40, dtype=np.int32).reshape(4, 10)
    index, value = junk(9), junk(9)
    index[0], value[0] = 3, 4  # of another table
    count = kernel("fill_deltas", suffix)(
        table, ints([3, 1, 0]), ints([8, 2, 5]), ints([10, 3, 5]), 500, index, value, 1
    )
    assert count == 4
    assert index[:count].tolist() == [3, 538, 539, 512]
    assert value[:count].tolist() == [4, 38, 39, 12]
    assert index[count:].tolist() == [-77] * 5


@both
def test_deltas_beyond_the_capacity_are_refused(suffix):
    table, index, value = np.zeros((4, 10), np.int32), junk(5), junk(5)
    call = kernel("fill_deltas", suffix)
    assert call(table, ints([0]), ints([0]), ints([6]), 0, index, value, 0) == REFUSED
    assert call(table, ints([0]), ints([0]), ints([5]), 0, index, value, 0) == 5


@both
@pytest.mark.parametrize(
    ("slot", "computed"),
    [(4, 0), (0, 40)],
    ids=["slot behind the table", "column behind the table"],
)
def test_an_index_behind_its_table_is_refused(suffix, slot, computed):
    table, col, resume = np.ones((4, 10), np.int32), junk(5), np.zeros(5, np.int32)
    row, one, start = ints([slot]), ints([1]), ints([0, 1])
    n = ints([computed])
    assert kernel("fill_kv_slots", suffix)(row, n, one, start, table, 4, junk(1)) == REFUSED
    assert (
        kernel("fill_pages", suffix)(row, n, one, col, resume, table, 4, True, junk(1), junk(1))
        == REFUSED
    )
    outs = [junk(1 + (name == "row_start")) for name in ROW_FIELDS]
    call = kernel("fill_decode_rows", suffix)
    assert call(row, n, col, resume, table, table, 4, 4, True, *outs) == REFUSED


@both
def test_more_tokens_than_the_buffer_holds_are_refused(suffix):
    n, m, start = ints([0]), ints([5]), ints([0, 5])
    assert kernel("fill_positions", suffix)(n, m, start, junk(4)) == REFUSED
    table = np.ones((1, 10), np.int32)
    assert kernel("fill_kv_slots", suffix)(n, n, m, start, table, 4, junk(4)) == REFUSED


def test_q1_threads_get_what_one_thread_gets():
    lengths = ints(np.arange(500) % 7)

    def starts(_):
        out = junk(501)
        return host_rows.fill_row_starts(lengths, out), out.tolist()

    with ThreadPoolExecutor(8) as pool:
        assert len({str(r) for r in pool.map(starts, range(64))}) == 1
