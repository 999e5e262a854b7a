"""
One token of the state-space-dual recurrence (Mamba-2) per row, on paged state.

    dt    = clamp(softplus(dt + dt_bias), dt_min, dt_max)
    state = exp(-exp(A_log) * dt) * state + dt * outer(x, B)
    out   = state @ C + D * x

A row reads its state from `read_page` and leaves the new one in `write_page`; the two may be equal.  The
clamp is applied to every token, in this op as in `ssd_chunk`, so that prefill and decode agree.
`offset`, `read_page` and `write_page` are read early: ops/dependent_launch.py says who may write them.

Letters: R rows, H heads, P head width, M state size, G groups of B and C, N pages.  Head h uses group
h // (H // G).
Traffic: 2 * H * P * M elements of state per row; 5 operations per element.
Source: Dao and Gu 2024, "Transformers are SSMs", arXiv 2405.21060, recurrent form.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
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

_TILE_BYTES = 4096  # of state that a program takes, measured on an H200: docs/log.md
_WARPS = 1  # many small programs drain evenly
_FEW_ROWS = 4  # below, a program's own latency counts
_WARPS_FEW = 4
_NULL_PAGE = tl.constexpr(NULL_PAGE)


def ssd_step_ref(
    arena: Tensor,  # [N, E]         region [H, P, M] at `offset`
    out: Tensor,  # [R, H, P]
    x: Tensor,  # [R, H, P]
    dt: Tensor,  # [R, H]         before bias and softplus
    A_log: Tensor,  # [H]
    B: Tensor,  # [R, G, M]
    C: Tensor,  # [R, G, M]
    D: Tensor,  # [H]
    dt_bias: Tensor,  # [H]
    dt_min: float,
    dt_max: float,
    offset: Tensor,  # i64[1]         elements
    read_page: Tensor,  # i32[>= R]  NULL_PAGE: zeros
    write_page: Tensor,  # i32[>= R]  NULL_PAGE: padding
) -> None:
    """Say what the kernel means, all rows at once."""
    rows, heads, width = x.shape
    region = state_region(arena, offset, heads, width, B.shape[-1])
    live = write_page[:rows].nonzero().squeeze(1)
    source = read_page[live].long()
    state = region[source].masked_fill((source == NULL_PAGE)[:, None, None, None], 0)
    state, y = ssd_token_ref(
        state, x[live], dt[live], A_log, B[live], C[live], D, dt_bias, dt_min, dt_max
    )
    out.zero_()
    out[live] = y.to(out.dtype)
    region[write_page[live].long()] = state.to(arena.dtype)


def ssd_token_ref(
    state: Tensor,  # [n, H, P, M]
    x: Tensor,  # [n, H, P]
    dt: Tensor,  # [n, H]
    A_log: Tensor,
    B: Tensor,  # [n, G, M]
    C: Tensor,  # [n, G, M]
    D: Tensor,
    dt_bias: Tensor,
    dt_min: float,
    dt_max: float,
) -> tuple[Tensor, Tensor]:
    """New state and output of one token for n rows, in fp32 or better."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x, B, C = x.to(wide), B.to(wide), C.to(wide)
    heads_per_group = x.shape[1] // B.shape[1]
    B_heads = B.repeat_interleave(heads_per_group, 1)
    C_heads = C.repeat_interleave(heads_per_group, 1)
    dt = F.softplus(dt.to(wide) + dt_bias.to(wide)).clamp(dt_min, dt_max)
    decay = torch.exp(-torch.exp(A_log.to(wide)) * dt)
    update = (dt[..., None] * x)[..., None] * B_heads[:, :, None, :]
    state = state.to(wide) * decay[..., None, None] + update
    y = (state * C_heads[:, :, None, :]).sum(-1) + D.to(wide)[:, None] * x
    return state, y


@triton.jit
def ssd_step_size(dt, bias, dt_min, dt_max):
    """clamp(softplus(dt + bias)) with a log1p that keeps small steps exact."""
    z = dt.to(tl.float32) + bias.to(tl.float32)
    e = tl.exp(tl.minimum(z, 20.0))
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.minimum(tl.maximum(tl.where(z > 20.0, z, log1p), dt_min), dt_max)


