"""
Attention of one new token per row over the keys and values in its KV pages.

softmax(scale * q k^T) v over positions 0..position[row] (Vaswani et al. 2017, with KV heads shared
as in Ainslie et al. 2023).  Query head h uses KV head h // (H // G).  A row with row_slot -1 is
padding: its output is zero and it reads nothing.

Letters: R rows, S slots, Z columns of the block table, N pages, E elements of a page, H query
heads, G KV heads, D width of a head.
Traffic: 2 * G * D elements per position of every row, once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.ops.paged_kv import (
    attend,
    check_contiguous_heads,
    check_kv_pages,
    check_shared_heads,
    kv_region,
    random_pool,
)
from midstream.ops.paged_tile import LOG2_E, attend_tile, num_processors, tile_positions
from midstream.ops.registry import LAUNCH_ALIGN, PADDING, Args, OpCase, Tolerance, define_op

_PROGRAMS_PER_PROCESSOR = 4  # enough loads in flight to fill the memory bus
_SMALLEST_SPLIT = 64  # positions
_MOST_SPLITS = 64


def paged_attention_decode_ref(
    out: Tensor,  # [R, H, D]
    arena: Tensor,  # [N, E]
    q: Tensor,  # [R, H, D]
    offset: Tensor,  # i64[1]  start of the layer's region in a page
    kv_table: Tensor,  # i32[S, Z]
    row_slot: Tensor,  # i32[>=R]
    position: Tensor,  # i32[>=R]
    kv_heads: int,
    kv_block: int,
    scale: float,
) -> None:
    """Say what the kernel means, one row at a time."""
    rows, _, width = q.shape
    region = kv_region(arena, offset, kv_block, kv_heads, width)
    for row, slot in enumerate(row_slot[:rows].tolist()):
        if slot == PADDING:
            out[row] = 0
            continue
        here = slice(row, row + 1)
        out[here] = attend(q[here], region, kv_table[slot], position[here], scale)


@triton.jit
def _attend_kernel(
    out_ptr,  # [R, H, D]  written where SPLITS == 1
    part_ptr,  # f32[SPLITS, R, H, D]  softmax over the split's positions, where SPLITS > 1
    part_log_ptr,  # f32[SPLITS, R, H]  log2 of the split's weights
    arena_ptr,  # [N, page_stride]
    q_ptr,  # [R, H, D]
    offset_ptr,  # i64[1]
    kv_table_ptr,  # i32[S, Z]
    row_slot_ptr,  # i32[>=R]
    position_ptr,  # i32[>=R]
    out_row_stride,
    out_head_stride,
    page_stride,
    q_row_stride,
    q_head_stride,
    table_stride,
    place_stride,  # elements from position to position, G * D
    scale,  # of scores, for base 2
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,  # query heads of one KV head
    KV_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    ALIGN: tl.constexpr,  # elements; regions start on multiples of it
    M: tl.constexpr,  # power of two >= SHARE and 16
    TILE: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two >= D
):
    kv_head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(row_slot_ptr + row)
    share = tl.arange(0, M)
    lane = tl.arange(0, WIDTH)
    head = kv_head * SHARE + share
    held = (share < SHARE)[:, None] & (lane < D)[None, :]
    out_row_ptr = out_ptr + row * out_row_stride + head[:, None] * out_head_stride + lane[None, :]
    if slot < 0:
        if SPLITS == 1:
            zero = tl.zeros([M, WIDTH], out_ptr.dtype.element_ty)
            tl.store(out_row_ptr, zero, mask=held)
        return
    num_seen = tl.load(position_ptr + row) + 1
    begin, end = _split_range(num_seen, split, SPLITS, TILE)
    if begin >= end:
        return
    q_row_ptr = q_ptr + row * q_row_stride + head[:, None] * q_head_stride + lane[None, :]
    query = tl.load(q_row_ptr, mask=held, other=0.0).to(arena_ptr.dtype.element_ty)
    region = tl.multiple_of(tl.load(offset_ptr), ALIGN)
    head_ptr = arena_ptr + region + kv_head * D
    table_ptr = kv_table_ptr + slot.to(tl.int64) * table_stride
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, WIDTH], tl.float32)
    seen = tl.zeros([M], tl.int32) + end
    for first in range(begin, end, TILE):
        top, total, mixed = attend_tile(
            query, top, total, mixed, seen, first, end, head_ptr, table_ptr,
            page_stride, place_stride, scale, True, KV_BLOCK, TILE, D, WIDTH,
        )  # fmt: skip
    mixed = mixed / total[:, None]
    if SPLITS == 1:
        tl.store(out_row_ptr, mixed.to(out_ptr.dtype.element_ty), mask=held)
    else:
        part = (split * tl.num_programs(2) + row) * HEADS + head
        tl.store(part_ptr + part[:, None] * D + lane[None, :], mixed, mask=held)
        tl.store(part_log_ptr + part, top + tl.log2(total), mask=share < SHARE)


@triton.jit
def _split_range(num_seen, split, SPLITS: tl.constexpr, TILE: tl.constexpr):
    """Positions of a split: whole tiles, equally many; none for the last splits of a short row."""
    size = tl.cdiv(tl.cdiv(num_seen, SPLITS), TILE) * TILE
    return split * size, tl.minimum(split * size + size, num_seen)


@triton.jit
def _combine_kernel(
    out_ptr,  # [R, H, D]
    part_ptr,  # f32[SPLITS, R, H, D]
    part_log_ptr,  # f32[SPLITS, R, H]
    row_slot_ptr,  # i32[>=R]
    position_ptr,  # i32[>=R]
    out_row_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two >= D
):
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    out_row_ptr = out_ptr + row * out_row_stride + head * out_head_stride + lane
    if tl.load(row_slot_ptr + row) < 0:
        tl.store(out_row_ptr, tl.zeros([WIDTH], out_ptr.dtype.element_ty), mask=lane < D)
        return
    split = tl.arange(0, SPLITS)
    begin, end = _split_range(tl.load(position_ptr + row) + 1, split, SPLITS, TILE)
    used = begin < end
    part = (split * tl.num_programs(1) + row) * HEADS + head
    part_log = tl.load(part_log_ptr + part, mask=used, other=float("-inf"))
    weight = tl.exp2(part_log - tl.max(part_log, 0))
    mask = used[:, None] & (lane < D)[None, :]
    mixed = tl.load(part_ptr + part[:, None] * D + lane[None, :], mask=mask, other=0.0)
    result = tl.sum(mixed * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out_row_ptr, result.to(out_ptr.dtype.element_ty), mask=lane < D)


def num_splits(rows: int, kv_heads: int, capacity: int, processors: int) -> int:
    """Programs that share a row and a KV head; a power of two.  Depends on shapes only.

    `capacity` is the number of positions that a row may have.

    >>> [num_splits(rows, kv_heads=8, capacity=131072, processors=132) for rows in (1, 32, 256)]
    [64, 4, 1]
    >>> num_splits(1, kv_heads=8, capacity=200, processors=132)
    4
    """
    wanted = triton.cdiv(_PROGRAMS_PER_PROCESSOR * processors, max(1, rows * kv_heads))
    useful = triton.cdiv(capacity, _SMALLEST_SPLIT)
    return triton.next_power_of_2(max(1, min(wanted, useful, _MOST_SPLITS)))


def _launch(
    out: Tensor,
    arena: Tensor,
    q: Tensor,
    offset: Tensor,
    kv_table: Tensor,
    row_slot: Tensor,
    position: Tensor,
    kv_heads: int,
    kv_block: int,
    scale: float,
) -> None:
    check_kv_pages("paged_attention_decode", arena)
    check_contiguous_heads("paged_attention_decode", q=q, out=out)
    check_shared_heads("paged_attention_decode", q.shape[1], kv_heads)
    rows, heads, width = q.shape
    if rows == 0:
        return
    share = heads // kv_heads
    padded = triton.next_power_of_2(width)
    capacity = kv_table.shape[1] * kv_block
    splits = num_splits(rows, kv_heads, capacity, num_processors(arena.device))
    part = part_log = out
    if splits > 1:
        part = torch.empty((splits, rows, heads, width), dtype=torch.float32, device=out.device)
        part_log = torch.empty((splits, rows, heads), dtype=torch.float32, device=out.device)
    tile = tile_positions(padded, arena.element_size())
    _attend_kernel[(kv_heads, splits, rows)](
        out, part, part_log, arena, q, offset, kv_table, row_slot, position,
        out_row_stride=out.stride(0), out_head_stride=out.stride(1),
        page_stride=arena.stride(0),
        q_row_stride=q.stride(0), q_head_stride=q.stride(1),
        table_stride=kv_table.stride(0), place_stride=kv_heads * width,
        scale=scale * LOG2_E,
        HEADS=heads, SHARE=share, KV_BLOCK=kv_block, SPLITS=splits,
        ALIGN=LAUNCH_ALIGN // arena.element_size(),
        M=max(16, triton.next_power_of_2(share)), TILE=tile, D=width, WIDTH=padded,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(heads, rows)](
            out, part, part_log, row_slot, position,
            out_row_stride=out.stride(0), out_head_stride=out.stride(1),
            HEADS=heads, SPLITS=splits, TILE=tile, D=width, WIDTH=padded, num_warps=2,
        )  # fmt: skip


def _case(
    lengths: tuple[int, ...] = (5, 1, 17),
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 16,
    kv_block: int = 4,
    padding: int = 1,
    spare_columns: int = 3,
    name: str = "",
) -> OpCase:
    """One row per entry of `lengths` (positions seen), then `padding` rows."""

    def build(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Args:
        pool = random_pool(generator, dtype, lengths, kv_block, kv_heads, width, spare_columns)
        rows = len(lengths) + padding
        q = torch.randn(heads, rows, width, generator=generator).to(dtype).transpose(0, 1)
        row_slot = torch.full((rows + 2,), PADDING, dtype=torch.int32)
        position = torch.zeros(rows + 2, dtype=torch.int32)
        order = torch.randperm(len(lengths), generator=generator)
        row_slot[: len(lengths)] = order.int()
        position[: len(lengths)] = torch.tensor(lengths, dtype=torch.int32)[order] - 1
        return {
            "out": torch.full((rows, heads, width), torch.nan, dtype=dtype, device=device),
            "arena": pool.arena.to(device),
            "q": q.to(device),
            "offset": pool.offset.to(device),
            "kv_table": pool.kv_table.to(device),
            "row_slot": row_slot.to(device),
            "position": position.to(device),
            "kv_heads": kv_heads,
            "kv_block": kv_block,
            "scale": width**-0.5,
        }

    shape = f"R{len(lengths) + padding}-H{heads}-G{kv_heads}-D{width}-block{kv_block}"
    return OpCase(f"{shape}-{name or 'length' + str(max(lengths, default=0))}", build)


def _traffic(args: Args) -> tuple[int, int]:
    """Keys and values once; two multiply-adds per query head and element."""
    rows, heads, width = args["q"].shape
    live = args["row_slot"][:rows] != PADDING
    seen = int((args["position"][:rows].long() + 1)[live].sum())
    moved = 2 * seen * args["kv_heads"] * width + 2 * args["q"].numel()
    return moved * args["q"].element_size(), 4 * seen * heads * width


paged_attention_decode = define_op(
    "paged_attention_decode(Tensor(a!) out, Tensor arena, Tensor q, Tensor offset, "
    "Tensor kv_table, Tensor row_slot, Tensor position, SymInt kv_heads, SymInt kv_block, "
    "float scale) -> ()",
    cuda=_launch,
    cpu=paged_attention_decode_ref,
    cases=(
        _case(),
        _case(lengths=tuple(range(1, 10)), name="lengths1to9"),
        _case(lengths=(15, 16, 17, 63, 64, 65, 130), name="lengths-around-tiles"),
        _case(lengths=(130, 1), spare_columns=100, name="split"),  # room for several programs a row
        _case(lengths=(), padding=2, name="all-padding"),
        _case(lengths=(300,), padding=0, kv_block=16),
        _case(kv_heads=4),  # no sharing
        _case(heads=3, kv_heads=1),  # one KV head for all, and not a power of two
        _case(heads=32, kv_heads=8, width=64, kv_block=16),
        _case(width=24, kv_block=8),  # not a power of two
        _case(width=128, kv_block=16),
        _case(heads=2, kv_heads=1, width=256, kv_block=16),
    ),
    tolerance=Tolerance(
        {torch.float32: 4e-6, torch.bfloat16: 2e-2},
        "an average of values: a few eps of the largest entry; bf16 rounds the weights before they "
        "meet the values, and the result",
    ),
    traffic=_traffic,
)
