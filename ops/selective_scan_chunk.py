"""
The selective scan (Mamba-1) over packed rows of any length, on paged state.

The recurrence is the one of `selective_scan_step`.  A row starts from the state in `read_page`; after every
chunk whose `chunk_page` is not the null page, the state is exported to that page, which may be the row's
`read_page`.  `out` is left alone at tokens of no chunk.

Every element of the state has a decay of its own, so no product of matrices can do the work, and as many
exponentials as elements are the bound.  A program is one warp that walks all tokens of a row with the states
of a few channels in its registers; tokens are read `_TOKENS` at a time, one turn ahead.  Tokens are taken one
after the other, so that results do not depend on where chunks are cut.

Letters: T tokens, D channels, M state size, G groups, N pages, R rows, Q chunks (see `chunk_table`).
Traffic: 3 * D + 2 * G * M elements of activations per token; D * M of state per row and export; 5 operations
and an exponential per token and element of state.
Source: as `selective_scan_step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.ops.case_data import bench_arena, chunk_pages, element_offset, poisoned_arena
from midstream.ops.chunk_table import cut_chunks
from midstream.ops.paged_state import aligned_elements, state_region
from midstream.ops.registry import NULL_PAGE, Args, OpCase, Tolerance, define_op
from midstream.ops.selective_scan_step import (
    EXP_OPERATIONS,
    SelectiveShape,
    check_selective_args,
    draw_selective,
    selective_terms_ref,
)
from midstream.ops.softplus import softplus
from midstream.ops.state_types import check_state_dtype

_TOKENS = 8  # of a turn
_STATES = 4  # elements of a channel's state that a thread keeps
_WARP = 32  # threads
_NULL_PAGE = tl.constexpr(NULL_PAGE)
_LOG2_E = tl.constexpr(1.4426950408889634)


def selective_scan_chunk_ref(
    arena: Tensor,  # [N, E]           region [D, M] at `offset`
    out: Tensor,  # [T, D]
    x: Tensor,  # [T, D]
    dt: Tensor,  # [T, D]           before bias and softplus
    A_log: Tensor,  # [D, M]
    B: Tensor,  # [T, G, M]
    C: Tensor,  # [T, G, M]
    skip: Tensor,  # [D]              the paper's D
    dt_bias: Tensor,  # [D]
    offset: Tensor,  # i64[1]           elements
    read_page: Tensor,  # i32[>= R]    NULL_PAGE: zeros
    chunk_start: Tensor,  # i32[Q + 1]
    chunk_row: Tensor,  # i32[Q]
    chunk_page: Tensor,  # i32[Q]       NULL_PAGE: no export
    row_chunk: Tensor,  # i32[R + 1]
) -> None:
    """Say what the kernel means, one token at a time."""
    region = state_region(arena, offset, *A_log.shape)
    start, page, bounds = chunk_start.tolist(), chunk_page.tolist(), row_chunk.tolist()
    for row, (first, last) in enumerate(pairwise(bounds)):
        if first == last:
            continue
        source = int(read_page[row])
        state = region[source] if source != NULL_PAGE else torch.zeros_like(region[0])
        for chunk in range(first, last):
            part = slice(start[chunk], start[chunk + 1])
            decay, update, C_channels, skipped = selective_terms_ref(
                x[part], dt[part], A_log, B[part], C[part], skip, dt_bias
            )
            state = state.to(decay.dtype)
            for t in range(decay.shape[0]):
                state = torch.addcmul(update[t], state, decay[t])
                y = (state * C_channels[t]).sum(-1) + skipped[t]
                out[start[chunk] + t] = y.to(out.dtype)
            if page[chunk] != NULL_PAGE:
                region[page[chunk]] = state.to(arena.dtype)


@triton.jit
def _scan_tokens(
    state,  # [STATES, THREADS]
    A,  # [STATES, THREADS]  logarithm to base 2 of the decay in a unit of time
    step,  # [TOKENS, D_TILE]
    x,  # [TOKENS, D_TILE]
    B,  # [TOKENS, STATES, SPLIT]
    C,  # [TOKENS, STATES, SPLIT]
    TOKENS: tl.constexpr,
    STATES: tl.constexpr,
    SPLIT: tl.constexpr,
    D_TILE: tl.constexpr,
):
    """State after the tokens and their outputs [TOKENS, D_TILE]; a step of 0 leaves the state alone."""
    THREADS: tl.constexpr = SPLIT * D_TILE
    whole: tl.constexpr = [TOKENS, STATES, SPLIT, D_TILE]
    flat: tl.constexpr = [TOKENS, STATES, THREADS]
    Bs = tl.reshape(tl.broadcast_to(B.to(tl.float32)[:, :, :, None], whole), flat)
    Cs = tl.reshape(tl.broadcast_to(C.to(tl.float32)[:, :, :, None], whole), flat)
    steps = _to_threads(step, SPLIT).to(tl.int32, bitcast=True)
    gains = _to_threads(step * x, SPLIT).to(tl.int32, bitcast=True)
    Bs = Bs.to(tl.int32, bitcast=True)
    Cs = Cs.to(tl.int32, bitcast=True)
    place = tl.arange(0, TOKENS)
    y = tl.zeros([TOKENS, THREADS], tl.float32)
    for i in tl.static_range(TOKENS):
        # a token is taken out of a tile by a sum in which all others are 0; it is one of integers, of
        # which nothing is left once they are in registers
        here = (place == i)[:, None]
        step_i = tl.sum(tl.where(here, steps, 0), axis=0).to(tl.float32, bitcast=True)
        gain_i = tl.sum(tl.where(here, gains, 0), axis=0).to(tl.float32, bitcast=True)
        B_i = tl.sum(tl.where(here[:, :, None], Bs, 0), axis=0).to(tl.float32, bitcast=True)
        C_i = tl.sum(tl.where(here[:, :, None], Cs, 0), axis=0).to(tl.float32, bitcast=True)
        state = state * tl.exp2(A * step_i[None, :]) + gain_i[None, :] * B_i
        y = tl.where(here, tl.sum(state * C_i, axis=0)[None, :], y)
    return state, tl.sum(tl.reshape(y, [TOKENS, SPLIT, D_TILE]), axis=1)


@triton.jit
def _to_threads(tile, SPLIT: tl.constexpr):
    """[TOKENS, D_TILE] -> [TOKENS, THREADS]: the same for all threads that share a channel."""
    TOKENS: tl.constexpr = tile.shape[0]
    D_TILE: tl.constexpr = tile.shape[1]
    shared = tl.broadcast_to(tile[:, None, :], [TOKENS, SPLIT, D_TILE])
    return tl.reshape(shared, [TOKENS, SPLIT * D_TILE])


@triton.jit
def _selective_scan_chunk_kernel(
    arena_ptr,  # [N, page_stride]
    out_ptr,  # [T, D]
    x_ptr,  # [T, D]
    dt_ptr,  # [T, D]
    A_log_ptr,  # [D, M]
    B_ptr,  # [T, G, M]
    C_ptr,  # [T, G, M]
    skip_ptr,  # [D]
    dt_bias_ptr,  # [D]
    offset_ptr,  # i64[1]
    read_page_ptr,  # i32[R]
    chunk_start_ptr,  # i32[Q + 1]
    chunk_page_ptr,  # i32[Q]
    row_chunk_ptr,  # i32[R + 1]
    page_stride,  # elements; so are all strides
    out_stride,  # from token to token
    x_stride,
    dt_stride,
    B_stride,
    B_group,  # from group to group
    C_stride,
    C_group,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    TOKENS: tl.constexpr,
    STATES: tl.constexpr,
    SPLIT: tl.constexpr,  # threads that share a channel
    D_TILE: tl.constexpr,
    ALIGN: tl.constexpr,  # elements on which pages and regions start
):
    """One program per row and tile of the channels of one group."""
    SHARE: tl.constexpr = D // G  # channels of a group
    TILES: tl.constexpr = (SHARE + D_TILE - 1) // D_TILE
    row = tl.program_id(0) // (G * TILES)
    group = tl.program_id(0) // TILES % G
    chunk = tl.load(row_chunk_ptr + row)
    last = tl.load(row_chunk_ptr + row + 1)
    if chunk == last:
        return
    place = tl.program_id(0) % TILES * D_TILE + tl.arange(0, D_TILE)
    known = place < SHARE
    channel = group * SHARE + place
    thread = tl.arange(0, SPLIT * D_TILE)
    held = tl.program_id(0) % TILES * D_TILE + thread % D_TILE
    m = (thread // D_TILE * STATES)[None, :] + tl.arange(0, STATES)[:, None]
    element = (group * SHARE + held)[None, :] * M + m
    inside = (held < SHARE)[None, :] & (m < M)
    offset = tl.load(offset_ptr)
    read_page = tl.load(read_page_ptr + row).to(tl.int64)
    source = tl.multiple_of(read_page * page_stride + offset, ALIGN)
    has_state = inside & (read_page != _NULL_PAGE)
    state = tl.load(arena_ptr + source + element, mask=has_state, other=0.0).to(tl.float32)
    tl.debug_barrier()  # in place: no thread may still have an element to load
    A_log = tl.load(A_log_ptr + element, mask=inside, other=0.0).to(tl.float32)
    A = tl.exp(A_log) * -_LOG2_E
    skip = tl.load(skip_ptr + channel, mask=known, other=0.0).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + channel, mask=known, other=0.0).to(tl.float32)

    turn = tl.arange(0, TOKENS)
    wide = turn.to(tl.int64)
    x_cell = wide[:, None] * x_stride + channel[None, :]
    dt_cell = wide[:, None] * dt_stride + channel[None, :]
    out_cell = wide[:, None] * out_stride + channel[None, :]
    m = tl.arange(0, SPLIT)[None, None, :] * STATES + tl.arange(0, STATES)[None, :, None]
    B_cell = wide[:, None, None] * B_stride + group.to(tl.int64) * B_group + m
    C_cell = wide[:, None, None] * C_stride + group.to(tl.int64) * C_group + m

    end = tl.load(chunk_start_ptr + last).to(tl.int64)
    token = tl.load(chunk_start_ptr + chunk).to(tl.int64)
    stop = tl.load(chunk_start_ptr + chunk + 1).to(tl.int64)
    live = (turn < stop - token)[:, None] & known[None, :]
    live_m = (turn < stop - token)[:, None, None] & (m < M)
    x = tl.load(x_ptr + token * x_stride + x_cell, mask=live, other=0.0)
    dt = tl.load(dt_ptr + token * dt_stride + dt_cell, mask=live, other=0.0)
    B = tl.load(B_ptr + token * B_stride + B_cell, mask=live_m, other=0.0)
    C = tl.load(C_ptr + token * C_stride + C_cell, mask=live_m, other=0.0)
    step = tl.where(live, softplus(dt.to(tl.float32) + dt_bias[None, :]), 0.0)
    while token < end:
        now, now_stop, now_live = token, stop, live
        now_x, now_B, now_C = x.to(tl.float32), B, C
        # the tokens of the next turn are on their way while this one is computed
        token = tl.minimum(now + TOKENS, stop)
        following = tl.minimum(chunk + 1 + (token == stop).to(tl.int32), last)
        stop = tl.load(chunk_start_ptr + following).to(tl.int64)
        live = (turn < stop - token)[:, None] & known[None, :]
        live_m = (turn < stop - token)[:, None, None] & (m < M)
        x = tl.load(x_ptr + token * x_stride + x_cell, mask=live, other=0.0)
        dt = tl.load(dt_ptr + token * dt_stride + dt_cell, mask=live, other=0.0)
        B = tl.load(B_ptr + token * B_stride + B_cell, mask=live_m, other=0.0)
        C = tl.load(C_ptr + token * C_stride + C_cell, mask=live_m, other=0.0)

        state, y = _scan_tokens(state, A, step, now_x, now_B, now_C, TOKENS, STATES, SPLIT, D_TILE)
        y += skip[None, :] * now_x
        tl.store(out_ptr + now * out_stride + out_cell, y, mask=now_live)
        if token == now_stop:
            page = tl.load(chunk_page_ptr + chunk).to(tl.int64)
            if page != _NULL_PAGE:
                target = tl.multiple_of(page * page_stride + offset, ALIGN)
                tl.store(arena_ptr + target + element, state, mask=inside)
            chunk += 1
        # carried from turn to turn, or the compiler repeats it for each thread that shares a channel
        step = tl.where(live, softplus(dt.to(tl.float32) + dt_bias[None, :]), 0.0)


def _launch(
    arena: Tensor,
    out: Tensor,
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    offset: Tensor,
    read_page: Tensor,
    chunk_start: Tensor,
    chunk_row: Tensor,
    chunk_page: Tensor,
    row_chunk: Tensor,
) -> None:
    check_state_dtype("selective_scan_chunk", arena)
    check_selective_args("selective_scan_chunk", out, x, dt, A_log, B, C)
    rows, (channels, size), groups = row_chunk.shape[0] - 1, A_log.shape, B.shape[1]
    if rows == 0:
        return
    split = max(1, triton.next_power_of_2(size) // _STATES)
    d_tile = max(1, _WARP // split)
    tiles = groups * triton.cdiv(channels // groups, d_tile)
    _selective_scan_chunk_kernel[(rows * tiles,)](
        arena, out, x, dt, A_log, B, C, skip, dt_bias,
        offset, read_page, chunk_start, chunk_page, row_chunk,
        arena.stride(0), out.stride(0), x.stride(0), dt.stride(0),
        B.stride(0), B.stride(1), C.stride(0), C.stride(1),
        G=groups, D=channels, M=size, TOKENS=_TOKENS, STATES=_STATES, SPLIT=split, D_TILE=d_tile,
        ALIGN=aligned_elements(arena), num_warps=max(1, split * d_tile // _WARP),
    )  # fmt: skip


def _build(
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
    lengths: Sequence[int],
    exports: Sequence[Sequence[int]],
    state_dtype: torch.dtype | None,
    shape: SelectiveShape,
) -> Args:
    """Rows as `chunk_pages` has them, then five tokens of no chunk, which are NaN."""
    plan = chunk_pages(lengths, exports)
    start = 128
    live = plan.read_page[: len(lengths)].tolist()
    arena = poisoned_arena(generator, plan.pages, start, shape.elements, live, state_dtype or dtype)
    args = draw_selective(generator, sum(lengths) + 5, dtype, shape)
    for name in ("x", "dt", "B", "C"):
        args[name][sum(lengths) :] = float("nan")
    return {
        "arena": arena,
        **args,
        "offset": element_offset(start),
        "read_page": plan.read_page,
        **asdict(plan.table),
    }


def _case(
    why: str = "",
    lengths: Sequence[int] = (9, 1),
    exports: Sequence[Sequence[int]] = (),
    channels: int = 6,
    state_dtype: torch.dtype | None = torch.float32,  # None: that of x
    **changes: Any,
) -> OpCase:
    shape = SelectiveShape(channels, **changes)
    build = partial(_build, lengths=lengths, exports=exports, state_dtype=state_dtype, shape=shape)
    return OpCase(f"T{'+'.join(map(str, lengths))}-{shape}{why}", build)


def _traffic(args: Args) -> tuple[int, int]:
    tokens, rows = int(args["chunk_start"][-1]), args["row_chunk"].shape[0] - 1
    channels, size = args["A_log"].shape
    exports = int((args["chunk_page"] != NULL_PAGE).sum())
    activations = tokens * (3 * channels + 2 * args["B"][0].numel()) * args["x"].element_size()
    states = (rows + exports) * channels * size * args["arena"].element_size()
    return activations + states, (5 + EXP_OPERATIONS) * tokens * channels * size


CASES = (
    _case(),
    _case(lengths=(1, 3, 64, 65, 7)),
    _case("-exports", lengths=(5, 5, 5, 9), exports=((2,), (1, 2), (1, 3), (1, 2, 6))),
    _case(size=12, channels=13),  # no power of two, no multiple of eight
    _case("-gap", gap=5),  # views into a wider projection, no 16-byte access possible
    _case(channels=12, groups=3),  # a tile is cut where its group ends
    _case(channels=16),  # two whole tiles
    _case(channels=5, size=4),  # a thread keeps a whole channel
    _case(channels=2, size=200),  # two warps keep one channel
    _case("-strong_decay", lengths=(20,), step=4.0, log_decay=2.0),  # below 1e-12 per token
    _case("-no_decay", step=-30.0),  # the state stands still
    _case("-state_like_x", state_dtype=None),
)


def _build_bench(
    generator: torch.Generator, dtype: torch.dtype, device: torch.device, lengths: Sequence[int]
) -> Args:
    """Every row in place, sizes of Falcon Mamba 7B."""
    shape = SelectiveShape(channels=8192)
    arena, page = bench_arena(generator, len(lengths), shape.elements, torch.float32)
    args = draw_selective(torch.Generator().manual_seed(0), sum(lengths), dtype, shape)
    table = cut_chunks(lengths, page.tolist())
    args |= {"offset": element_offset(0), "read_page": page, **asdict(table)}
    return {"arena": arena, **{name: value.to(device) for name, value in args.items()}}


BENCH_CASES = tuple(
    OpCase(f"R{rows}-T{length}-D8192-M16", partial(_build_bench, lengths=[length] * rows))
    for rows, length in ((1, 6000), (8, 750))
)

selective_scan_chunk = define_op(
    "selective_scan_chunk(Tensor(a!) arena, Tensor(b!) out, Tensor x, Tensor dt, Tensor A_log, Tensor B, "
    "Tensor C, Tensor skip, Tensor dt_bias, Tensor offset, Tensor read_page, Tensor chunk_start, "
    "Tensor chunk_row, Tensor chunk_page, Tensor row_chunk) -> ()",
    cuda=_launch,
    cpu=selective_scan_chunk_ref,
    cases=CASES,
    tolerance=Tolerance(
        {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4},
        "fp32 recurrence, which forgets old rounding; 16-bit results are rounded once (2 ** -9, 2 ** -12)",
    ),
    traffic=_traffic,
    export_alignment=1,
    bench_cases=BENCH_CASES,
)
