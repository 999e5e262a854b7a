"""host_rows: compiled kernels against plain loops over lists."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from midstream.ops import host_decode, host_rows
from midstream.ops.host_rows import REFUSED

NAMES = [
    "fill_deltas", "fill_decode_step", "fill_token_rows", "fill_chunks", "pad_step",
]  # fmt: skip
NO_DELTAS = np.zeros((3, 0), np.int32), np.zeros(1, np.int32), 0
JUNK = -77
both = pytest.mark.parametrize("suffix", ["", "_py"], ids=["compiled", "plain"])
quick = settings(max_examples=60, deadline=None)  # the first call of a kernel compiles it

rows_of_tokens = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 150)), max_size=6)


def kernel(name, suffix):
    return getattr(host_rows, name + suffix)


def ints(values) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def junk(*shape) -> np.ndarray:
    return np.full(shape, JUNK, dtype=np.int32)


def plan_rows(slot, num_computed, num_new, samples=0, kv_slot=0, page=0) -> np.ndarray:
    """Rows of a plan, and columns of junk behind them."""
    rows = junk(host_decode.ROW_FIELDS, len(slot) + 2)
    for field, values in (
        (host_decode.SLOT, slot), (host_decode.COMPUTED, num_computed), (host_decode.NEW, num_new),
        (host_decode.SAMPLES, samples), (host_decode.KV_SLOT, kv_slot),
        (host_decode.PAGE, page),
    ):  # fmt: skip
        rows[field, : len(slot)] = values
    return rows


def starts_of(lengths) -> np.ndarray:
    return ints([0, *itertools.accumulate(lengths)])


@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_has_a_plain_twin(name):
    assert callable(kernel(name, "_py"))
    assert kernel(name, "").nopython_signatures is not None
    assert not hasattr(kernel(name, "_py"), "nopython_signatures")


class Area:
    """A flat area whose fields have room for `rows`, `tokens` and `chunks`, full of junk."""

    def __init__(self, rows=0, tokens=0, chunks=0):
        more = {"row_start": rows + 1, "row_chunk": rows + 1, "chunk_start": chunks + 1}
        more |= dict.fromkeys(("token_id", "position", "kv_slot"), tokens)
        more |= dict.fromkeys(("chunk_row", "chunk_page"), chunks)
        sizes = [more.get(name, rows) for name in host_rows.FIELDS]
        self.start = np.cumsum([0, *sizes])
        self.words = junk(int(self.start[-1]))
        self.both = self.words, self.start

    def __getitem__(self, name) -> np.ndarray:
        field = host_rows.FIELDS.index(name)
        return self.words[self.start[field] : self.start[field + 1]]

    def filled(self) -> dict[str, list[int]]:
        """Fields of which anything was written."""
        fields = {name: self[name].tolist() for name in host_rows.FIELDS}
        return {name: words for name, words in fields.items() if set(words) - {JUNK}}


@both
@quick
@given(
    rows=rows_of_tokens,
    num_known=st.integers(0, 6),
    kv_block=st.integers(1, 40),
    seed=st.integers(0, 9),
)
def test_token_rows_follow_the_tables(suffix, rows, num_known, kv_block, seed):
    rows = [(n, m if row < num_known else 1) for row, (n, m) in enumerate(rows)]
    rng = np.random.default_rng(seed)
    slots = rng.permutation(8)[: len(rows)].tolist()
    table = rng.integers(1, 5000, (8, 350 // kv_block + 1)).astype(np.int32)
    tokens = rng.integers(0, 5000, (8, 351)).astype(np.int32)
    samples = rng.integers(0, 2, len(rows)).astype(np.int32)
    lengths = [m for _, m in rows]
    planned = rng.integers(1, 5000, len(rows))  # where the tokens of decoding rows go
    area = Area(len(rows) + 1, sum(lengths) + 2)
    total = kernel("fill_token_rows", suffix)(
        plan_rows(slots, [n for n, _ in rows], lengths, samples, planned, planned + 7), len(rows), tokens,
        num_known, table, *area.both, kv_block,
    )  # fmt: skip
    places = [(slot, p) for slot, (n, m) in zip(slots, rows, strict=True) for p in range(n, n + m)]
    known = sum(lengths[:num_known])
    token_id = [int(tokens[slot, p]) for slot, p in places[:known]] + [-1] * (total - known)
    kv_slot = [
        int(table[slot, p // kv_block]) * kv_block + p % kv_block for slot, p in places[:known]
    ]
    kv_slot += planned[num_known:].tolist()
    starts = starts_of(lengths).tolist()
    assert total == sum(lengths)
    assert area.filled() == {
        name: words
        for name, words in {
            "row_slot": [*slots, JUNK],
            "row_start": [*starts, JUNK],
            "row_sample": [*samples.tolist(), JUNK],
            "write_page": [*(planned + 7).tolist(), JUNK],
            "sample_token": [*(start - 1 for start in starts[1:]), JUNK],
            "token_id": [*token_id, JUNK, JUNK],
            "position": [*(p for _, p in places), JUNK, JUNK],
            "kv_slot": [*kv_slot, JUNK, JUNK],
        }.items()
        if set(words) - {JUNK}
    }


@both
@pytest.mark.parametrize(("rows", "padded"), [(13, 16), (13, 13), (1, 2), (0, 2)])
def test_decode_rows_equal_the_separate_kernels(suffix, rows, padded):
    rng = np.random.default_rng(rows)
    plan = plan_rows(
        rng.permutation(20)[:rows],
        rng.integers(0, 200, rows),
        1,
        1,
        *rng.integers(1, 999, (2, rows)),
    )
    area = Area(max(padded, 3))
    deltas = ints([[5, 4, 3], [50, 40, 30], [0, 0, 0]]), ints([2])
    fill = kernel("fill_decode_step", suffix)
    assert fill(plan, rows, *deltas, 2, *area.both, padded) == 2
    want, table = Area(max(padded, 3), padded + 1), np.zeros((20, 0), np.int32)
    host_rows.fill_token_rows_py(plan, rows, table, 0, table, *want.both, 16)
    host_rows.pad_step_py(*want.both, rows, rows, 0, padded, padded, 0)
    of_decode = {
        f"decode_{name}": [*want[name][:padded].tolist(), *[JUNK] * (max(padded, 3) - padded)]
        for name in ("token_id", "position", "kv_slot")
    }
    assert area["delta_count"][0] == 2 and area["delta_index"][:3].tolist() == [5, 4, JUNK]
    assert area["delta_value"][:3].tolist() == [50, 40, JUNK] and deltas[1][0] == 0
    assert fill(plan, rows, *deltas, 2, *area.both, padded) == area["delta_count"][0] == 0
    for name in ("delta_count", "delta_index", "delta_value"):
        area[name][:] = JUNK
    same = {
        name: want[name].tolist() for name in ("row_slot", "row_start", "write_page", "row_sample")
    }
    assert area.filled() == same | of_decode


@pytest.mark.parametrize("block", [1, 3, 7, 49, 64, 1312])
def test_columns_are_exact_without_a_division(block):
    compiled = njit(host_decode.col_of)
    counts = [n for k in (1, 2, 999, (2**31 - 2) // block) for n in (k * block - 1, k * block)]
    for tokens in [0, *counts]:
        assert host_decode.col_of(tokens, 1.0 / block) == tokens // block
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


def cut(suffix, rows, chunk, capacity):
    """Result of `fill_chunks` and the area that it filled."""
    exports = [e for row in rows for e in row[3]]
    area = Area(len(rows), chunks=capacity)
    area["row_start"][:] = starts_of([r[1] for r in rows])
    computed, lengths, written = ([r[i] for r in rows] for i in range(3))
    count = kernel("fill_chunks", suffix)(
        plan_rows([9] * len(rows), computed, lengths, page=written), len(rows),
        starts_of([len(r[3]) for r in rows]), ints([p for p, _ in exports]),
        ints([page for _, page in exports]), *area.both, chunk,
    )  # fmt: skip
    return count, area


@both
@quick
@given(rows=rows_with_exports(), chunk=st.sampled_from([64, 1, 50]))
def test_chunks_cover_rows_and_end_at_exports(suffix, rows, chunk):
    count, area = cut(suffix, rows, chunk, 2000)
    names = ("chunk_start", "chunk_row", "chunk_page", "row_chunk")
    chunk_start, chunk_row, chunk_page, row_chunk = (area[name].tolist() for name in names)
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
    assert cut(suffix, [(10, 20, 1000, exports)], 64, 50)[0] == REFUSED


@both
def test_chunks_beyond_the_capacity_are_refused(suffix):
    assert cut(suffix, [(0, 200, 1000, [])], 64, 3)[0] == REFUSED
    assert cut(suffix, [(0, 192, 1000, [])], 64, 3)[0] == 3


@both
def test_padding_fills_every_tail_and_nothing_else(suffix):
    area = Area(rows=5, tokens=7, chunks=6)
    kernel("pad_step", suffix)(*area.both, 2, 3, 4, 4, 6, 5)
    rest = [JUNK]
    assert area.filled() == {
        "row_slot": [JUNK] * 2 + [-1, -1] + rest,
        "row_start": [JUNK] * 3 + [3, 3] + rest,
        **{
            name: [JUNK] * 2 + [0, 0] + rest
            for name in ("write_page", "row_sample", "sample_token")
        },
        "token_id": [JUNK] * 3 + [0] * 3 + rest,
        "position": [JUNK] * 3 + [0] * 3 + rest,
        "kv_slot": [JUNK] * 3 + [-1] * 3 + rest,
        "chunk_start": [JUNK] * 5 + [3] + rest,
        "chunk_row": [JUNK] * 4 + [-1] + rest,
        "chunk_page": [JUNK] * 4 + [0] + rest,
        "row_chunk": [JUNK] * 3 + [4, 4] + rest,
    }


@both
@pytest.mark.parametrize(
    ("slot", "computed"),
    [(4, 0), (0, 40)],
    ids=["slot behind the table", "column behind the table"],
)
def test_an_index_behind_its_table_is_refused(suffix, slot, computed):
    table, tokens, area = np.ones((4, 10), np.int32), np.ones((9, 99), np.int32), Area(1, 1)
    fill, plan = kernel("fill_token_rows", suffix), plan_rows([slot], [computed], [1])
    assert fill(plan, 1, tokens, 1, table, *area.both, 4) == REFUSED


@both
def test_rows_and_tokens_beyond_the_fields_are_refused(suffix):
    table, tokens = np.ones((2, 10), np.int32), np.ones((2, 40), np.int32)
    plan, fill = plan_rows([0, 1], 0, 1), kernel("fill_token_rows", suffix)
    for rows, room, fits in ((1, 9, False), (2, 1, False), (2, 2, True)):
        result = fill(plan, 2, tokens, 2, table, *Area(rows, room).both, 4)
        assert (result == 2) == fits and (result == REFUSED) != fits
    fill = kernel("fill_decode_step", suffix)
    assert fill(plan, 2, *NO_DELTAS, *Area(1).both, 2) == REFUSED
    assert fill(plan, 2, *NO_DELTAS, *Area(2).both, 1) == REFUSED
    assert fill(plan, 2, *NO_DELTAS, *Area(2).both, 2) == 0
    one_delta = ints([[5], [50], [0]]), ints([1]), 0
    assert fill(plan, 2, *one_delta, *Area(2).both, 2) == REFUSED


@both
def test_deltas_leave_the_set_as_many_as_a_copy_holds(suffix):
    deltas, count, area = ints([[5, 4, 3], [50, 40, 30], [0, 0, 0]]), ints([3]), Area(4)
    fill = kernel("fill_deltas", suffix)
    assert fill(deltas, count, 2, *area.both) == count[0] == 1
    assert area["delta_count"][0] == 2 and area["delta_index"].tolist() == [4, 3, JUNK, JUNK]
    assert area["delta_value"].tolist() == [40, 30, JUNK, JUNK]
    assert fill(deltas, count, 2, *area.both) == count[0] == 0
    assert area["delta_count"][0] == 1 and area["delta_index"][0] == 5


@both
def test_a_row_without_known_tokens_decodes_one_token(suffix):
    table, tokens = np.ones((2, 10), np.int32), np.ones((2, 40), np.int32)
    fill, plan = kernel("fill_token_rows", suffix), plan_rows([0, 1], 0, [1, 2])
    assert fill(plan, 2, tokens, 2, table, *Area(2, 3).both, 4) == 3
    assert fill(plan, 2, tokens, 1, table, *Area(2, 3).both, 4) == REFUSED
    none = plan_rows([0, 1], 0, [1, 0])
    assert fill(none, 2, tokens, 1, table, *Area(2, 3).both, 4) == REFUSED
    assert fill(plan, 2, tokens[:, :1].copy(), 2, table, *Area(2, 3).both, 4) == REFUSED


def test_q1_threads_get_what_plain_python_gets():
    rng = np.random.default_rng(1)
    plan = plan_rows(
        rng.permutation(500), rng.integers(0, 900, 500), 1, 1, rng.integers(1, 999, 500)
    )
    table = rng.integers(1, 999, (500, 901), np.int32)

    def words(fill):
        area = Area(500, 500)
        assert fill(plan, 500, table, 300, table, *area.both, 16) == 500
        return area.words.tolist()

    want = words(host_rows.fill_token_rows_py)
    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(lambda _: words(host_rows.fill_token_rows), range(64)):
            assert got == want
