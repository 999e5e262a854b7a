"""
Advance Kimi delta attention by one token per row, from the page it reads into the page it writes.

The gated delta rule with a decay of its own for every key channel.  Per row and head, with the key and
the query scaled to unit length and the query by K**-0.5:
    state <- exp(g)[:, None] * state
    state <- state + key (outer) beta * (v - state^T key)
    out    = state^T query
A row whose write page is 0 is padding: its `out` is zero and no page is touched.  Read page 0 means
no history.  A row may write the page it reads, or another one and leave that page as it was.

Letters: R rows, N pages, E elements of a page, H value heads, G key heads (head h uses key head
h // (H // G)), K key width, V value width.
Traffic: the state of every live row is read and written once, 2 * H * K * V elements.
Source: Kimi Team, "Kimi Linear", arXiv:2510.26692, section 3; lengths as in `gated_delta_step`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.errors import ContractError
from midstream.ops.case_data import draw
from midstream.ops.gated_delta_step import NORM_EPS, delta_rule_token, unit_length
from midstream.ops.linear_heads import (
    BENCH_SHAPE,
    LinearShape,
    bench_step_cases,
    check_linear,
    decode_args,
    step_traffic,
)
from midstream.ops.paged_state import FUSE_FROM, aligned_elements, state_region
from midstream.ops.registry import NULL_PAGE, Args, OpCase, Tolerance, define_op

_TILE_V = 32  # values per program: 128 bytes of every state line, and 128 programs for H=32, V=128


def kda_rule(
    state_RHKV: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each row: the state after it, and its output [R, H, V]; in the state's dtype."""
    groups = state_RHKV.shape[1] // k.shape[1]
    q, k, v, g, beta = (x.to(state_RHKV.dtype) for x in (q, k, v, g, beta))
    key_RHK = unit_length(k).repeat_interleave(groups, dim=1)
    query_RHK = unit_length(q).repeat_interleave(groups, dim=1) * k.shape[-1] ** -0.5
    state_RHKV = state_RHKV * g.exp()[..., None]
    error_RHV = v - torch.einsum("rhkv,rhk->rhv", state_RHKV, key_RHK)
    state_RHKV = state_RHKV + key_RHK[..., None] * (beta[..., None] * error_RHV)[..., None, :]
    return state_RHKV, torch.einsum("rhkv,rhk->rhv", state_RHKV, query_RHK)


def kda_step_ref(
    arena: Tensor,  # f32, bf16 or f16 [N, E]  written: the region [H, K, V] of the write pages
    out: Tensor,  # [R, H, V]  written
    q: Tensor,  # [R, G, K]  before normalisation
    k: Tensor,  # [R, G, K]  before normalisation
    v: Tensor,  # [R, H, V]
    g: Tensor,  # f32[R, H, K]  log of the decay
    beta: Tensor,  # [R, H]    strength of the update
    offset: Tensor,  # i64[1]    element of a page where the region starts
    read_page: Tensor,  # i32[>= R]  0 = no history
    write_page: Tensor,  # i32[>= R]  0 = padding
) -> None:
    """Say what the kernel means, all rows at once."""
    states = state_region(arena, offset, v.shape[1], k.shape[2], v.shape[2])
    out.zero_()
    row = (write_page[: q.shape[0]] != NULL_PAGE).nonzero()[:, 0]
    source = read_page[row].long()
    state = states[source].to(torch.promote_types(arena.dtype, torch.float32))
    state[source == NULL_PAGE] = 0.0
    state, result = kda_rule(state, q[row], k[row], v[row], g[row], beta[row])
    states[write_page[row].long()] = state.to(arena.dtype)
    out[row] = result.to(out.dtype)


@triton.jit
def _step_kernel(
    arena_ptr,  # [N, page_stride]
    out_ptr,  # [R, H, V]
    q_ptr,  # [R, G, K]
    k_ptr,  # [R, G, K]
    v_ptr,  # [R, H, V]
    g_ptr,  # f32[R, H, K]
    beta_ptr,  # [R, H]
    offset_ptr,  # i64[1]
    read_page_ptr,  # i32[R]
    write_page_ptr,  # i32[R]
    page_stride,  # elements
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
    HEADS_PER_KEY: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    head = tl.program_id(1)
    row = tl.program_id(2)
    wide_row = row.to(tl.int64)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    out_at = out_ptr + wide_row * out_row + head * out_head + value
    target = tl.load(write_page_ptr + row)
    if target == 0:
        tl.store(out_at, tl.zeros([BLOCK_V], out_ptr.dtype.element_ty), mask=value < V)
        return
    source = tl.load(read_page_ptr + row)
    offset = tl.load(offset_ptr)
    # pages and regions start on 128 bytes; without the hint every access would be a scalar one
    read_at = tl.multiple_of(source.to(tl.int64) * page_stride + offset, ALIGN)
    write_at = tl.multiple_of(target.to(tl.int64) * page_stride + offset, ALIGN)

    key = tl.arange(0, BLOCK_K)
    place = head * (K * V) + key[:, None] * V + value[None, :]
    inside = (key[:, None] < K) & (value[None, :] < V)
    state = tl.load(arena_ptr + read_at + place, mask=inside & (source > 0), other=0.0)

    key_head = head // HEADS_PER_KEY
    k_at = k_ptr + wide_row * k_row + key_head * k_head + key
    q_at = q_ptr + wide_row * q_row + key_head * q_head + key
    g_at = g_ptr + wide_row * g_row + head * g_head + key
    v_at = v_ptr + wide_row * v_row + head * v_head + value
    k = tl.load(k_at, mask=key < K, other=0.0).to(tl.float32)
    q = tl.load(q_at, mask=key < K, other=0.0).to(tl.float32)
    g = tl.load(g_at, mask=key < K, other=0.0).to(tl.float32)
    v = tl.load(v_at, mask=value < V, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + wide_row * beta_row + head).to(tl.float32)
    state, result = delta_rule_token(state.to(tl.float32), q, k, v, g[:, None], beta, SCALE, EPS)
    tl.debug_barrier()  # in place: a small tile is loaded by every warp and stored by one
    tl.store(arena_ptr + write_at + place, state.to(arena_ptr.dtype.element_ty), mask=inside)
    tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=value < V)


