"""
Run the gated delta rule over chunks token by token, in fp32: the chunk ops' path for fp32 models.

The decay is one number per head (`gated_delta_chunk`) or one per key channel (`kda_chunk`).

Exact fp32 products cannot use tensor cores, and those of a whole chunk do not fit into registers.  The
recurrence itself needs neither, rounds least, and gives the same bits however a row is cut.  A program is
one warp, as in `linear_step`: the sums of a token need no other warp.

Letters: R rows, T tokens, Q chunks, N pages, H value heads, G key heads, K key width, V value width.
Traffic: that of the chunk ops without anything in between.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.ops.linear_heads import check_heads
from midstream.ops.linear_step import NORM_EPS, correction, values_of_warp
from midstream.ops.paged_state import aligned_elements


@triton.jit
def _token(state, q, k, v, g, beta, SCALE: tl.constexpr, EPS: tl.constexpr):
    """One token of one head: a [K, V] tile of the state after it, and its output; all in fp32."""
    state *= tl.exp(g)
    along_k, along_q = tl.sum(state * k[:, None], 0), tl.sum(state * q[:, None], 0)
    update, result = correction(along_k, along_q, q, k, v, beta, SCALE, EPS)
    return state + k[:, None] * update[None, :], result


@triton.jit
def _tokens_kernel(
    arena_ptr,  # [N, page_stride]
    out_ptr,  # [T, H, V]
    q_ptr,  # [T, G, K]
    k_ptr,  # [T, G, K]
    v_ptr,  # [T, H, V]
    g_ptr,  # f32[T, H] or f32[T, H, K]
    beta_ptr,  # [T, H]
    offset_ptr,  # i64[1]
    read_page_ptr,  # i32[R]
    chunk_start_ptr,  # i32[Q + 1]
    chunk_page_ptr,  # i32[Q]
    row_chunk_ptr,  # i32[R + 1]
    page_stride,  # strides in elements
    out_token,
    out_head,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    g_token,
    g_head,
    beta_token,
    HEADS_PER_KEY: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    head = tl.program_id(1)
    row = tl.program_id(2)
    first = tl.load(row_chunk_ptr + row)
    behind = tl.load(row_chunk_ptr + row + 1)
    if first == behind:
        return
    key = tl.arange(0, BLOCK_K)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    key_head = head // HEADS_PER_KEY
    place = head * (V * K) + value[None, :] * K + key[:, None]
    inside = (key[:, None] < K) & (value[None, :] < V)
    offset = tl.load(offset_ptr)
    source = tl.load(read_page_ptr + row)
    # pages and regions start on 128 bytes; without the hint every access would be a scalar one
    read_at = tl.multiple_of(source.to(tl.int64) * page_stride + offset, ALIGN)
    state = tl.load(arena_ptr + read_at + place, mask=inside & (source > 0), other=0.0)
    state = state.to(tl.float32)
    tl.debug_barrier()  # in place: of a small tile, lanes hold copies and one stores

    for chunk in range(first, behind):
        end = tl.load(chunk_start_ptr + chunk + 1)
        for step in range(tl.load(chunk_start_ptr + chunk), end):
            token = tl.zeros([], tl.int64) + step
            q_at = q_ptr + token * q_token + key_head * q_head + key
            k_at = k_ptr + token * k_token + key_head * k_head + key
            v_at = v_ptr + token * v_token + head * v_head + value
            q = tl.load(q_at, mask=key < K, other=0.0).to(tl.float32)
            k = tl.load(k_at, mask=key < K, other=0.0).to(tl.float32)
            v = tl.load(v_at, mask=value < V, other=0.0).to(tl.float32)
            g_at = g_ptr + token * g_token + head * g_head
            if PER_CHANNEL:
                g = tl.load(g_at + key, mask=key < K, other=0.0).to(tl.float32)[:, None]
            else:
                g = tl.load(g_at).to(tl.float32)
            beta = tl.load(beta_ptr + token * beta_token + head).to(tl.float32)
            state, result = _token(state, q, k, v, g, beta, SCALE, EPS)
            out_at = out_ptr + token * out_token + head * out_head + value
            tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=value < V)
        page = tl.load(chunk_page_ptr + chunk)
        write_at = tl.multiple_of(page.to(tl.int64) * page_stride + offset, ALIGN)
        saved = state.to(arena_ptr.dtype.element_ty)
        tl.store(arena_ptr + write_at + place, saved, mask=inside & (page > 0))
        state = tl.where(page > 0, saved.to(tl.float32), state)


def launch_tokens(
    arena: Tensor,
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    offset: Tensor,
    read_page: Tensor,
    chunk_start: Tensor,
    chunk_row: Tensor,
    chunk_page: Tensor,
    row_chunk: Tensor,
) -> None:
    """Run all rows; arguments as `gated_delta_chunk`, or as `kda_chunk` with its g [T, H, K]."""
    check_heads("gated_delta_chunk", q, k, v)
    rows = row_chunk.shape[0] - 1
    _, heads, width = v.shape
    if rows == 0 or chunk_row.shape[0] == 0:
        return
    block_k = triton.next_power_of_2(k.shape[2])
    tile = values_of_warp(block_k, width, torch.float32.itemsize)
    _tokens_kernel[(triton.cdiv(width, tile), heads, rows)](
        arena, out, q, k, v, g, beta, offset, read_page, chunk_start, chunk_page, row_chunk,
        arena.stride(0), out.stride(0), out.stride(1), q.stride(0), q.stride(1),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), g.stride(0), g.stride(1),
        beta.stride(0),
        HEADS_PER_KEY=heads // k.shape[1], K=k.shape[2], V=width, SCALE=k.shape[2] ** -0.5,
        EPS=NORM_EPS, PER_CHANNEL=g.ndim == 3, ALIGN=aligned_elements(arena),
        BLOCK_K=block_k, BLOCK_V=tile, num_warps=1,
    )  # fmt: skip
