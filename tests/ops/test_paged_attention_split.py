"""Pieces of spans: together every visible position once, about equally long, within the fixed grid."""

from itertools import accumulate

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from midstream.ops.paged_attention_split import find_piece, piece_range, spans_per_turn

TILE = 4
NO_PIECE = -7


@triton.jit
def _list_pieces(
    found_ptr,  # i32[programs, 4]  span, number of its pieces, begin, end
    row_ptr, start_ptr, position_ptr, num_spans, spare, window,
    WINDOW: tl.constexpr, ROUND_UP: tl.constexpr, FEWEST: tl.constexpr,
    SPANS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    span, piece, size = find_piece(
        number, row_ptr, start_ptr, position_ptr, num_spans, spare, window,
        WINDOW, ROUND_UP, FEWEST, SPANS, TILE,
    )  # fmt: skip
    if span < 0:
        return
    head = span
    tail = span
    if start_ptr is not None:
        head = tl.load(start_ptr + span)
        tail = tl.load(start_ptr + span + 1) - 1
    pieces, begin, end = piece_range(
        tl.load(position_ptr + head), tl.load(position_ptr + tail), piece, size, window,
        WINDOW, ROUND_UP, TILE,
    )  # fmt: skip
    tl.store(found_ptr + 4 * number, span)
    tl.store(found_ptr + 4 * number + 1, pieces)
    tl.store(found_ptr + 4 * number + 2, begin)
    tl.store(found_ptr + 4 * number + 3, end)


def pieces_of(spans, spare, window, device, round_up=True, fewest=1):
    """(span, pieces, begin, end) of every program that has work.

    A span is (positions before it, its tokens), or None for padding; those of one token each are given
    as rows of a decode step.
    """
    chunks = any(span is not None and span[1] != 1 for span in spans)
    of_tokens = [span or (0, 0 if chunks else 1) for span in spans]
    numbers = {
        "row": [-1 if span is None else 0 for span in spans],
        "start": [0, *accumulate(new for _, new in of_tokens)],
        "position": [past + i for past, new in of_tokens for i in range(new)] or [0],
    }
    given = {n: torch.tensor(v, dtype=torch.int32, device=device) for n, v in numbers.items()}
    found = torch.full((len(spans) + spare, 4), NO_PIECE, dtype=torch.int32, device=device)
    _list_pieces[(len(found),)](
        found, given["row"], given["start"] if chunks else None, given["position"], len(spans), spare,
        window, WINDOW=window > 0, ROUND_UP=round_up, FEWEST=fewest,
        SPANS=16, TILE=TILE,
    )  # fmt: skip
    return [tuple(piece) for piece in found.tolist() if piece[0] != NO_PIECE]


def rows(*lengths):
    return [(length - 1, 1) for length in lengths]


past = st.integers(0, 40)
spans_of_a_step = st.one_of(
    st.lists(st.one_of(st.none(), st.tuples(past, st.just(1))), min_size=1, max_size=20),
    st.lists(st.one_of(st.none(), st.tuples(past, st.integers(0, 9))), min_size=1, max_size=20),
)


@settings(max_examples=24, deadline=None)
@given(
    spans=spans_of_a_step,
    spare=st.integers(1, 9),
    window=st.sampled_from([0, 1, 3, 4, 10, 99]),
    round_up=st.booleans(),
    fewest=st.sampled_from([1, 3]),
)
@example(spans=rows(20), spare=3, window=0, round_up=True, fewest=1)  # 5 tiles in 3 pieces
@example(spans=rows(20) * 35, spare=9, window=18, round_up=True, fewest=1)  # three turns
@example(spans=[(20, 9), None, (0, 0), (3, 9)] * 5, spare=9, window=10, round_up=False, fewest=1)
def test_pieces_cover_every_visible_position_once(spans, spare, window, round_up, fewest):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pieces = pieces_of(spans, spare, window, device, round_up, fewest)
    visible = [range(0)] * len(spans)
    for i, span in enumerate(spans):
        if span is not None and span[1]:
            start = max(0, span[0] + 1 - window) if window else 0
            visible[i] = range(start, sum(span))
    covered = [[] for _ in spans]
    for span, count, begin, end in pieces:
        assert begin < end, "a piece without work"
        assert count == sum(other[0] == span for other in pieces)
        covered[span] += range(begin, end)
    assert covered == [list(positions) for positions in visible]
    tiles = [triton.cdiv(len(positions), TILE) for positions in visible]
    size = max(triton.cdiv(sum(tiles), spare), fewest)
    most = size if round_up else size + size // 2
    assert all(end - begin <= TILE * most for *_, begin, end in pieces)
    assert round_up or all(tiles[i] >= size + triton.cdiv(size, 2) for i, n, *_ in pieces if n > 1)


def test_one_long_row_among_short_ones_takes_all_programs_to_spare(device):
    pieces = pieces_of(rows(*[4] * 9, 160, *[4] * 9), 12, 0, device)
    long = [end - begin for row, _, begin, end in pieces if row == 9]
    assert len(long) >= 8 and max(long) - min(long) <= TILE
    assert len(pieces) == 18 + len(long)


def test_a_single_row_is_cut_into_one_piece_per_program(device):
    pieces = pieces_of(rows(64 * TILE), 16, 0, device)
    assert [end - begin for *_, begin, end in pieces] == [4 * TILE] * 16


@pytest.mark.parametrize(
    ("spans", "turn"), [(1, 16), (16, 16), (33, 64), (1024, 1024), (9000, 1024)]
)
def test_spans_of_a_turn_are_a_power_of_two_within_limits(spans, turn):
    assert spans_per_turn(spans) == turn
