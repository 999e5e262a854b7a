"""
Move state pages: the temporal part of one page and the convolution part of one, per listed move.

Which pages move is decided before (`advance`, `post_copy`); this op only moves.  A move takes the
whole temporal page from `move_from[0]` and the convolution page from `move_from[1]`.
`move_shift` > 0 drops that many oldest rows of each convolution window: rows [shift, window_rows)
of the source become rows [0, window_rows - shift) of the destination, whose other rows keep their
content.  Source and destination of a move may be one page.

Moves of a list have no order.  So no page may be the destination of two moves, or the destination
of one and a source of another: a chain or a cycle has no meaning here.  The reference refuses such
a list; why `advance` and `post_copy` never make one is said in `ops/advance.py`.

Letters: R capacity of the list, N pages, E elements of a page.
Traffic: twice the bytes of a page per move, nothing when nothing moves.  No arithmetic: bit-exact.

Physics: at the copy rate of an H200 (4.2 TB/s, half of it reads) about 2 MB must be in flight to
cover a latency of 1 us, 16 KB per SM, and more in a loaded machine.  Many small programs with one
piece each do better than few that hold several.  All programs of an SM must be resident, or part of
the grid waits until the rest is done.  What a short move loses:
* the launch and the latencies of count, list and page, one after the other.  The list is read
  before the count is known, so that two of the three overlap.
* its tail.  Pieces are dealt to all programs in turn, over the borders of pages, so that programs
  differ by one piece at most.
Measured variants (larger pieces, fewer or more programs, cache hints, dealing by an atomic counter,
dependent launch, bulk copies): docs/log.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.errors import ContractError
from midstream.ops.page_words import (
    REGISTERS,
    WORD,
    as_dtype,
    copy_words,
    page_words,
    resident_programs,
    wide_offset,
)
from midstream.ops.registry import EXACT, NULL_PAGE, Args, OpCase, define_op

_PIECE_BYTES = 2048  # of a page that stay together
_WARPS = 2  # two 128-bit accesses of a thread move a piece
_PARTS = 8  # programs that share the window of one layer
_CONV_TILE = 512  # words of a convolution page that a program copies per turn
_WINDOW_TILE = 64  # words (else channels) of each row of a window that a program holds at once
_CARRIER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes an element


def page_move_ref(
    temporal: Tensor, conv: Tensor, move_from: Tensor, move_to: Tensor, move_shift: Tensor,
    num_moves: Tensor, conv_offset: Tensor, conv_width: Tensor, window_rows: int,
) -> None:  # fmt: skip
    """Say what the kernel means, one move at a time."""
    count = int(num_moves)
    check_unordered(move_from[:, :count], move_to[:count])
    for move in range(count):
        source, conv_source = move_from[:, move].tolist()
        target, shift = int(move_to[move]), int(move_shift[move])
        if source != target:
            temporal[target] = temporal[source]
        if shift == 0 and conv_source != target:
            conv[target] = conv[conv_source]
        for offset, width in zip(conv_offset.tolist(), conv_width.tolist(), strict=True):
            if shift > 0:
                region = slice(offset, offset + window_rows * width)
                window = conv[conv_source, region].view(window_rows, width)[shift:].clone()
                conv[target, region].view(window_rows, width)[: window_rows - shift] = window


def check_unordered(move_from: Tensor, move_to: Tensor) -> None:
    """Reads device values.

    Raises:
        ContractError: the result would depend on the order in which the moves are done.
    """
    sources, targets = move_from.T.tolist(), move_to.tolist()
    writer = dict(zip(targets, range(len(targets)), strict=True))  # of each page, the last one
    for move, (pages, target) in enumerate(zip(sources, targets, strict=True)):
        for page in (*pages, target):
            other = writer.get(page, move)
            if other != move and page != NULL_PAGE:
                raise ContractError(
                    f"page_move: page {page} is in move {move} ({pages} to {target}) and is the "
                    f"destination of move {other}; moves have no order, so give each a page of its "
                    "own and move in two calls what forms a chain"
                )


@triton.jit
def _shift_tile(
    ptr, source, target, width, start, shift, ROWS: tl.constexpr, ROWS_POW2: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Move rows [shift, ROWS) of a window to its rows [0, ROWS - shift), for TILE of its columns."""
    row = tl.arange(0, ROWS_POW2)[:, None]
    column = start + tl.arange(0, TILE)[None, :]
    moving = (row + shift < ROWS) & (column < width)
    window = tl.load(ptr + source + (row + shift) * width + column, mask=moving)
    tl.debug_barrier()  # in place: all threads have read before one of them writes
    tl.store(ptr + target + row * width + column, window, mask=moving)


