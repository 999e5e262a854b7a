"""
One turn of attention over a tile of paged keys and values, for the kernels of the attention ops.

Online softmax in base 2 (Milakov & Gimelshein 2018; Dao et al. 2022): after any number of turns,
`total` and `mixed` are the sum of weights and the weighted values relative to the largest score
`top`.  A soft cap bends scores to softcap * tanh(score / softcap) (Gemma 2, 2024).

Letters: M query rows of a program, D width of a head.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = 1.4426950408889634


def tile_positions(width: int, element_bytes: int) -> int:
    """Positions of a tile: three stages of keys and values fit on chip.

    >>> [tile_positions(width, element_bytes=2) for width in (64, 128, 256)]
    [64, 64, 32]
    """
    if element_bytes > 2:  # no tensor cores: what fits into registers
        return 32 if width <= 64 else 16
    return 64 if width <= 128 else 32


def score_factors(scale: float, softcap: float) -> tuple[float, float]:
    """What `attend_tile` takes as `scale` and `cap`, for scores in base 2.

    >>> score_factors(0.5, softcap=0.0), score_factors(0.5, softcap=10.0)
    ((0.7213475204444817, 0.0), (0.05, 14.426950408889635))
    """
    if softcap:
        return scale / softcap, softcap * _LOG2_E
    return scale * _LOG2_E, 0.0


@triton.jit
def _tanh(x):
    """Hyperbolic tangent to a few eps; the series where the quotient would cancel."""
    square = x * x
    series = 62.0 / 2835.0 * square - 17.0 / 315.0
    series = series * square + 2.0 / 15.0
    series = series * square - 1.0 / 3.0
    series = x + x * square * series
    fall = tl.exp2(-2.8853900817779268 * tl.abs(x))  # exp(-2 |x|)
    quotient = (1.0 - fall) / (1.0 + fall)
    return tl.where(square < 0.0625, series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def attend_tile(
    query,  # [M, WIDTH]
    top,  # f32[M]  largest score so far
    total,  # f32[M]
    mixed,  # f32[M, WIDTH]
    seen,  # i32[M]  positions below it are visible to the row; read where MASKED
    first,  # first position of the tile
    end,  # positions from here on are not loaded
    head_ptr,  # keys of one KV head in page 0, place 0
    table_ptr,  # i32[Z]  pages of the sequence
    page_stride,
    place_stride,  # elements from position to position, G * D
    scale,  # of `score_factors`
    cap,  # of `score_factors`; read where SOFTCAP
    window,  # positions that a row sees at most; read where WINDOW
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,  # with MASKED
    UNSEEN: tl.constexpr,  # with MASKED: rows may have seen no position when the tile is done
    SOFTCAP: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two >= D
):
    place = first + tl.arange(0, TILE)
    inside = place < end
    page = tl.load(table_ptr + place // KV_BLOCK, mask=inside, other=0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    source = page * page_stride + (place % KV_BLOCK) * place_stride
    source_ptr = head_ptr + source[:, None] + lane[None, :]
    held = inside[:, None] & (lane < D)[None, :]
    key = tl.load(source_ptr, mask=held, other=0.0)
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if SOFTCAP:
        score = cap * _tanh(score)
    if MASKED:
        visible = place[None, :] < seen[:, None]
        if WINDOW:
            visible = visible & (place[None, :] >= (seen - window)[:, None])
        score = tl.where(visible, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    shift = new_top
    if UNSEEN:  # a row that has seen nothing yet: -inf minus -inf is no number
        shift = tl.where(new_top > float("-inf"), new_top, 0.0)
    weight = tl.exp2(score - shift[:, None])
    fade = tl.exp2(top - shift)
    value = tl.load(source_ptr + KV_BLOCK * place_stride, mask=held, other=0.0)
    mixed = tl.dot(weight.to(value.dtype), value, mixed * fade[:, None], input_precision="ieee")
    return new_top, total * fade + tl.sum(weight, 1), mixed