def check_kda(
    name: str, arena: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> None:
    """Refuse what the kernels of Kimi delta attention cannot read or write.

    Raises:
        ContractError: heads, widths, strides or dtypes do not fit.
    """
    check_linear(name, arena, out, q, k, v)
    if g.shape != (*v.shape[:2], k.shape[2]) or beta.shape != v.shape[:2] or g.stride(-1) != 1:
        raise ContractError(
            f"{name}: g {tuple(g.shape)} of strides {g.stride()} and beta {tuple(beta.shape)} do not fit "
            f"k {tuple(k.shape)} and v {tuple(v.shape)}; g must be [n, H, K], contiguous in K, and "
            "beta [n, H]"
        )
    if beta.stride(-1) != 1:
        raise ContractError(
            f"{name}: beta has strides {beta.stride()}, expected heads next to each other; make its "
            "last dimension contiguous"
        )


def _launch(
    arena: Tensor,
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    offset: Tensor,
    read_page: Tensor,
    write_page: Tensor,
) -> None:
    check_kda("kda_step", arena, out, q, k, v, g, beta)
    rows, heads, width = v.shape
    if rows == 0:
        return
    tile, block_k = min(_TILE_V, triton.next_power_of_2(width)), triton.next_power_of_2(k.shape[2])
    _step_kernel[(triton.cdiv(width, tile), heads, rows)](
        arena, out, q, k, v, g, beta, offset, read_page, write_page,
        arena.stride(0), out.stride(0), out.stride(1), q.stride(0), q.stride(1),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), g.stride(0), g.stride(1),
        beta.stride(0),
        HEADS_PER_KEY=heads // k.shape[1], K=k.shape[2], V=width, SCALE=k.shape[2] ** -0.5,
        EPS=NORM_EPS, ALIGN=aligned_elements(arena),
        BLOCK_K=block_k, BLOCK_V=tile, num_warps=4, enable_fp_fusion=block_k >= FUSE_FROM,
    )  # fmt: skip


def draw_kda_gates(
    rng: torch.Generator, tokens: int, dtype: torch.dtype, shape: LinearShape
) -> Args:
    """Log decays, from almost none to strong, and update strengths in (0, 1)."""
    g = draw(rng, tokens, shape.heads, shape.key_width, dtype=torch.float32)
    beta = draw(rng, tokens, shape.heads, dtype=torch.float32)
    return {"g": -0.3 * torch.nn.functional.softplus(2.0 * g), "beta": beta.sigmoid().to(dtype)}


def _build(
    rng: torch.Generator, dtype: torch.dtype, device: torch.device, rows: int, shape: LinearShape
) -> Args:
    args = decode_args(rng, dtype, rows, shape) | draw_kda_gates(rng, rows, dtype, shape)
    return {name: value.to(device) for name, value in args.items()}


def _case(rows: int = 4, **changes: Any) -> OpCase:
    shape = LinearShape(**changes)
    return OpCase(f"R{rows}-{shape}", partial(_build, rows=rows, shape=shape))


CASES = (
    _case(),
    _case(rows=1),
    _case(rows=0),
    _case(key_width=16, value_width=24),  # a width that is no power of two
    _case(key_width=5, value_width=3, gap=3),  # nothing is aligned
    _case(heads=3, key_heads=3, gap=64),
    _case(state_dtype=None),  # pages of the activations' dtype
    _case(rows=3, key_heads=4, key_width=128, value_width=128),  # widths of Kimi Linear
)

kda_step = define_op(
    "kda_step(Tensor(a!) arena, Tensor(b!) out, Tensor q, Tensor k, Tensor v, Tensor g, "
    "Tensor beta, Tensor offset, Tensor read_page, Tensor write_page) -> ()",
    cuda=_launch,
    cpu=kda_step_ref,
    cases=CASES,
    tolerance=Tolerance(
        {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3},
        "fp32 arithmetic with sums of K products of unit vectors: a few eps; bf16 results are "
        "rounded to 2**-9, and truncated to 2**-8 by Triton's interpreter; fp16 to 2**-11",
    ),
    traffic=step_traffic,
    bench_cases=bench_step_cases(partial(draw_kda_gates, shape=BENCH_SHAPE)),
)