@triton.jit
def _move_window(
    ptr, word_ptr, source, target, width, share, shift, ROWS: tl.constexpr,
    ROWS_POW2: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, PER_WORD: tl.constexpr,
):  # fmt: skip
    """Move one share (of PARTS) of the window that lies at elements `source` and `target`.

    Columns never cross: a column of the window belongs to one program, so that a window may move
    within itself.  Where rows keep the alignment, a column is a word of several channels.
    """
    if width % (2 * PER_WORD) == 0:
        words = tl.multiple_of(width // PER_WORD, 2)
        source_word = tl.multiple_of(source // PER_WORD, 2)
        target_word = tl.multiple_of(target // PER_WORD, 2)
        for start in range(share * TILE, words, PARTS * TILE):
            _shift_tile(
                word_ptr, source_word, target_word, words, start, shift, ROWS, ROWS_POW2, TILE
            )
    else:
        for start in range(share * TILE, width, PARTS * TILE):
            _shift_tile(ptr, source, target, width, start, shift, ROWS, ROWS_POW2, TILE)


@triton.jit
def _listed_pages(move_from_ptr, move_to_ptr, move, capacity):
    """Temporal source and destination of a move; equal pages, so nothing to do, behind the list."""
    inside = move < capacity
    source = tl.load(move_from_ptr + move, mask=inside, other=0)
    return source, tl.load(move_to_ptr + move, mask=inside, other=0)


@triton.jit
def _page_move_kernel(
    temporal_ptr,  # i64[N, temporal_words]
    conv_word_ptr,  # i64[N, conv_words]
    conv_ptr,  # [N, E]  the same memory as elements
    move_from_ptr,  # i32[2, R]
    move_to_ptr,  # i32[R]
    move_shift_ptr,  # i32[R]
    num_moves_ptr,  # i32[1]
    conv_offset_ptr,  # i64[layers]
    conv_width_ptr,  # i32[layers]
    temporal_stride,  # words from page to page
    conv_word_stride,  # words from page to page
    conv_stride,  # elements from page to page
    move_stride,  # from temporal sources to conv sources
    capacity,  # R
    temporal_words,
    page_pieces,  # pieces of a temporal page, at least 1
    conv_words,
    conv_layers,
    ROWS: tl.constexpr,
    ROWS_POW2: tl.constexpr,
    WINDOW_TILE: tl.constexpr,
    CONV_TILE: tl.constexpr,
    PARTS: tl.constexpr,
    PER_WORD: tl.constexpr,  # conv elements
    PIECE: tl.constexpr,  # words
    PROGRAMS: tl.constexpr,
):
    program = tl.program_id(0)
    piece = program
    # before the count is known: one latency instead of two
    source, target = _listed_pages(move_from_ptr, move_to_ptr, piece // page_pieces, capacity)
    num_moves = tl.load(num_moves_ptr)
    end = num_moves * page_pieces
    while piece < end:
        word = piece % page_pieces * PIECE + tl.arange(0, PIECE)
        moving = (source != target) & (word < temporal_words)
        source_ptr = temporal_ptr + wide_offset(source, temporal_stride) + word
        target_ptr = temporal_ptr + wide_offset(target, temporal_stride) + word
        piece += PROGRAMS
        source, target = _listed_pages(move_from_ptr, move_to_ptr, piece // page_pieces, capacity)
        tl.store(target_ptr, tl.load(source_ptr, mask=moving), mask=moving)

    parts = conv_layers * PARTS
    for turn in range(PROGRAMS - 1 - program, num_moves * parts, PROGRAMS):
        move = turn // parts
        part = turn % parts
        conv_source = tl.load(move_from_ptr + move_stride + move)
        conv_target = tl.load(move_to_ptr + move)
        shift = tl.load(move_shift_ptr + move)
        if shift > 0:
            offset = tl.load(conv_offset_ptr + part // PARTS)
            _move_window(
                conv_ptr,
                conv_word_ptr,
                wide_offset(conv_source, conv_stride) + offset,
                wide_offset(conv_target, conv_stride) + offset,
                tl.load(conv_width_ptr + part // PARTS),
                part % PARTS,
                shift,
                ROWS,
                ROWS_POW2,
                WINDOW_TILE,
                PARTS,
                PER_WORD,
            )
        elif conv_source != conv_target:
            copy_words(
                conv_word_ptr + wide_offset(conv_target, conv_word_stride),
                conv_word_ptr + wide_offset(conv_source, conv_word_stride),
                part * CONV_TILE,
                conv_words,
                parts * CONV_TILE,
                CONV_TILE,
            )


def _launch(
    temporal: Tensor, conv: Tensor, move_from: Tensor, move_to: Tensor, move_shift: Tensor,
    num_moves: Tensor, conv_offset: Tensor, conv_width: Tensor, window_rows: int,
) -> None:  # fmt: skip
    temporal_words, conv_words = (
        page_words("page_move", name, arena)
        for name, arena in (("temporal", temporal), ("conv", conv))
    )
    elements = as_dtype(conv, _CARRIER[conv.element_size()])
    programs = resident_programs(temporal.device)
    piece = _PIECE_BYTES // WORD
    _page_move_kernel[(programs,)](
        temporal_words, conv_words, elements, move_from, move_to, move_shift, num_moves,
        conv_offset, conv_width,
        temporal_words.stride(0), conv_words.stride(0), elements.stride(0), move_from.stride(0),
        move_to.shape[0], temporal_words.shape[1],
        max(triton.cdiv(temporal_words.shape[1], piece), 1), conv_words.shape[1],
        conv_width.shape[0],
        ROWS=window_rows, ROWS_POW2=triton.next_power_of_2(window_rows), WINDOW_TILE=_WINDOW_TILE,
        CONV_TILE=_CONV_TILE, PARTS=_PARTS, PER_WORD=WORD // conv.element_size(), PIECE=piece,
        PROGRAMS=programs, num_warps=_WARPS, maxnreg=REGISTERS,
    )  # fmt: skip


@dataclass(frozen=True)
class _Case:
    elements: int = 5120  # temporal elements of a page: two tiles, the last one partial
    widths: tuple[int, ...] = (32, 21, 1200)  # rows of a window: aligned; odd; several tiles
    window_rows: int = 5
    shift: int = 2  # of the moves that shift
    moves: int = 5

    def id(self) -> str:
        widths = "x".join(map(str, self.widths))
        return (
            f"E{self.elements}-conv{self.window_rows}x{widths}-shift{self.shift}-moves{self.moves}"
        )

    def __call__(self, gen: torch.Generator, dtype: torch.dtype, device: torch.device) -> Args:
        def ints(values: object, kind: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=kind, device=device)

        step = 128 // dtype.itemsize  # elements between possible starts of a region
        offsets, end = [], 0
        for width in self.widths:
            offsets.append(end)
            end = triton.cdiv(end + self.window_rows * width, step) * step
        shift = self.shift
        moves = [  # (temporal source, conv source, target, shift); the pages of a move are its own
            (1, 1, 2, 0),
            (1, 1, 3, 0),  # a shared checkpoint is read twice
            (4, 5, 6, shift),
            (7, 8, 8, shift),  # convolution in place
            (10, 9, 10, shift),  # temporal state is already there
            (2, 2, 11, 0),  # stale: behind the count
        ]
        return {
            "temporal": _noise((12, self.elements), dtype, gen).to(device),
            "conv": _noise((12, end), dtype, gen).to(device),
            "move_from": ints([[m[0] for m in moves], [m[1] for m in moves]]),
            "move_to": ints([m[2] for m in moves]),
            "move_shift": ints([m[3] for m in moves]),
            "num_moves": ints([self.moves]),
            "conv_offset": ints(offsets, torch.int64),
            "conv_width": ints(self.widths),
            "window_rows": self.window_rows,
        }


def _noise(shape: tuple[int, int], dtype: torch.dtype, gen: torch.Generator) -> Tensor:
    """Random bits: every kind of NaN included."""
    count = shape[0] * shape[1] * dtype.itemsize
    return torch.randint(0, 256, (count,), generator=gen, dtype=torch.uint8).view(dtype).view(shape)


_CASES = tuple(
    OpCase(c.id(), c)
    for c in (
        _Case(),
        _Case(moves=0),
        _Case(moves=1),
        _Case(shift=0),
        _Case(shift=1, window_rows=4),  # rows of the window are a power of two
        _Case(shift=4),  # one row is left
        _Case(elements=64),  # less than a tile
        _Case(elements=0),  # a model of short convolutions only
        _Case(widths=()),  # a model without convolutions
        _Case(widths=(4200, 1301)),  # several turns of a program for one window
        _Case(widths=(4200,), window_rows=8, shift=0),  # and for one convolution page
    )
)


def _traffic(args: Args) -> tuple[int, int]:
    pages = sum(a.shape[1] * a.element_size() for a in (args["temporal"], args["conv"]))
    return 2 * pages * int(args["num_moves"]), 0


page_move = define_op(
    "page_move(Tensor(a!) temporal, Tensor(b!) conv, Tensor move_from, Tensor move_to, "
    "Tensor move_shift, Tensor num_moves, Tensor conv_offset, Tensor conv_width, "
    "SymInt window_rows) -> ()",
    cuda=_launch,
    cpu=page_move_ref,
    cases=_CASES,
    tolerance=EXACT,
    traffic=_traffic,
    arenas=("temporal", "conv"),
)
