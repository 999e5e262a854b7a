"""
The inverse of a unit lower triangular matrix inside a Triton kernel, accurate to a few eps.

Doubling the powers of the strict part would take fewer steps, but for equal keys without decay
those powers reach 1e18 while the inverse has entries of 1.  Substitution has no such terms: first
row by row within the diagonal blocks, all of them at once, then block by block.
"""

import triton
import triton.language as tl


@triton.jit
def unit_lower_inverse(lower, SIZE: tl.constexpr, SUB: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + lower)**-1 for f32 [SIZE, SIZE], zero on and above the diagonal; blocks of side SUB."""
    BLOCKS: tl.constexpr = SIZE // SUB
    block = tl.arange(0, BLOCKS)
    same = block[:, None, None, None] == block[None, None, :, None]
    row = tl.arange(0, SUB)
    # the diagonal blocks; the unit diagonal is added behind the loop
    left = -tl.sum(tl.where(same, tl.reshape(lower, [BLOCKS, SUB, BLOCKS, SUB]), 0.0), axis=2)
    blocks = left
    for i in range(2, SUB):
        here = row[None, :, None] == i
        line = tl.sum(tl.where(here, left, 0.0), axis=1)
        line += tl.sum(line[:, :, None] * blocks, axis=1)
        blocks = tl.where(here, line[:, None, :], blocks)
    blocks += tl.where(row[None, :, None] == row[None, None, :], 1.0, 0.0)
    diagonal = tl.reshape(tl.where(same, blocks[:, :, None, :], 0.0), [SIZE, SIZE])

    band = tl.arange(0, SIZE) // SUB
    below = tl.where(band[:, None] > band[None, :], lower, 0.0)
    step = tl.dot(diagonal, below, input_precision=PRECISION)
    inverse = diagonal
    for _ in tl.static_range(BLOCKS - 1):  # each turn makes one more line of blocks final
        inverse = diagonal - tl.dot(step, inverse, input_precision=PRECISION)
    return inverse
