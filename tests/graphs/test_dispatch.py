"""
Which form each step runs in, and which graph it replays: the vectors F-1 to F-4, and where ours differ.

The reference names modes by how decode steps and mixed steps run.  In our words they are `Forms`: FULL is
whole/whole/whole, FULL_AND_PIECEWISE whole/pieces/pieces, FULL_DECODE_ONLY whole/eager/eager, PIECEWISE
pieces throughout, NONE eager throughout.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream import UnsupportedError
from midstream.graphs.dispatch import (
    MODES,
    Forms,
    GraphKey,
    Ladder,
    Support,
    decode_key,
    decode_sizes,
    resolve_forms,
    smallest_fit,
    weakened,
)
from midstream.graphs.ladder import chunk_ladder, is_late, ladder, ladder_of

SIZES = (1, 2, 4, 8, 16, 24, 32)
MAX_ROWS = 16
FULL = Forms("whole", "whole", "whole")
FULL_AND_PIECEWISE = Forms("whole", "pieces", "pieces")
FULL_DECODE_ONLY = Forms("whole", "eager", "eager")
PIECEWISE = Forms("pieces", "pieces", "pieces")


def reference_ladder(forms: Forms, drafts: int = 0) -> Ladder:
    """The sizes of the vectors: chunk graphs take any mix of up to 16 requests."""
    decode = tuple(
        decode_key(rows, drafts, forms.decode == "pieces")
        for rows in decode_sizes(SIZES, MAX_ROWS, drafts)
    )
    chunk = tuple(GraphKey(n, MAX_ROWS, 64, in_pieces=True) for n in SIZES)
    return Ladder(decode, chunk if forms.short == "pieces" else ())


def chunks(tokens: int, rows: int) -> GraphKey:
    return GraphKey(tokens, rows, rows)


# -- F-1 to F-3: sizes ------------------------------------------------------------------------------


def test_f1_decode_replays_whole_graphs_and_mixed_steps_graphs_in_pieces() -> None:
    graphs = reference_ladder(FULL_AND_PIECEWISE)
    assert graphs.decode_step(5) == decode_key(8)
    assert graphs.decode_step(16) == decode_key(16)
    for tokens, rows, padded in ((20, 3, 24), (7, 1, 8)):
        found = graphs.chunk_step(chunks(tokens, rows))
        assert found is not None and found.in_pieces and found.tokens == padded
    assert graphs.chunk_step(chunks(40, 3)) is None


def test_f2_without_graphs_for_mixed_steps_only_decode_has_one() -> None:
    graphs = reference_ladder(FULL_DECODE_ONLY)
    assert graphs.decode_step(5) == decode_key(8)
    assert graphs.chunk_step(chunks(20, 3)) is None


def test_f2_in_pieces_every_step_is_padded_to_the_same_sizes() -> None:
    graphs = reference_ladder(PIECEWISE)
    assert graphs.decode_step(5) == decode_key(8, in_pieces=True)
    assert graphs.decode_step(16) == decode_key(16, in_pieces=True)
    found = [graphs.chunk_step(chunks(*step)) for step in ((20, 3), (7, 1))]
    assert [(k.tokens, k.in_pieces) for k in found if k] == [(24, True), (8, True)]


def test_f3_decode_sizes_are_multiples_of_one_and_the_drafts() -> None:
    graphs = reference_ladder(FULL_AND_PIECEWISE, drafts=3)
    captured = [(key.tokens, key.rows) for key in graphs.decode]
    assert captured == [(4, 1), (8, 2), (16, 4), (24, 6), (32, 8)]
    assert all(key.tokens_per_row == 4 for key in graphs.decode)
    assert graphs.decode_step(3, 4) == decode_key(4, drafts=3)
    assert graphs.decode_step(5, 4) == decode_key(6, drafts=3)
    assert graphs.decode_step(9, 4) is None
    assert graphs.chunk_step(chunks(9, 3)) == GraphKey(16, MAX_ROWS, 64, in_pieces=True)
    # plain decode is another step than verifying drafts, whatever its number of tokens
    assert graphs.decode_step(4, 1) is None


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_every_batch_of_verifying_rows_has_a_graph_up_to_the_largest(drafts: int) -> None:
    """Fault G4: ladder sizes that are no multiples of 1 + drafts leave batches without a graph."""
    sizes = (1, 2, 4, 8, 16, 24)
    keys = tuple(decode_key(n, drafts) for n in decode_sizes(sizes, 24, drafts))
    graphs = Ladder(keys)
    for rows in range(1, 24 // (1 + drafts) + 1):
        found = graphs.decode_step(rows, 1 + drafts)
        assert found is not None and found.rows >= rows
        assert found.tokens == found.rows * (1 + drafts)


# -- F-4: modes -------------------------------------------------------------------------------------

LEVELS = [  # support, drafts
    (Support.ALWAYS, 0),
    (Support.EQUAL_ROWS, 0),
    (Support.ONE_TOKEN, 0),
    (Support.ONE_TOKEN, 3),
    (Support.NEVER, 0),
]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (FULL, [FULL, FULL_AND_PIECEWISE, FULL_AND_PIECEWISE, PIECEWISE]),
        (FULL_AND_PIECEWISE, [*[FULL_AND_PIECEWISE] * 3, PIECEWISE, PIECEWISE]),
        (PIECEWISE, [PIECEWISE] * 5),
    ],
)
def test_f4_the_weakest_op_decides_row_by_row(asked: Forms, expected: list[Forms]) -> None:
    for (support, drafts), forms in zip(LEVELS, expected, strict=False):
        assert weakened(asked, support, drafts) == forms, support


def test_f4_where_short_steps_give_up_whole_graphs_longer_ones_run_in_pieces_as_well() -> None:
    assert resolve_forms("full", Support.EQUAL_ROWS) == FULL_AND_PIECEWISE
    assert resolve_forms("full", Support.ONE_TOKEN, drafts=3) == PIECEWISE


def test_f4_whole_graphs_that_no_op_allows_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="choose graphs='piecewise'"):
        resolve_forms("full", Support.NEVER)
    assert resolve_forms("full+piecewise", Support.NEVER) == PIECEWISE


def test_f4_without_a_place_to_split_only_decode_stays_whole() -> None:
    assert weakened(FULL, Support.EQUAL_ROWS, can_split=False) == FULL_DECODE_ONLY


@pytest.mark.parametrize(("support", "drafts"), LEVELS)
def test_f4_steps_that_were_not_asked_for_stay_without_graphs(
    support: Support, drafts: int
) -> None:
    """Ours on purpose: FULL_DECODE_ONLY turns into PIECEWISE in the reference, where mixed steps then get
    graphs that nobody asked for.  Ours gives pieces to the decode steps and leaves the others eager."""
    forms = weakened(FULL_DECODE_ONLY, support, drafts)
    assert (forms.short, forms.long) == ("eager", "eager")
    in_pieces = drafts > 0 or support == Support.NEVER
    assert forms.decode == ("pieces" if in_pieces else "whole")


def test_our_modes_are_the_references_where_short_prompts_are_whole_too() -> None:
    """Ours on purpose: "full+piecewise" captures short chunk steps whole, which the reference does for
    FULL only; ops take tables, so one graph serves every mix of rows.  A step that is bound by launches
    then has one launch, where pieces would have two for each layer."""
    assert MODES["off"] == Forms("eager", "eager", "eager")
    assert MODES["piecewise"] == PIECEWISE
    assert MODES["full"] == FULL
    assert MODES["full+piecewise"] == replace(FULL_AND_PIECEWISE, short="whole")


@pytest.mark.parametrize("mode", MODES)
def test_ops_that_can_always_be_captured_leave_every_mode_as_it_is(mode: str) -> None:
    assert resolve_forms(mode) == MODES[mode]


# -- state, not shape --------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens_per_row", [1, 4])
def test_a_prompt_chunk_shaped_like_decode_gets_a_chunk_graph(tokens_per_row: int) -> None:
    """Fault G5.  The reference counts a one-token prompt tail over existing state as decode; ours never
    does, at the cost of a chunk graph's launch, so that no shape can be taken for another state."""
    drafts = tokens_per_row - 1
    graphs = Ladder((decode_key(8, drafts),), (GraphKey(64, 8, 18),))
    shape = GraphKey(2 * tokens_per_row, rows=2, chunks=2)
    assert graphs.chunk_step(shape) == GraphKey(64, 8, 18)
    assert graphs.decode_step(2, tokens_per_row) == decode_key(8, drafts)


