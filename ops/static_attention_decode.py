"""
Attention of one new token per row over a static cache: keys and values of all positions, filled or not.

softmax(scale * q k^T) v over the positions that `visible` marks (Vaswani et al. 2017, with KV heads shared
as in Ainslie et al. 2023).  Query head h uses KV head h // (H // G).  A row that sees nothing gives zeros,
as torch's safe softmax does.  What is hidden may be NaN; what is visible and NaN makes the result NaN.

Positions are cut into pieces, each with a program per KV head, so that one row fills the device; a second
kernel adds the pieces up.  A tile whose positions are all hidden is not read: what a step costs goes with
the tokens in the cache, not with its length.

Letters: B rows, H query heads, G KV heads, L positions, D width of a head, U pieces.
Traffic: 2 * G * D elements per visible tile of every row, once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.errors import ContractError
from midstream.ops.dependent_launch import after_previous, dependent_launch
from midstream.ops.device_limits import num_processors
from midstream.ops.paged_kv import TOLERANCE, check_shared_heads
from midstream.ops.paged_tile import score_factors, tile_positions
from midstream.ops.registry import DTYPES, Args, OpCase, define_op

MAX_WIDTH = 256  # of a head
MAX_ROWS = 65535  # of a launch's second and third axis
_HEADS = 16  # query heads of a program: what a matrix unit takes
_PROGRAMS_PER_PROCESSOR = 4
_PIECES_AT_ONCE = 16  # that a program adds up


def static_attention_decode_ref(
    out: Tensor,  # [B, H, D]
    q: Tensor,  # [B, H, D]
    k: Tensor,  # [B, G, L, D]
    v: Tensor,  # [B, G, L, D]
    visible: Tensor | None,  # bool[B, L]; None: all
    scale: float,
) -> None:
    """Say what the kernel means."""
    wide = torch.promote_types(q.dtype, torch.float32)
    share = q.shape[1] // k.shape[1]
    keys, values = (x.to(wide).repeat_interleave(share, 1) for x in (k, v))
    score = scale * torch.einsum("bhd,bhld->bhl", q.to(wide), keys)
    if visible is not None:
        hidden = ~visible[:, None, :]
        score = score.masked_fill(hidden, -torch.inf)
        values = values.masked_fill(hidden[..., None], 0)  # may be NaN: never written
    nothing = score.isneginf().all(-1, keepdim=True)
    weight = torch.softmax(score, -1).masked_fill(nothing, 0)
    out.copy_(torch.einsum("bhl,bhld->bhd", weight, values))


@triton.jit
def _attend_kernel(
    part_ptr,  # f32[B, H, U, D]  softmax over the positions of a piece
    part_log_ptr,  # f32[B, H, U]  log2 of the piece's weights; -inf: sees nothing
    q_ptr,  # [B, H, D]
    k_ptr,  # [B, G, L, D]
    v_ptr,  # [B, G, L, D]
    visible_ptr,  # u8[B, L]  read where MASKED
    q_row,  # strides in elements
    q_head,
    k_row,
    k_head,
    k_place,
    v_row,
    v_head,
    v_place,
    visible_row,
    length,  # L
    per_piece,  # positions, a multiple of TILE
    scale,  # of `score_factors`
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,  # query heads of one KV head
    PARTS: tl.constexpr,  # programs that divide them
    M: tl.constexpr,  # query heads of a program
    TILE: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two >= D
    MASKED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    after_previous(DEPENDENT)
    piece = tl.program_id(0)
    kv_head = (tl.program_id(1) // PARTS).to(tl.int64)
    share = tl.program_id(1) % PARTS * M + tl.arange(0, M)
    row = tl.program_id(2).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    head = kv_head * SHARE + share
    held = (share < SHARE)[:, None] & (lane < D)[None, :]
    q_at = q_ptr + row * q_row + head[:, None] * q_head + lane[None, :]
    query = tl.load(q_at, mask=held, other=0.0)
    k_at = k_ptr + row * k_row + kv_head * k_head + lane[None, :]
    v_at = v_ptr + row * v_row + kv_head * v_head + lane[None, :]
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, WIDTH], tl.float32)
    for first in range(piece * per_piece, min(length, (piece + 1) * per_piece), TILE):
        place = (first + tl.arange(0, TILE)).to(tl.int64)
        seen = place < length
        if MASKED:
            seen &= tl.load(visible_ptr + row * visible_row + place, mask=seen, other=0) != 0
        if tl.max(seen.to(tl.int32), 0) > 0:
            read = seen[:, None] & (lane < D)[None, :]
            key = tl.load(k_at + place[:, None] * k_place, mask=read, other=0.0)
            value = tl.load(v_at + place[:, None] * v_place, mask=read, other=0.0)
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            score = tl.where(seen[None, :], score, float("-inf"))
            new_top = tl.maximum(
                top, tl.max(score, 1)
            )  # NaN apart, which weights and sums carry on
            shift = tl.where(new_top > float("-inf"), new_top, 0.0)
            weight = tl.exp2(score - shift[:, None])
            fade = tl.exp2(top - shift)
            weighted = mixed * fade[:, None]
            mixed = tl.dot(weight.to(value.dtype), value, weighted, input_precision="ieee")
            total = total * fade + tl.sum(weight, 1)
            top = new_top
    part = (row * HEADS + head) * tl.num_programs(0) + piece
    some = total != 0  # true for NaN
    log = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    tl.store(part_log_ptr + part, log, mask=share < SHARE)
    # nobody reads the part of a piece that saw nothing
    mixed = mixed / tl.where(some, total, 1.0)[:, None]
    tl.store(part_ptr + part[:, None] * D + lane[None, :], mixed, mask=held & some[:, None])


@triton.jit
def _combine_kernel(
    out_ptr,  # [B, H, D]
    part_ptr,  # f32[B, H, U, D]
    part_log_ptr,  # f32[B, H, U]
    out_row,  # strides in elements
    out_head,
    pieces,  # U
    HEADS: tl.constexpr,
    AT_ONCE: tl.constexpr,  # pieces of a turn
    D: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two >= D
    DEPENDENT: tl.constexpr,
):
    after_previous(DEPENDENT)
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    part = (row * HEADS + head) * pieces
    top = float("-inf")
    total = 0.0
    mixed = tl.zeros([WIDTH], tl.float32)
    for first in range(0, pieces, AT_ONCE):
        piece = first + tl.arange(0, AT_ONCE)
        log = tl.load(part_log_ptr + part + piece, mask=piece < pieces, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(log, 0))
        shift = tl.where(new_top > float("-inf"), new_top, 0.0)
        weight = tl.exp2(log - shift)
        fade = tl.exp2(top - shift)
        read = (log != float("-inf"))[:, None] & (lane < D)[None, :]
        value_at = part_ptr + (part + piece)[:, None] * D + lane[None, :]
        value = tl.load(value_at, mask=read, other=0.0)
        mixed = mixed * fade + tl.sum(value * weight[:, None], 0)
        total = total * fade + tl.sum(weight, 0)
        top = new_top
    result = mixed / tl.where(total != 0, total, 1.0)
    out_at = out_ptr + row * out_row + head * out_head + lane
    tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=lane < D)


def num_pieces(length: int, tile: int, programs: int, processors: int) -> int:
    """Pieces of a row's positions: enough for all processors, and none smaller than a tile.

    `programs` work on one piece of all rows.

    >>> [num_pieces(length, 64, programs=8, processors=132) for length in (1, 4096, 131072)]
    [1, 64, 64]
    """
    most = triton.cdiv(_PROGRAMS_PER_PROCESSOR * processors, programs)
    per_piece = triton.cdiv(triton.cdiv(length, tile), most) * tile
    return int(triton.cdiv(length, per_piece))


def check_static_attention(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None
) -> None:
    """Refuse what the kernel cannot read.

    Raises:
        ContractError: sizes, strides or dtypes do not fit.
    """
    if q.dim() != 3 or k.dim() != 4 or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[2]:
        raise ContractError(
            f"static_attention_decode: q has shape {tuple(q.shape)} and k {tuple(k.shape)}, expected "
            "[B, H, D] and [B, G, L, D]; pass one token per row"
        )
    for name, tensor, shape in (
        ("out", out, q.shape),
        ("v", v, k.shape),
        ("visible", visible, (k.shape[0], k.shape[2])),
    ):
        if tensor is not None and tuple(tensor.shape) != tuple(shape):
            raise ContractError(
                f"static_attention_decode: {name} has shape {tuple(tensor.shape)}, expected "
                f"{tuple(shape)}, as the others say; pass it so"
            )
    check_shared_heads("static_attention_decode", q.shape[1], k.shape[1])
    if not 0 < q.shape[2] <= MAX_WIDTH or not k.shape[2] or q.shape[0] > MAX_ROWS:
        raise ContractError(
            f"static_attention_decode: {q.shape[0]} rows, heads of {q.shape[2]} elements and {k.shape[2]} "
            f"positions, expected at most {MAX_ROWS}, 1 to {MAX_WIDTH} and at least one; use "
            "torch.nn.functional.scaled_dot_product_attention"
        )
    for name, tensor in {"out": out, "q": q, "k": k, "v": v, "visible": visible}.items():
        if tensor is not None and tensor.stride(-1) != 1:
            raise ContractError(
                f"static_attention_decode: {name} has strides {tensor.stride()}, expected a last axis "
                "without gaps; pass it contiguous"
            )
    dtypes = {tensor.dtype for tensor in (out, q, k, v)}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES):
        raise ContractError(
            f"static_attention_decode: tensors of {sorted(map(str, dtypes))}, expected one of {DTYPES} "
            "for all; convert them"
        )
    if visible is not None and visible.dtype != torch.bool:
        raise ContractError(
            f"static_attention_decode: visible is {visible.dtype}, expected torch.bool; pass mask == 0 "
            "for an additive mask"
        )


def _launch(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float
) -> None:
    check_static_attention(out, q, k, v, visible)
    rows, heads, width = q.shape
    if rows == 0 or heads == 0:
        return
    kv_heads, length = k.shape[1:3]
    share = heads // kv_heads
    padded = triton.next_power_of_2(max(width, 16))
    tile = tile_positions(padded, k.element_size())
    parts = triton.cdiv(share, _HEADS)
    programs = rows * kv_heads * parts
    pieces = num_pieces(length, tile, programs, num_processors(k.device))
    per_piece = triton.cdiv(triton.cdiv(length, pieces), tile) * tile
    part = torch.empty((rows, heads, pieces, width), dtype=torch.float32, device=out.device)
    part_log = torch.empty((rows, heads, pieces), dtype=torch.float32, device=out.device)
    factor, _ = score_factors(scale, softcap=0.0)
    seen = part_log if visible is None else visible.view(torch.uint8)
    _attend_kernel[(pieces, kv_heads * parts, rows)](
        part, part_log, q, k, v, seen, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        k.stride(2), v.stride(0), v.stride(1), v.stride(2), 0 if visible is None else visible.stride(0),
        length, per_piece, factor,
        HEADS=heads, SHARE=share, PARTS=parts, M=_HEADS, TILE=tile, D=width, WIDTH=padded,
        MASKED=visible is not None, num_warps=4, **dependent_launch(),
    )  # fmt: skip
    _combine_kernel[(heads, rows)](
        out, part, part_log, out.stride(0), out.stride(1), pieces,
        HEADS=heads, AT_ONCE=_PIECES_AT_ONCE, D=width, WIDTH=padded, num_warps=2,
        **dependent_launch(),
    )  # fmt: skip


def _case(
    seen: tuple[int, ...] = (5, 1, 40),
    length: int = 40,
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 16,
    masked: bool = True,
    hole: bool = False,
    name: str = "",
) -> OpCase:
    """One row per entry of `seen`, which sees its first positions; what it does not see is NaN.

    `hole`: it also does not see the first tile.  Heads lie as a cache and a projection leave them.
    """

    def build(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Args:
        def random(*shape: int) -> Tensor:
            numbers = torch.randn(shape, generator=generator, device=generator.device)
            return numbers.to(device, dtype)

        rows, place = len(seen), torch.arange(length, device=device)
        visible = place[None] < torch.tensor(seen, device=device)[:, None]
        if hole:
            visible &= place >= 64
        k, v = (random(rows, kv_heads, length, width) for _ in range(2))
        if masked:
            k, v = (x.masked_fill_(~visible[:, None, :, None], torch.nan) for x in (k, v))
        return {
            "out": torch.full((rows, heads, width), torch.nan, dtype=dtype, device=device),
            "q": random(rows, 1, heads, width).transpose(1, 2)[:, :, 0],
            "k": k,
            "v": v,
            "visible": visible if masked else None,
            "scale": width**-0.5,
        }

    shape = f"B{len(seen)}-H{heads}-G{kv_heads}-L{length}-D{width}"
    return OpCase(f"{shape}{'' if masked else '-all'}-{name or 'seen' + str(max(seen))}", build)


def _traffic(args: Args) -> tuple[int, int]:
    """What is seen of keys and values, once; two multiply-adds per query head and element."""
    k, visible = args["k"], args["visible"]
    seen = k.shape[0] * k.shape[2] if visible is None else int(visible.sum())
    heads, width = args["q"].shape[1:]
    return 2 * seen * k.shape[1] * width * k.element_size(), 4 * seen * heads * width


static_attention_decode = define_op(
    "static_attention_decode(Tensor(a!) out, Tensor q, Tensor k, Tensor v, Tensor? visible, "
    "float scale) -> ()",
    cuda=_launch,
    cpu=static_attention_decode_ref,
    cases=(
        _case(),
        _case(masked=False),
        _case(seen=(0, 3), name="a-row-sees-nothing"),
        _case(seen=(1,), length=1),
        _case(seen=(300, 64, 65, 63, 129), length=300, name="around-tiles"),
        _case(seen=(200, 60), length=200, hole=True, name="first-tile-hidden"),
        _case(seen=(2500,), length=2600, heads=2, kv_heads=1),  # several tiles per piece
        _case(seen=(90,), length=100, heads=3, kv_heads=1),
        _case(seen=(90,), length=100, heads=40, kv_heads=1),  # more heads than a program takes
        _case(seen=(90,), length=100, heads=32, kv_heads=8, width=64),
        _case(seen=(30, 20), length=33, width=24),  # not a power of two
        _case(seen=(30,), length=70, width=5),
        _case(seen=(70, 10), length=70, width=128),
        _case(seen=(40,), length=50, heads=2, kv_heads=1, width=256),
    ),
    tolerance=TOLERANCE,
    traffic=_traffic,
    bench_cases=(_case((4096,), 4096, 32, 8, 64), _case((4096,) * 8, 4096, 32, 8, 64)),
)
