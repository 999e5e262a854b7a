"""
The real-gated linear recurrent unit (RecurrentGemma) over packed rows of any length, on paged state.

The recurrence is the one of `rg_lru_step`.  A row starts from the state in `read_page`; after every chunk
whose `chunk_page` is not the null page, the state is exported to that page, which may be the row's
`read_page`.  `out` is left alone at tokens of no chunk.  At position 0 a sequence begins, also inside a row.

A program walks the chunks of a row for a few channels and reads the next chunk while it computes one.  A
chunk is cut into groups of tokens.  All groups at once are walked token by token, each as the pair (a, b)
that takes the state before it to a * state + b; then the groups are scanned, where (a, b) followed by (c, d)
is (a * c, c * b + d).  Decays are only ever multiplied, never inverted, so that none can overflow.

Letters: T tokens, D channels, N pages, R rows, Q chunks (see `chunk_table`).
Traffic: 4 * D elements of activations per token; D of state per row and export.
Source: as `rg_lru_step`; Blelloch 1990, "Prefix Sums and Their Applications", section 1.4, for the scan.
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
from midstream.ops.chunk_table import CHUNK, cut_chunks
from midstream.ops.paged_state import aligned_elements, state_region
from midstream.ops.registry import NULL_PAGE, Args, OpCase, Tolerance, define_op
from midstream.ops.rg_lru_step import (
    OPERATIONS,
    RgLruShape,
    check_rg_lru_args,
    draw_rg_lru,
    rg_lru_strength,
    rg_lru_terms,
    rg_lru_terms_ref,
)
from midstream.ops.state_types import check_state_dtype

_TILE = 32  # channels of a program: 64 bytes of bf16 per token, and many programs for one long row
_WALK = tl.constexpr(8)  # tokens of a group
_GROUPS = tl.constexpr(CHUNK // 8)
_NULL_PAGE = tl.constexpr(NULL_PAGE)


def rg_lru_chunk_ref(
    arena: Tensor,  # [N, E]           region [D] at `offset`
    out: Tensor,  # [T, D]
    x: Tensor,  # [T, D]
    input_gate: Tensor,  # [T, D]           before the sigmoid
    recurrent_gate: Tensor,  # [T, D]           before the sigmoid
    recurrent_param: Tensor,  # [D]
    offset: Tensor,  # i64[1]           elements
    position: Tensor,  # i32[>= T]    of the token in its sequence; 0: the sequence begins
    read_page: Tensor,  # i32[>= R]    NULL_PAGE: zeros
    chunk_start: Tensor,  # i32[Q + 1]
    chunk_row: Tensor,  # i32[Q]
    chunk_page: Tensor,  # i32[Q]       NULL_PAGE: no export
    row_chunk: Tensor,  # i32[R + 1]
) -> None:
    """Say what the kernel means, one token at a time."""
    region = state_region(arena, offset, x.shape[1])
    start, page, bounds = chunk_start.tolist(), chunk_page.tolist(), row_chunk.tolist()
    begins = position[: x.shape[0]] == 0
    decay, update = rg_lru_terms_ref(x, input_gate, recurrent_gate, recurrent_param, begins)
    for row, (first, last) in enumerate(pairwise(bounds)):
        if first == last:
            continue
        source = int(read_page[row])
        fresh = source == NULL_PAGE or bool(begins[start[first]])
        state = (torch.zeros_like(region[0]) if fresh else region[source]).to(decay.dtype)
        for chunk in range(first, last):
            for t in range(start[chunk], start[chunk + 1]):
                state = torch.addcmul(update[t], state, decay[t])
                out[t] = state.to(out.dtype)
            if page[chunk] != NULL_PAGE:
                region[page[chunk]] = state.to(arena.dtype)


@triton.jit
def _then(decay, update, next_decay, next_update):
    """One stretch of tokens after another: state -> next_decay * (decay * state + update) + next_update."""
    return decay * next_decay, next_decay * update + next_update


@triton.jit
def _load_chunk(
    x_ptr, input_gate_ptr, recurrent_gate_ptr, position_ptr,
    x_stride, input_gate_stride, recurrent_gate_stride, start, stop, channel, known,
):  # fmt: skip
    """For each step of the walk what all groups need: three tiles [GROUPS, TILE], positions and liveness."""
    tokens = ()
    for i in tl.static_range(_WALK):
        token = start + i + tl.arange(0, _GROUPS) * _WALK
        live = (token < stop)[:, None]
        token = token[:, None]
        inside = live & known
        x = tl.load(x_ptr + token * x_stride + channel, mask=inside, other=0.0)
        input_gate_ptrs = input_gate_ptr + token * input_gate_stride + channel
        input_gate = tl.load(input_gate_ptrs, mask=inside, other=0.0)
        recurrent_gate_ptrs = recurrent_gate_ptr + token * recurrent_gate_stride + channel
        recurrent_gate = tl.load(recurrent_gate_ptrs, mask=inside, other=0.0)
        position = tl.load(position_ptr + token, mask=live, other=1)
        tokens += ((x, input_gate, recurrent_gate, position, live),)  # type: ignore[assignment]
    return tokens


@triton.jit
def _scan_groups(state, decay, update):
    """States [GROUPS, TILE] before each group, and the one [TILE] after all, from the one before all."""
    group = tl.arange(0, _GROUPS)
    kept = tl.where((group == 0)[:, None], decay * state[None, :], 0.0)
    _, after = tl.associative_scan((decay, update + kept), 0, _then)
    follows = (group[:, None] + 1 == group[None, :])[:, :, None]
    before = tl.sum(tl.where(follows, after[:, None, :], 0.0), axis=0)
    last = tl.sum(tl.where((group == _GROUPS - 1)[:, None], after, 0.0), axis=0)
    return tl.where((group == 0)[:, None], state[None, :], before), last


@triton.jit
def _rg_lru_chunk_kernel(
    arena_ptr,  # [N, page_stride]
    out_ptr,  # [T, D]
    x_ptr,  # [T, D]
    input_gate_ptr,  # [T, D]
    recurrent_gate_ptr,  # [T, D]
    recurrent_param_ptr,  # [D]
    offset_ptr,  # i64[1]
    position_ptr,  # i32[T]
    read_page_ptr,  # i32[R]
    chunk_start_ptr,  # i32[Q + 1]
    chunk_page_ptr,  # i32[Q]
    row_chunk_ptr,  # i32[R + 1]
    page_stride,  # elements; the other strides go from token to token
    out_stride,
    x_stride,
    input_gate_stride,
    recurrent_gate_stride,
    D: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,  # elements on which pages and regions start
):
    """One program per row and tile of channels."""
    TILES: tl.constexpr = (D + TILE - 1) // TILE
    row = tl.program_id(0) // TILES
    first = tl.load(row_chunk_ptr + row)
    last = tl.load(row_chunk_ptr + row + 1)
    if first == last:
        return
    channel = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    known = channel < D
    offset = tl.load(offset_ptr)
    read_page = tl.load(read_page_ptr + row).to(tl.int64)
    source = tl.multiple_of(read_page * page_stride + offset, ALIGN)
    start = tl.load(chunk_start_ptr + first).to(tl.int64)
    stop = tl.load(chunk_start_ptr + first + 1).to(tl.int64)
    has_state = known & (read_page != _NULL_PAGE) & (tl.load(position_ptr + start) != 0)
    state = tl.load(arena_ptr + source + channel, mask=has_state, other=0.0).to(tl.float32)
    tl.debug_barrier()  # in place: no thread may still have a channel to load
    param = tl.load(recurrent_param_ptr + channel, mask=known, other=0.0)
    strength = rg_lru_strength(param)[None, :]
    tokens = _load_chunk(
        x_ptr, input_gate_ptr, recurrent_gate_ptr, position_ptr,
        x_stride, input_gate_stride, recurrent_gate_stride, start, stop, channel[None, :], known[None, :],
    )  # fmt: skip
    for chunk in range(first, last):
        decays = ()
        updates = ()
        decay = tl.full([_GROUPS, TILE], 1.0, tl.float32)
        update = tl.zeros([_GROUPS, TILE], tl.float32)
        for i in tl.static_range(_WALK):
            x, input_gate, recurrent_gate, position, live = tokens[i]
            a, b = rg_lru_terms(x, input_gate, recurrent_gate, strength, position == 0)
            # tokens after the chunk's last one leave the state alone
            decay, update = _then(decay, update, tl.where(live, a, 1.0), tl.where(live, b, 0.0))
            decays += (decay,)  # type: ignore[assignment]
            updates += (update,)  # type: ignore[assignment]
        now, now_stop = start, stop
        start = stop
        stop = tl.load(chunk_start_ptr + tl.minimum(chunk + 2, last)).to(tl.int64)
        tokens = _load_chunk(
            x_ptr, input_gate_ptr, recurrent_gate_ptr, position_ptr,
            x_stride, input_gate_stride, recurrent_gate_stride, start, stop, channel[None, :], known[None, :],
        )  # fmt: skip

        before, state = _scan_groups(state, decay, update)
        for i in tl.static_range(_WALK):
            token = (now + i + tl.arange(0, _GROUPS) * _WALK)[:, None]
            out_ptrs = out_ptr + token * out_stride + channel[None, :]
            inside = (token < now_stop) & known[None, :]
            tl.store(out_ptrs, decays[i] * before + updates[i], mask=inside)
        page = tl.load(chunk_page_ptr + chunk).to(tl.int64)
        if page != _NULL_PAGE:
            target = tl.multiple_of(page * page_stride + offset, ALIGN)
            tl.store(arena_ptr + target + channel, state, mask=known)


def _launch(
    arena: Tensor,
    out: Tensor,
    x: Tensor,
    input_gate: Tensor,
    recurrent_gate: Tensor,
    recurrent_param: Tensor,
    offset: Tensor,
    position: Tensor,
    read_page: Tensor,
    chunk_start: Tensor,
    chunk_row: Tensor,
    chunk_page: Tensor,
    row_chunk: Tensor,
) -> None:
    check_state_dtype("rg_lru_chunk", arena)
    check_rg_lru_args("rg_lru_chunk", out, x, input_gate, recurrent_gate, recurrent_param)
    rows, channels = row_chunk.shape[0] - 1, x.shape[1]
    if rows == 0:
        return
    _rg_lru_chunk_kernel[(rows * triton.cdiv(channels, _TILE),)](
        arena, out, x, input_gate, recurrent_gate, recurrent_param,
        offset, position, read_page, chunk_start, chunk_page, row_chunk,
        arena.stride(0), out.stride(0), x.stride(0), input_gate.stride(0), recurrent_gate.stride(0),
        D=channels, TILE=_TILE, ALIGN=aligned_elements(arena), num_warps=8,
    )  # fmt: skip


def _build(
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
    lengths: Sequence[int],
    exports: Sequence[Sequence[int]],
    state_dtype: torch.dtype | None,
    shape: RgLruShape,
) -> Args:
    """Rows as `chunk_pages` has them, then five tokens of no chunk, which are NaN.

    The second row begins at its first token, from a page of NaN, and once more at its third.
    """
    plan = chunk_pages(lengths, exports)
    start, tokens = 128, sum(lengths) + 5
    live = [page for row, page in enumerate(plan.read_page[: len(lengths)].tolist()) if row != 1]
    arena = poisoned_arena(generator, plan.pages, start, shape.channels, live, state_dtype or dtype)
    args = draw_rg_lru(generator, tokens, dtype, shape)
    for name in ("x", "input_gate", "recurrent_gate"):
        args[name][sum(lengths) :] = float("nan")
    position = torch.arange(3, tokens + 3, dtype=torch.int32)
    position[lengths[0] : sum(lengths[:2]) : 2][:2] = 0
    return {
        "arena": arena,
        **args,
        "offset": element_offset(start),
        "position": position,
        "read_page": plan.read_page,
        **asdict(plan.table),
    }


def _case(
    why: str = "",
    lengths: Sequence[int] = (9, 1),
    exports: Sequence[Sequence[int]] = (),
    state_dtype: torch.dtype | None = torch.float32,  # None: that of x
    **changes: Any,
) -> OpCase:
    shape = RgLruShape(**changes)
    build = partial(_build, lengths=lengths, exports=exports, state_dtype=state_dtype, shape=shape)
    return OpCase(f"T{'+'.join(map(str, lengths))}-{shape}{why}", build)


def _traffic(args: Args) -> tuple[int, int]:
    tokens, rows = int(args["chunk_start"][-1]), args["row_chunk"].shape[0] - 1
    channels = args["x"].shape[1]
    exports = int((args["chunk_page"] != NULL_PAGE).sum())
    states = (rows + exports) * channels * args["arena"].element_size()
    return 4 * tokens * channels * args["x"].element_size() + states, OPERATIONS * tokens * channels


CASES = (
    _case(),
    _case(lengths=(1, 3, 64, 65, 7)),
    _case("-exports", lengths=(5, 5, 5, 9), exports=((2,), (1, 2), (1, 3), (1, 2, 6))),
    _case(channels=13),  # no power of two, no multiple of eight
    _case("-gap", gap=5),  # views into a wider projection, no 16-byte access possible
    _case(lengths=(3, 2), channels=40),  # a partial second tile
    _case("-strong_decay", lengths=(70,), param=28.0, gate=8.0),  # far below 1e-12 per token
    _case(
        "-weak_decay", lengths=(70,), param=-9.0, gate=-4.0
    ),  # 1 - decay is below the rounding of 1
    _case("-no_decay", gate=-80.0),  # the state stands still
    _case("-state_like_x", state_dtype=None),
)


def _build_bench(
    generator: torch.Generator, dtype: torch.dtype, device: torch.device, lengths: Sequence[int]
) -> Args:
    """Every row in place, sizes of RecurrentGemma 9B."""
    shape, tokens = RgLruShape(channels=4096), sum(lengths)
    arena, page = bench_arena(generator, len(lengths), shape.channels, torch.float32)
    args = draw_rg_lru(torch.Generator().manual_seed(0), tokens, dtype, shape)
    args["position"] = torch.arange(1, tokens + 1, dtype=torch.int32)
    table = cut_chunks(lengths, page.tolist())
    args |= {"offset": element_offset(0), "read_page": page, **asdict(table)}
    return {"arena": arena, **{name: value.to(device) for name, value in args.items()}}


BENCH_CASES = tuple(
    OpCase(f"R{rows}-T{length}-D4096", partial(_build_bench, lengths=[length] * rows))
    for rows, length in ((1, 6000), (8, 750))
)

rg_lru_chunk = define_op(
    "rg_lru_chunk(Tensor(a!) arena, Tensor(b!) out, Tensor x, Tensor input_gate, Tensor recurrent_gate, "
    "Tensor recurrent_param, Tensor offset, Tensor position, Tensor read_page, Tensor chunk_start, "
    "Tensor chunk_row, Tensor chunk_page, Tensor row_chunk) -> ()",
    cuda=_launch,
    cpu=rg_lru_chunk_ref,
    cases=CASES,
    tolerance=Tolerance(
        {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4},
        "fp32 recurrence, which forgets old rounding; 16-bit results are rounded once (2 ** -9, 2 ** -12)",
    ),
    traffic=_traffic,
    export_alignment=1,
    bench_cases=BENCH_CASES,
)