# -- sizes -------------------------------------------------------------------------------------------


@given(st.integers(1, 70), st.sets(st.integers(1, 64), min_size=1))
def test_rows_are_padded_to_the_next_size_that_holds_them(rows: int, sizes: set[int]) -> None:
    fitting = [size for size in sizes if size >= rows]
    found = Ladder(tuple(map(decode_key, sorted(sizes)))).decode_step(rows)
    assert (found.rows if found else None) == min(fitting, default=None)


SHAPES = st.builds(GraphKey, st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))


@given(SHAPES, st.sets(SHAPES))
def test_the_smallest_fit_holds_the_step_in_every_dimension(
    needed: GraphKey, keys: set[GraphKey]
) -> None:
    found = smallest_fit(needed, sorted(keys))
    fitting = [
        key
        for key in keys
        if key.tokens >= needed.tokens and key.rows >= needed.rows and key.chunks >= needed.chunks
    ]
    assert found == min(fitting, default=None)


@pytest.mark.parametrize("short", ["tokens", "rows", "chunks"])
def test_a_graph_that_is_one_too_small_in_one_dimension_does_not_fit(short: str) -> None:
    needed = GraphKey(64, 8, 18)
    assert smallest_fit(needed, [needed]) == needed
    assert smallest_fit(needed, [replace(needed, **{short: getattr(needed, short) - 1})]) is None


