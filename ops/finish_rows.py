"""
What stands behind the products of a few rows, as one kernel.

    y      = sum of parts (+ residual)     or, gated: silu(sum of parts) * (sum of the other parts)
    out    = y
    normed = y * rsqrt(mean(y^2) + eps) * (norm_weight + norm_shift)
All of it is float32; only the two results are rounded.  Either may be left out.

Letters: R rows, N elements of a row, S parts (of the inputs, see ops/skinny_linear.py), M matrices: 1, or 2
where there is a gate.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from midstream.ops.dependent_launch import after_previous, dependent_launch

MAX_NORMED = 16384  # elements of a row: one program keeps them in registers
_TILE = 1024  # elements per program, where rows need not be whole
_PER_WARP = 256


def warps_of_row(elements: int) -> int:
    """Warps of a program that works on so many elements.

    >>> [warps_of_row(elements) for elements in (1, 1024, 2048, 9000)]
    [1, 4, 8, 16]
    """
    return min(16, max(1, triton.next_power_of_2(elements) // _PER_WARP))


@triton.jit
def rms_scale(row, N, eps):
    """1 over the root of the mean square of a row of N elements, padded with zeros."""
    return tl.rsqrt(tl.sum(row * row, 0) / N + eps)


@triton.jit
def _finish_kernel(
    out_ptr,  # [R, N]
    normed_ptr,  # [R, N]
    part_ptr,  # [M, S, R, N]
    residual_ptr,  # [R, N]
    norm_ptr,  # [N]
    N,
    row_pitch,  # elements between the rows of a part
    eps,
    norm_shift,
    S: tl.constexpr,
    TILE: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    STORED: tl.constexpr,
    NORMED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    after_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = n < N
    part_pitch = tl.num_programs(0).to(tl.int64) * row_pitch
    y = tl.zeros((TILE,), tl.float32)
    for part in tl.static_range(S):
        place = part * part_pitch + row * row_pitch + n
        y += tl.load(part_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.zeros((TILE,), tl.float32)
        for part in tl.static_range(S):
            place = (S + part) * part_pitch + row * row_pitch + n
            up += tl.load(part_ptr + place, mask=inside, other=0.0).to(tl.float32)
        y = y * tl.sigmoid(y) * up
    if ADDED:
        y += tl.load(residual_ptr + row * N + n, mask=inside, other=0.0).to(tl.float32)
    if STORED:
        tl.store(out_ptr + row * N + n, y.to(out_ptr.dtype.element_ty), mask=inside)
    if NORMED:
        scale = rms_scale(y, N, eps)
        weight = tl.load(norm_ptr + n, mask=inside, other=0.0).to(tl.float32) + norm_shift
        tl.store(
            normed_ptr + row * N + n, (y * scale * weight).to(normed_ptr.dtype.element_ty), mask=inside
        )  # fmt: skip


def finish_rows(
    out: Tensor | None,  # [R, N]
    normed: Tensor | None,  # [R, N]
    parts: Tensor,  # [M, S, R, N]; rows may lie further apart, parts follow each other
    residual: Tensor | None,  # [R, N]
    norm_weight: Tensor | None,  # [N], with `normed`
    eps: float,
    norm_shift: float,
) -> None:
    """Launch the kernel.  R is at least 1, and N at most MAX_NORMED where there is `normed`."""
    matrices, num_parts, rows, width = parts.shape
    tile = _TILE if normed is None else triton.next_power_of_2(width)
    some = out if normed is None else normed
    _finish_kernel[(rows, triton.cdiv(width, tile))](
        some if out is None else out, some, parts, parts if residual is None else residual,
        parts if norm_weight is None else norm_weight, width, parts.stride(2), eps, norm_shift,
        S=num_parts, TILE=tile, GATED=matrices == 2, ADDED=residual is not None,
        STORED=out is not None, NORMED=normed is not None,
        num_warps=warps_of_row(tile), **dependent_launch(),
    )  # fmt: skip
