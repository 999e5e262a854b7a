"""
One token of the real-gated linear recurrent unit (RecurrentGemma) per row, on paged state.

    log_a = -8 * softplus(recurrent_param) * sigmoid(recurrent_gate)
    state = exp(log_a) * state + sqrt(1 - exp(2 * log_a)) * sigmoid(input_gate) * x
    out   = state

At position 0 a sequence begins: state = sigmoid(input_gate) * x, whatever the page held.  A row reads its
state from `read_page` and leaves the new one in `write_page`; the two may be equal.  The block-diagonal
linears that make the gates are the model's own code.  The cut lies before the sigmoids, because a decay near
1 that was rounded to 16 bits forgets at the wrong rate.

Letters: R rows, D channels, N pages.
Traffic: 2 * D elements of state and 4 * D of activations per row; per channel 30 operations, and 7
exponentials, quotients and roots.
Source: De et al. 2024, "Griffin", arXiv 2402.19427, equations 1 to 4; the reset is that of transformers.
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
    index,
    poisoned_arena,
)
from midstream.ops.paged_state import aligned_elements, state_region
from midstream.ops.registry import NULL_PAGE, Args, OpCase, Tolerance, define_op
from midstream.ops.softplus import softplus
from midstream.ops.state_types import check_state_dtype

SHARPNESS = 8.0  # the paper's c
_TILE = 512  # channels of a program: eight per thread, 16 bytes of 16-bit activations
OPERATIONS = 30 + 7 * 16  # of a channel; 16 is what the other units do during one of the 7
_NULL_PAGE = tl.constexpr(NULL_PAGE)
_SHARPNESS = tl.constexpr(SHARPNESS)


def rg_lru_step_ref(
    arena: Tensor,  # [N, E]         region [D] at `offset`
    out: Tensor,  # [R, D]
    x: Tensor,  # [R, D]
    input_gate: Tensor,  # [R, D]         before the sigmoid
    recurrent_gate: Tensor,  # [R, D]         before the sigmoid
    recurrent_param: Tensor,  # [D]
    offset: Tensor,  # i64[1]         elements
    position: Tensor,  # i32[>= R]  of the row's token in its sequence; 0: the sequence begins
    read_page: Tensor,  # i32[>= R]  NULL_PAGE: zeros
    write_page: Tensor,  # i32[>= R]  NULL_PAGE: padding
) -> None:
    """Say what the kernel means, all rows at once."""
    rows, channels = x.shape
    region = state_region(arena, offset, channels)
    live = write_page[:rows].nonzero().squeeze(1)
    source = read_page[live].long()
    begins = position[live] == 0
    state = region[source].masked_fill(((source == NULL_PAGE) | begins)[:, None], 0)
    decay, update = rg_lru_terms_ref(
        x[live], input_gate[live], recurrent_gate[live], recurrent_param, begins
    )
    state = state.to(decay.dtype) * decay + update
    out.zero_()
    out[live] = state.to(out.dtype)
    region[write_page[live].long()] = state.to(arena.dtype)


def rg_lru_terms_ref(
    x: Tensor,  # [n, D]
    input_gate: Tensor,  # [n, D]
    recurrent_gate: Tensor,  # [n, D]
    recurrent_param: Tensor,  # [D]
    begins: Tensor,  # bool[n]
) -> tuple[Tensor, Tensor]:
    """Decay and update of n tokens, in fp32 or better; the decay of a token that begins is 0."""
    wide = torch.promote_types(x.dtype, torch.float32)
    gated = torch.sigmoid(input_gate.to(wide)) * x.to(wide)
    strength = -SHARPNESS * F.softplus(recurrent_param.to(wide), threshold=40.0)
    log_a = strength * torch.sigmoid(recurrent_gate.to(wide))
    scale = torch.sqrt(-torch.expm1(2 * log_a))
    first = begins[:, None]
    return torch.exp(log_a).masked_fill(first, 0), torch.where(first, gated, scale * gated)


@triton.jit
def rg_lru_strength(recurrent_param):
    """The log of the decay where the recurrent gate is open."""
    return softplus(recurrent_param) * -_SHARPNESS


@triton.jit
def rg_lru_terms(x, input_gate, recurrent_gate, strength, begins):
    """Decay and update of tokens, in fp32."""
    gated = x.to(tl.float32) / (1.0 + tl.exp(-input_gate.to(tl.float32)))
    log_a = strength / (1.0 + tl.exp(-recurrent_gate.to(tl.float32)))
    # 1 - exp(z); near 0 by its series, because the difference would keep few digits of it
    z = 2.0 * log_a
    series = 1.0 + z * 0.125
    series = 1.0 + z * series * 0.14285714285714285
    series = 1.0 + z * series * 0.16666666666666666
    series = 1.0 + z * series * 0.2
    series = 1.0 + z * series * 0.25
    series = 1.0 + z * series * 0.3333333333333333
    series = 1.0 + z * series * 0.5
    scale = tl.sqrt(tl.where(z > -0.5, -z * series, 1.0 - tl.exp(z)))
    return tl.where(begins, 0.0, tl.exp(log_a)), tl.where(begins, gated, scale * gated)


@triton.jit
def _rg_lru_step_kernel(
    arena_ptr,  # [N, page_stride]
    out_ptr,  # [R, D]
    x_ptr,  # [R, D]
    input_gate_ptr,  # [R, D]
    recurrent_gate_ptr,  # [R, D]
    recurrent_param_ptr,  # [D]
    offset_ptr,  # i64[1]
    position_ptr,  # i32[R]
    read_page_ptr,  # i32[R]
    write_page_ptr,  # i32[R]
    page_stride,  # elements; the other strides go from row to row
    out_stride,
    x_stride,
    input_gate_stride,
    recurrent_gate_stride,
    D: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,  # elements on which pages and regions start
):
    """One program per row and tile of channels."""
    TILES: tl.constexpr = (D + TILE - 1) // TILE
    row = (tl.program_id(0) // TILES).to(tl.int64)
    channel = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    inside = channel < D
    out_ptrs = out_ptr + row * out_stride + channel
    read_page = tl.load(read_page_ptr + row).to(tl.int64)
    write_page = tl.load(write_page_ptr + row).to(tl.int64)
    offset = tl.load(offset_ptr)
    if write_page == _NULL_PAGE:
        tl.store(out_ptrs, tl.zeros([TILE], tl.float32), mask=inside)
        return
    begins = tl.load(position_ptr + row) == 0
    source = tl.multiple_of(read_page * page_stride + offset, ALIGN)
    target = tl.multiple_of(write_page * page_stride + offset, ALIGN)
    has_state = inside & (read_page != _NULL_PAGE) & (begins == 0)
    state = tl.load(arena_ptr + source + channel, mask=has_state, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + channel, mask=inside, other=0.0)
    input_gate_ptrs = input_gate_ptr + row * input_gate_stride + channel
    input_gate = tl.load(input_gate_ptrs, mask=inside, other=0.0)
    recurrent_gate_ptrs = recurrent_gate_ptr + row * recurrent_gate_stride + channel
    recurrent_gate = tl.load(recurrent_gate_ptrs, mask=inside, other=0.0)
    strength = rg_lru_strength(tl.load(recurrent_param_ptr + channel, mask=inside, other=0.0))
    decay, update = rg_lru_terms(x, input_gate, recurrent_gate, strength, begins)
    state = state * decay + update
    tl.debug_barrier()  # in place: no thread may still have a channel to load
    tl.store(arena_ptr + target + channel, state, mask=inside)
    tl.store(out_ptrs, state, mask=inside)


def _launch(
    arena: Tensor,
    out: Tensor,
    x: Tensor,
    input_gate: Tensor,
    recurrent_gate: Tensor,
    recurrent_param: Tensor,
    offset: Tensor,
    position: Tensor,
    read_page: Tensor,
    write_page: Tensor,
) -> None:
    check_state_dtype("rg_lru_step", arena)
    check_rg_lru_args("rg_lru_step", out, x, input_gate, recurrent_gate, recurrent_param)
    rows, channels = x.shape
    if rows == 0:
        return
    _rg_lru_step_kernel[(rows * triton.cdiv(channels, _TILE),)](
        arena, out, x, input_gate, recurrent_gate, recurrent_param,
        offset, position, read_page, write_page,
        arena.stride(0), out.stride(0), x.stride(0), input_gate.stride(0), recurrent_gate.stride(0),
        D=channels, TILE=_TILE, ALIGN=aligned_elements(arena), num_warps=2,
    )  # fmt: skip


def check_rg_lru_args(
    op: str, out: Tensor, x: Tensor, input_gate: Tensor, recurrent_gate: Tensor, param: Tensor
) -> None:
    """Raises ContractError where a kernel would read or write the wrong elements."""
    like_x = {"out": out, "input_gate": input_gate, "recurrent_gate": recurrent_gate}
    for name, tensor in like_x.items():
        if tensor.shape != x.shape:
            raise ContractError(
                f"{op}: {name} is {tuple(tensor.shape)} and x {tuple(x.shape)}, expected [n, D] of both; "
                "flatten the blocks of a gate into channels"
            )
    if param.shape != x.shape[1:] or not param.is_contiguous():
        raise ContractError(
            f"{op}: recurrent_param is {tuple(param.shape)} with strides {param.stride()}, expected "
            f"{x.shape[1]} adjacent channels as x has; pass the parameter as the model stores it"
        )
    for name, tensor in {"x": x, **like_x}.items():
        if tensor.stride(1) != 1:
            raise ContractError(
                f"{op}: {name} has strides {tensor.stride()} for {tuple(tensor.shape)}, expected adjacent "
                "channels; slice whole rows of a projection"
            )


@dataclass(frozen=True, slots=True)
class RgLruShape:
    """Sizes and ranges of a random layer."""

    channels: int = 24
    gap: int = 0  # elements between the rows of a view
    gate: float = 0.0  # what the recurrent gates are moved by; far below 0 nothing decays
    param: float = -1.0  # what the recurrent parameters are moved by; 28 gives a decay below 1e-12

    def __str__(self) -> str:
        return f"D{self.channels}"


def draw_rg_lru(
    generator: torch.Generator, tokens: int, dtype: torch.dtype, shape: RgLruShape
) -> Args:
    """Activations and parameters of both ops."""
    pitched = partial(draw_pitched, generator, tokens, shape.channels, dtype=dtype, gap=shape.gap)
    return {
        "out": torch.full((tokens, shape.channels), float("nan"), dtype=dtype),
        "x": pitched(),
        "input_gate": pitched(),
        "recurrent_gate": pitched() + shape.gate if shape.gate else pitched(),
        "recurrent_param": draw(generator, shape.channels, dtype=dtype) + shape.param,
    }


def _build(
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    state_dtype: torch.dtype | None,
    shape: RgLruShape,
) -> Args:
    """Rows in turn: in place, to another page, fresh, padding; the fifth begins and has a NaN page."""
    pages, read_page, write_page = decode_pages(rows)
    start = 128
    live = [page for row, page in enumerate(read_page.tolist()) if row != 4]
    return {
        "arena": poisoned_arena(
            generator, pages, start, shape.channels, live, state_dtype or dtype
        ),
        **draw_rg_lru(generator, rows, dtype, shape),
        "offset": element_offset(start),
        "position": index(*(0 if row == 4 else 7 + row for row in range(rows + 2))),
        "read_page": read_page,
        "write_page": write_page,
    }


def _case(
    why: str = "",
    rows: int = 6,
    state_dtype: torch.dtype | None = torch.float32,  # None: that of x
    **changes: Any,
) -> OpCase:
    shape = RgLruShape(**changes)
    build = partial(_build, rows=rows, state_dtype=state_dtype, shape=shape)
    return OpCase(f"R{rows}-{shape}{why}", build)


def _traffic(args: Args) -> tuple[int, int]:
    rows = int((args["write_page"][: args["x"].shape[0]] != NULL_PAGE).sum())
    channels = rows * args["x"].shape[1]
    state, activation = args["arena"].element_size(), args["x"].element_size()
    return channels * (2 * state + 4 * activation), OPERATIONS * channels


CASES = (
    _case(),
    _case(rows=1),
    _case(channels=13),  # no power of two, no multiple of eight
    _case("-gap", gap=5),  # views into a wider projection, no 16-byte access possible
    _case(channels=640),  # a partial second tile
    _case("-strong_decay", param=28.0, gate=8.0),  # far below 1e-12
    _case("-weak_decay", param=-9.0, gate=-4.0),  # 1 - decay is below the rounding of 1
    _case("-no_decay", gate=-80.0),  # the state stands still
    _case("-state_like_x", state_dtype=None),
)


def _build_bench(
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    state_dtype: torch.dtype,
) -> Args:
    """Every row in place, sizes of RecurrentGemma 9B."""
    shape = RgLruShape(channels=4096)
    arena, page = bench_arena(generator, rows, shape.channels, state_dtype)
    args = draw_rg_lru(torch.Generator().manual_seed(0), rows, dtype, shape)
    args |= {"offset": element_offset(0), "position": index(*range(1, rows + 1))}
    args = {name: value.to(device) for name, value in args.items()}
    return {"arena": arena, **args, "read_page": page, "write_page": page}


BENCH_CASES = tuple(
    OpCase(
        f"R{rows}-D4096-{str(state_dtype).removeprefix('torch.')}",
        partial(_build_bench, rows=rows, state_dtype=state_dtype),
    )
    for state_dtype in (torch.float32, torch.bfloat16)
    for rows in (1, 32, 256)
)

rg_lru_step = define_op(
    "rg_lru_step(Tensor(a!) arena, Tensor(b!) out, Tensor x, Tensor input_gate, Tensor recurrent_gate, "
    "Tensor recurrent_param, Tensor offset, Tensor position, Tensor read_page, Tensor write_page) -> ()",
    cuda=_launch,
    cpu=rg_lru_step_ref,
    cases=CASES,
    tolerance=Tolerance(
        {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4},
        "fp32 arithmetic with fast exp and sqrt; 16-bit results are rounded once (2 ** -9, 2 ** -12)",
    ),
    traffic=_traffic,
    bench_cases=BENCH_CASES,
)