def test_keys_are_ordered_by_tokens_first_and_whole_graphs_before_pieces() -> None:
    assert sorted([GraphKey(2, 1, 9), GraphKey(1, 9, 0), GraphKey(2, 1, 3)])[0].tokens == 1
    assert decode_key(5) == GraphKey(tokens=5, rows=5, chunks=0)
    assert GraphKey(64, 8, 18) < GraphKey(64, 8, 18, in_pieces=True)


@given(
    st.sampled_from(list(MODES)), st.integers(1, 300), st.integers(1, 3000), st.integers(1, 3000)
)
def test_every_mode_has_ascending_sizes_within_its_bounds(
    mode: str, max_rows: int, max_step_tokens: int, graph_tokens: int
) -> None:
    graphs = ladder_of(MODES[mode], max_rows, max_step_tokens, graph_tokens)
    limit = min(max_step_tokens, graph_tokens)
    for keys in (graphs.decode, graphs.chunk):
        assert list(keys) == sorted(set(keys))
    assert all(key.tokens <= max_step_tokens for key in graphs.decode)
    assert all(key.tokens <= limit + 7 for key in graphs.chunk)
    if limit >= 64 and mode != "off":  # a full step has a graph
        assert graphs.chunk_step(GraphKey(limit, min(max_rows, 8), 2)) is not None
    assert bool(graphs.keys) == (mode != "off")
    if graphs.decode:  # a decode step has no more rows than a step has tokens
        assert graphs.decode[-1].rows == min(max_rows, max_step_tokens)


def test_the_sizes_of_each_mode() -> None:
    whole, pieces = chunk_ladder(32, 8192), chunk_ladder(32, 8192, in_pieces=True)
    long = [768, 1024, 1280, 1536, 1792, 2048, 2560, 3000]
    graphs = {mode: ladder_of(MODES[mode], 32, 8192, 3000) for mode in MODES}
    assert graphs["full"].decode == tuple(map(decode_key, ladder(32)))
    assert graphs["full"].chunk == (*whole, *chunk_ladder(32, 3000, long))
    assert graphs["full+piecewise"].decode == graphs["full"].decode
    assert graphs["full+piecewise"].chunk == (*whole, *chunk_ladder(32, 3000, long, in_pieces=True))
    assert graphs["piecewise"].chunk[: len(pieces)] == pieces
    assert all(key.in_pieces for key in graphs["piecewise"].keys)
    assert [(k.rows, k.chunks) for k in graphs["piecewise"].chunk[-2:]] == [(8, 109), (32, 157)]


def test_steps_of_long_prompts_and_pieces_are_captured_late() -> None:
    late = {str(mode): [] for mode in MODES}
    for mode, forms in MODES.items():
        late[mode] = [key.tokens for key in ladder_of(forms, 8, 8192, 1024).keys if is_late(key)]
    assert late["full"] == late["full+piecewise"] == [768, 1024]
    assert late["piecewise"] == [64, 128, 256, 512, 768, 1024]


def test_padding_costs_long_prompts_a_third_at_most() -> None:
    graphs = ladder_of(MODES["full"], 8, 40000, 40000)
    for tokens in range(513, 40001):
        key = graphs.chunk_step(GraphKey(tokens, 1, 1))
        assert key is not None and (key.tokens <= 1.34 * tokens or key.tokens == 768)
