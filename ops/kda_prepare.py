"""
What the chunks of Kimi delta attention need before a state can walk through them, all chunks at once.

In the system that `kda_chunk` solves, the sum over channels c of D_ij[c] x_i[c] k_j[c] is a matrix product
only if the decay D_ij from token j to token i splits into a factor of i and one of j.  Both factors are
at most 1 if they meet at a token between the two.  Every pair j < i is cut apart by exactly one border
in the middle of an aligned block of 2, 4, .. CHUNK tokens: one product for each of these sizes, with all
decays from or to its borders, covers all pairs, and no decay can overflow.

A log decay between two tokens is a difference of sums since the chunk's start, so it is off by their
rounding: at most 4e-4, where all decays are the strongest ones.  Operands of 16 bits do not see it.

Letters: T tokens, Q chunks, H value heads, G key heads, K key width.
Traffic: q, k and g once, q and k once more; three vectors of K and one of f32 per token and head, and two
CHUNK x CHUNK matrices per chunk and head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.ops.chunk_table import CHUNK
from midstream.ops.linear_step import NORM_EPS
from midstream.ops.unit_lower_inverse import unit_lower_inverse

_LEVELS = CHUNK.bit_length() - 1  # CHUNK == 2**_LEVELS
_SUB = 16  # side of the diagonal blocks that are inverted row by row
_TILE_K = 64  # key channels that the products of all levels take at a time
# exp of it is 0 in fp32; stronger decay changes nothing, and -inf would give NaN
_LOG_ZERO = -110.0


@dataclass(frozen=True, slots=True)
class KdaChunks:
    """Workspace: what the walk reads of every chunk and token."""

    solve: Tensor  # [Q, H, CHUNK, CHUNK]  inverse system, times beta_j
    attend: Tensor  # [Q, H, CHUNK, CHUNK]  sum_c D_ij[c] query_i[c] key_j[c] for j <= i
    key_in: Tensor  # [T, H, K]  unit keys, decayed since the start of their chunk
    query_in: Tensor  # [T, H, K]  scaled queries, the same
    key_out: Tensor  # [T, H, K]  unit keys, decayed until the end of their chunk
    decay: Tensor  # f32[Q, H, K]  of the whole chunk


@triton.jit
def _fade_kernel(
    key_in_ptr,  # [T, H, K]  keys, decayed since the start of their chunk
    query_in_ptr,  # [T, H, K]  queries, the same
    key_out_ptr,  # [T, H, K]  keys, decayed until the end of their chunk
    sum_g_ptr,  # f32[T, H, K]  log decay since the start of the chunk
    scale_ptr,  # f32[3, T, H]  factors of q and k to their lengths, and query . key
    decay_ptr,  # f32[Q, H, K]  of the whole chunk
    q_ptr,  # [T, G, K]
    k_ptr,  # [T, G, K]
    g_ptr,  # f32[T, H, K]
    chunk_start_ptr,  # i32[Q + 1]
    q_token,  # strides in elements
    q_head,
    k_token,
    k_head,
    g_token,
    g_head,
    tokens,
    HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    K: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    LOG_ZERO: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Unit keys and queries as the state before and after the chunk sees them."""
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    start = tl.load(chunk_start_ptr + chunk)
    count = tl.load(chunk_start_ptr + chunk + 1) - start
    if count <= 0:
        return
    place = tl.arange(0, CHUNK)
    token = (start + place).to(tl.int64)
    key = tl.arange(0, BLOCK_K)
    inside = (place < count)[:, None] & (key[None, :] < K)
    key_head = head // HEADS_PER_KEY
    k_at = k_ptr + token[:, None] * k_token + key_head * k_head + key[None, :]
    q_at = q_ptr + token[:, None] * q_token + key_head * q_head + key[None, :]
    g_at = g_ptr + token[:, None] * g_token + head * g_head + key[None, :]
    # dead places hold zeros: the decay stands still there
    k = tl.load(k_at, mask=inside, other=0.0).to(tl.float32)
    q = tl.load(q_at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(g_at, mask=inside, other=0.0).to(tl.float32)
    k_scale = tl.rsqrt(tl.sum(k * k, 1) + EPS)
    q_scale = tl.rsqrt(tl.sum(q * q, 1) + EPS) * SCALE
    k *= k_scale[:, None]
    q *= q_scale[:, None]
    scale_at = scale_ptr + token * HEADS + head
    tl.store(scale_at, q_scale, mask=place < count)
    tl.store(scale_at + tokens * HEADS, k_scale, mask=place < count)
    tl.store(scale_at + 2 * tokens * HEADS, tl.sum(q * k, 1), mask=place < count)
    sum_g = tl.cumsum(tl.maximum(g, LOG_ZERO), 0)
    last_g = tl.sum(tl.where(place[:, None] == CHUNK - 1, sum_g, 0.0), 0)
    decay = tl.exp(sum_g)
    rest = tl.exp(-tl.abs(last_g[None, :] - sum_g))
    item = chunk.to(tl.int64) * HEADS + head
    tl.store(decay_ptr + item * K + key, tl.exp(last_g), mask=key < K)
    at = token[:, None] * (HEADS * K) + head * K + key[None, :]
    tl.store(sum_g_ptr + at, sum_g, mask=inside)
    tl.store(key_in_ptr + at, (k * decay).to(key_in_ptr.dtype.element_ty), mask=inside)
    tl.store(query_in_ptr + at, (q * decay).to(query_in_ptr.dtype.element_ty), mask=inside)
    tl.store(key_out_ptr + at, (k * rest).to(key_out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _solve_kernel(
    solve_ptr,  # [Q, H, CHUNK, CHUNK]  inverse system, times beta_j
    attend_ptr,  # [Q, H, CHUNK, CHUNK]  sum_c D_ij[c] query_i[c] key_j[c] for j <= i
    q_ptr,  # [T, G, K]
    k_ptr,  # [T, G, K]
    sum_g_ptr,  # f32[T, H, K]
    scale_ptr,  # f32[3, T, H]
    beta_ptr,  # [T, H]
    chunk_start_ptr,  # i32[Q + 1]
    q_token,  # strides in elements
    q_head,
    k_token,
    k_head,
    beta_token,
    tokens,
    HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    SUB: tl.constexpr,
    TILE_K: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE_PRECISION: tl.constexpr,
):
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    start = tl.load(chunk_start_ptr + chunk)
    count = tl.load(chunk_start_ptr + chunk + 1) - start
    if count <= 0:
        return
    dtype: tl.constexpr = solve_ptr.dtype.element_ty
    place = tl.arange(0, CHUNK)
    alive = place < count
    token = (start + place).to(tl.int64)
    key_head = head // HEADS_PER_KEY
    sum_g_ptr += start.to(tl.int64) * (HEADS * K) + head * K
    queries = tl.zeros([CHUNK, CHUNK], tl.float32)
    keys = tl.zeros([CHUNK, CHUNK], tl.float32)
    for first in tl.range(0, K, TILE_K):
        key = first + tl.arange(0, TILE_K)
        inside = alive[:, None] & (key[None, :] < K)
        k_at = k_ptr + token[:, None] * k_token + key_head * k_head + key[None, :]
        q_at = q_ptr + token[:, None] * q_token + key_head * q_head + key[None, :]
        k = tl.load(k_at, mask=inside, other=0.0).to(tl.float32)
        q = tl.load(q_at, mask=inside, other=0.0).to(tl.float32)
        sum_at = sum_g_ptr + place[:, None] * (HEADS * K) + key[None, :]
        sum_g = tl.load(sum_at, mask=inside, other=0.0)
        for level in tl.range(LEVELS):
            half = 1 << level
            # the last token before the middle of its block of 2 * half tokens
            border = (place | (2 * half - 1)) - half
            border_at = sum_g_ptr + border[:, None] * (HEADS * K) + key[None, :]
            known = (border < count)[:, None] & (key[None, :] < K)
            decay = tl.exp(-tl.abs(sum_g - tl.load(border_at, mask=known, other=0.0)))
            far_k = (k * decay).to(dtype)
            far_q = (q * decay).to(dtype)
            apart = ((place & half)[:, None] > (place & half)[None, :]) & (
                border[:, None] == border[None, :]
            )
            product = tl.dot(far_q, tl.trans(far_k), input_precision=PRECISION)
            queries += tl.where(apart, product, 0.0)
            product = tl.dot(far_k, tl.trans(far_k), input_precision=PRECISION)
            keys += tl.where(apart, product, 0.0)

    beta = tl.load(beta_ptr + token * beta_token + head, mask=alive, other=0.0).to(tl.float32)
    scale_at = scale_ptr + token * HEADS + head
    q_scale = tl.load(scale_at, mask=alive, other=0.0)
    k_scale = tl.load(scale_at + tokens * HEADS, mask=alive, other=0.0)
    same = tl.load(scale_at + 2 * tokens * HEADS, mask=alive, other=0.0)
    queries *= q_scale[:, None] * k_scale[None, :]
    queries = tl.where(place[:, None] == place[None, :], same[:, None], queries)
    item = chunk.to(tl.int64) * HEADS + head
    square = item * CHUNK * CHUNK + place[:, None] * CHUNK + place[None, :]
    tl.store(attend_ptr + square, queries.to(dtype))
    lower = (beta * k_scale)[:, None] * k_scale[None, :] * keys
    inverse = unit_lower_inverse(lower, CHUNK, SUB, INVERSE_PRECISION)
    tl.store(solve_ptr + square, (inverse * beta[None, :]).to(dtype))


def prepare_chunks(
    q: Tensor,  # [T, G, K]
    k: Tensor,  # [T, G, K]
    g: Tensor,  # f32[T, H, K]
    beta: Tensor,  # [T, H]
    chunk_start: Tensor,  # i32[Q + 1]
) -> KdaChunks:
    """Run both kernels on all chunks.  Tokens of no chunk and places behind a chunk's end stay unset."""
    (tokens, heads, width), chunks = g.shape, chunk_start.shape[0] - 1
    exact = q.dtype == torch.float32
    block = max(16, triton.next_power_of_2(width))
    sizes = {"HEADS": heads, "HEADS_PER_KEY": heads // k.shape[1], "K": width, "CHUNK": CHUNK}
    squares = torch.empty((2, chunks, heads, CHUNK, CHUNK), dtype=q.dtype, device=q.device)
    vectors = torch.empty((3, tokens, heads, width), dtype=q.dtype, device=q.device)
    sum_g = torch.empty((tokens, heads, width), dtype=torch.float32, device=q.device)
    scale = torch.empty((3, tokens, heads), dtype=torch.float32, device=q.device)
    decay = torch.empty((chunks, heads, width), dtype=torch.float32, device=q.device)
    _fade_kernel[(heads, chunks)](
        *vectors, sum_g, scale, decay, q, k, g, chunk_start,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), g.stride(0), g.stride(1), tokens,
        SCALE=width**-0.5, EPS=NORM_EPS, LOG_ZERO=_LOG_ZERO, BLOCK_K=block,
        num_warps=max(4, block // 8), **sizes,
    )  # fmt: skip
    _solve_kernel[(heads, chunks)](
        *squares, q, k, sum_g, scale, beta, chunk_start,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), beta.stride(0), tokens,
        LEVELS=_LEVELS, SUB=_SUB, TILE_K=min(_TILE_K, block), PRECISION="ieee" if exact else None,
        INVERSE_PRECISION="ieee" if exact else "tf32x3", num_warps=8, **sizes,
    )  # fmt: skip
    (solve, attend), (key_in, query_in, key_out) = squares, vectors
    return KdaChunks(solve, attend, key_in, query_in, key_out, decay)
