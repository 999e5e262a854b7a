"""
Noise that depends only on a seed, a position and an index, equal on host and device.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), keyed by the two
seed words and counted by (block, position, 0, 0), gives four 32-bit words a block.  A span of 1024
indices takes 256 blocks: their first words, then their second words, and so on, so that indices
stay contiguous in a kernel that uses all four words.

A word becomes a standard exponential variable E.  argmax(log p_i - log E_i) is a draw from p
(Gumbel 1954); small E decide it, so they keep full relative precision.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NOISE_SPAN = tl.constexpr(1024)  # indices of a run of NOISE_SPAN // 4 blocks
_ROUNDS = 10
_WORD = 0xFFFFFFFF
_MULTIPLIER_A, _MULTIPLIER_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85

_TO_UNIT = tl.constexpr(2.0**-32)
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)  # largest float32 below 1
_SMALL = tl.constexpr(2.0**-10)  # three terms of the series are exact in float32 below it


def philox(
    block: Tensor, position: Tensor, seed_low: Tensor, seed_high: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words, as int64 in [0, 2**32), of i64 counters and keys that broadcast.

    >>> zero = torch.tensor(0)
    >>> [hex(int(w)) for w in philox(zero, zero, zero, zero)]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = block, position & _WORD, torch.zeros_like(block), torch.zeros_like(block)
    k0, k1 = seed_low & _WORD, seed_high & _WORD
    for _ in range(_ROUNDS):
        # int64 wraps, which leaves all 64 bits of the product right
        a, b = c0 * _MULTIPLIER_A, c2 * _MULTIPLIER_B
        c0, c2 = (b >> 32 & _WORD) ^ c1 ^ k0, (a >> 32 & _WORD) ^ c3 ^ k1
        c1, c3 = b & _WORD, a & _WORD
        k0, k1 = (k0 + _WEYL_A) & _WORD, (k1 + _WEYL_B) & _WORD
    return c0, c1, c2, c3


def log_exponential_ref(num: int, position: Tensor, seed: Tensor) -> Tensor:
    """log E of indices 0..num-1 for R positions i[R] and seeds i[R, 2]: float32[R, num]."""
    quarter = NOISE_SPAN.value // 4
    spans = -(-num // NOISE_SPAN.value)
    low, high = seed.long()[:, :, None].unbind(1)
    words = philox(torch.arange(spans * quarter), position.long()[:, None], low, high)
    word = torch.stack([w.unflatten(1, (spans, quarter)) for w in words], dim=2)
    unit = ((word.flatten(1)[:, :num].float() + 0.5) * _TO_UNIT.value).clamp(max=_BELOW_ONE.value)
    series = unit + unit * unit * (0.5 + unit * (1.0 / 3.0))
    return torch.where(unit < _SMALL.value, series, -torch.log(1.0 - unit)).log()


@triton.jit
def log_exponential(word):
    """log E of 32-bit words."""
    unit = tl.minimum((word.to(tl.float32) + 0.5) * _TO_UNIT, _BELOW_ONE)
    series = unit + unit * unit * (0.5 + unit * (1.0 / 3.0))
    return tl.log(tl.where(unit < _SMALL, series, -tl.log(1.0 - unit)))


@triton.jit
def philox_words(block, position, seed_low, seed_high):
    """Four uint32 words of each i32 counter block."""
    zero = block * 0
    seed = (seed_high.to(tl.int64) << 32) | (seed_low.to(tl.int64) & 0xFFFFFFFF)
    return tl.philox(seed, block, zero + position, zero, zero)
