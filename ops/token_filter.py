"""
Which tokens temperature, top_k, top_p and min_p allow: the definition, and the search of the
kernel.

* top_k: tokens with at least the k-th largest logit.
* top_p: of these, the smallest set {logit >= t} that holds at least top_p of their probability.
* min_p: tokens at least min_p times as likely as the likeliest.

Equal logits are allowed or refused together; a filter by sorting refuses some of them.  The kernel
needs no sort: it bisects on the bits of the logit, so its number of turns is fixed.  Weights are
relative to the likeliest token: exp((logit - peak) / temperature).

Letters: L vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = tl.constexpr(3.4028234663852886e38)  # largest float32
STOP_IDS = tl.constexpr(8)  # of a slot
_HOTTEST = tl.constexpr(1e6)  # bound on 1 / temperature
_SUM_SLACK = tl.constexpr(1e-6)  # relative: sums of any order agree on the token that crosses top_p
_LEAST_MASS = tl.constexpr(1e-20)  # top_p 0 allows the likeliest tokens


def allowed_tokens(
    logit: Tensor,  # [R, L]
    temperature: Tensor,  # f32[R]  above 0
    top_k: Tensor,  # i32[R]  0 is off
    top_p: Tensor,  # f32[R]  1 is off
    min_p: Tensor,  # f32[R]  0 is off
) -> tuple[Tensor, Tensor]:
    """Which tokens may be drawn, and log of their weight relative to the likeliest: two [R, L]."""
    vocabulary = logit.shape[1]
    inverse = (1 / temperature).clamp(max=_HOTTEST.value)
    peak = logit.amax(1, keepdim=True).clamp(min=-LARGEST.value)
    log_weight = (logit - peak) * inverse[:, None]
    weight = log_weight.exp()
    ranked, order = logit.sort(dim=1, descending=True)

    count = torch.where((top_k > 0) & (top_k < vocabulary), top_k, vocabulary).long()
    allowed = (logit > -torch.inf) & (logit >= ranked.gather(1, count[:, None] - 1))

    mass = weight.masked_fill(~allowed, 0).gather(1, order).cumsum(1)
    target = mass[:, -1] * (top_p * (1 - _SUM_SLACK.value)).clamp(min=_LEAST_MASS.value)
    crossing = (mass < target[:, None]).sum(1).clamp(max=vocabulary - 1)
    allowed &= (logit >= ranked.gather(1, crossing[:, None])) | (top_p >= 1)[:, None]
    return allowed & (weight >= min_p.clamp(max=1)[:, None]), log_weight


@triton.jit
def load_logits(logits_row_ptr, token, vocabulary, stop_ptr, early):
    """Raw logits, and logits without NaN, +inf and refused tokens; -inf past the vocabulary."""
    raw = tl.load(logits_row_ptr + token, mask=token < vocabulary, other=float("-inf"))
    raw = raw.to(tl.float32)
    usable = tl.where(raw == raw, tl.minimum(raw, LARGEST), float("-inf"))
    clean = usable
    if early:
        for place in range(STOP_IDS):
            clean = tl.where(token == tl.load(stop_ptr + place), float("-inf"), clean)
    return raw, usable, clean


@triton.jit
def ordered(logit):
    """int32 keys in the order of the logits; the two zeros are equal."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def inverse_temperature(temperature):
    return tl.minimum(tl.div_rn(1.0, temperature), _HOTTEST)


@triton.jit
def _largest_key(
    logits_row_ptr, vocabulary, stop_ptr, early, inverse, peak, target,
    BY_WEIGHT: tl.constexpr, KEY_BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The largest key for which the tokens at or above it weigh (or count) at least `target`.

    Bisection, one bit of the key after the other.
    """
    key = tl.full([], -(2**31), tl.int32)
    for turn in range(KEY_BITS):
        candidate = key ^ (tl.full([], 1, tl.int32) << (31 - turn))
        sums = tl.zeros([TILE], tl.float32)
        for first in range(0, vocabulary, TILE):
            token = first + tl.arange(0, TILE)
            _, _, clean = load_logits(logits_row_ptr, token, vocabulary, stop_ptr, early)
            weight = tl.exp((clean - peak) * inverse) if BY_WEIGHT else 1.0
            above = ordered(clean) >= candidate
            sums += tl.where(above & (token < vocabulary), weight, 0.0)
        key = tl.where(tl.sum(sums, 0) >= target, candidate, key)
    return key


@triton.jit
def _total_weight(
    logits_row_ptr, vocabulary, stop_ptr, early, inverse, peak, lowest_key, TILE: tl.constexpr
):
    """Weight of the tokens at or above `lowest_key`."""
    sums = tl.zeros([TILE], tl.float32)
    for first in range(0, vocabulary, TILE):
        token = first + tl.arange(0, TILE)
        _, _, clean = load_logits(logits_row_ptr, token, vocabulary, stop_ptr, early)
        weight = tl.exp((clean - peak) * inverse)
        sums += tl.where(ordered(clean) >= lowest_key, weight, 0.0)
    return tl.sum(sums, 0)


@triton.jit
def lowest_allowed_key(
    logits_row_ptr, vocabulary, stop_ptr, early, inverse, peak, top_k, top_p,
    KEY_BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Key from which on top_k and top_p allow tokens."""
    lowest_key = tl.full([], -(2**31), tl.int32)
    if (top_k > 0) & (top_k < vocabulary):
        lowest_key = _largest_key(
            logits_row_ptr, vocabulary, stop_ptr, early, inverse, peak,
            top_k.to(tl.float32), False, KEY_BITS, TILE,
        )  # fmt: skip
    if top_p < 1.0:
        total = _total_weight(
            logits_row_ptr, vocabulary, stop_ptr, early, inverse, peak, lowest_key, TILE
        )
        target = total * tl.maximum(top_p * (1.0 - _SUM_SLACK), _LEAST_MASS)
        crossing = _largest_key(
            logits_row_ptr, vocabulary, stop_ptr, early, inverse, peak,
            target, True, KEY_BITS, TILE,
        )  # fmt: skip
        # below lowest_key the search saw too much weight: all of it lies above the target there
        lowest_key = tl.maximum(lowest_key, crossing)
    return lowest_key
