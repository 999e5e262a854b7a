"""Pieces of rows: together every visible position once, about equally long, within the fixed grid."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from midstream.ops.paged_attention_split import find_piece, piece_range, rows_per_turn

TILE = 4
NO_PIECE = -7


@triton.jit
def _list_pieces(
    found_ptr,  # i32[programs, 4]  row, number of its pieces, begin, end
    row_slot_ptr, position_ptr, num_rows, spare, window,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    row, piece, size = find_piece(
        number, row_slot_ptr, position_ptr, num_rows, spare, window, WINDOW, ROWS, TILE
    )
    if row >= num_rows:
        return
    pieces, begin, end = piece_range(tl.load(position_ptr + row), piece, size, window, WINDOW, TILE)
    tl.store(found_ptr + 4 * number, row)
    tl.store(found_ptr + 4 * number + 1, pieces)
    tl.store(found_ptr + 4 * number + 2, begin)
    tl.store(found_ptr + 4 * number + 3, end)


def pieces_of(lengths, spare, window, rows_of_turn, device):
    """(row, pieces, begin, end) of every program that has work; length 0 is a padded row."""
    rows = len(lengths)
    slot = torch.tensor([0 if n else -1 for n in lengths], dtype=torch.int32, device=device)
    position = torch.tensor([max(0, n - 1) for n in lengths], dtype=torch.int32, device=device)
    found = torch.full((rows + spare, 4), NO_PIECE, dtype=torch.int32, device=device)
    _list_pieces[(rows + spare,)](
        found, slot, position, rows, spare, window, WINDOW=window > 0, ROWS=rows_of_turn, TILE=TILE
    )
    return [tuple(piece) for piece in found.tolist() if piece[0] != NO_PIECE]


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=20),
    spare=st.integers(1, 9),
    window=st.sampled_from([0, 1, 3, 4, 10, 99]),
)
@example(lengths=[20], spare=3, window=0)  # 5 tiles in 3 pieces
@example(lengths=[20] * 17, spare=9, window=18)  # more rows than a turn
def test_pieces_cover_every_visible_position_once(lengths, spare, window):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pieces = pieces_of(lengths, spare, window, 16, device)
    visible = [range(max(0, n - window) if window else 0, n) for n in lengths]
    covered = [[] for _ in lengths]
    for row, count, begin, end in pieces:
        assert begin < end, "a piece without work"
        assert count == sum(other[0] == row for other in pieces)
        covered[row] += range(begin, end)
    assert covered == [list(positions) for positions in visible]
    tiles = [triton.cdiv(len(positions), TILE) for positions in visible]
    assert all(
        end - begin <= TILE * max(1, triton.cdiv(sum(tiles), spare)) for *_, begin, end in pieces
    )


def test_one_long_row_among_short_ones_takes_all_programs_to_spare(device):
    pieces = pieces_of([4] * 9 + [160] + [4] * 9, 12, 0, 16, device)
    long = [end - begin for row, _, begin, end in pieces if row == 9]
    assert len(long) >= 8 and max(long) - min(long) <= TILE
    assert len(pieces) == 18 + len(long)


def test_a_single_row_is_cut_into_one_piece_per_program(device):
    pieces = pieces_of([64 * TILE], 16, 0, 16, device)
    assert [end - begin for *_, begin, end in pieces] == [4 * TILE] * 16


@pytest.mark.parametrize(
    ("rows", "turn"), [(1, 16), (16, 16), (33, 64), (1024, 1024), (9000, 1024)]
)
def test_rows_of_a_turn_are_a_power_of_two_within_limits(rows, turn):
    assert rows_per_turn(rows) == turn
