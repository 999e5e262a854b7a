"""
Which span of tokens, and which of the positions it sees, a program of paged attention works on.

A span is a row's one token in a decode step, or a chunk of a prompt.  The grid is fixed by shapes: one
program per span and some to spare (per KV head).  How spans are cut follows from the positions that they
see, which only the device knows: all of them into pieces of about equally many tiles, so that one long
span among short ones is shared by the programs to spare.

    size   = ceil(tiles of all spans / spare)     tiles of a piece, but for the rounding
    pieces = tiles of a span / size               of a span, rounded; together at most spans + spare

Rounded up, no piece is longer than `size`; rounded to the nearest, none is longer than 1.5 `size`, and no
shorter span is cut.  Programs take the last span first: late chunks of a prompt see most positions.  A span
of several pieces gets their softmaxes side by side, and `fold_pieces` adds them up.

Letters: Y spans, D width of a head.
"""

from __future__ import annotations

import triton
import triton.language as tl

_MOST_SPANS = 1024  # looked at in one turn
_FEWEST_SPANS = 16
_MOST_PIECES = 16  # folded in one turn
_FOLD_ELEMENTS = 2048  # of a turn


def spans_per_turn(spans: int) -> int:
    """Spans that a program looks at in one turn, a power of two.

    >>> [spans_per_turn(spans) for spans in (1, 17, 5000)]
    [16, 32, 1024]
    """
    return max(_FEWEST_SPANS, min(_MOST_SPANS, triton.next_power_of_2(spans)))


