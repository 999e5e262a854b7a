"""
The state-space-dual scan (Mamba-2) over packed rows of any length, on paged state.

The recurrence is the one of `ssd_step`.  A row starts from the state in `read_page`; after every chunk whose
`chunk_page` is not the null page, the state is exported to that page, which may be the row's `read_page`.
`out` is left alone at tokens of no chunk.

Within a chunk, with a[t] = -exp(A_log) * dt[t] and the running sum c[t] = a[first] + ... + a[t],

    out[t] = exp(c[t]) * incoming @ C[t] + D * x[t]
           + sum_{s <= t} (C[t] . B[s]) * exp(c[t] - c[s]) * dt[s] * x[s]
    state  = exp(c[last]) * incoming + sum_s exp(c[last] - c[s]) * dt[s] * outer(x[s], B[s])

in three launches: `prepare` fills c, dt and the products C . B, which the heads of a group share; `pass`
walks the chunks of each row, keeps the state before each and exports; `output` computes all chunks at once.

Letters: T tokens, H heads, P head width, M state size, G groups, N pages, R rows, Q chunks (`chunk_table`).
Traffic: 2 * H * P tokens of activations; per chunk 2 * H * P * M elements of kept states.
Source: Dao and Gu 2024, "Transformers are SSMs", arXiv 2405.21060, section 6 (block decomposition).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from midstream.ops.case_data import chunk_pages, element_offset, poisoned_arena
from midstream.ops.chunk_table import CHUNK
from midstream.ops.paged_state import aligned_elements, state_region
from midstream.ops.registry import NULL_PAGE, PADDING, Args, OpCase, Tolerance, define_op
from midstream.ops.ssd_matmul import ssd_chunk_matmul
from midstream.ops.ssd_step import SsdShape, check_ssd_args, draw_ssd, ssd_step_size

_HEADS = 16  # heads of a program that accumulates decays
_SHARED_HEADS = 4  # heads of a program that computes outputs,
_MANY = 4096  # where chunks and heads are so many that this still fills the device
_REGISTERS = 168  # of a thread of the output kernel: three programs per processor
_NULL_PAGE = tl.constexpr(NULL_PAGE)
_PADDING = tl.constexpr(PADDING)
_CHUNK = tl.constexpr(CHUNK)
# exp(-100) is nearly the smallest number of fp32: a stronger decay says no more and could give inf - inf
_MIN_LOG_DECAY = tl.constexpr(-100.0)


def ssd_chunk_ref(
    arena: Tensor,  # [N, E]           region [H, P, M] at `offset`
    out: Tensor,  # [T, H, P]
    x: Tensor,  # [T, H, P]
    dt: Tensor,  # [T, H]           before bias and softplus
    A_log: Tensor,  # [H]
    B: Tensor,  # [T, G, M]
    C: Tensor,  # [T, G, M]
    D: Tensor,  # [H]
    dt_bias: Tensor,  # [H]
    dt_min: float,
    dt_max: float,
    offset: Tensor,  # i64[1]           elements
    read_page: Tensor,  # i32[>= R]    NULL_PAGE: zeros
    chunk_start: Tensor,  # i32[Q + 1]
    chunk_row: Tensor,  # i32[Q]
    chunk_page: Tensor,  # i32[Q]       NULL_PAGE: no export
    row_chunk: Tensor,  # i32[R + 1]
) -> None:
    """Say what the kernel means, one token at a time."""
    wide = torch.promote_types(x.dtype, torch.float32)
    heads, width = x.shape[1:]
    region = state_region(arena, offset, heads, width, B.shape[-1])
    start, page, bounds = chunk_start.tolist(), chunk_page.tolist(), row_chunk.tolist()
    step = F.softplus(dt.to(wide) + dt_bias.to(wide)).clamp(dt_min, dt_max)  # [T, H]
    decay = torch.exp(-torch.exp(A_log.to(wide)) * step)[..., None, None]
    gain = (step[..., None] * x.to(wide))[..., None]  # [T, H, P, 1]
    B_heads = B.to(wide).repeat_interleave(heads // B.shape[1], 1)[:, :, None]  # [T, H, 1, M]
    C_heads = C.to(wide).repeat_interleave(heads // C.shape[1], 1)[:, :, None]
    skip = D.to(wide)[:, None] * x.to(wide)
    for row, (first, last) in enumerate(pairwise(bounds)):
        if first == last:
            continue
        source = int(read_page[row])
        state = (
            region[source].to(wide) if source != NULL_PAGE else torch.zeros_like(region[0]).to(wide)
        )
        for chunk in range(first, last):
            for t in range(start[chunk], start[chunk + 1]):
                state = torch.addcmul(state * decay[t], gain[t], B_heads[t])
                out[t] = ((state * C_heads[t]).sum(-1) + skip[t]).to(out.dtype)
            if page[chunk] != NULL_PAGE:
                region[page[chunk]] = state.to(arena.dtype)


@triton.jit
def _store_scores(
    score_ptr, B_ptr, C_ptr, B_stride, C_stride, token, live, M, M_TILE: tl.constexpr
):
    """C[t] . B[s] for all pairs of the chunk's tokens."""
    scores = tl.zeros([_CHUNK, _CHUNK], tl.float32)
    for first in tl.range(0, M, M_TILE):
        m = first + tl.arange(0, M_TILE)
        C_ptrs = C_ptr + token[:, None] * C_stride + m[None, :]
        B_ptrs = B_ptr + token[None, :] * B_stride + m[:, None]
        C = tl.load(C_ptrs, mask=live[:, None] & (m < M)[None, :], other=0.0)
        B = tl.load(B_ptrs, mask=live[None, :] & (m < M)[:, None], other=0.0)
        scores = tl.dot(C, B, scores, input_precision="ieee")
    place = tl.arange(0, _CHUNK)
    tl.store(score_ptr + place[:, None] * _CHUNK + place[None, :], scores)


