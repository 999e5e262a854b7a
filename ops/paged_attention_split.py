"""
Which row, and which of its positions, a program of paged_attention_decode works on.

The grid is fixed by shapes: one program per row and some to spare (per KV head).  How the rows are
cut follows from their lengths, which only the device knows: all of them into pieces of about equally
many tiles, so that one long row among short ones is shared by the programs to spare.

    size   = ceil(tiles of all rows / spare)     tiles of a piece at most
    pieces = ceil(tiles of a row / size)         of a row; together at most rows + spare

Programs take pieces in the order of rows.  Letters: R rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

_MOST_ROWS = 1024  # looked at in one turn
_FEWEST_ROWS = 16


def rows_per_turn(rows: int) -> int:
    """Rows that a program looks at in one turn, a power of two.

    >>> [rows_per_turn(rows) for rows in (1, 17, 5000)]
    [16, 32, 1024]
    """
    return max(_FEWEST_ROWS, min(_MOST_ROWS, triton.next_power_of_2(rows)))


@triton.jit
def _num_seen(position, window, WINDOW: tl.constexpr):
    """Positions that a row at `position` sees."""
    if WINDOW:
        return tl.minimum(position + 1, window)
    else:
        return position + 1


@triton.jit
def _tiles_of_rows(
    first, row_slot_ptr, position_ptr, num_rows, window,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Tiles of rows first..first + ROWS; none for padding."""
    row = first + tl.arange(0, ROWS)
    inside = row < num_rows
    slot = tl.load(row_slot_ptr + row, mask=inside, other=-1)
    position = tl.load(position_ptr + row, mask=inside, other=0)
    return tl.where(slot >= 0, tl.cdiv(_num_seen(position, window, WINDOW), TILE), 0)


@triton.jit
def find_piece(
    number,  # of the piece, over all rows
    row_slot_ptr,  # i32[>=R]
    position_ptr,  # i32[>=R]
    num_rows,
    spare,  # programs beyond one per row
    window,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Row of a piece (`num_rows`: no such piece), its place among the row's pieces, tiles of a piece."""
    tiles = 0
    for first in range(0, num_rows, ROWS):
        tiles += tl.sum(
            _tiles_of_rows(first, row_slot_ptr, position_ptr, num_rows, window, WINDOW, ROWS, TILE),
            0,
        )
    size = tl.maximum(tl.cdiv(tiles, spare), 1)
    row = 0
    before = 0  # pieces of the rows before that row
    passed = 0
    for first in range(0, num_rows, ROWS):
        tiles_of = _tiles_of_rows(
            first, row_slot_ptr, position_ptr, num_rows, window, WINDOW, ROWS, TILE
        )
        pieces = tl.cdiv(tiles_of, size)
        is_before = passed + tl.cumsum(pieces, 0) <= number
        row += tl.sum(is_before.to(tl.int32), 0)
        before += tl.sum(tl.where(is_before, pieces, 0), 0)
        passed += tl.sum(pieces, 0)
    return tl.minimum(row, num_rows), number - before, size


@triton.jit
def piece_range(position, piece, size, window, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Number of the row's pieces, and the positions [begin, end) of this one: whole tiles."""
    num_seen = _num_seen(position, window, WINDOW)
    tiles = tl.cdiv(num_seen, TILE)
    pieces = tl.cdiv(tiles, size)
    start = position + 1 - num_seen
    begin = start + piece * tiles // pieces * TILE
    end = tl.minimum(start + (piece + 1) * tiles // pieces * TILE, position + 1)
    return pieces, begin, end
