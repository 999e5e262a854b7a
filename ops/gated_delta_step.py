"""
Advance the gated delta rule by one token per row, from the page it reads into the page it writes.

Per row and head, with the key and the query scaled to unit length and the query by K**-0.5:
    state <- exp(g) * state
    state <- state + key (outer) beta * (v - state^T key)
    out    = state^T query
A row whose write page is 0 is padding: its `out` is zero and no page is touched.  Read page 0 means
no history.  A row may write the page it reads, or another one and leave that page as it was.

Letters: R rows, N pages, E elements of a page, H value heads, G key heads (head h uses key head
h // (H // G)), K key width, V value width.
Traffic: the state of every live row is read and written once, 2 * H * K * V elements.
Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv:2412.06464, equation 10.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.errors import ContractError
from midstream.ops.case_data import (
    bench_arena,
    decode_pages,
    draw,
    draw_pitched,
    element_offset,
    poisoned_arena,
)
from midstream.ops.dependent_launch import after_previous, dependent_launch
from midstream.ops.paged_state import FUSE_FROM, aligned_elements, state_region
from midstream.ops.registry import NULL_PAGE, Args, OpCase, Tolerance, define_op

NORM_EPS = 1e-6  # added to the squared length inside the root, as transformers does
MAX_KEY_WIDTH = 256  # a program holds whole columns of the state
_START = 192  # element at which the region of a case starts
_INTERPRETED = tl.constexpr(
    triton.knobs.runtime.interpret
)  # which adds tuples one element at a time
_FEW_ROWS = 8  # below, small tiles keep all processors busy


def delta_rule(
    state_RHKV: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each row: the state after it, and its output [R, H, V]; in the state's dtype."""
    groups = state_RHKV.shape[1] // k.shape[1]
    q, k, v, g, beta = (x.to(state_RHKV.dtype) for x in (q, k, v, g, beta))
    key_RHK = unit_length(k).repeat_interleave(groups, dim=1)
    query_RHK = unit_length(q).repeat_interleave(groups, dim=1) * k.shape[-1] ** -0.5
    state_RHKV = state_RHKV * g.exp()[..., None, None]
    error_RHV = v - torch.einsum("rhkv,rhk->rhv", state_RHKV, key_RHK)
    state_RHKV = state_RHKV + key_RHK[..., None] * (beta[..., None] * error_RHV)[..., None, :]
    return state_RHKV, torch.einsum("rhkv,rhk->rhv", state_RHKV, query_RHK)