@triton.jit
def _store_sums(sum_ptr, rest_ptr, step_ptr, log_decay, step, known):
    """Running sums as two fp32 numbers, so that the difference of two large sums is still exact."""
    sums = tl.cumsum(log_decay.to(tl.float64), axis=0)
    rounded = sums.to(tl.float32)
    tl.store(sum_ptr, rounded, mask=known)
    tl.store(rest_ptr, (sums - rounded.to(tl.float64)).to(tl.float32), mask=known)
    tl.store(step_ptr, step, mask=known)


@triton.jit
def _prepare_kernel(
    sum_ptr,  # f32[Q, H, CHUNK]  running sum of log decays; constant after the chunk's last token
    rest_ptr,  # f32[Q, H, CHUNK]  what rounding took from it
    step_ptr,  # f32[Q, H, CHUNK]  dt after softplus and clamp; 0 after the chunk's last token
    score_ptr,  # f32[Q, G, CHUNK, CHUNK]  C[t] . B[s]
    dt_ptr,  # [T, H]
    A_log_ptr,  # [H]
    B_ptr,  # [T, G, M]
    C_ptr,  # [T, G, M]
    dt_bias_ptr,  # [H]
    chunk_start_ptr,  # i32[Q + 1]
    chunk_row_ptr,  # i32[Q]
    dt_stride,
    B_stride,
    C_stride,
    dt_min,
    dt_max,
    H: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    M_TILE: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One program per chunk and group (scores) or tile of heads (sums)."""
    PARTS: tl.constexpr = G + (H + HEADS - 1) // HEADS
    chunk = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    if tl.load(chunk_row_ptr + chunk) == _PADDING:
        return
    place = tl.arange(0, _CHUNK)
    token = tl.load(chunk_start_ptr + chunk).to(tl.int64) + place
    live = token < tl.load(chunk_start_ptr + chunk + 1)
    if part < G:
        scores_ptr = score_ptr + (chunk * G + part) * (_CHUNK * _CHUNK)
        B_ptr += part * M
        C_ptr += part * M
        _store_scores(scores_ptr, B_ptr, C_ptr, B_stride, C_stride, token, live, M, M_TILE)
    else:
        head = ((part - G) * HEADS + tl.arange(0, HEADS))[None, :]
        known = head < H
        dt_ptrs = dt_ptr + token[:, None] * dt_stride + head
        dt = tl.load(dt_ptrs, mask=live[:, None] & known, other=0.0)
        bias = tl.load(dt_bias_ptr + head, mask=known, other=0.0)
        A_log = tl.load(A_log_ptr + head, mask=known, other=0.0).to(tl.float32)
        step = tl.where(live[:, None], ssd_step_size(dt, bias, dt_min, dt_max), 0.0)
        log_decay = tl.maximum(-tl.exp(A_log) * step, _MIN_LOG_DECAY)
        cell = (chunk * H + head) * _CHUNK + place[:, None]
        _store_sums(sum_ptr + cell, rest_ptr + cell, step_ptr + cell, log_decay, step, known)


@triton.jit
def _pass_kernel(
    arena_ptr,  # [N, page_stride]
    incoming_ptr,  # [Q, H, P, M]  state before each chunk
    x_ptr,  # [T, H, P]
    B_ptr,  # [T, G, M]
    sum_ptr,  # f32[Q, H, CHUNK]
    rest_ptr,  # f32[Q, H, CHUNK]
    step_ptr,  # f32[Q, H, CHUNK]
    offset_ptr,  # i64[1]
    read_page_ptr,  # i32[R]
    chunk_start_ptr,  # i32[Q + 1]
    chunk_page_ptr,  # i32[Q]
    row_chunk_ptr,  # i32[R + 1]
    page_stride,  # elements; the other strides go from token to token
    x_stride,
    B_stride,
    H: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    P_TILE: tl.constexpr,
    M_TILE: tl.constexpr,
    ALIGN: tl.constexpr,  # elements on which pages and regions start
):
    """One program per row and tile [P_TILE, M_TILE] of a head's state, which no other program touches."""
    P_TILES: tl.constexpr = (P + P_TILE - 1) // P_TILE
    M_TILES: tl.constexpr = (M + M_TILE - 1) // M_TILE
    TILES: tl.constexpr = H * P_TILES * M_TILES
    row = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    first = tl.load(row_chunk_ptr + row).to(tl.int64)  # 64-bit, so is every address that follows
    last = tl.load(row_chunk_ptr + row + 1).to(tl.int64)
    if first == last:
        return
    head = tile // (P_TILES * M_TILES)
    p = tile // M_TILES % P_TILES * P_TILE + tl.arange(0, P_TILE)
    m = tile % M_TILES * M_TILE + tl.arange(0, M_TILE)
    place = tl.arange(0, _CHUNK)
    inside = (p < P)[:, None] & (m < M)[None, :]
    element = (head * P + p)[:, None] * M + m[None, :]
    offset = tl.load(offset_ptr)
    read_page = tl.load(read_page_ptr + row).to(tl.int64)
    source = tl.multiple_of(read_page * page_stride + offset, ALIGN)
    has_state = inside & (read_page != _NULL_PAGE)
    state = tl.load(arena_ptr + source + element, mask=has_state, other=0.0).to(tl.float32)
    x_ptrs = x_ptr + (head * P + p)[:, None]
    B_ptrs = B_ptr + (head // HEADS_PER_GROUP * M + m)[None, :]
    for chunk in range(first, last):
        page = tl.load(chunk_page_ptr + chunk).to(tl.int64)
        token = tl.load(chunk_start_ptr + chunk) + place
        live = token < tl.load(chunk_start_ptr + chunk + 1)
        x_offsets = token.to(tl.int64)[None, :] * x_stride
        B_offsets = token.to(tl.int64)[:, None] * B_stride
        x = tl.load(x_ptrs + x_offsets, mask=live[None, :] & (p < P)[:, None], other=0.0)
        B = tl.load(B_ptrs + B_offsets, mask=live[:, None] & (m < M)[None, :], other=0.0)
        cell = (chunk * H + head) * _CHUNK + place
        end = (chunk * H + head) * _CHUNK + (_CHUNK - 1)
        total = tl.load(sum_ptr + end)
        total_rest = tl.load(rest_ptr + end)
        since = (total - tl.load(sum_ptr + cell)) + (total_rest - tl.load(rest_ptr + cell))
        gain = tl.load(step_ptr + cell) * tl.exp(since)
        incoming_ptrs = incoming_ptr + chunk * (H * P * M) + element
        tl.store(incoming_ptrs, state, mask=inside)
        weighted = (x.to(tl.float32) * gain[None, :]).to(x.dtype)
        state = tl.dot(weighted, B, state * tl.exp(total), input_precision="ieee")
        if page != _NULL_PAGE:
            target = tl.multiple_of(page * page_stride + offset, ALIGN)
            tl.store(arena_ptr + target + element, state, mask=inside)


@triton.jit
def _output_kernel(
    out_ptr,  # [T, H, P]
    incoming_ptr,  # [Q, H, P, M]
    x_ptr,  # [T, H, P]
    C_ptr,  # [T, G, M]
    D_ptr,  # [H]
    sum_ptr,  # f32[Q, H, CHUNK]
    rest_ptr,  # f32[Q, H, CHUNK]
    step_ptr,  # f32[Q, H, CHUNK]
    score_ptr,  # f32[Q, G, CHUNK, CHUNK]
    chunk_start_ptr,  # i32[Q + 1]
    chunk_row_ptr,  # i32[Q]
    out_stride,  # from token to token
    x_stride,
    C_stride,
    H: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HEADS: tl.constexpr,  # heads of a program, all of one group: they share C and the scores
    P_TILE: tl.constexpr,
    M_TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per chunk, `HEADS` heads and tile of P."""
    P_TILES: tl.constexpr = (P + P_TILE - 1) // P_TILE
    PARTS: tl.constexpr = (H // HEADS) * P_TILES
    chunk = (tl.program_id(0) // PARTS).to(tl.int64)
    first_head = tl.program_id(0) % PARTS // P_TILES * HEADS
    if tl.load(chunk_row_ptr + chunk) == _PADDING:
        return
    group = first_head // HEADS_PER_GROUP
    p = tl.program_id(0) % P_TILES * P_TILE + tl.arange(0, P_TILE)
    place = tl.arange(0, _CHUNK)
    token = tl.load(chunk_start_ptr + chunk).to(tl.int64) + place
    live = token < tl.load(chunk_start_ptr + chunk + 1)
    inside = live[:, None] & (p < P)[None, :]
    past = place[:, None] >= place[None, :]
    score_ptr += (chunk * (H // HEADS_PER_GROUP) + group) * (_CHUNK * _CHUNK)
    score = tl.load(score_ptr + place[:, None] * _CHUNK + place[None, :])
    m = tl.arange(0, M_TILE)
    C_ptrs = C_ptr + token[:, None] * C_stride + group * M + m[None, :]
    C = tl.load(C_ptrs, mask=live[:, None] & (m < M)[None, :], other=0.0)
    for head in tl.range(first_head, first_head + HEADS, num_stages=STAGES):
        state_ptrs = incoming_ptr + ((chunk * H + head) * P + p)[None, :] * M + m[:, None]
        state = tl.load(state_ptrs, mask=(p < P)[None, :] & (m < M)[:, None], other=0.0)
        y = tl.dot(C, state, input_precision="ieee")
        if M > M_TILE:
            for first in tl.range(M_TILE, M, M_TILE):
                more = (m < M - first)[None, :] & live[:, None]
                C_more = tl.load(C_ptrs + first, mask=more, other=0.0)
                more = (m < M - first)[:, None] & (p < P)[None, :]
                state = tl.load(state_ptrs + first, mask=more, other=0.0)
                y = tl.dot(C_more, state, y, input_precision="ieee")

        x_ptrs = x_ptr + token[:, None] * x_stride + head * P + p[None, :]
        x = tl.load(x_ptrs, mask=inside, other=0.0)
        cell = (chunk * H + head) * _CHUNK + place
        sums = tl.load(sum_ptr + cell)
        rest = tl.load(rest_ptr + cell)
        since = (sums[:, None] - sums[None, :]) + (rest[:, None] - rest[None, :])
        gain = tl.exp(tl.where(past, since, float("-inf"))) * tl.load(step_ptr + cell)[None, :]
        y *= tl.exp(sums)[:, None]
        y = tl.dot((score * gain).to(x.dtype), x, y, input_precision="ieee")
        y += tl.load(D_ptr + head).to(tl.float32) * x.to(tl.float32)
        out_ptrs = out_ptr + token[:, None] * out_stride + head * P + p[None, :]
        tl.store(out_ptrs, y, mask=inside)


def _launch(
    arena: Tensor,
    out: Tensor,
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_min: float,
    dt_max: float,
    offset: Tensor,
    read_page: Tensor,
    chunk_start: Tensor,
    chunk_row: Tensor,
    chunk_page: Tensor,
    row_chunk: Tensor,
) -> None:
    check_ssd_args("ssd_chunk", out, x, dt, B, C)
    (heads, width), (groups, size) = x.shape[1:], B.shape[1:]
    chunks, rows = chunk_row.shape[0], row_chunk.shape[0] - 1
    if chunks == 0:
        return
    sums = torch.empty((3, chunks, heads, CHUNK), dtype=torch.float32, device=x.device)
    scores = torch.empty((chunks, groups, CHUNK, CHUNK), dtype=torch.float32, device=x.device)
    incoming = torch.empty((chunks, heads, width, size), dtype=x.dtype, device=x.device)
    whole, tiles = _tiles(x.dtype, width, size)
    p_tiles = triton.cdiv(width, tiles["P_TILE"])
    regular = x.dtype != torch.float32 and size == whole and width % tiles["P_TILE"] == 0
    shared = 1 if chunks * heads < _MANY else math.gcd(_SHARED_HEADS, heads // groups)
    sizes = {"H": heads, "P": width, "M": size, "HEADS_PER_GROUP": heads // groups}
    _prepare_kernel[(chunks * (groups + triton.cdiv(heads, _HEADS)),)](
        *sums, scores, dt, A_log, B, C, dt_bias, chunk_start, chunk_row,
        dt.stride(0), B.stride(0), C.stride(0), dt_min, dt_max,
        H=heads, G=groups, M=size, M_TILE=tiles["M_TILE"], HEADS=_HEADS, num_warps=4,
    )  # fmt: skip
    _pass_kernel[(rows * heads * p_tiles * triton.cdiv(size, tiles["M_TILE"]),)](
        arena, incoming, x, B, *sums, offset, read_page, chunk_start, chunk_page, row_chunk,
        arena.stride(0), x.stride(0), B.stride(0),
        **sizes, **tiles, ALIGN=aligned_elements(arena), num_warps=4, num_stages=5,
    )  # fmt: skip
    _output_kernel[(chunks * (heads // shared) * p_tiles,)](
        out, incoming, x, C, D, *sums, scores, chunk_start, chunk_row,
        out.stride(0), x.stride(0), C.stride(0),
        **sizes, HEADS=shared, P_TILE=tiles["P_TILE"], M_TILE=whole, STAGES=2, num_warps=4,
        maxnreg=_REGISTERS if regular else None,
    )  # fmt: skip


def _tiles(dtype: torch.dtype, width: int, size: int) -> tuple[int, dict[str, int]]:
    """M_TILE of the output kernel and tiles of the pass kernel.

    Tensor cores take 64 x 64 tiles and all of M at once; exact fp32 products run without, on small tiles.
    """
    exact = dtype == torch.float32
    p_tile = max(16, min(16 if exact else 64, triton.next_power_of_2(width)))
    m_tile = max(16, min(32 if exact else 64, triton.next_power_of_2(size)))
    whole = m_tile if exact else max(16, min(256, triton.next_power_of_2(size)))
    return whole, {"P_TILE": p_tile, "M_TILE": m_tile}


def _build(
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
    lengths: Sequence[int],
    exports: Sequence[Sequence[int]],
    state_dtype: torch.dtype | None,
    shape: SsdShape,
) -> Args:
    """Rows as `chunk_pages` has them, then five tokens of no chunk, which are NaN."""
    plan = chunk_pages(lengths, exports, generator)
    start = 128
    live = plan.read_page[: len(lengths)].tolist()
    arena = poisoned_arena(generator, plan.pages, start, shape.elements, live, state_dtype or dtype)
    args = draw_ssd(generator, sum(lengths) + 5, dtype, shape)
    for name in ("x", "dt", "B", "C"):
        args[name][sum(lengths) :] = float("nan")
    return {
        "arena": arena,
        **args,
        "offset": element_offset(start),
        "read_page": plan.read_page,
        "chunk_start": plan.table.chunk_start,
        "chunk_row": plan.table.chunk_row,
        "chunk_page": plan.table.chunk_page,
        "row_chunk": plan.table.row_chunk,
    }


def _case(
    why: str = "",
    lengths: Sequence[int] = (7, 70),
    exports: Sequence[Sequence[int]] = (),
    heads: int = 2,
    state_dtype: torch.dtype | None = torch.float32,  # None: that of x
    **changes: Any,
) -> OpCase:
    shape = SsdShape(heads=heads, **changes)
    build = partial(_build, lengths=lengths, exports=exports, state_dtype=state_dtype, shape=shape)
    return OpCase(f"T{'+'.join(map(str, lengths))}-{shape}{why}", build)


def _traffic(args: Args) -> tuple[int, int]:
    (tokens, heads, width), size = args["x"].shape, args["B"].shape[-1]
    groups, element = args["B"].shape[1], args["x"].element_size()
    states = args["chunk_row"].shape[0] * heads * width * size
    moved = tokens * (2 * heads * width + 2 * groups * size + heads) + 2 * states
    return moved * element, 2 * tokens * heads * width * (2 * size + CHUNK)


CASES = (
    _case(),
    _case(lengths=(1, 3, 64, 65, 7)),
    _case("-exports", lengths=(5, 5, 5, 9), exports=((2,), (1, 2), (1, 3), (1, 2, 6))),
    _case(heads=4, groups=2),
    _case(width=12, size=20),  # no power of two
    _case("-gap", gap=5),  # views into a wider projection, no 16-byte access possible
    _case("-tiles", lengths=(5,), width=72, size=80, heads=1),  # several tiles per head
    _case(lengths=(5,), width=64, size=128),  # sizes of mamba2
    _case("-clamp", step=(0.3, 0.5)),  # both ends of the clamp are met
    _case("-strong_decay", log_decay=4.0),  # far below 1e-12 within a chunk
    _case("-state_like_x", state_dtype=None),
)

ssd_chunk = define_op(
    "ssd_chunk(Tensor(a!) arena, Tensor(b!) out, Tensor x, Tensor dt, Tensor A_log, Tensor B, Tensor C, "
    "Tensor D, Tensor dt_bias, float dt_min, float dt_max, Tensor offset, Tensor read_page, "
    "Tensor chunk_start, Tensor chunk_row, Tensor chunk_page, Tensor row_chunk) -> ()",
    cuda=_launch,
    cpu=ssd_chunk_matmul,
    reference=ssd_chunk_ref,
    cases=CASES,
    tolerance=Tolerance(
        {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3},
        "fp32 sums over a chunk; with bf16 inputs the operands of all products are bf16 "
        "(2 ** -9 each), with fp16 inputs fp16 (2 ** -12)",
    ),
    traffic=_traffic,
    export_alignment=1,
)
