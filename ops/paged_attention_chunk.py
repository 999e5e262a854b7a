"""
Causal attention of the chunks of a step over the keys and values in their rows' KV pages.

softmax(cap(scale * q k^T)) v over positions 0..position[t] for every token t of a chunk; the step's
own keys and values are in the pages already.  With `window` > 0 a token sees its last `window`
positions only, its own included; with `softcap` > 0, cap(s) is softcap * tanh(s / softcap).  Query
head h uses KV head h // (H // G).  Tokens outside all chunks keep their output.

Where few chunks see many positions, as when 100 new tokens follow 6,000 known ones, several programs
share the positions of a chunk (ops/paged_attention_split.py).

Letters: Q chunks of at most `CHUNK` tokens of one row, T tokens, R rows, S slots, Z columns of the
block table, N pages, E elements of a page, H query heads, G KV heads, D width of a head, U pieces of
chunks, B query rows (token, head) of a chunk and a KV head.
Traffic: q and out once; 2 * G * D elements per position that a chunk sees, per chunk.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.ops.chunk_table import CHUNK, cut_chunks
from midstream.ops.device_limits import num_processors, shared_limit
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

_QUERY_ROWS = 128  # (token, head) pairs of a program
_FEWEST_TILES = 4  # of a piece
_FOLD_ROWS = 8  # (token, head) pairs that a program adds up at once
_FOLD_PROGRAMS = 4096  # that add pieces up; most have nothing to add


def paged_attention_chunk_ref(
    out: Tensor,  # [T, H, D]
    arena: Tensor,  # [N, E]
    q: Tensor,  # [T, H, D]
    offset: Tensor,  # i64[1]  start of the layer's region in a page
    kv_table: Tensor,  # i32[S, Z]
    row_slot: Tensor,  # i32[R]
    position: Tensor,  # i32[>=T]
    chunk_start: Tensor,  # i32[Q + 1]  first token of each chunk
    chunk_row: Tensor,  # i32[Q]  -1 in padding
    kv_heads: int,
    kv_block: int,
    scale: float,
    window: int,  # 0: none
    softcap: float,  # 0: none
) -> None:
    """Say what the kernel means, one chunk at a time."""
    region = kv_region(arena, offset, kv_block, kv_heads, q.shape[2])
    starts, slots = chunk_start.tolist(), row_slot.tolist()
    for chunk, row in enumerate(chunk_row.tolist()):
        first, end = starts[chunk], starts[chunk + 1]
        if row < 0 or first == end:
            continue
        here = slice(first, end)
        pages = kv_table[slots[row]]
        out[here] = attend(q[here], region, pages, position[here], scale, window, softcap)


@triton.jit
def _attend_kernel(
    out_ptr,  # [T, H, D]  written where a chunk has one piece
    part_ptr,  # f32[U, G, B, D]  softmax over the piece's positions, where a chunk has several
    part_log_ptr,  # f32[U, G, B]  log2 of the piece's weights
    chunk_piece_ptr,  # i32[2, Q]  first piece of a chunk, number of its pieces
    arena_ptr,  # [N, page_stride]
    q_ptr,  # [T, H, D]
    offset_ptr,  # i64[1]
    kv_table_ptr,  # i32[S, Z]
    row_slot_ptr,  # i32[R]
    position_ptr,  # i32[>=T]
    chunk_start_ptr,  # i32[Q + 1]
    chunk_row_ptr,  # i32[Q]
    out_token_stride,
    out_head_stride,
    page_stride,
    q_token_stride,
    q_head_stride,
    table_stride,
    place_stride,  # elements from position to position, G * D
    scale,  # of `score_factors`
    cap,
    window,
    num_chunks,
    spare,  # pieces beyond one per chunk; read where SPLIT
    SPLIT: tl.constexpr,
    FEWEST_TILES: tl.constexpr,  # of a piece
    CHUNKS: tl.constexpr,  # of a turn that looks for a piece
    SHARE: tl.constexpr,  # query heads of one KV head
    KV_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIGN: tl.constexpr,  # elements; regions start on multiples of it
    PARTS: tl.constexpr,  # programs of a piece and a KV head
    M: tl.constexpr,  # query rows (token, head) of a program
    TILE: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two >= D
):
    part = tl.program_id(0) % PARTS
    kv_head = tl.program_id(1)
    number = tl.program_id(0) // PARTS
    chunk = num_chunks - 1 - number  # late chunks see most positions: they start first
    if SPLIT:
        chunk, piece, size = find_piece(
            number, chunk_row_ptr, chunk_start_ptr, position_ptr, num_chunks, spare, window,
            WINDOW, False, FEWEST_TILES, CHUNKS, TILE,
        )  # fmt: skip
        if chunk < 0:
            return
    row = tl.load(chunk_row_ptr + chunk)
    if row < 0:
        return
    start = tl.load(chunk_start_ptr + chunk)
    stop = tl.load(chunk_start_ptr + chunk + 1)
    num_rows = (stop - start) * SHARE
    if part * M >= num_rows:
        return
    place = part * M + tl.arange(0, M)
    query_row = tl.minimum(place, num_rows - 1)  # rows past the end repeat the last one, unstored
    token = (start + query_row // SHARE).to(tl.int64)
    head = (kv_head * SHARE + query_row % SHARE).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    q_row_ptr = q_ptr + token * q_token_stride + head * q_head_stride
    query = tl.load(q_row_ptr[:, None] + lane[None, :], mask=(lane < D)[None, :], other=0.0)
    query = query.to(arena_ptr.dtype.element_ty)
    seen = tl.load(position_ptr + token) + 1
    end = tl.max(seen, 0)
    begin = 0
    unmasked_end = tl.min(seen, 0) // TILE * TILE
    if WINDOW:  # which positions a token sees differs at both ends
        begin = tl.maximum(tl.min(seen, 0) - window, 0)
    if SPLIT:  # what these rows see of the piece, in its tiles: with a window these start anywhere
        first_position = tl.load(position_ptr + start)
        last_position = tl.load(position_ptr + stop - 1)
        pieces, piece_begin, piece_end = piece_range(
            first_position, last_position, piece, size, window, WINDOW, False, TILE
        )
        begin = piece_begin + tl.maximum(begin - piece_begin, 0) // TILE * TILE
        end = tl.minimum(end, piece_end)
        unmasked_end = tl.minimum(unmasked_end, piece_end)
    slot = tl.load(row_slot_ptr + row).to(tl.int64)
    table_ptr = kv_table_ptr + slot * table_stride
    region = tl.multiple_of(tl.load(offset_ptr), ALIGN)
    head_ptr = arena_ptr + region + kv_head * D
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, WIDTH], tl.float32)
    if not WINDOW:
        begin = tl.multiple_of(begin, TILE)
        unmasked_end = tl.multiple_of(tl.maximum(unmasked_end, begin), TILE)
        for first in range(begin, unmasked_end, TILE):
            top, total, mixed = attend_tile(
                query, top, total, mixed, seen, first, end, head_ptr, table_ptr, page_stride,
                place_stride, scale, cap, window, False, False, False, SOFTCAP, KV_BLOCK, TILE, D, WIDTH,
            )  # fmt: skip
        begin = unmasked_end
    for first in range(begin, end, TILE):
        top, total, mixed = attend_tile(
            query, top, total, mixed, seen, first, end, head_ptr, table_ptr, page_stride,
            place_stride, scale, cap, window, True, WINDOW, WINDOW or SPLIT, SOFTCAP, KV_BLOCK, TILE,
            D, WIDTH,
        )  # fmt: skip
    out_row_ptr = out_ptr + token * out_token_stride + head * out_head_stride
    out_row_ptr = out_row_ptr[:, None] + lane[None, :]
    held = (place < num_rows)[:, None] & (lane < D)[None, :]
    if SPLIT:
        total = tl.where(total > 0, total, 1.0)  # it saw no position: 0, of weight 2**-inf
        if (piece == 0) & (part == 0) & (kv_head == 0):
            tl.store(chunk_piece_ptr + chunk, number)
            tl.store(chunk_piece_ptr + num_chunks + chunk, pieces)
        mixed = mixed / total[:, None]
        if pieces > 1:
            own_part = (number.to(tl.int64) * tl.num_programs(1) + kv_head) * (PARTS * M) + part * M
            own = tl.arange(0, M)
            own_ptr = part_ptr + own_part * D + (own[:, None] * D + lane[None, :])
            tl.store(own_ptr, mixed, mask=(lane < D)[None, :])
            tl.store(part_log_ptr + own_part + own, top + tl.log2(total))
        else:
            tl.store(out_row_ptr, mixed.to(out_ptr.dtype.element_ty), mask=held)
    else:
        tl.store(out_row_ptr, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=held)


@triton.jit
def _combine_kernel(
    out_ptr,  # [T, H, D]
    part_ptr,  # f32[U, G, B, D]
    part_log_ptr,  # f32[U, G, B]
    chunk_piece_ptr,  # i32[2, Q]
    chunk_start_ptr,  # i32[Q + 1]
    chunk_row_ptr,  # i32[Q]
    out_token_stride,
    out_head_stride,
    num_chunks,
    SHARE: tl.constexpr,  # query heads of one KV head
    PART_ROWS: tl.constexpr,  # B
    PROGRAMS: tl.constexpr,  # of a chunk and a KV head
    M: tl.constexpr,  # query rows (token, head) of a turn
    PIECES: tl.constexpr,  # of a turn
    D: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two >= D
):
    chunk = tl.program_id(0) // PROGRAMS
    kv_head = tl.program_id(1)
    if tl.load(chunk_row_ptr + chunk) < 0:
        return
    start = tl.load(chunk_start_ptr + chunk)
    num_rows = (tl.load(chunk_start_ptr + chunk + 1) - start) * SHARE
    OWN: tl.constexpr = (PART_ROWS // M + PROGRAMS - 1) // PROGRAMS * M  # rows of a program
    begin = tl.program_id(0) % PROGRAMS * OWN
    end = tl.minimum(begin + OWN, num_rows)
    if begin >= end:
        return
    pieces = tl.load(chunk_piece_ptr + num_chunks + chunk)
    if pieces == 1:
        return
    step = tl.num_programs(1).to(tl.int64) * PART_ROWS
    first = tl.load(chunk_piece_ptr + chunk) * step + kv_head * PART_ROWS
    lane = tl.arange(0, WIDTH)[None, :]
    for turn in range(begin, end, M):
        place = turn + tl.arange(0, M)
        held = place < end
        result = fold_pieces(
            part_ptr, part_log_ptr, first + turn, step, pieces, held, PIECES, M, D, WIDTH
        )
        token = (start + place // SHARE).to(tl.int64)[:, None]
        head = (kv_head * SHARE + place % SHARE).to(tl.int64)[:, None]
        out_row_ptr = out_ptr + token * out_token_stride + head * out_head_stride
        result = result.to(out_ptr.dtype.element_ty)
        tl.store(out_row_ptr + lane, result, mask=held[:, None] & (lane < D))


def num_spare(num_chunks: int, programs_per_chunk: int, programs: int) -> int:
    """Pieces beyond one per chunk, 0 where chunks are not cut.  Depends on shapes only.

    They fill a device that runs so many programs at once.  Chunks that fill it several times over are
    not cut, nor are those of which one does.

    >>> [num_spare(chunks, 16, programs=264) for chunks in (4, 67, 68)]
    [17, 17, 0]
    """
    filling = triton.cdiv(programs, programs_per_chunk)
    return filling if filling > 1 and num_chunks < 4 * filling else 0


def _tile_shape(width: int, share: int, element_bytes: int) -> tuple[int, int]:
    """Query rows and positions of a program's tile.

    >>> _tile_shape(64, 4, element_bytes=2), _tile_shape(64, 1, element_bytes=2)
    ((128, 64), (64, 64))
    """
    tile = tile_positions(width, element_bytes)
    if element_bytes > 2:  # no tensor cores: what fits into registers
        return 16, tile
    return min(_QUERY_ROWS, triton.next_power_of_2(CHUNK * share)), tile


def _launch(
    out: Tensor,
    arena: Tensor,
    q: Tensor,
    offset: Tensor,
    kv_table: Tensor,
    row_slot: Tensor,
    position: Tensor,
    chunk_start: Tensor,
    chunk_row: Tensor,
    kv_heads: int,
    kv_block: int,
    scale: float,
    window: int,
    softcap: float,
) -> None:
    check_kv_pages("paged_attention_chunk", arena)
    check_contiguous_heads("paged_attention_chunk", q=q, out=out)
    check_shared_heads("paged_attention_chunk", q.shape[1], kv_heads)
    check_score_options("paged_attention_chunk", window, softcap)
    _, heads, width = q.shape
    num_chunks = chunk_row.shape[0]
    if num_chunks == 0:
        return
    share = heads // kv_heads
    padded = triton.next_power_of_2(width)
    query_rows, tile = _tile_shape(padded, share, arena.element_size())
    line_bytes = padded * arena.element_size()
    while (query_rows + 4 * tile) * line_bytes > shared_limit(q.device):  # keys, values: twice
        query_rows //= 2
    parts = triton.cdiv(CHUNK * share, query_rows)
    warps = 8 if query_rows * padded > 128 * 64 else 4
    at_once = num_processors(arena.device) * 8 // warps
    spare = num_spare(num_chunks, parts * kv_heads, at_once)
    pieces = None
    if spare:
        shape = (num_chunks + spare, kv_heads, parts * query_rows)
        pieces = (
            torch.empty((*shape, width), dtype=torch.float32, device=out.device),
            torch.empty(shape, dtype=torch.float32, device=out.device),
            torch.empty((2, num_chunks), dtype=torch.int32, device=out.device),
        )
    part, part_log, chunk_piece = pieces or (None, None, None)
    factor, cap = score_factors(scale, softcap)
    _attend_kernel[((num_chunks + spare) * parts, kv_heads)](
        out, part, part_log, chunk_piece, arena, q, offset, kv_table, row_slot, position,
        chunk_start, chunk_row,
        out_token_stride=out.stride(0), out_head_stride=out.stride(1),
        page_stride=arena.stride(0),
        q_token_stride=q.stride(0), q_head_stride=q.stride(1),
        table_stride=kv_table.stride(0), place_stride=kv_heads * width,
        scale=factor, cap=cap, window=window, num_chunks=num_chunks, spare=spare,
        SPLIT=spare > 0, FEWEST_TILES=_FEWEST_TILES, CHUNKS=spans_per_turn(num_chunks) if spare else 0,
        SHARE=share, KV_BLOCK=kv_block, WINDOW=window > 0, SOFTCAP=softcap > 0,
        ALIGN=LAUNCH_ALIGN // arena.element_size(),
        PARTS=parts, M=query_rows, TILE=tile,
        D=width, WIDTH=padded,
        num_warps=warps, num_stages=3,
    )  # fmt: skip
    if pieces is not None:
        _combine(out, *pieces, chunk_start, chunk_row)


def _combine(
    out: Tensor, part: Tensor, part_log: Tensor, chunk_piece: Tensor, chunk_start: Tensor, chunk_row: Tensor
) -> None:  # fmt: skip
    """Add up the pieces of chunks that have several."""
    num_chunks, (_, kv_heads, part_rows, width) = chunk_row.shape[0], part.shape
    padded = triton.next_power_of_2(width)
    fold_rows = rows_of_fold(_FOLD_ROWS, padded)
    programs = max(1, min(part_rows // fold_rows, _FOLD_PROGRAMS // (num_chunks * kv_heads)))
    _combine_kernel[(num_chunks * programs, kv_heads)](
        out, part, part_log, chunk_piece, chunk_start, chunk_row,
        out_token_stride=out.stride(0), out_head_stride=out.stride(1), num_chunks=num_chunks,
        SHARE=out.shape[1] // kv_heads, PART_ROWS=part_rows, PROGRAMS=programs, M=fold_rows,
        PIECES=turn_of_pieces(fold_rows, padded), D=width, WIDTH=padded, num_warps=4,
    )  # fmt: skip


def _case(
    new: tuple[int, ...] = (5, 1, 9),
    past: tuple[int, ...] = (0, 6, 3),
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 16,
    kv_block: int = 4,
    padding: int = 2,
    window: int = 0,
    softcap: float = 0.0,
    name: str = "",
) -> OpCase:
    """Row i has `past[i]` positions before the step and `new[i]` tokens in it; then padding.

    Positions before the window of a row's first token hold NaN, as do all that no row owns.
    """

    def build(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Args:
        generator = host_generator(generator)
        lengths = tuple(p + n for p, n in zip(past, new, strict=True))
        hidden = tuple(max(0, p + 1 - window) if window else 0 for p in past)
        pool = random_pool(generator, dtype, lengths, kv_block, kv_heads, width, hidden)
        tokens = sum(new) + padding
        q = torch.randn(heads, tokens, width, generator=generator).to(dtype).transpose(0, 1)
        order = torch.randperm(len(new), generator=generator).tolist()
        position = torch.zeros(tokens, dtype=torch.int32)
        known = [p for i in order for p in range(past[i], lengths[i])]
        position[: sum(new)] = torch.tensor(known, dtype=torch.int32)
        lengths_in_order = [new[i] for i in order]
        table = cut_chunks(lengths_in_order, [1] * len(new), padding_chunks=padding)
        return {
            "out": torch.full((tokens, heads, width), 7.0, dtype=dtype, device=device),
            "arena": pool.arena.to(device),
            "q": q.to(device),
            "offset": pool.offset.to(device),
            "kv_table": pool.kv_table.to(device),
            "row_slot": torch.tensor([*order, PADDING], dtype=torch.int32, device=device),
            "position": position.to(device),
            "chunk_start": table.chunk_start.to(device),
            "chunk_row": table.chunk_row.to(device),
            "kv_heads": kv_heads,
            "kv_block": kv_block,
            "scale": width**-0.5,
            "window": window,
            "softcap": softcap,
        }

    shape = f"T{sum(new) + padding}-H{heads}-G{kv_heads}-D{width}-block{kv_block}"
    options = f"-window{window}" * bool(window) + f"-cap{softcap:g}" * bool(softcap)
    return OpCase(f"{shape}{options}-{name or 'past' + str(max(past, default=0))}", build)


def _traffic(args: Args) -> tuple[int, int]:
    """q and out once, and what every chunk sees of keys and values."""
    _, heads, width = args["q"].shape
    end = args["position"].long() + 1
    seen = end.clamp(max=args["window"]) if args["window"] else end
    starts = args["chunk_start"].tolist()
    spans = [(a, b) for a, b in pairwise(starts) if b > a]
    seen_by_chunks = sum(int(end[b - 1] - end[a] + seen[a]) for a, b in spans)
    seen_by_tokens = sum(int(seen[a:b].sum()) for a, b in spans)
    moved = 2 * seen_by_chunks * args["kv_heads"] * width + 2 * starts[-1] * heads * width
    return moved * args["q"].element_size(), 4 * seen_by_tokens * heads * width


_AROUND_BLOCKS = (*range(1, 10), 63, 64, 65, 127, 128, 129)

paged_attention_chunk = define_op(
    "paged_attention_chunk(Tensor(a!) out, Tensor arena, Tensor q, Tensor offset, Tensor kv_table, "
    "Tensor row_slot, Tensor position, Tensor chunk_start, Tensor chunk_row, SymInt kv_heads, "
    "SymInt kv_block, float scale, SymInt window, float softcap) -> ()",
    cuda=_launch,
    cpu=paged_attention_chunk_ref,
    cases=(
        _case(),
        _case(new=(130,), past=(0,)),  # three chunks of one row, the last one partial
        _case(new=(64, 65, 1, 15), past=(1, 70, 129, 0), kv_block=16, name="mixed"),
        _case(
            new=_AROUND_BLOCKS, past=(0,) * 15, kv_heads=4, width=24, kv_block=16, name="j2-lengths"
        ),
        _case(new=(1, 1, 1, 1), past=(0, 3, 4, 64), name="one-token-chunks"),
        _case(
            new=(1, 64, 2), past=(30, 150, 1), heads=2, kv_heads=1, kv_block=16, name="long-past"
        ),
        _case(
            new=(3, 36), past=(5, 150), heads=2, kv_block=16, window=100, name="long-past-window"
        ),
        _case(new=(), past=(), name="all-padding"),
        _case(padding=0),
        _case(kv_heads=4),  # no sharing
        _case(heads=3, kv_heads=1),  # one KV head for all, and not a power of two
        _case(heads=8, kv_heads=2, width=64, kv_block=16, new=(40, 3), past=(0, 30)),
        _case(width=24, kv_block=8),  # not a power of two
        _case(width=80, kv_block=16),
        _case(width=96, kv_block=16),
        _case(width=128, kv_block=16),
        _case(heads=2, kv_heads=1, width=192, kv_block=16),
        _case(heads=2, kv_heads=1, width=256, kv_block=16),
        _case(window=3, name="window-below-block"),
        _case(window=10, new=(70, 1, 9), past=(0, 30, 31), name="window-across-blocks"),
        _case(window=64, new=(65, 2), past=(64, 126), kv_block=16),
        _case(window=10, new=(64,), past=(30,), heads=2, kv_heads=1, width=256, name="dark-tile"),
        _case(window=500),  # wider than all rows
        _case(softcap=0.5),  # bends every score
        _case(softcap=30.0, new=(70, 3), past=(0, 60)),  # bends few
        _case(softcap=2.0, window=7, width=80, kv_block=16),
    ),
    tolerance=TOLERANCE,
    traffic=_traffic,
    bench_cases=tuple(
        _case(new, past, heads=32, kv_heads=8, width=64, kv_block=16, name=name)
        for new, past, name in (
            ((100,), (0,), "100"),
            ((100,), (6000,), "100-behind-6000"),
            ((2048,), (0,), "2048"),
            ((1,) * 31 + (100,), (500,) * 31 + (6000,), "among-31-rows"),
        )
    ),
)
