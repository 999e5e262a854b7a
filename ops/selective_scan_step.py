"""
One token of the selective scan (Mamba-1) per row, on paged state.

    dt    = softplus(dt + dt_bias)
    state = exp(-exp(A_log) * dt) * state + outer(dt * x, B)
    out   = state @ C + skip * x

Every channel has its own step dt and every element of its state its own decay.  A row reads its state from
`read_page` and leaves the new one in `write_page`; the two may be equal.  Gates and norms around the scan are
the model's own code.

Letters: R rows, D channels, M state size, G groups of B and C, N pages.  Channel d uses group d // (D // G).
Traffic: 2 * D * M elements of state and 3 * D of activations per row; 5 operations and 2 exponentials per
element of state.
Source: Gu and Dao 2023, "Mamba", arXiv 2312.00752, algorithm 2, with the step of B taken as dt * B.
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
from midstream.ops.paged_state import aligned_elements, state_region
from midstream.ops.registry import NULL_PAGE, Args, OpCase, Tolerance, define_op
from midstream.ops.softplus import softplus
from midstream.ops.state_types import check_state_dtype

_FEW_ROWS = 4  # below, smaller tiles keep all processors busy
_TILE = 2048  # state elements of a program: four 16-byte accesses of a thread
_TILE_FEW = 1024
EXP_OPERATIONS = 16  # that the other units do meanwhile: 256 a clock against 16 exponentials
_NULL_PAGE = tl.constexpr(NULL_PAGE)
_LOG2_E = tl.constexpr(1.4426950408889634)


def selective_scan_step_ref(
    arena: Tensor,  # [N, E]         region [D, M] at `offset`
    out: Tensor,  # [R, D]
    x: Tensor,  # [R, D]
    dt: Tensor,  # [R, D]         before bias and softplus
    A_log: Tensor,  # [D, M]
    B: Tensor,  # [R, G, M]
    C: Tensor,  # [R, G, M]
    skip: Tensor,  # [D]            the paper's D
    dt_bias: Tensor,  # [D]
    offset: Tensor,  # i64[1]         elements
    read_page: Tensor,  # i32[>= R]  NULL_PAGE: zeros
    write_page: Tensor,  # i32[>= R]  NULL_PAGE: padding
) -> None:
    """Say what the kernel means, all rows at once."""
    rows = x.shape[0]
    region = state_region(arena, offset, *A_log.shape)
    live = write_page[:rows].nonzero().squeeze(1)
    source = read_page[live].long()
    state = region[source].masked_fill((source == NULL_PAGE)[:, None, None], 0)
    decay, update, C_channels, skipped = selective_terms_ref(
        x[live], dt[live], A_log, B[live], C[live], skip, dt_bias
    )
    state = state.to(decay.dtype) * decay + update
    out.zero_()
    out[live] = ((state * C_channels).sum(-1) + skipped).to(out.dtype)
    region[write_page[live].long()] = state.to(arena.dtype)


def selective_terms_ref(
    x: Tensor,  # [n, D]
    dt: Tensor,  # [n, D]
    A_log: Tensor,  # [D, M]
    B: Tensor,  # [n, G, M]
    C: Tensor,  # [n, G, M]
    skip: Tensor,  # [D]
    dt_bias: Tensor,  # [D]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Decay, update and C of n tokens, each [n, D, M], and skip * x [n, D]; in fp32 or better."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x, A_log = x.to(wide), A_log.to(wide)
    channels_per_group = x.shape[1] // B.shape[1]
    step = F.softplus(dt.to(wide) + dt_bias.to(wide), threshold=40.0)
    decay = torch.exp(-torch.exp(A_log) * step[..., None])
    update = (step * x)[..., None] * B.to(wide).repeat_interleave(channels_per_group, 1)
    return decay, update, C.to(wide).repeat_interleave(channels_per_group, 1), skip.to(wide) * x


@triton.jit
def _selective_scan_step_kernel(
    arena_ptr,  # [N, page_stride]
    out_ptr,  # [R, D]
    x_ptr,  # [R, D]
    dt_ptr,  # [R, D]
    A_log_ptr,  # [D, M]
    B_ptr,  # [R, G, M]
    C_ptr,  # [R, G, M]
    skip_ptr,  # [D]
    dt_bias_ptr,  # [D]
    offset_ptr,  # i64[1]
    read_page_ptr,  # i32[R]
    write_page_ptr,  # i32[R]
    page_stride,  # elements; so are all strides
    out_stride,  # from row to row
    x_stride,
    dt_stride,
    B_stride,
    B_group,  # from group to group
    C_stride,
    C_group,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    D_TILE: tl.constexpr,
    M_TILE: tl.constexpr,  # power of two >= M
    ALIGN: tl.constexpr,  # elements on which pages and regions start
):
    """One program per row and tile of the channels of one group."""
    SHARE: tl.constexpr = D // G  # channels of a group
    TILES: tl.constexpr = (SHARE + D_TILE - 1) // D_TILE
    row = (tl.program_id(0) // (G * TILES)).to(tl.int64)
    group = tl.program_id(0) // TILES % G
    place = tl.program_id(0) % TILES * D_TILE + tl.arange(0, D_TILE)
    known = place < SHARE
    channel = group * SHARE + place
    m = tl.arange(0, M_TILE)
    out_ptrs = out_ptr + row * out_stride + channel
    read_page = tl.load(read_page_ptr + row).to(tl.int64)
    write_page = tl.load(write_page_ptr + row).to(tl.int64)
    offset = tl.load(offset_ptr)
    if write_page == _NULL_PAGE:
        tl.store(out_ptrs, tl.zeros([D_TILE], tl.float32), mask=known)
        return
    source = tl.multiple_of(read_page * page_stride + offset, ALIGN)
    target = tl.multiple_of(write_page * page_stride + offset, ALIGN)
    element = channel[:, None] * M + m[None, :]
    inside = known[:, None] & (m < M)[None, :]
    has_state = inside & (read_page != _NULL_PAGE)
    state = tl.load(arena_ptr + source + element, mask=has_state, other=0.0).to(tl.float32)

    dt = tl.load(dt_ptr + row * dt_stride + channel, mask=known, other=0.0).to(tl.float32)
    step = softplus(dt + tl.load(dt_bias_ptr + channel, mask=known, other=0.0).to(tl.float32))
    x = tl.load(x_ptr + row * x_stride + channel, mask=known, other=0.0).to(tl.float32)
    skip = tl.load(skip_ptr + channel, mask=known, other=0.0).to(tl.float32)
    A_log = tl.load(A_log_ptr + element, mask=inside, other=0.0).to(tl.float32)
    B_ptrs = B_ptr + row * B_stride + group.to(tl.int64) * B_group + m
    C_ptrs = C_ptr + row * C_stride + group.to(tl.int64) * C_group + m
    B = tl.load(B_ptrs, mask=m < M, other=0.0).to(tl.float32)
    C = tl.load(C_ptrs, mask=m < M, other=0.0).to(tl.float32)
    decay = tl.exp2(tl.exp(A_log) * (step * -_LOG2_E)[:, None])
    state = state * decay + (step * x)[:, None] * B[None, :]
    tl.debug_barrier()  # in place: no thread may still have an element to load
    tl.store(arena_ptr + target + element, state, mask=inside)
    tl.store(out_ptrs, tl.sum(state * C[None, :], axis=1) + skip * x, mask=known)


def _launch(
    arena: Tensor,
    out: Tensor,
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    offset: Tensor,
    read_page: Tensor,
    write_page: Tensor,
) -> None:
    check_state_dtype("selective_scan_step", arena)
    check_selective_args("selective_scan_step", out, x, dt, A_log, B, C)
    rows, (channels, size), groups = x.shape[0], A_log.shape, B.shape[1]
    if rows == 0:
        return
    m_tile = triton.next_power_of_2(size)
    d_tile = max(1, (_TILE_FEW if rows < _FEW_ROWS else _TILE) // m_tile)
    tiles = groups * triton.cdiv(channels // groups, d_tile)
    _selective_scan_step_kernel[(rows * tiles,)](
        arena, out, x, dt, A_log, B, C, skip, dt_bias, offset, read_page, write_page,
        arena.stride(0), out.stride(0), x.stride(0), dt.stride(0),
        B.stride(0), B.stride(1), C.stride(0), C.stride(1),
        G=groups, D=channels, M=size, D_TILE=d_tile, M_TILE=m_tile, ALIGN=aligned_elements(arena),
        num_warps=4,
    )  # fmt: skip


def check_selective_args(
    op: str, out: Tensor, x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor
) -> None:
    """Raises ContractError where a kernel would read or write the wrong elements."""
    (channels, size), groups = A_log.shape, B.shape[1]
    fits = x.shape[1] == channels and x.shape == dt.shape == out.shape
    if channels % groups or not fits or B.shape != C.shape or B.shape[2] != size:
        raise ContractError(
            f"{op}: x {tuple(x.shape)}, out {tuple(out.shape)}, dt {tuple(dt.shape)}, A_log "
            f"{tuple(A_log.shape)}, B {tuple(B.shape)}, C {tuple(C.shape)} do not agree; expected [n, D] "
            "three times, [D, M], [n, G, M] twice with D a multiple of G; fold heads into channels and groups"
        )
    for name, tensor in (("out", out), ("x", x), ("dt", dt), ("B", B), ("C", C)):
        if tensor.stride(-1) != 1:
            raise ContractError(
                f"{op}: {name} has strides {tensor.stride()} for {tuple(tensor.shape)}, expected adjacent "
                "elements in its last dimension; slice whole rows of a projection"
            )
    if not A_log.is_contiguous():
        raise ContractError(
            f"{op}: A_log has strides {A_log.stride()}, expected a contiguous [D, M]; store it that way"
        )


@dataclass(frozen=True, slots=True)
class SelectiveShape:
    """Sizes and ranges of a random layer; a token's decay is about exp(-softplus(step) * exp(log_decay))."""

    channels: int = 24
    size: int = 16
    groups: int = 1
    gap: int = 0  # elements between the rows of a view
    step: float = -1.0  # of a token, before softplus
    log_decay: float = 0.0

    @property
    def elements(self) -> int:
        """Of one layer's state."""
        return self.channels * self.size

    def __str__(self) -> str:
        return f"D{self.channels}-M{self.size}-G{self.groups}"


