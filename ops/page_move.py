"""
Move state pages: the temporal part of one page and the convolution part of one, per listed move.

Which pages move is decided before (`advance`, `post_copy`); this op only moves.  A move takes the
whole temporal page from `move_from[0]` and the convolution page from `move_from[1]`.
`move_shift` > 0 drops that many oldest rows of each convolution window: rows [shift, window_rows)
of the source become rows [0, window_rows - shift) of the destination, whose other rows keep their
content.  Source and destination may be one page.  Callers own the pages: no page is written by
two moves, or written by one and read by another.

Letters: R capacity of the list, N pages, E elements of a page.
Traffic: twice the bytes of a page per move, nothing when nothing moves.  No arithmetic: bit-exact.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.errors import ContractError
from midstream.ops.registry import EXACT, Args, OpCase, define_op

_WORD = 8  # bytes; two words make one 128-bit access
_TILE = 2048  # words a program moves per turn: 16 KiB, eight accesses in flight per thread
_WARPS = 4
_PROGRAMS_PER_SM = 8  # fixed grid: how much moves is known on the device only
_PROGRAMS_EMULATED = 3  # in the interpreter
_PARTS = 4  # programs that share the windows of one layer
_CHANNELS = 512  # channels of a window that a program holds at once
_CARRIER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes an element


def page_move_ref(
    temporal: Tensor, conv: Tensor, move_from: Tensor, move_to: Tensor, move_shift: Tensor,
    num_moves: Tensor, conv_offset: Tensor, conv_width: Tensor, window_rows: int,
) -> None:  # fmt: skip
    """Say what the kernel means, one move at a time."""
    for move in range(int(num_moves)):
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


@triton.jit
def wide_offset(index, stride):
    """Distance of a page or table row from the first one; widened first: it passes 2**31 early."""
    return index.to(tl.int64) * stride


@triton.jit
def _copy_tile(ptr, source, target, start, words, TILE: tl.constexpr):
    """Copy words [start, start + TILE) of the page at `source` to the page at `target`."""
    word = start + tl.arange(0, TILE)
    inside = word < words
    tl.store(ptr + target + word, tl.load(ptr + source + word, mask=inside), mask=inside)


@triton.jit
def _shift_tile(
    ptr, source, target, width, start, shift, ROWS: tl.constexpr, ROWS_POW2: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Move rows [shift, ROWS) of a window to its rows [0, ROWS - shift), for some channels."""
    row = tl.arange(0, ROWS_POW2)[:, None]
    channel = start + tl.arange(0, CHANNELS)[None, :]
    moving = (row + shift < ROWS) & (channel < width)
    window = tl.load(ptr + source + (row + shift) * width + channel, mask=moving)
    tl.debug_barrier()  # in place: all threads have read before one of them writes
    tl.store(ptr + target + row * width + channel, window, mask=moving)


@triton.jit
def _move_windows(
    ptr, source, target, conv_offset_ptr, conv_width_ptr, part, shift, ROWS: tl.constexpr,
    ROWS_POW2: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Move one part (of PARTS) of one layer's window; `part` counts over all layers."""
    layer = part // PARTS
    offset = tl.load(conv_offset_ptr + layer)
    width = tl.load(conv_width_ptr + layer)
    for start in range((part % PARTS) * CHANNELS, width, PARTS * CHANNELS):
        _shift_tile(
            ptr, source + offset, target + offset, width, start, shift, ROWS, ROWS_POW2, CHANNELS
        )


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
    temporal_words,
    conv_words,
    conv_layers,
    ROWS: tl.constexpr,
    ROWS_POW2: tl.constexpr,
    CHANNELS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    program = tl.program_id(0)
    num_moves = tl.load(num_moves_ptr)
    tiles = tl.cdiv(temporal_words, TILE)
    for turn in range(program, num_moves * tiles, PROGRAMS):
        source = tl.load(move_from_ptr + turn // tiles)
        target = tl.load(move_to_ptr + turn // tiles)
        if source != target:
            _copy_tile(
                temporal_ptr,
                wide_offset(source, temporal_stride),
                wide_offset(target, temporal_stride),
                (turn % tiles) * TILE,
                temporal_words,
                TILE,
            )
    parts = conv_layers * PARTS
    for turn in range(PROGRAMS - 1 - program, num_moves * parts, PROGRAMS):  # idle programs first
        source = tl.load(move_from_ptr + move_stride + turn // parts)
        target = tl.load(move_to_ptr + turn // parts)
        shift = tl.load(move_shift_ptr + turn // parts)
        part = turn % parts
        if shift > 0:
            _move_windows(
                conv_ptr,
                wide_offset(source, conv_stride),
                wide_offset(target, conv_stride),
                conv_offset_ptr,
                conv_width_ptr,
                part,
                shift,
                ROWS,
                ROWS_POW2,
                CHANNELS,
                PARTS,
            )
        elif source != target:
            for start in range(part * TILE, conv_words, parts * TILE):
                _copy_tile(
                    conv_word_ptr,
                    wide_offset(source, conv_word_stride),
                    wide_offset(target, conv_word_stride),
                    start,
                    conv_words,
                    TILE,
                )


@functools.cache
def _programs(device: torch.device) -> int:
    """Programs of the fixed grid."""
    if device.type != "cuda":
        return _PROGRAMS_EMULATED
    return torch.cuda.get_device_properties(device).multi_processor_count * _PROGRAMS_PER_SM


def _words(name: str, arena: Tensor) -> Tensor:
    """The arena as 64-bit words."""
    page_bytes, stride_bytes = (n * arena.element_size() for n in (arena.shape[1], arena.stride(0)))
    if page_bytes == 0:
        return _as_dtype(arena, torch.int64)
    if page_bytes % (2 * _WORD) or stride_bytes % (2 * _WORD):
        raise ContractError(
            f"page_move: pages of {name} must be multiples of 16 bytes, got {page_bytes} bytes "
            f"every {stride_bytes}; build arenas from StateLayout"
        )
    return _as_dtype(arena, torch.int64)


def _as_dtype(arena: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bytes under another dtype; torch refuses to view pages without elements."""
    return arena.view(dtype) if arena.shape[1] else arena.new_empty(arena.shape, dtype=dtype)


def _launch(
    temporal: Tensor, conv: Tensor, move_from: Tensor, move_to: Tensor, move_shift: Tensor,
    num_moves: Tensor, conv_offset: Tensor, conv_width: Tensor, window_rows: int,
) -> None:  # fmt: skip
    temporal_words, conv_words = _words("temporal", temporal), _words("conv", conv)
    elements = _as_dtype(conv, _CARRIER[conv.element_size()])
    programs = _programs(temporal.device)
    _page_move_kernel[(programs,)](
        temporal_words, conv_words, elements, move_from, move_to, move_shift, num_moves,
        conv_offset, conv_width,
        temporal_words.stride(0), conv_words.stride(0), elements.stride(0), move_from.stride(0),
        temporal_words.shape[1], conv_words.shape[1], conv_width.shape[0],
        ROWS=window_rows, ROWS_POW2=triton.next_power_of_2(window_rows), CHANNELS=_CHANNELS,
        PARTS=_PARTS, TILE=_TILE, PROGRAMS=programs, num_warps=_WARPS,
    )  # fmt: skip


@dataclass(frozen=True)
class _Case:
    elements: int = 5120  # temporal elements of a page: two tiles, the last one partial
    widths: tuple[int, ...] = (32, 20, 1200)  # aligned; odd; several tiles of channels
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
)
