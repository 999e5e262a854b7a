"""
One token per row of linear attention: the kernel, its plan and the reference behind the `*_step` ops.

Per row and head, with a decay of the head or of every key channel:
    state <- exp(g) * state + k (outer) update
    out    = state^T q
The update is v (`lightning_step`), or what corrects the state's answer to the key, with keys and queries
scaled to unit length (`gated_delta_step`, `kda_step`).  The sums over keys that this needs are taken over
the state as it was, so that nothing waits for the update.

How rows are cut into programs depends on widths and dtypes alone: a row has the same bits in any company.

Letters: R rows, N pages, E elements of a page, H value heads, G key heads (head h uses key head
h // (H // G)), K key width, V value width.
Traffic: the state of every live row is read and written once, 2 * H * K * V elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.ops.dependent_launch import after_previous, dependent_launch
from midstream.ops.paged_state import FUSE_FROM, aligned_elements, state_region
from midstream.ops.registry import NULL_PAGE

NORM_EPS = 1e-6  # added to the squared length inside the root, as transformers does
_LINE_BYTES = 256  # of a state's line of values that a program takes: whole lines are fastest
_MIN_DOT = 16  # keys and values from which on tensor cores take a tile
# the interpreter adds tuples one element at a time, and knows no PTX
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


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
    states = state_region(arena, offset, out.shape[1], key_width, out.shape[2])
    out.zero_()
    row = (write_page[: out.shape[0]] != NULL_PAGE).nonzero()[:, 0]
    source = read_page[row].long()
    state = states[source].to(torch.promote_types(arena.dtype, torch.float32))
    state[source == NULL_PAGE] = 0.0
    state, result = rule(state, row)
    states[write_page[row].long()] = state.to(arena.dtype)
    out[row] = result.to(out.dtype)


@triton.jit
def delta_rule_token(state, q, k, v, g, beta, SCALE: tl.constexpr, EPS: tl.constexpr):
    """One token of one head: a [K, V] tile of the state after it, and its output; all in fp32."""
    state *= tl.exp(g)
    # sums between warps wait for each other, so there is one and not two
    if _INTERPRETED:
        along_k, along_q = tl.sum(state * k[:, None], 0), tl.sum(state * q[:, None], 0)
    else:
        along_k, along_q = tl.reduce((state * k[:, None], state * q[:, None]), 0, _add_two)
    update, result = _correction(along_k, along_q, q, k, v, beta, SCALE, EPS)
    return state + k[:, None] * update[None, :], result


@triton.jit
def lightning_token(state, q, k, v, decay):
    """The same without a correction."""
    result = decay * tl.sum(state * q[:, None], 0) + tl.sum(q * k, 0) * v
    return decay * state + k[:, None] * v[None, :], result


@triton.jit
def _correction(along_k, along_q, q, k, v, beta, SCALE: tl.constexpr, EPS: tl.constexpr):
    """What k adds to the state, and the output, from sums of the decayed state with k and q."""
    if _INTERPRETED:
        kk, qq, qk = tl.sum(k * k, 0), tl.sum(q * q, 0), tl.sum(q * k, 0)
    else:
        kk, qq, qk = tl.reduce((k * k, q * q, q * k), 0, _add_three)
    k_scale = tl.rsqrt(kk + EPS)
    q_scale = tl.rsqrt(qq + EPS) * SCALE
    update = beta * (v - k_scale * along_k)
    return k_scale * update, q_scale * (along_q + k_scale * qk * update)


@triton.jit
def _add_two(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def _add_three(a, b, c, other_a, other_b, other_c):
    return a + other_a, b + other_b, c + other_c


@triton.jit
def _dot_sums(both, state, PARTS: tl.constexpr):
    """Sums of a state of 16 bits with keys, rows 0-7 of `both`, and queries, rows 8-15: parts or copies."""
    sums = tl.dot(both, state).reshape(2, 8, state.shape[1])
    along_k, along_q = tl.split(sums.permute(1, 2, 0))
    if PARTS:
        return tl.sum(along_k, 0), tl.sum(along_q, 0)
    elif _INTERPRETED:
        return tl.max(along_k, 0), tl.max(along_q, 0)
    else:
        return tl.reduce(along_k, 0, _first), tl.reduce(along_q, 0, _first)


@triton.jit
def _parts(x, TYPE: tl.constexpr):
    """Numbers of fp32, the same in rows 0-7 and in rows 8-15, as three parts of 16 bits each and zeros."""
    part = tl.arange(0, 16)[:, None] % 8
    second = x - x.to(TYPE).to(tl.float32)
    third = second - second.to(TYPE).to(tl.float32)
    x = tl.where(part == 0, x, tl.where(part == 1, second, third))
    return tl.where(part < 3, x, 0.0).to(TYPE)


@triton.jit
def _first(a, b):
    return a


@triton.jit
def _widened(x):
    """In fp32; two bf16 numbers of a register are one shift and one mask, which the compiler does not see."""
    if x.dtype == tl.bfloat16 and not _INTERPRETED:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
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
    key_head = head // HEADS_PER_KEY
    first = tl.program_id(0) * BLOCK_V
    lane = tl.arange(0, BLOCK_V)
    value = first + lane
    key = tl.arange(0, BLOCK_K)
    g_at = g_ptr + wide_row * g_row + head * g_head
    if PER_KEY:
        g = tl.load(g_at + key, mask=key < K, other=0.0).to(tl.float32)[:, None]
    else:
        g = tl.load(g_at).to(tl.float32)
    k_at = k_ptr + wide_row * k_row + key_head * k_head
    q_at = q_ptr + wide_row * q_row + key_head * q_head
    k = tl.load(k_at + key, mask=key < K, other=0.0).to(tl.float32)
    q = tl.load(q_at + key, mask=key < K, other=0.0).to(tl.float32)
    v_at = v_ptr + wide_row * v_row + head * v_head + value
    v = tl.load(v_at, mask=value < V, other=0.0).to(tl.float32)
    if beta_ptr is not None:
        beta = tl.load(beta_ptr + wide_row * beta_row + head * beta_head).to(tl.float32)
    if DOT:
        both_at = tl.where(tl.arange(0, 16)[:, None] < 8, k_at, q_at) + key[None, :]
        both = tl.load(both_at, mask=key[None, :] < K, other=0.0)
        if PER_KEY:
            g_line = tl.load(g_at + key[None, :], mask=key[None, :] < K, other=0.0).to(tl.float32)
            both = _parts(both.to(tl.float32) * tl.exp(g_line), arena_ptr.dtype.element_ty)
    out_at = out_ptr + wide_row * out_row + head * out_head + value
    if target == 0:
        tl.store(out_at, tl.zeros([BLOCK_V], out_ptr.dtype.element_ty), mask=value < V)
        return

    # pages and regions start on 128 bytes; without the hint every access would be a scalar one.  All but
    # the place within the tile is one address of the program: one added later would cost registers.
    read_at = tl.multiple_of(source.to(tl.int64) * page_stride + offset, ALIGN)
    write_at = tl.multiple_of(target.to(tl.int64) * page_stride + offset, ALIGN)
    region = head * (K * V) + first
    read_ptr, write_ptr = arena_ptr + read_at + region, arena_ptr + write_at + region
    place = key[:, None] * V + lane[None, :]
    inside = (key[:, None] < K) & (value[None, :] < V)
    state = tl.load(read_ptr + place, mask=inside & (source > 0), other=0.0)
    if DOT:
        decay = tl.exp(g)
        along_k, along_q = _dot_sums(both, state, PER_KEY)
        if not PER_KEY:
            along_k, along_q = decay * along_k, decay * along_q
        if beta_ptr is not None:
            update, result = _correction(along_k, along_q, q, k, v, beta, SCALE, EPS)
        else:
            update, result = v, along_q + tl.sum(q * k, 0) * v
        state = decay * _widened(state) + k[:, None] * update[None, :]
    elif beta_ptr is not None:
        state, result = delta_rule_token(_widened(state), q, k, v, g, beta, SCALE, EPS)
    else:
        state, result = lightning_token(_widened(state), q, k, v, tl.exp(g))
    if BLOCK_K * BLOCK_V < 32:  # in place: of a small tile, lanes hold copies and one stores
        tl.debug_barrier()
    tl.store(write_ptr + place, state.to(arena_ptr.dtype.element_ty), mask=inside)
    tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=value < V)


@dataclass(frozen=True, slots=True)
class _Plan:
    """How heads are cut into programs, and what they sum with; see docs/log.md."""

    block_k: int  # all keys of a head
    tile: int  # values
    warps: int
    registers: int | None  # of a thread, at most
    dot: bool


def _plan(arena: Tensor, q: Tensor, k: Tensor, width: int) -> _Plan:
    """Measured on an H200 with 128 x 128 states; other tiles keep as many registers of a thread busy."""
    block_k = triton.next_power_of_2(k.shape[2])
    tile = min(_LINE_BYTES // arena.element_size(), triton.next_power_of_2(width))
    alike = arena.dtype == q.dtype == k.dtype and arena.element_size() == 2
    dot = alike and min(block_k, tile) >= _MIN_DOT
    # 64 registers of a thread hold the state: numbers of 16 bits stay packed until tensor cores have summed
    warps = min(max(block_k * tile // (4096 if dot else 2048), 1), 16)
    return _Plan(block_k, tile, warps, None if dot else 128, dot)


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
    plan = _plan(arena, q, k, width)
    g_row, g_head = g.stride()[:2] if g.ndim > 1 else (0, g.stride(0))
    beta_row, beta_head = (0, 0) if beta is None else beta.stride()
    _linear_step_kernel[(triton.cdiv(width, plan.tile), heads, rows)](
        arena, out, q, k, v, g, beta, offset, read_page, write_page,
        arena.stride(0), out.stride(0), out.stride(1), q.stride(0), q.stride(1),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), g_row, g_head, beta_row, beta_head,
        HEADS_PER_KEY=heads // k.shape[1], K=k.shape[2], V=width, SCALE=k.shape[2] ** -0.5,
        EPS=NORM_EPS, PER_KEY=g.ndim == 3, DOT=plan.dot, ALIGN=aligned_elements(arena),
        BLOCK_K=plan.block_k, BLOCK_V=plan.tile, num_warps=plan.warps, maxnreg=plan.registers,
        enable_fp_fusion=plan.block_k >= FUSE_FROM, **dependent_launch(),
    )  # fmt: skip
