"""
One token per row of linear attention: the kernel, its cut and the reference behind the `*_step` ops.

Per row and head, with a decay of the head or of every key channel:
    state <- exp(g) * state + k (outer) update
    out    = state^T q
The update is v (`lightning_step`), or what corrects the state's answer to the key, with keys and queries
scaled to unit length (`gated_delta_step`, `kda_step`).  The sums over keys that this needs are taken over
the state as it was, so that nothing waits for the update.

A program is one warp: it takes all keys of some values, so that its sums need no other warp.  How rows are
cut into programs depends on widths and dtypes alone: a row has the same bits in any company.

Letters: R rows, N pages, E elements of a page, H value heads, G key heads (head h uses key head
h // (H // G)), K key width, V value width.
Traffic: the state of every live row is read and written once, 2 * H * K * V elements.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.ops.dependent_launch import after_previous, dependent_launch
from midstream.ops.paged_state import FUSE_FROM, aligned_elements, linear_states
from midstream.ops.registry import NULL_PAGE

NORM_EPS = 1e-6  # added to the squared length inside the root, as transformers does
_TILE_BYTES = 4096  # of a state that a program takes, measured on an H200: docs/log.md
# of a thread, at most, by the bytes of a state's numbers: 28 or 18 programs on an SM.  With activations of
# fp32, or wider keys, this would spill.
_REGISTERS = {4: 72, 2: 112}
_TIGHT_KEYS = 128
_MIN_DOT = 16  # keys and values from which on tensor cores take a tile
# two bf16 numbers of a register in fp32, which the compiler does not see; and the same once more in other
# words, so that the register is kept until the update and not the two that the sums were taken over
_WIDEN = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")
_WIDEN_AGAIN = tl.constexpr("prmt.b32 $0, $2, 0, 0x1044; prmt.b32 $1, $2, 0, 0x3244;")
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # the interpreter knows no PTX


def step_rows(
    rule: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    arena: Tensor,
    out: Tensor,
    key_width: int,
    offset: Tensor,
    read_page: Tensor,
    write_page: Tensor,
) -> None:
    """Reference: `rule` takes states and the numbers of their rows, and gives states and outputs."""
    states = linear_states(arena, offset, out.shape[1], key_width, out.shape[2])
    out.zero_()
    row = (write_page[: out.shape[0]] != NULL_PAGE).nonzero()[:, 0]
    source = read_page[row].long()
    state = states[source].to(torch.promote_types(arena.dtype, torch.float32))
    state[source == NULL_PAGE] = 0.0
    state, result = rule(state, row)
    states[write_page[row].long()] = state.to(arena.dtype)
    out[row] = result.to(out.dtype)


@triton.jit
def correction(along_k, along_q, q, k, v, beta, SCALE: tl.constexpr, EPS: tl.constexpr):
    """What k adds to the state, and the output, from sums of the decayed state with k and q."""
    k_scale = tl.rsqrt(tl.sum(k * k, 0) + EPS)
    q_scale = tl.rsqrt(tl.sum(q * q, 0) + EPS) * SCALE
    update = beta * (v - k_scale * along_k)
    return k_scale * update, q_scale * (along_q + k_scale * tl.sum(q * k, 0) * update)


@triton.jit
def _dot_sums(state, both, PARTS: tl.constexpr):
    """Sums of a state of 16 bits with keys, columns 0-7 of `both`, and queries, 8-15: parts or copies."""
    sums = tl.dot(state, both).reshape(state.shape[0], 2, 8)
    along_k, along_q = tl.split(sums.permute(0, 2, 1))
    if PARTS:
        return tl.sum(along_k, 1), tl.sum(along_q, 1)
    elif _INTERPRETED:
        return tl.max(along_k, 1), tl.max(along_q, 1)
    else:
        return tl.reduce(along_k, 1, _first), tl.reduce(along_q, 1, _first)


@triton.jit
def _first(a, b):
    return a


@triton.jit
def _parts(x, TYPE: tl.constexpr):
    """Numbers of fp32, the same in columns 0-7 and in 8-15, as three parts of 16 bits each and zeros."""
    part = tl.arange(0, 16)[None, :] % 8
    second = x - x.to(TYPE).to(tl.float32)
    third = second - second.to(TYPE).to(tl.float32)
    x = tl.where(part == 0, x, tl.where(part == 1, second, third))
    return tl.where(part < 3, x, 0.0).to(TYPE)


@triton.jit
def _widened(x, ASM: tl.constexpr):
    """In fp32."""
    if x.dtype == tl.bfloat16 and not _INTERPRETED:
        return tl.inline_asm_elementwise(
            ASM, "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(tl.float32)


@triton.jit
def _linear_step_kernel(
    arena_ptr,  # [N, page_stride]
    out_ptr,  # [R, H, V]
    q_ptr,  # [R, G, K]
    k_ptr,  # [R, G, K]
    v_ptr,  # [R, H, V]
    g_ptr,  # f32[R, H, K], f32[R, H] or f32[H], by its strides
    beta_ptr,  # [R, H]; None: no correction
    offset_ptr,  # i64[1]
    read_page_ptr,  # i32[R]
    write_page_ptr,  # i32[R]
    page_stride,  # strides in elements
    out_row,
    out_head,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    g_row,
    g_head,
    beta_row,
    beta_head,
    HEADS_PER_KEY: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    PER_KEY: tl.constexpr,  # decays
    DOT: tl.constexpr,  # sums by tensor cores: q, k and states are of one type of 16 bits
    ALIGN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(2)
    target = tl.load(write_page_ptr + row)
    source = tl.load(read_page_ptr + row)
    offset = tl.load(offset_ptr)
    after_previous(DEPENDENT)
    wide_row = row.to(tl.int64)
    head = tl.program_id(1)
    first = tl.program_id(0) * BLOCK_V
    lane = tl.arange(0, BLOCK_V)
    value = first + lane
    key = tl.arange(0, BLOCK_K)
    out_at = out_ptr + wide_row * out_row + head * out_head + value
    if target == 0:
        tl.store(out_at, tl.zeros([BLOCK_V], out_ptr.dtype.element_ty), mask=value < V)
        return

    # Pages and regions start on 128 bytes; without the hint every access would be a scalar one.  All but
    # the place within the tile is one address of the program: one added later would cost registers.
    read_at = tl.multiple_of(source.to(tl.int64) * page_stride + offset, ALIGN)
    write_at = tl.multiple_of(target.to(tl.int64) * page_stride + offset, ALIGN)
    region = (head * V + first) * K
    read_ptr, write_ptr = arena_ptr + read_at + region, arena_ptr + write_at + region
    place = lane[:, None] * K + key[None, :]
    inside = (value[:, None] < V) & (key[None, :] < K)
    state = tl.load(read_ptr + place, mask=inside & (source > 0), other=0.0)

    key_head = head // HEADS_PER_KEY
    k_at = k_ptr + wide_row * k_row + key_head * k_head
    q_at = q_ptr + wide_row * q_row + key_head * q_head
    g_at = g_ptr + wide_row * g_row + head * g_head
    k = tl.load(k_at + key, mask=key < K, other=0.0).to(tl.float32)
    q = tl.load(q_at + key, mask=key < K, other=0.0).to(tl.float32)
    v_at = v_ptr + wide_row * v_row + head * v_head + value
    v = tl.load(v_at, mask=value < V, other=0.0).to(tl.float32)
    if PER_KEY:
        decay = tl.exp(tl.load(g_at + key, mask=key < K, other=0.0).to(tl.float32))
    else:
        decay = tl.exp(tl.load(g_at).to(tl.float32))
    if DOT:
        both_at = tl.where(tl.arange(0, 16)[None, :] < 8, k_at, q_at) + key[:, None]
        both = tl.load(both_at, mask=key[:, None] < K, other=0.0)
        if PER_KEY:
            g = tl.load(g_at + key[:, None], mask=key[:, None] < K, other=0.0).to(tl.float32)
            both = _parts(both.to(tl.float32) * tl.exp(g), arena_ptr.dtype.element_ty)
        along_k, along_q = _dot_sums(state, both, PER_KEY)
    else:
        k_by, q_by = (decay * k, decay * q) if PER_KEY else (k, q)
        wide = _widened(state, _WIDEN)
        along_k, along_q = tl.sum(wide * k_by[None, :], 1), tl.sum(wide * q_by[None, :], 1)
    if PER_KEY:
        decay = decay[None, :]
    else:
        along_k, along_q = decay * along_k, decay * along_q
    if beta_ptr is not None:
        beta = tl.load(beta_ptr + wide_row * beta_row + head * beta_head).to(tl.float32)
        update, result = correction(along_k, along_q, q, k, v, beta, SCALE, EPS)
    else:
        update, result = v, along_q + tl.sum(q * k, 0) * v
    wide = _widened(state, _WIDEN_AGAIN) * decay + update[:, None] * k[None, :]
    if BLOCK_K * BLOCK_V < 32:  # in place: of a small tile, lanes hold copies and one stores
        tl.debug_barrier()
    tl.store(write_ptr + place, wide.to(arena_ptr.dtype.element_ty), mask=inside)
    tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=value < V)


def values_of_warp(block_k: int, width: int, element_bytes: int) -> int:
    """Values of a state that one warp takes, with all of their keys."""
    return min(max(1, _TILE_BYTES // element_bytes // block_k), triton.next_power_of_2(width))


def launch_linear_step(
    arena: Tensor,
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,  # [R, H, K], [R, H], or [H]: the same for all rows
    beta: Tensor | None,  # None: v is added as it is, and q and k are not scaled
    offset: Tensor,
    read_page: Tensor,
    write_page: Tensor,
) -> None:
    """Advance all rows by a token; the caller has checked the tensors."""
    rows, heads, width = v.shape
    if rows == 0:
        return
    size = arena.element_size()
    block_k = triton.next_power_of_2(k.shape[2])
    tile = values_of_warp(block_k, width, size)
    # with one decay and a correction, plain sums hide behind the state's way through memory
    alike = size == 2 and arena.dtype == q.dtype == k.dtype
    dot = alike and (g.ndim == 3 or beta is None) and min(block_k, tile) >= _MIN_DOT
    tight = q.element_size() == 2 and block_k <= _TIGHT_KEYS
    g_row, g_head = g.stride()[:2] if g.ndim > 1 else (0, g.stride(0))
    beta_row, beta_head = (0, 0) if beta is None else beta.stride()
    _linear_step_kernel[(triton.cdiv(width, tile), heads, rows)](
        arena, out, q, k, v, g, beta, offset, read_page, write_page,
        arena.stride(0), out.stride(0), out.stride(1), q.stride(0), q.stride(1),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), g_row, g_head, beta_row, beta_head,
        HEADS_PER_KEY=heads // k.shape[1], K=k.shape[2], V=width, SCALE=k.shape[2] ** -0.5,
        EPS=NORM_EPS, PER_KEY=g.ndim == 3, DOT=dot, ALIGN=aligned_elements(arena),
        BLOCK_K=block_k, BLOCK_V=tile, num_warps=1, maxnreg=_REGISTERS.get(size) if tight else None,
        enable_fp_fusion=block_k >= FUSE_FROM, **dependent_launch(),
    )  # fmt: skip
