"""
Advance lightning attention by one token per row, from the page it reads into the page it writes.

Linear attention whose state decays by a constant of its head.  Per row and head:
    state <- exp(g) * state + k (outer) v
    out    = state^T q
A row whose write page is 0 is padding: its `out` is zero and no page is touched.  Read page 0 means
no history.  A row may write the page it reads, or another one and leave that page as it was.
Queries and keys enter as they are: an activation, a norm or a scale belongs to the caller.

Letters: R rows, N pages, E elements of a page, H value heads, G key heads (head h uses key head
h // (H // G)), K key width, V value width.
Traffic: the state of every live row is read and written once, 2 * H * K * V elements.
Source: Qin et al., "Lightning Attention-2", arXiv:2401.04658, equations 3 and 4.
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


def lightning_rule(
    state_RHKV: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each row: the state after it, and its output [R, H, V]; in the state's dtype."""
    groups = state_RHKV.shape[1] // k.shape[1]
    q, k, v, g = (x.to(state_RHKV.dtype) for x in (q, k, v, g))
    key_RHK, query_RHK = (x.repeat_interleave(groups, dim=1) for x in (k, q))
    state_RHKV = state_RHKV * g.exp()[:, None, None] + key_RHK[..., None] * v[..., None, :]
    return state_RHKV, torch.einsum("rhkv,rhk->rhv", state_RHKV, query_RHK)


def lightning_step_ref(
    arena: Tensor,  # f32, bf16 or f16 [N, E]  written: the region [H, K, V] of the write pages
    out: Tensor,  # [R, H, V]  written
    q: Tensor,  # [R, G, K]
    k: Tensor,  # [R, G, K]
    v: Tensor,  # [R, H, V]
    g: Tensor,  # f32[H]     log of the decay
    offset: Tensor,  # i64[1]     element of a page where the region starts
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
    state, result = lightning_rule(state, q[row], k[row], v[row], g)
    states[write_page[row].long()] = state.to(arena.dtype)
    out[row] = result.to(out.dtype)


@triton.jit
def lightning_token(state, q, k, v, decay):
    """One token of one head: a [K, V] tile of the state after it, and its output; all in fp32."""
    # the sum over the old state does not wait for the update
    result = decay * tl.sum(state * q[:, None], 0) + tl.sum(q * k, 0) * v
    return decay * state + k[:, None] * v[None, :], result


@triton.jit
def _step_kernel(
    arena_ptr,  # [N, page_stride]
    out_ptr,  # [R, H, V]
    q_ptr,  # [R, G, K]
    k_ptr,  # [R, G, K]
    v_ptr,  # [R, H, V]
    g_ptr,  # f32[H]
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
    HEADS_PER_KEY: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
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
    v_at = v_ptr + wide_row * v_row + head * v_head + value
    k = tl.load(k_at, mask=key < K, other=0.0).to(tl.float32)
    q = tl.load(q_at, mask=key < K, other=0.0).to(tl.float32)
    v = tl.load(v_at, mask=value < V, other=0.0).to(tl.float32)
    decay = tl.exp(tl.load(g_ptr + head).to(tl.float32))
    state, result = lightning_token(state.to(tl.float32), q, k, v, decay)
    tl.debug_barrier()  # in place: a small tile is loaded by every warp and stored by one
    tl.store(arena_ptr + write_at + place, state.to(arena_ptr.dtype.element_ty), mask=inside)
    tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=value < V)


def check_lightning(
    name: str, arena: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor
) -> None:
    """Refuse what the kernels of lightning attention cannot read or write.

    Raises:
        ContractError: heads, widths, strides or dtypes do not fit.
    """
    check_linear(name, arena, out, q, k, v)
    if g.shape != v.shape[1:2] or not g.is_contiguous():
        raise ContractError(
            f"{name}: g has shape {tuple(g.shape)} and strides {g.stride()}, expected one log decay for "
            f"each of {v.shape[1]} heads; pass a contiguous [H]"
        )


def _launch(
    arena: Tensor,
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    offset: Tensor,
    read_page: Tensor,
    write_page: Tensor,
) -> None:
    check_lightning("lightning_step", arena, out, q, k, v, g)
    rows, heads, width = v.shape
    if rows == 0:
        return
    tile, block_k = min(_TILE_V, triton.next_power_of_2(width)), triton.next_power_of_2(k.shape[2])
    _step_kernel[(triton.cdiv(width, tile), heads, rows)](
        arena, out, q, k, v, g, offset, read_page, write_page,
        arena.stride(0), out.stride(0), out.stride(1), q.stride(0), q.stride(1),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        HEADS_PER_KEY=heads // k.shape[1], K=k.shape[2], V=width, ALIGN=aligned_elements(arena),
        BLOCK_K=block_k, BLOCK_V=tile, num_warps=4, enable_fp_fusion=block_k >= FUSE_FROM,
    )  # fmt: skip


def draw_log_decays(rng: torch.Generator, heads: int) -> Tensor:
    """One per head, from almost none to strong."""
    return -0.3 * torch.nn.functional.softplus(2.0 * draw(rng, heads, dtype=torch.float32))


def _build(
    rng: torch.Generator, dtype: torch.dtype, device: torch.device, rows: int, shape: LinearShape
) -> Args:
    args = decode_args(rng, dtype, rows, shape) | {"g": draw_log_decays(rng, shape.heads)}
    return {name: value.to(device) for name, value in args.items()}


def _bench_gates(rng: torch.Generator, rows: int, dtype: torch.dtype) -> Args:
    return {"g": draw_log_decays(rng, BENCH_SHAPE.heads)}


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
    _case(rows=3, key_heads=4, key_width=128, value_width=128),  # widths of MiniMax-01
)

lightning_step = define_op(
    "lightning_step(Tensor(a!) arena, Tensor(b!) out, Tensor q, Tensor k, Tensor v, Tensor g, "
    "Tensor offset, Tensor read_page, Tensor write_page) -> ()",
    cuda=_launch,
    cpu=lightning_step_ref,
    cases=CASES,
    tolerance=Tolerance(
        {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3},
        "fp32 arithmetic with a sum of K terms: a few eps; bf16 results are rounded to 2**-9, and "
        "truncated to 2**-8 by Triton's interpreter; fp16 to 2**-11",
    ),
    traffic=step_traffic,
    bench_cases=bench_step_cases(_bench_gates),
)