def unit_length(x: Tensor) -> Tensor:
    """Vectors along the last dimension, scaled to length one."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def gated_delta_step_ref(
    arena: Tensor,  # f32 or bf16 [N, E]  written: the region [H, K, V] of the write pages
    out: Tensor,  # [R, H, V]  written
    q: Tensor,  # [R, G, K]  before normalisation
    k: Tensor,  # [R, G, K]  before normalisation
    v: Tensor,  # [R, H, V]
    g: Tensor,  # f32[R, H]  log of the decay
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
    state, result = delta_rule(state, q[row], k[row], v[row], g[row], beta[row])
    states[write_page[row].long()] = state.to(arena.dtype)
    out[row] = result.to(out.dtype)


@triton.jit
def delta_rule_token(state, q, k, v, g, beta, SCALE: tl.constexpr, EPS: tl.constexpr):
    """One token of one head: a [K, V] tile of the state after it, and its output; all in fp32."""
    state *= tl.exp(g)
    # Sums between warps wait for each other, so there are two of them and not five: over the old state,
    # so that none needs the update, and over keys and queries before they are scaled.
    if _INTERPRETED:
        kk, qq, qk = tl.sum(k * k, 0), tl.sum(q * q, 0), tl.sum(q * k, 0)
        along_k, along_q = tl.sum(state * k[:, None], 0), tl.sum(state * q[:, None], 0)
    else:
        kk, qq, qk = tl.reduce((k * k, q * q, q * k), 0, _add_three)
        along_k, along_q = tl.reduce((state * k[:, None], state * q[:, None]), 0, _add_two)
    k_scale = tl.rsqrt(kk + EPS)
    q_scale = tl.rsqrt(qq + EPS) * SCALE
    update = beta * (v - k_scale * along_k)
    result = q_scale * (along_q + k_scale * qk * update)
    return state + k[:, None] * (k_scale * update)[None, :], result


@triton.jit
def _add_two(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def _add_three(a, b, c, other_a, other_b, other_c):
    return a + other_a, b + other_b, c + other_c


@triton.jit
def _step_kernel(
    arena_ptr,  # [N, page_stride]
    out_ptr,  # [R, H, V]
    q_ptr,  # [R, G, K]
    k_ptr,  # [R, G, K]
    v_ptr,  # [R, H, V]
    g_ptr,  # f32[R, H]
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
    beta_row,
    HEADS_PER_KEY: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HEADS: tl.constexpr,  # of a program, one after the other
    THREADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    after_previous(DEPENDENT)
    first_head = tl.program_id(1) * HEADS
    row = tl.program_id(2)
    wide_row = row.to(tl.int64)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    target = tl.load(write_page_ptr + row)
    source = tl.load(read_page_ptr + row)
    offset = tl.load(offset_ptr)
    if target == 0:
        for head in range(first_head, first_head + HEADS):
            out_at = out_ptr + wide_row * out_row + head * out_head + value
            tl.store(out_at, tl.zeros([BLOCK_V], out_ptr.dtype.element_ty), mask=value < V)
        return
    # pages and regions start on 128 bytes; without the hint every access would be a scalar one
    read_at = tl.multiple_of(source.to(tl.int64) * page_stride + offset, ALIGN)
    write_at = tl.multiple_of(target.to(tl.int64) * page_stride + offset, ALIGN)
    key = tl.arange(0, BLOCK_K)
    inside = (key[:, None] < K) & (value[None, :] < V)
    for head in range(first_head, first_head + HEADS):
        place = head * (K * V) + key[:, None] * V + value[None, :]
        state = tl.load(arena_ptr + read_at + place, mask=inside & (source > 0), other=0.0)
        key_head = head // HEADS_PER_KEY
        k_at = k_ptr + wide_row * k_row + key_head * k_head + key
        q_at = q_ptr + wide_row * q_row + key_head * q_head + key
        v_at = v_ptr + wide_row * v_row + head * v_head + value
        k = tl.load(k_at, mask=key < K, other=0.0).to(tl.float32)
        q = tl.load(q_at, mask=key < K, other=0.0).to(tl.float32)
        v = tl.load(v_at, mask=value < V, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + wide_row * g_row + head).to(tl.float32)
        beta = tl.load(beta_ptr + wide_row * beta_row + head).to(tl.float32)
        state, result = delta_rule_token(state.to(tl.float32), q, k, v, g, beta, SCALE, EPS)
        if BLOCK_K * BLOCK_V < THREADS:  # in place: every warp loads a small tile and one stores it
            tl.debug_barrier()
        tl.store(arena_ptr + write_at + place, state.to(arena_ptr.dtype.element_ty), mask=inside)
        out_at = out_ptr + wide_row * out_row + head * out_head + value
        tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=value < V)


def check_heads(name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse activations that the kernels of the gated delta rule cannot read.

    Raises:
        ContractError: heads, widths or strides do not fit.
    """
    if v.shape[1] % k.shape[1] or q.shape != k.shape or k.shape[2] > MAX_KEY_WIDTH:
        raise ContractError(
            f"{name}: q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit; q "
            f"and k must be equal, of width <= {MAX_KEY_WIDTH}, and v's heads a multiple of theirs"
        )
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        raise ContractError(
            f"{name}: q, k and v end in strides {q.stride(-1)}, {k.stride(-1)}, {v.stride(-1)}, "
            "expected 1; make their last dimension contiguous"
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
    check_heads("gated_delta_step", q, k, v)
    rows, heads, width = v.shape
    if rows == 0:
        return
    plan = _plan(rows, arena.element_size())
    tile = min(plan.tile, triton.next_power_of_2(width))
    per_program = plan.heads if heads % plan.heads == 0 else 1
    block_k = triton.next_power_of_2(k.shape[2])
    _step_kernel[(triton.cdiv(width, tile), heads // per_program, rows)](
        arena, out, q, k, v, g, beta, offset, read_page, write_page,
        arena.stride(0), out.stride(0), out.stride(1), q.stride(0), q.stride(1),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), g.stride(0), beta.stride(0),
        HEADS_PER_KEY=heads // k.shape[1], K=k.shape[2], V=width, SCALE=k.shape[2] ** -0.5,
        EPS=NORM_EPS, ALIGN=aligned_elements(arena), BLOCK_K=block_k, BLOCK_V=tile,
        HEADS=per_program, THREADS=32 * plan.warps, num_warps=plan.warps,
        enable_fp_fusion=block_k >= FUSE_FROM, **dependent_launch(),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a launch is cut into programs."""

    tile: int  # values of a program
    heads: int  # of a program
    warps: int


def _plan(rows: int, state_bytes: int) -> _Plan:
    """Measured on an H200 with 128 x 128 states, see docs/log.md."""
    if rows < _FEW_ROWS:
        return _Plan(tile=32, heads=1, warps=4)
    if state_bytes == 4:
        return _Plan(tile=64, heads=2, warps=4)
    return _Plan(tile=64, heads=4, warps=2)


@dataclass(frozen=True, slots=True)
class _Case:
    """One input.  Rows are in place, to another page, without history and padding, in turn."""

    rows: int = 4
    heads: int = 4
    key_heads: int = 2
    key_width: int = 16
    value_width: int = 32
    state_dtype: torch.dtype | None = torch.float32  # None: as the activations
    gap: int = 0  # elements between the rows of q, k and v

    def id(self) -> str:
        sizes = (
            f"R{self.rows}-H{self.heads}-G{self.key_heads}-K{self.key_width}-V{self.value_width}"
        )
        gap = f"-gap{self.gap}" if self.gap else ""
        return sizes + gap + ("" if self.state_dtype else "-own")


def _build(case: _Case, rng: torch.Generator, dtype: torch.dtype, device: torch.device) -> Args:
    rows, heads = case.rows, case.heads
    pages, read_page, write_page = decode_pages(rows, rng)
    read = read_page[:rows][write_page[:rows] != NULL_PAGE].tolist()
    size = heads * case.key_width * case.value_width
    keys = (rows, case.key_heads, case.key_width)
    args = {
        "arena": poisoned_arena(rng, pages, _START, size, read, case.state_dtype or dtype),
        "out": torch.full((rows, heads, case.value_width), float("nan"), dtype=dtype),
        "q": draw_pitched(rng, *keys, dtype=dtype, gap=case.gap),
        "k": draw_pitched(rng, *keys, dtype=dtype, gap=case.gap),
        "v": draw_pitched(rng, rows, heads, case.value_width, dtype=dtype, gap=case.gap),
        **draw_gates(rng, rows, heads, dtype),
        "offset": element_offset(_START),
        "read_page": read_page,
        "write_page": write_page,
    }
    return {name: value.to(device) for name, value in args.items()}


def draw_gates(rng: torch.Generator, tokens: int, heads: int, dtype: torch.dtype) -> Args:
    """Log decays, from almost none to strong, and update strengths in (0, 1)."""
    g = draw(rng, tokens, heads, dtype=torch.float32)
    beta = draw(rng, tokens, heads, dtype=torch.float32)
    return {"g": -0.3 * torch.nn.functional.softplus(2.0 * g), "beta": beta.sigmoid().to(dtype)}


def _traffic(args: Args) -> tuple[int, int]:
    arena, k, v = args["arena"], args["k"], args["v"]
    live = int((args["write_page"][: v.shape[0]] != NULL_PAGE).sum())
    states = live * v.shape[1] * k.shape[2] * v.shape[2]
    around = sum(args[name].numel() * args[name].element_size() for name in ("out", "q", "k", "v"))
    return 2 * states * arena.element_size() + around, 8 * states


_CASES = (
    _Case(),
    _Case(rows=1),
    _Case(rows=0),
    _Case(key_width=16, value_width=24),  # a width that is no power of two
    _Case(key_width=5, value_width=3, gap=3),  # nothing is aligned
    _Case(heads=3, key_heads=3, gap=64),
    _Case(rows=9),  # two heads of a program
    _Case(rows=9, heads=3, key_heads=3, key_width=5, value_width=3),  # heads that do not divide
    _Case(state_dtype=None),  # bf16 pages with bf16 activations
    _Case(rows=3, heads=4, key_heads=2, key_width=128, value_width=128),  # widths of qwen3_next
    _Case(rows=9, heads=2, key_heads=1, key_width=128, value_width=128),
    _Case(rows=9, heads=4, key_heads=2, key_width=128, value_width=128, state_dtype=None),
)


def _build_bench(
    rows: int,
    state_dtype: torch.dtype,
    rng: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
) -> Args:
    """Every row in place, sizes of qwen3_next."""
    heads, key_heads, width = 32, 16, 128
    arena, page = bench_arena(rng, rows, heads * width * width, state_dtype)
    host = torch.Generator().manual_seed(0)
    args = {
        "out": torch.full((rows, heads, width), float("nan"), dtype=dtype),
        "q": draw(host, rows, key_heads, width, dtype=dtype),
        "k": draw(host, rows, key_heads, width, dtype=dtype),
        "v": draw(host, rows, heads, width, dtype=dtype),
        **draw_gates(host, rows, heads, dtype),
        "offset": element_offset(0),
    }
    args = {name: value.to(device) for name, value in args.items()}
    return {"arena": arena, **args, "read_page": page, "write_page": page}


_BENCH_CASES = tuple(
    OpCase(
        f"R{rows}-H32-G16-K128-V128-{str(state_dtype).removeprefix('torch.')}",
        partial(_build_bench, rows, state_dtype),
    )
    for state_dtype in (torch.float32, torch.bfloat16)
    for rows in (1, 32, 256)
)

gated_delta_step = define_op(
    "gated_delta_step(Tensor(a!) arena, Tensor(b!) out, Tensor q, Tensor k, Tensor v, Tensor g, "
    "Tensor beta, Tensor offset, Tensor read_page, Tensor write_page) -> ()",
    cuda=_launch,
    cpu=gated_delta_step_ref,
    cases=tuple(OpCase(case.id(), partial(_build, case)) for case in _CASES),
    tolerance=Tolerance(
        {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3},
        "fp32 arithmetic with sums of K products of unit vectors: a few eps; bf16 results are "
        "rounded to 2**-9, and truncated to 2**-8 by Triton's interpreter; fp16 to 2**-11",
    ),
    traffic=_traffic,
    bench_cases=_BENCH_CASES,
)
