"""
Attention of one new token per row over the keys and values in its KV pages.

softmax(cap(scale * q k^T)) v over positions 0..position[row] (Vaswani et al. 2017, with KV heads
shared as in Ainslie et al. 2023).  With `window` > 0 a row sees its last `window` positions only, its
own included; with `softcap` > 0, cap(s) is softcap * tanh(s / softcap).  Query head h uses KV head
h // (H // G).  A row with row_slot -1 is padding: its output is zero and it reads nothing.

Letters: R rows, S slots, Z columns of the block table, N pages, E elements of a page, H query
heads, G KV heads, D width of a head, U pieces of rows (ops/paged_attention_split.py).
Traffic: 2 * G * D elements per visible position of every row, once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.ops.device_limits import num_processors
from midstream.ops.paged_attention_split import (
    find_piece,
    fold_pieces,
    piece_range,
    rows_of_fold,
    spans_per_turn,
    turn_of_pieces,
)
from midstream.ops.paged_kv import (
    TOLERANCE,
    attend,
    check_contiguous_heads,
    check_kv_pages,
    check_score_options,
    check_shared_heads,
    host_generator,
    kv_region,
    random_pool,
)
from midstream.ops.paged_tile import attend_tile, score_factors, tile_positions
from midstream.ops.registry import LAUNCH_ALIGN, PADDING, Args, OpCase, define_op

_PROGRAMS_PER_PROCESSOR = 4  # enough loads in flight to fill the memory bus
_FEWEST_HEADS, _MOST_HEADS = 16, 64  # query heads of a program
_SMALL_COMBINE = 4096  # (row, head) pairs up to which each has a program of its own


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
    window: int,  # 0: none
    softcap: float,  # 0: none
) -> None:
    """Say what the kernel means, one row at a time."""
    rows, _, width = q.shape
    region = kv_region(arena, offset, kv_block, kv_heads, width)
    for row, slot in enumerate(row_slot[:rows].tolist()):
        if slot == PADDING:
            out[row] = 0
            continue
        here = slice(row, row + 1)
        out[here] = attend(q[here], region, kv_table[slot], position[here], scale, window, softcap)


@triton.jit
def _attend_kernel(
    out_ptr,  # [R, H, D]  written where a row has one piece
    part_ptr,  # f32[U, H, D]  softmax over the piece's positions, where a row has several
    part_log_ptr,  # f32[U, H]  log2 of the piece's weights
    row_piece_ptr,  # i32[2, R]  first piece of a row, number of its pieces
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
    scale,  # of `score_factors`
    cap,
    window,
    num_rows,
    spare,  # programs beyond one per row
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,  # query heads of one KV head
    KV_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIGN: tl.constexpr,  # elements; regions start on multiples of it
    ROWS: tl.constexpr,  # of a turn that looks for a piece
    PARTS: tl.constexpr,  # programs that divide the query heads of one KV head
    M: tl.constexpr,  # query heads of a program, a power of two >= 16
    TILE: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two >= D
):
    number = tl.program_id(0)
    row, piece, size = find_piece(
        number, row_slot_ptr, None, position_ptr, num_rows, spare, window,
        WINDOW, True, 1, ROWS, TILE,
    )  # fmt: skip
    if row < 0:
        return
    kv_head = tl.program_id(1) // PARTS
    share = tl.program_id(1) % PARTS * M + tl.arange(0, M)
    position = tl.load(position_ptr + row)
    slot = tl.load(row_slot_ptr + row).to(tl.int64)
    pieces, begin, end = piece_range(position, position, piece, size, window, WINDOW, True, TILE)
    lane = tl.arange(0, WIDTH)
    # int64 before the products: a view of heads first has a head stride of tokens * D
    row = row.to(tl.int64)
    head = (kv_head * SHARE + share).to(tl.int64)
    held = (share < SHARE)[:, None] & (lane < D)[None, :]
    q_row_ptr = q_ptr + row * q_row_stride + head[:, None] * q_head_stride + lane[None, :]
    query = tl.load(q_row_ptr, mask=held, other=0.0).to(arena_ptr.dtype.element_ty)
    region = tl.multiple_of(tl.load(offset_ptr), ALIGN)
    head_ptr = arena_ptr + region + kv_head * D
    table_ptr = kv_table_ptr + slot * table_stride
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, WIDTH], tl.float32)
    seen = tl.zeros([M], tl.int32) + end
    for first in range(begin, end, TILE):
        top, total, mixed = attend_tile(
            query, top, total, mixed, seen, first, end, head_ptr, table_ptr, page_stride,
            place_stride, scale, cap, window, True, False, False, SOFTCAP, KV_BLOCK, TILE, D, WIDTH,
        )  # fmt: skip
    mixed = mixed / total[:, None]
    if (piece == 0) & (tl.program_id(1) == 0):
        tl.store(row_piece_ptr + row, number)
        tl.store(row_piece_ptr + num_rows + row, pieces)
    if pieces == 1:
        out_row_ptr = out_ptr + row * out_row_stride + head[:, None] * out_head_stride
        tl.store(out_row_ptr + lane[None, :], mixed.to(out_ptr.dtype.element_ty), mask=held)
    else:
        part = number.to(tl.int64) * HEADS + head
        tl.store(part_ptr + part[:, None] * D + lane[None, :], mixed, mask=held)
        tl.store(part_log_ptr + part, top + tl.log2(total), mask=share < SHARE)


@triton.jit
def _combine_kernel(
    out_ptr,  # [R, H, D]
    part_ptr,  # f32[U, H, D]
    part_log_ptr,  # f32[U, H]
    row_piece_ptr,  # i32[2, R]
    row_slot_ptr,  # i32[>=R]
    out_row_stride,
    out_head_stride,
    num_rows,
    HEADS: tl.constexpr,
    M: tl.constexpr,  # heads of a program, a power of two
    PIECES: tl.constexpr,  # of a turn
    D: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two >= D
):
    row = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1).to(tl.int64) * M
    head = first_head + tl.arange(0, M)
    held = head < HEADS
    lane = tl.arange(0, WIDTH)[None, :]
    result = tl.zeros([M, WIDTH], tl.float32)
    if tl.load(row_slot_ptr + row) >= 0:
        pieces = tl.load(row_piece_ptr + num_rows + row)
        if pieces == 1:
            return
        first = tl.load(row_piece_ptr + row).to(tl.int64) * HEADS + first_head
        result = fold_pieces(
            part_ptr, part_log_ptr, first, HEADS, pieces, held, PIECES, M, D, WIDTH
        )
    out_row_ptr = out_ptr + row * out_row_stride + head[:, None] * out_head_stride
    result = result.to(out_ptr.dtype.element_ty)
    tl.store(out_row_ptr + lane, result, mask=held[:, None] & (lane < D))


def num_spare(programs_per_row: int, processors: int) -> int:
    """Pieces beyond one per row: together they fill the device.  Depends on shapes only.

    >>> [num_spare(programs, processors=132) for programs in (1, 8, 1000)]
    [528, 66, 1]
    """
    return triton.cdiv(_PROGRAMS_PER_PROCESSOR * processors, programs_per_row)


def _heads_per_program(share: int, element_bytes: int) -> int:
    """Query heads that meet a key at once, a power of two; at least what a matrix unit takes.

    >>> [_heads_per_program(share, element_bytes=2) for share in (1, 24, 71)]
    [16, 32, 64]
    """
    if element_bytes > 2:  # no tensor cores: what fits into registers
        return _FEWEST_HEADS
    return min(_MOST_HEADS, max(_FEWEST_HEADS, triton.next_power_of_2(share)))


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
    window: int,
    softcap: float,
) -> None:
    check_kv_pages("paged_attention_decode", arena)
    check_contiguous_heads("paged_attention_decode", q=q, out=out)
    check_shared_heads("paged_attention_decode", q.shape[1], kv_heads)
    check_score_options("paged_attention_decode", window, softcap)
    rows, heads, width = q.shape
    if rows == 0:
        return
    share = heads // kv_heads
    padded = triton.next_power_of_2(width)
    per_program = _heads_per_program(share, arena.element_size())
    head_parts = triton.cdiv(share, per_program)
    spare = num_spare(kv_heads * head_parts, num_processors(arena.device))
    part = torch.empty((rows + spare, heads, width), dtype=torch.float32, device=out.device)
    part_log = torch.empty((rows + spare, heads), dtype=torch.float32, device=out.device)
    row_piece = torch.empty((2, rows), dtype=torch.int32, device=out.device)
    factor, cap = score_factors(scale, softcap)
    _attend_kernel[(rows + spare, kv_heads * head_parts)](
        out, part, part_log, row_piece, arena, q, offset, kv_table, row_slot, position,
        out_row_stride=out.stride(0), out_head_stride=out.stride(1),
        page_stride=arena.stride(0),
        q_row_stride=q.stride(0), q_head_stride=q.stride(1),
        table_stride=kv_table.stride(0), place_stride=kv_heads * width,
        scale=factor, cap=cap, window=window, num_rows=rows, spare=spare,
        HEADS=heads, SHARE=share, KV_BLOCK=kv_block, WINDOW=window > 0, SOFTCAP=softcap > 0,
        ALIGN=LAUNCH_ALIGN // arena.element_size(), ROWS=spans_per_turn(rows), PARTS=head_parts,
        M=per_program, TILE=tile_positions(padded, arena.element_size()), D=width, WIDTH=padded,
        num_warps=8 if per_program * padded > 64 * 128 else 4, num_stages=3,
    )  # fmt: skip
    fold_rows = rows_of_fold(1 if rows * heads <= _SMALL_COMBINE else share, padded)
    _combine_kernel[(rows, triton.cdiv(heads, fold_rows))](
        out, part, part_log, row_piece, row_slot,
        out_row_stride=out.stride(0), out_head_stride=out.stride(1), num_rows=rows,
        HEADS=heads, M=fold_rows, PIECES=turn_of_pieces(fold_rows, padded),
        D=width, WIDTH=padded, num_warps=2,
    )  # fmt: skip


def _case(
    lengths: tuple[int, ...] = (5, 1, 17),
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 16,
    kv_block: int = 4,
    padding: int = 1,
    window: int = 0,
    softcap: float = 0.0,
    name: str = "",
) -> OpCase:
    """One row per entry of `lengths` (positions up to its own), then `padding` rows.

    Positions before the window of a row hold NaN, as do all that no row owns.
    """

    def build(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Args:
        generator = host_generator(generator)
        hidden = tuple(max(0, length - window) if window else 0 for length in lengths)
        pool = random_pool(generator, dtype, lengths, kv_block, kv_heads, width, hidden)
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
            "window": window,
            "softcap": softcap,
        }

    shape = f"R{len(lengths) + padding}-H{heads}-G{kv_heads}-D{width}-block{kv_block}"
    options = f"-window{window}" * bool(window) + f"-cap{softcap:g}" * bool(softcap)
    return OpCase(f"{shape}{options}-{name or 'length' + str(max(lengths, default=0))}", build)


def _traffic(args: Args) -> tuple[int, int]:
    """Visible keys and values once; two multiply-adds per query head and element."""
    rows, heads, width = args["q"].shape
    live = args["row_slot"][:rows] != PADDING
    seen = args["position"][:rows].long() + 1
    if args["window"]:
        seen = seen.clamp(max=args["window"])
    total = int(seen[live].sum())
    moved = 2 * total * args["kv_heads"] * width + 2 * args["q"].numel()
    return moved * args["q"].element_size(), 4 * total * heads * width


_AROUND_BLOCKS = (*range(1, 10), 63, 64, 65, 127, 128, 129)

paged_attention_decode = define_op(
    "paged_attention_decode(Tensor(a!) out, Tensor arena, Tensor q, Tensor offset, "
    "Tensor kv_table, Tensor row_slot, Tensor position, SymInt kv_heads, SymInt kv_block, "
    "float scale, SymInt window, float softcap) -> ()",
    cuda=_launch,
    cpu=paged_attention_decode_ref,
    cases=(
        _case(),
        _case(
            lengths=_AROUND_BLOCKS, heads=2, kv_heads=1, kv_block=16, padding=2, name="j2-lengths"
        ),
        _case(lengths=(1, 1, 400, 1), name="one-long-row"),
        _case(lengths=(), padding=2, name="all-padding"),
        _case(lengths=(700,), heads=8, kv_heads=1, kv_block=16),
        _case(kv_heads=4),  # no sharing
        _case(heads=3, kv_heads=1),  # one KV head for all, and not a power of two
        _case(heads=71, kv_heads=1, width=32),  # more heads than a program takes
        _case(heads=32, kv_heads=8, width=64, kv_block=16),
        _case(width=24, kv_block=8),  # not a power of two
        _case(width=80, kv_block=16),
        _case(width=96, kv_block=16, lengths=(5, 70)),
        _case(width=128, kv_block=16),
        _case(heads=2, kv_heads=1, width=192, kv_block=16),
        _case(heads=2, kv_heads=1, width=256, kv_block=16, lengths=(5, 100)),
        _case(window=3, lengths=(1, 2, 3, 4, 5, 8, 9), name="window-below-block"),
        _case(window=10, lengths=(9, 10, 11, 12, 40), name="window-across-blocks"),
        _case(window=64, lengths=(63, 64, 65, 128, 129, 200), kv_block=16),
        _case(window=500, lengths=(5, 30)),  # wider than all rows
        _case(softcap=0.5),  # bends every score
        _case(softcap=30.0, lengths=(5, 1, 130)),  # bends few
        _case(softcap=2.0, window=7, width=80, kv_block=16, lengths=(40, 3)),
    ),
    tolerance=TOLERANCE,
    traffic=_traffic,
    bench_cases=tuple(
        _case(
            (length,) * rows, heads=32, kv_heads=8, width=64, kv_block=16, name=f"{rows}x{length}"
        )
        for rows, length in ((1, 6000), (32, 2000), (64, 1000))
    ),
)
