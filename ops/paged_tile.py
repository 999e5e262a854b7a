"""
One turn of attention over a tile of paged keys and values, for the kernels of the attention ops.

Online softmax in base 2 (Milakov & Gimelshein 2018; Dao et al. 2022): after any number of turns,
`total` and `mixed` are the sum of weights and the weighted values relative to the largest score
`top`.

Letters: M query rows of a program, D width of a head.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
_PROCESSORS_WITHOUT_DEVICE = 8  # of the interpreter: small, so that small inputs take every path


def tile_positions(width: int, element_bytes: int) -> int:
    """Positions of a tile: three stages of keys and values fit on chip.

    >>> [tile_positions(width, element_bytes=2) for width in (64, 128, 256)]
    [64, 64, 32]
    """
    if element_bytes > 2:  # no tensor cores: what fits into registers
        return 32 if width <= 64 else 16
    return 64 if width <= 128 else 32


@cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of the device."""
    if device.type != "cuda":
        return _PROCESSORS_WITHOUT_DEVICE
    return torch.cuda.get_device_properties(device).multi_processor_count


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
    scale,  # of scores, for base 2
    MASKED: tl.constexpr,
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
    if MASKED:
        score = tl.where(place[None, :] < seen[:, None], score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    weight = tl.exp2(score - new_top[:, None])
    fade = tl.exp2(top - new_top)
    value = tl.load(source_ptr + KV_BLOCK * place_stride, mask=held, other=0.0)
    mixed = tl.dot(weight.to(value.dtype), value, mixed * fade[:, None], input_precision="ieee")
    return new_top, total * fade + tl.sum(weight, 1), mixed