def draw_selective(
    generator: torch.Generator, tokens: int, dtype: torch.dtype, shape: SelectiveShape
) -> Args:
    """Activations and parameters of both ops."""
    pitched = partial(draw_pitched, generator, tokens, dtype=dtype, gap=shape.gap)
    A_log = draw(generator, shape.channels, shape.size, dtype=torch.float32)
    return {
        "out": torch.full((tokens, shape.channels), float("nan"), dtype=dtype),
        "x": pitched(shape.channels),
        "dt": pitched(shape.channels),
        "A_log": A_log / 2 + shape.log_decay,
        "B": pitched(shape.groups, shape.size),
        "C": pitched(shape.groups, shape.size),
        "skip": draw(generator, shape.channels, dtype=dtype),
        "dt_bias": draw(generator, shape.channels, dtype=dtype) + shape.step,
    }


def _build(
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    state_dtype: torch.dtype | None,
    shape: SelectiveShape,
) -> Args:
    """Rows in turn: in place, to another page, fresh, padding."""
    pages, read_page, write_page = decode_pages(rows)
    start, live = 128, read_page.tolist()
    return {
        "arena": poisoned_arena(
            generator, pages, start, shape.elements, live, state_dtype or dtype
        ),
        **draw_selective(generator, rows, dtype, shape),
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
    shape = SelectiveShape(**changes)
    build = partial(_build, rows=rows, state_dtype=state_dtype, shape=shape)
    return OpCase(f"R{rows}-{shape}{why}", build)


def _traffic(args: Args) -> tuple[int, int]:
    rows = int((args["write_page"][: args["x"].shape[0]] != NULL_PAGE).sum())
    channels, size = args["A_log"].shape
    state = rows * channels * size
    activations = args["x"].element_size() * rows * (3 * channels + 2 * args["B"][0].numel())
    weights = args["A_log"].element_size() * channels * size
    return 2 * state * args["arena"].element_size() + activations + weights, (
        5 + 2 * EXP_OPERATIONS
    ) * state


CASES = (
    _case(),
    _case(rows=1),
    _case(channels=13, size=12),  # nothing is a power of two, or a multiple of eight
    _case("-gap", gap=5),  # views into a wider projection, no 16-byte access possible
    _case(groups=3),  # a tile is cut where its group ends
    _case(channels=320),  # three tiles, the last one partial
    _case(rows=6, channels=5, size=200),  # a long state
    _case("-strong_decay", step=4.0, log_decay=2.0),  # below 1e-12
    _case("-no_decay", step=-30.0),  # the state stands still
    _case("-state_like_x", state_dtype=None),
)


def _build_bench(
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    state_dtype: torch.dtype,
) -> Args:
    """Every row in place, sizes of Falcon Mamba 7B."""
    shape = SelectiveShape(channels=8192)
    arena, page = bench_arena(generator, rows, shape.elements, state_dtype)
    args = draw_selective(torch.Generator().manual_seed(0), rows, dtype, shape)
    args = {name: value.to(device) for name, value in args.items()}
    offset = element_offset(0).to(device)
    return {"arena": arena, **args, "offset": offset, "read_page": page, "write_page": page}


BENCH_CASES = tuple(
    OpCase(
        f"R{rows}-D8192-M16-{str(state_dtype).removeprefix('torch.')}",
        partial(_build_bench, rows=rows, state_dtype=state_dtype),
    )
    for state_dtype in (torch.float32, torch.bfloat16)
    for rows in (1, 32, 256)
)

selective_scan_step = define_op(
    "selective_scan_step(Tensor(a!) arena, Tensor(b!) out, Tensor x, Tensor dt, Tensor A_log, Tensor B, "
    "Tensor C, Tensor skip, Tensor dt_bias, Tensor offset, Tensor read_page, Tensor write_page) -> ()",
    cuda=_launch,
    cpu=selective_scan_step_ref,
    cases=CASES,
    tolerance=Tolerance(
        {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4},
        "fp32 arithmetic with a sum of M terms; 16-bit results are rounded once (2 ** -9, 2 ** -12)",
    ),
    traffic=_traffic,
    bench_cases=BENCH_CASES,
)
