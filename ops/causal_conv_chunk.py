"""
Depthwise causal convolution of packed rows of any length, continuing from paged windows.

The formula is the one of `causal_conv_step`.  A row starts from the window in `read_page`; after every chunk
whose `chunk_page` is not the null page, the newest W - 1 inputs are exported to that page, which may be the
row's `read_page`.  `out` is left alone at tokens of no chunk.

Letters: T tokens, D channels, W taps, N pages, R rows, Q chunks (see `chunk_table`).
Traffic: 2 * D elements per token, 2 * (W - 1) * D elements of state per row and export.
Source: as `causal_conv_step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.ops.case_data import (
    chunk_pages,
    draw,
    draw_pitched,
    element_offset,
    poisoned_arena,
)
from midstream.ops.causal_conv_step import check_conv_args, convolve_ref
from midstream.ops.chunk_table import CHUNK
from midstream.ops.device_limits import num_processors
from midstream.ops.paged_state import aligned_elements, state_region
from midstream.ops.registry import NULL_PAGE, PADDING, Args, OpCase, Tolerance, define_op

_TOKENS = 8  # per turn of a program
_TILE = 128  # channels of a program, whose weights stay in registers
_TILE_MANY_TAPS = 64  # of a program with more than four taps
_PROGRAMS_PER_PROCESSOR = 12  # at most, where chunks are cut
_SLICES = (8, 16, 32, CHUNK)  # tokens of a program; the fewest that this allows are taken
_NULL_PAGE = tl.constexpr(NULL_PAGE)
_PADDING = tl.constexpr(PADDING)
_SEARCH = tl.constexpr(128)  # chunks looked at in one turn


def causal_conv_chunk_ref(
    arena: Tensor,  # [N, Ec]          region [W - 1, D] at `offset`
    out: Tensor,  # [T, D]
    x: Tensor,  # [T, D]
    weight: Tensor,  # [D, W]
    bias: Tensor | None,  # [D]
    offset: Tensor,  # i64[1]           elements
    read_page: Tensor,  # i32[>= R]    NULL_PAGE: zeros
    chunk_start: Tensor,  # i32[Q + 1]
    chunk_row: Tensor,  # i32[Q]
    chunk_page: Tensor,  # i32[Q]       NULL_PAGE: no export
    row_chunk: Tensor,  # i32[R + 1]
    silu: bool,
) -> None:
    """Say what the kernel means, one row at a time."""
    history = weight.shape[1] - 1
    region = state_region(arena, offset, history, x.shape[1])
    start, page, bounds = chunk_start.tolist(), chunk_page.tolist(), row_chunk.tolist()
    for row, (first, last) in enumerate(pairwise(bounds)):
        if first == last:
            continue
        begin, end, source = start[first], start[last], int(read_page[row])
        window = region[source] if source != NULL_PAGE else torch.zeros_like(region[0])
        window = torch.cat([window.to(x.dtype), x[begin:end]])
        out[begin:end] = convolve_ref(window, weight, bias, silu).to(out.dtype)
        for chunk in range(first, last):
            if page[chunk] != NULL_PAGE:
                done = start[chunk + 1] - begin
                region[page[chunk]] = window[done : done + history].to(arena.dtype)


@triton.jit
def _load_inputs(x_ptr, x_stride, window_ptr, has_window, token, begin, channel, inside, D, W):
    """Inputs at `token` [n, 1] of a row that begins at token `begin`; earlier ones lie in its window."""
    place = token - begin + (W - 1)
    x_ptrs = x_ptr + token.to(tl.int64) * x_stride + channel
    new = tl.load(x_ptrs, mask=inside & (token >= begin), other=0.0)
    earlier = inside & (token < begin) & (place >= 0) & has_window
    old = tl.load(window_ptr + place * D + channel, mask=earlier, other=0.0)
    return tl.where(token >= begin, new.to(tl.float32), old.to(tl.float32))


@triton.jit
def _causal_conv_chunk_kernel(
    arena_ptr,  # [N, page_stride]
    out_ptr,  # [T, D]
    x_ptr,  # [T, D]
    weight_ptr,  # [D, W]
    bias_ptr,  # [D] or None
    offset_ptr,  # i64[1]
    read_page_ptr,  # i32[R]
    chunk_start_ptr,  # i32[Q + 1]
    chunk_row_ptr,  # i32[Q]
    chunk_page_ptr,  # i32[Q]
    row_chunk_ptr,  # i32[R + 1]
    page_stride,  # elements
    out_stride,
    x_stride,
    D: tl.constexpr,
    W: tl.constexpr,
    W_TILE: tl.constexpr,  # power of two >= W - 1
    WEIGHT_STRIDE: tl.constexpr,  # from channel to channel; taps are adjacent
    TOKENS: tl.constexpr,  # of a turn
    SLICE: tl.constexpr,  # tokens of a program
    TILE: tl.constexpr,  # channels of a program
    ALIGN: tl.constexpr,  # elements on which pages and regions start
    SILU: tl.constexpr,
):
    # The row's first program alone reads the window in read_page.  It computes all outputs and makes all
    # exports that need the window, and then the export that overwrites it: no program races with another.
    # Of the slices of a chunk the first one makes its exports.
    chunk = tl.program_id(0)
    slice_ = tl.program_id(2)
    row = tl.load(chunk_row_ptr + chunk)
    if row == _PADDING:
        return
    first = tl.load(row_chunk_ptr + row)
    last = tl.load(row_chunk_ptr + row + 1)
    begin = tl.load(chunk_start_ptr + first)
    end = tl.load(chunk_start_ptr + last)
    read_page = tl.load(read_page_ptr + row).to(tl.int64)
    offset = tl.load(offset_ptr)
    reads_window = (chunk == first) & (slice_ == 0)
    has_window = (read_page != _NULL_PAGE) & reads_window
    window_ptr = arena_ptr + tl.multiple_of(read_page * page_stride + offset, ALIGN)
    channel = (tl.program_id(1) * TILE + tl.arange(0, TILE))[None, :]

    start = tl.load(chunk_start_ptr + chunk) + slice_ * SLICE
    stop = tl.load(chunk_start_ptr + chunk + 1)
    if slice_ + 1 < tl.num_programs(2):
        stop = tl.minimum(stop, start + SLICE)
    window_end = tl.minimum(begin + (W - 1), end)  # tokens before it see the old window
    out_start = tl.where(reads_window, start, tl.maximum(start, window_end))
    out_stop = tl.where(reads_window, tl.maximum(stop, window_end), stop)
    weights = ()  # once for all turns
    for tap in tl.static_range(W):
        tap_ptrs = weight_ptr + channel * WEIGHT_STRIDE + tap
        loaded = (tl.load(tap_ptrs, mask=channel < D, other=0.0),)
        weights = weights + loaded  # type: ignore[assignment]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=channel < D, other=0.0)
    for turn in range(out_start, out_stop, TOKENS):
        token = turn + tl.arange(0, TOKENS)[:, None]
        inside = (token < out_stop) & (channel < D)
        y = tl.zeros([TOKENS, TILE], tl.float32)
        if bias_ptr is not None:
            y += bias.to(tl.float32)
        for tap in tl.static_range(W):
            source = token - (W - 1) + tap
            y += weights[tap].to(tl.float32) * _load_inputs(
                x_ptr, x_stride, window_ptr, has_window, source, begin, channel, inside, D, W
            )
        if SILU:
            y = y / (1 + tl.exp(-y))
        tl.store(out_ptr + token.to(tl.int64) * out_stride + channel, y, mask=inside)
    if slice_ > 0:
        return

    place = tl.arange(0, W_TILE)[:, None]
    inside = (place < W - 1) & (channel < D)
    cell = place * D + channel
    early = chunk + 1  # exports from here up to `early` are made by this program
    overwriting = -1
    if chunk == first:
        early = tl.minimum(last, first + (W - 1))
        for turn in range(first, last, _SEARCH):
            candidate = turn + tl.arange(0, _SEARCH)
            page = tl.load(chunk_page_ptr + candidate, mask=candidate < last, other=_NULL_PAGE)
            found = (page == read_page) & (page != _NULL_PAGE)
            overwriting = tl.maximum(overwriting, tl.max(tl.where(found, candidate, -1), axis=0))
    for exporting in range(chunk, early):
        page = tl.load(chunk_page_ptr + exporting).to(tl.int64)
        stop = tl.load(chunk_start_ptr + exporting + 1)
        needs_window = stop < begin + (W - 1)
        mine = (exporting == first) | (needs_window == (chunk == first))
        if mine & (page != _NULL_PAGE) & (page != read_page):
            source = stop - (W - 1) + place
            moved = _load_inputs(
                x_ptr, x_stride, window_ptr, has_window, source, begin, channel, inside, D, W
            )
            target = tl.multiple_of(page * page_stride + offset, ALIGN)
            tl.store(arena_ptr + target + cell, moved, mask=inside)
    if overwriting >= 0:
        source = tl.load(chunk_start_ptr + overwriting + 1) - (W - 1) + place
        moved = _load_inputs(
            x_ptr, x_stride, window_ptr, has_window, source, begin, channel, inside, D, W
        )
        # All loads of the old window come before its store, in every warp: outputs and exports above
        # read it too, and a warp loads what another one stores.
        tl.debug_barrier()
        tl.store(window_ptr + cell, moved, mask=inside)


def _tokens_of_program(programs: int, processors: int) -> int:
    """Tokens of a program, where whole chunks would make `programs`.

    >>> [_tokens_of_program(programs, processors=132) for programs in (136, 340, 1156)]
    [8, 16, 64]
    """
    most = _PROGRAMS_PER_PROCESSOR * processors
    return next((s for s in _SLICES if programs * (CHUNK // s) <= most), CHUNK)


def _launch(
    arena: Tensor,
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offset: Tensor,
    read_page: Tensor,
    chunk_start: Tensor,
    chunk_row: Tensor,
    chunk_page: Tensor,
    row_chunk: Tensor,
    silu: bool,
) -> None:
    check_conv_args("causal_conv_chunk", out, x, weight)
    channels, taps = weight.shape
    chunks = chunk_row.shape[0]
    if chunks == 0:
        return
    tile = _TILE if taps <= 4 else _TILE_MANY_TAPS
    tiles = triton.cdiv(channels, tile)
    slice_ = _tokens_of_program(chunks * tiles, num_processors(arena.device))
    _causal_conv_chunk_kernel[(chunks, tiles, CHUNK // slice_)](
        arena, out, x, weight, bias, offset, read_page, chunk_start, chunk_row, chunk_page, row_chunk,
        arena.stride(0), out.stride(0), x.stride(0),
        D=channels, W=taps, W_TILE=triton.next_power_of_2(taps - 1), WEIGHT_STRIDE=weight.stride(0),
        TOKENS=_TOKENS, SLICE=slice_, TILE=tile, ALIGN=aligned_elements(arena), SILU=silu, num_warps=4,
    )  # fmt: skip


def _build(
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
    lengths: Sequence[int],
    exports: Sequence[Sequence[int]],
    channels: int,
    taps: int,
    gap: int,
    options: tuple[bool, bool],
) -> Args:
    """Rows as `chunk_pages` has them, then five tokens of no chunk; options are bias and silu."""
    plan = chunk_pages(lengths, exports, generator)
    start, tokens = 64, sum(lengths) + 5
    x = draw_pitched(generator, tokens, channels, dtype=dtype, gap=gap)
    x[sum(lengths) :] = float("nan")
    live = plan.read_page[: len(lengths)].tolist()
    return {
        "arena": poisoned_arena(generator, plan.pages, start, (taps - 1) * channels, live, dtype),
        "out": torch.full((tokens, channels), float("nan"), dtype=dtype),
        "x": x,
        "weight": draw_pitched(generator, channels, taps, dtype=dtype, gap=gap),
        "bias": draw(generator, channels, dtype=dtype) if options[0] else None,
        "offset": element_offset(start),
        "read_page": plan.read_page,
        "chunk_start": plan.table.chunk_start,
        "chunk_row": plan.table.chunk_row,
        "chunk_page": plan.table.chunk_page,
        "row_chunk": plan.table.row_chunk,
        "silu": options[1],
    }


def _case(
    lengths: Sequence[int] = (1, 3, 64, 65, 7),
    exports: Sequence[Sequence[int]] = (),
    channels: int = 24,
    taps: int = 4,
    gap: int = 0,
    bias: bool = True,
    silu: bool = True,
    why: str = "",
) -> OpCase:
    build = partial(
        _build,
        lengths=lengths,
        exports=exports,
        channels=channels,
        taps=taps,
        gap=gap,
        options=(bias, silu),
    )
    sizes = "+".join(map(str, lengths[:5]))
    return OpCase(f"T{sizes}-D{channels}-W{taps}{why}", build)


def _traffic(args: Args) -> tuple[int, int]:
    tokens, channels = args["out"].shape
    taps, rows = args["weight"].shape[1], args["row_chunk"].shape[0] - 1
    state = 2 * rows * (taps - 1) * channels * args["arena"].element_size()
    return state + 2 * tokens * channels * args["x"].element_size(), 2 * tokens * channels * taps


CASES = (
    _case(),
    _case(lengths=(10,), exports=((1, 2, 3, 5),), why="-exports"),  # some need the old window
    _case(lengths=(5, 5, 5, 9), exports=((2,), (1, 2), (1, 3), (1, 2, 6)), why="-exports"),
    _case(lengths=(2, 2, 2, 70), exports=((1,), (1,), (1,), (66,)), why="-overwrite"),
    _case(channels=20, gap=7, why="-gap"),  # no 16-byte access possible
    _case(lengths=(3, 2), channels=136),  # a partial second tile
    _case(lengths=(1, 2) * 30, channels=136, why="-many"),  # whole chunks fill the device
    _case(lengths=(5, 1), channels=256),  # all accesses can be 128 bits wide, as in real models
    _case(lengths=(4, 1), taps=2),
    _case(lengths=(4, 1), taps=3, gap=1, why="-gap"),
    _case(lengths=(4, 1), exports=((1, 2, 3),), taps=5),
    _case(lengths=(6, 1, 9), exports=((1, 4),), taps=6, bias=False, why="-no_bias"),
    _case(lengths=(7, 1, 9), exports=((5,),), taps=7, gap=3, silu=False, why="-linear-gap"),
    _case(lengths=(8, 2, 9, 17), exports=((2, 7), (), (), (3,)), taps=8),
    _case(lengths=(4, 1), bias=False, why="-no_bias"),
    _case(lengths=(4, 1), silu=False, why="-linear"),
    _case(lengths=(4, 1), bias=False, silu=False, why="-no_bias-linear"),
)

causal_conv_chunk = define_op(
    "causal_conv_chunk(Tensor(a!) arena, Tensor(b!) out, Tensor x, Tensor weight, Tensor? bias, "
    "Tensor offset, Tensor read_page, Tensor chunk_start, Tensor chunk_row, Tensor chunk_page, "
    "Tensor row_chunk, bool silu) -> ()",
    cuda=_launch,
    cpu=causal_conv_chunk_ref,
    cases=CASES,
    tolerance=Tolerance(
        {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4},
        "a sum of W products in fp32 and a fast exp; bf16 rounds the result once (2 ** -8), and so "
        "does fp16 (2 ** -11)",
    ),
    traffic=_traffic,
    export_alignment=1,
)