@triton.jit
def _ssd_step_kernel(
    arena_ptr,  # [N, page_stride]
    out_ptr,  # [R, H, P]
    x_ptr,  # [R, H, P]
    dt_ptr,  # [R, H]
    A_log_ptr,  # [H]
    B_ptr,  # [R, G, M]
    C_ptr,  # [R, G, M]
    D_ptr,  # [H]
    dt_bias_ptr,  # [H]
    offset_ptr,  # i64[1]
    read_page_ptr,  # i32[R]
    write_page_ptr,  # i32[R]
    page_stride,  # elements; the other strides go from row to row
    out_stride,
    x_stride,
    dt_stride,
    B_stride,
    C_stride,
    dt_min,
    dt_max,
    P: tl.constexpr,
    M: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    P_TILE: tl.constexpr,
    M_TILE: tl.constexpr,  # power of two >= M
    ALIGN: tl.constexpr,  # elements on which pages and regions start
    THREADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    P_TILES: tl.constexpr = (P + P_TILE - 1) // P_TILE
    head = tl.program_id(0) // P_TILES
    row = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0) % P_TILES * P_TILE + tl.arange(0, P_TILE)
    m = tl.arange(0, M_TILE)
    read_page = tl.load(read_page_ptr + row).to(tl.int64)
    write_page = tl.load(write_page_ptr + row).to(tl.int64)
    offset = tl.load(offset_ptr)
    after_previous(DEPENDENT)
    out_ptrs = out_ptr + row * out_stride + head * P + p
    if write_page == _NULL_PAGE:
        tl.store(out_ptrs, tl.zeros([P_TILE], tl.float32), mask=p < P)
        return
    source = tl.multiple_of(read_page * page_stride + offset, ALIGN)
    target = tl.multiple_of(write_page * page_stride + offset, ALIGN)
    element = (head * P + p)[:, None] * M + m[None, :]
    inside = (p < P)[:, None] & (m < M)[None, :]
    state = tl.load(
        arena_ptr + source + element, mask=inside & (read_page != _NULL_PAGE), other=0.0
    )

    dt = tl.load(dt_ptr + row * dt_stride + head)
    dt = ssd_step_size(dt, tl.load(dt_bias_ptr + head), dt_min, dt_max)
    decay = tl.exp(-tl.exp(tl.load(A_log_ptr + head).to(tl.float32)) * dt)
    x = tl.load(x_ptr + row * x_stride + head * P + p, mask=p < P, other=0.0).to(tl.float32)
    group = head // HEADS_PER_GROUP * M
    B = tl.load(B_ptr + row * B_stride + group + m, mask=m < M, other=0.0).to(tl.float32)
    C = tl.load(C_ptr + row * C_stride + group + m, mask=m < M, other=0.0).to(tl.float32)
    state = state.to(tl.float32) * decay + (dt * x)[:, None] * B[None, :]
    if P_TILE * M_TILE < THREADS:  # in place: every warp loads a small tile and one stores it
        tl.debug_barrier()
    tl.store(arena_ptr + target + element, state, mask=inside)
    y = tl.sum(state * C[None, :], axis=1) + tl.load(D_ptr + head).to(tl.float32) * x
    tl.store(out_ptrs, y, mask=p < P)


def _launch(
    arena: Tensor,
    out: Tensor,
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_min: float,
    dt_max: float,
    offset: Tensor,
    read_page: Tensor,
    write_page: Tensor,
) -> None:
    check_ssd_args("ssd_step", out, x, dt, B, C)
    rows, heads, width = x.shape
    groups, size = B.shape[1:]
    if rows == 0:
        return
    m_tile = triton.next_power_of_2(size)
    warps = _WARPS_FEW if rows < _FEW_ROWS else _WARPS
    p_tile = _TILE_BYTES // arena.element_size() // m_tile
    p_tile = max(1, min(p_tile, triton.next_power_of_2(width)))
    _ssd_step_kernel[(heads * triton.cdiv(width, p_tile), rows)](
        arena, out, x, dt, A_log, B, C, D, dt_bias, offset, read_page, write_page,
        arena.stride(0), out.stride(0), x.stride(0), dt.stride(0), B.stride(0), C.stride(0), dt_min, dt_max,
        P=width, M=size, HEADS_PER_GROUP=heads // groups, P_TILE=p_tile, M_TILE=m_tile,
        ALIGN=aligned_elements(arena), THREADS=32 * warps, num_warps=warps,
        enable_fp_fusion=m_tile >= FUSE_FROM, **dependent_launch(),
    )  # fmt: skip