def rows_of_fold(rows: int, width: int) -> int:
    """Rows of up to `rows`, a power of two, that `fold_pieces` takes at once: a tile that registers hold.

    >>> [rows_of_fold(*tile) for tile in ((3, 64), (71, 64), (71, 256))]
    [4, 32, 8]
    """
    return max(1, min(triton.next_power_of_2(rows), _FOLD_ELEMENTS // width))


def turn_of_pieces(rows: int, width: int) -> int:
    """Pieces that `fold_pieces` takes in one turn: a tile that registers hold.

    >>> [turn_of_pieces(*tile) for tile in ((1, 64), (8, 64), (8, 256))]
    [16, 4, 1]
    """
    return max(1, min(_MOST_PIECES, _FOLD_ELEMENTS // (rows * width)))


@triton.jit
def _visible(first_position, last_position, window, WINDOW: tl.constexpr):
    """First position, and number of positions, that a token of a span sees."""
    if WINDOW:
        start = tl.maximum(first_position + 1 - window, 0)
        return start, last_position + 1 - start
    else:
        return 0, last_position + 1


@triton.jit
def _tiles_of_spans(
    first, row_ptr, start_ptr, position_ptr, num_spans, window,
    WINDOW: tl.constexpr, SPANS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Tiles of spans first..first + SPANS; none for padding and for spans of no token."""
    span = first + tl.arange(0, SPANS)
    used = span < num_spans
    used = used & (tl.load(row_ptr + span, mask=used, other=-1) >= 0)
    head = span
    tail = span
    if start_ptr is not None:
        head = tl.load(start_ptr + span, mask=used, other=0)
        tail = tl.load(start_ptr + span + 1, mask=used, other=0) - 1
        used = used & (head <= tail)
    first_position = tl.load(position_ptr + head, mask=used, other=0)
    last_position = tl.load(position_ptr + tail, mask=used, other=0)
    _, num_visible = _visible(first_position, last_position, window, WINDOW)
    return tl.where(used, tl.cdiv(num_visible, TILE), 0)


@triton.jit
def _num_pieces(tiles, size, ROUND_UP: tl.constexpr):
    """Pieces of a span of so many tiles."""
    if ROUND_UP:
        return tl.cdiv(tiles, size)
    else:
        return tl.where(tiles > 0, tl.maximum((tiles + size // 2) // size, 1), 0)


@triton.jit
def find_piece(
    number,  # of the piece, over all spans
    row_ptr,  # i32[>=Y]  negative: padding
    start_ptr,  # i32[>=Y + 1] first token of each span, or None: span i is token i
    position_ptr,  # i32[tokens]  rising in a span
    num_spans,
    spare,  # programs beyond one per span
    window,
    WINDOW: tl.constexpr,
    ROUND_UP: tl.constexpr,
    FEWEST: tl.constexpr,  # tiles of a piece
    SPANS: tl.constexpr,  # of a turn
    TILE: tl.constexpr,
):
    """Span of a piece (-1: no such piece), its place among the span's pieces, `size`."""
    tiles = 0
    for first in range(0, num_spans, SPANS):
        tiles += tl.sum(
            _tiles_of_spans(
                first, row_ptr, start_ptr, position_ptr, num_spans, window, WINDOW, SPANS, TILE
            ),
            0,
        )
    size = tl.maximum(tl.cdiv(tiles, spare), FEWEST)
    turns = tl.cdiv(num_spans, SPANS)
    span = turns * SPANS - 1
    before = 0  # pieces of the spans behind that span
    passed = 0
    for turn in range(0, turns):
        first = (turns - 1 - turn) * SPANS
        tiles_of = _tiles_of_spans(
            first, row_ptr, start_ptr, position_ptr, num_spans, window, WINDOW, SPANS, TILE
        )
        pieces = _num_pieces(tiles_of, size, ROUND_UP)
        is_behind = passed + tl.cumsum(pieces, 0, reverse=True) <= number
        span -= tl.sum(is_behind.to(tl.int32), 0)
        before += tl.sum(tl.where(is_behind, pieces, 0), 0)
        passed += tl.sum(pieces, 0)
    return span, number - before, size


@triton.jit
def piece_range(
    first_position,  # of the span's first token
    last_position,
    piece,
    size,
    window,
    WINDOW: tl.constexpr,
    ROUND_UP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Number of the span's pieces, and the positions [begin, end) of this one: whole tiles."""
    start, num_visible = _visible(first_position, last_position, window, WINDOW)
    tiles = tl.cdiv(num_visible, TILE)
    pieces = _num_pieces(tiles, size, ROUND_UP)
    begin = start + piece * tiles // pieces * TILE
    end = tl.minimum(start + (piece + 1) * tiles // pieces * TILE, last_position + 1)
    return pieces, begin, end


@triton.jit
def fold_pieces(
    part_ptr,  # f32[parts, D]  softmax over the positions of a piece
    part_log_ptr,  # f32[parts]  log2 of the sum of its weights, -inf where it saw none
    first,  # i64  part of the first row and piece; parts of more rows follow
    step,  # parts from piece to piece
    pieces,
    held,  # bool[ROWS]  rows that are read
    PIECES: tl.constexpr,  # of a turn
    ROWS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two >= D
):
    """f32[ROWS, WIDTH]: softmaxes over all positions.  Some piece of a row sees one."""
    lane = tl.arange(0, WIDTH)[None, None, :]
    row = tl.arange(0, ROWS)[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    for turn in range(0, pieces, PIECES):
        piece = turn + tl.arange(0, PIECES)[:, None]
        used = (piece < pieces) & held[None, :]
        at = first + piece * step
        part_log = tl.load(part_log_ptr + at + row, mask=used, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(part_log, 0))
        shift = tl.where(new_top > float("-inf"), new_top, 0.0)  # -inf minus -inf is no number
        weight = tl.exp2(part_log - shift[None, :])
        fade = tl.exp2(top - shift)
        mask = used[:, :, None] & (lane < D)
        value_ptr = part_ptr + (at * D)[:, :, None] + (row[:, :, None] * D + lane)
        value = tl.load(value_ptr, mask=mask, other=0.0)
        mixed = mixed * fade[:, None] + tl.sum(value * weight[:, :, None], 0)
        total = total * fade + tl.sum(weight, 0)
        top = new_top
    return mixed / tl.where(held, total, 1.0)[:, None]