def check_ssd_args(op: str, out: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> None:
    """Raises ContractError where a kernel would read or write the wrong elements."""
    heads, groups = x.shape[1], B.shape[1]
    if heads % groups or B.shape != C.shape or out.shape != x.shape or dt.shape != x.shape[:2]:
        raise ContractError(
            f"{op}: x {tuple(x.shape)}, out {tuple(out.shape)}, dt {tuple(dt.shape)}, B {tuple(B.shape)}, "
            f"C {tuple(C.shape)} do not agree; expected [n, H, P] twice, [n, H], [n, G, M] twice with H a "
            "multiple of G"
        )
    if not x.dtype == B.dtype == C.dtype:
        raise ContractError(
            f"{op}: x, B and C are {x.dtype}, {B.dtype}, {C.dtype}, expected one dtype; take all three from "
            "the same projection"
        )
    for name, tensor in (("out", out), ("x", x), ("dt", dt), ("B", B), ("C", C)):
        nested = tensor.ndim == 3 and tensor.shape[1] > 1
        if tensor.stride(-1) != 1 or (nested and tensor.stride(1) != tensor.shape[2]):
            raise ContractError(
                f"{op}: {name} has strides {tensor.stride()} for {tuple(tensor.shape)}, expected adjacent "
                "elements within a row; slice whole rows of a projection"
            )


@dataclass(frozen=True, slots=True)
class SsdShape:
    """Sizes and ranges of a random layer; a token's decay is about exp(-dt * exp(log_decay))."""

    heads: int = 4
    width: int = 8
    size: int = 16
    groups: int = 1
    gap: int = 0  # elements between the rows of a view
    step: tuple[float, float] = (0.0, float("inf"))
    log_decay: float = 0.0

    @property
    def elements(self) -> int:
        """Of one layer's state."""
        return self.heads * self.width * self.size

    def __str__(self) -> str:
        return f"H{self.heads}-P{self.width}-M{self.size}-G{self.groups}"


def draw_ssd(generator: torch.Generator, tokens: int, dtype: torch.dtype, shape: SsdShape) -> Args:
    """Activations and parameters of both SSD ops."""
    pitched = partial(draw_pitched, generator, tokens, dtype=dtype, gap=shape.gap)
    return {
        "out": torch.full((tokens, shape.heads, shape.width), float("nan"), dtype=dtype),
        "x": pitched(shape.heads, shape.width),
        "dt": pitched(shape.heads),
        "A_log": draw(generator, shape.heads, dtype=torch.float32) / 2 + shape.log_decay,
        "B": pitched(shape.groups, shape.size),
        "C": pitched(shape.groups, shape.size),
        "D": draw(generator, shape.heads, dtype=dtype),
        "dt_bias": draw(generator, shape.heads, dtype=dtype) - 1,
        "dt_min": shape.step[0],
        "dt_max": shape.step[1],
    }


def _build(
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    state_dtype: torch.dtype | None,
    shape: SsdShape,
) -> Args:
    """Rows in turn: in place, to another page, fresh, padding."""
    pages, read_page, write_page = decode_pages(rows, generator)
    start = 128
    arena = poisoned_arena(
        generator, pages, start, shape.elements, read_page.tolist(), state_dtype or dtype
    )
    return {
        "arena": arena,
        **draw_ssd(generator, rows, dtype, shape),
        "offset": element_offset(start),
        "read_page": read_page,
        "write_page": write_page,
    }


def _case(
    why: str = "",
    rows: int = 5,
    state_dtype: torch.dtype | None = torch.float32,  # None: that of x
    **changes: Any,
) -> OpCase:
    shape = SsdShape(**changes)
    build = partial(_build, rows=rows, state_dtype=state_dtype, shape=shape)
    return OpCase(f"R{rows}-{shape}{why}", build)


def _traffic(args: Args) -> tuple[int, int]:
    rows, heads, width = args["x"].shape
    state = rows * heads * width * args["B"].shape[-1]
    return 2 * state * args["arena"].element_size(), 5 * state


CASES = (
    _case(),
    _case(rows=1),
    _case(groups=2),
    _case(width=12, size=20),  # no power of two
    _case("-gap", gap=5),  # views into a wider projection, no 16-byte access possible
    _case("-tiles", width=64, size=128, heads=2),  # several tiles per head
    _case("-clamp", step=(0.3, 0.5)),  # both ends of the clamp are met
    _case("-tiny_decay", log_decay=5.0),
    _case("-state_like_x", state_dtype=None),
)


def _build_bench(
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    state_dtype: torch.dtype,
) -> Args:
    """Every row in place, sizes of the Mamba-2 layers of 2.7B."""
    shape = SsdShape(heads=64, width=64, size=128)
    arena, page = bench_arena(generator, rows, shape.elements, state_dtype)
    args = draw_ssd(torch.Generator().manual_seed(0), rows, dtype, shape)
    args = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in args.items()}
    offset = element_offset(0).to(device)
    return {"arena": arena, **args, "offset": offset, "read_page": page, "write_page": page}


BENCH_CASES = tuple(
    OpCase(
        f"R{rows}-H64-P64-M128-G1-{str(state_dtype).removeprefix('torch.')}",
        partial(_build_bench, rows=rows, state_dtype=state_dtype),
    )
    for state_dtype in (torch.float32, torch.bfloat16)
    for rows in (1, 32, 256)
)

ssd_step = define_op(
    "ssd_step(Tensor(a!) arena, Tensor(b!) out, Tensor x, Tensor dt, Tensor A_log, Tensor B, Tensor C, "
    "Tensor D, Tensor dt_bias, float dt_min, float dt_max, Tensor offset, Tensor read_page, "
    "Tensor write_page) -> ()",
    cuda=_launch,
    cpu=ssd_step_ref,
    cases=CASES,
    tolerance=Tolerance(
        {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4},
        "fp32 arithmetic with a sum of M terms; bf16 rounds results once (2 ** -9), so does fp16 (2 ** -11)",
    ),
    traffic=_traffic,
    bench_cases=BENCH_CASES,
)
