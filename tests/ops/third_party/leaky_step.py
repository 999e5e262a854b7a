"""
An op of somebody else, `acme::leaky_step`, with switches for what can be wrong in it.

    state = decay * state + x           out = state / root-mean-square(state)

Letters: R rows, N pages, D channels; a page is one state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.ops.registry import Args, OpCase, Tolerance

SCHEMA = (
    "(Tensor(a!) arena, Tensor(b!) out, Tensor x, Tensor decay, Tensor read_page, "
    "Tensor write_page) -> ()"
)
_EPS = 1e-6


def leaky_step_ref(
    arena: Tensor,  # [N, D]  written: the write pages
    out: Tensor,  # [R, D]  written
    x: Tensor,  # [R, D]
    decay: Tensor,  # f32[D]
    read_page: Tensor,  # i32[R]  0: zeros
    write_page: Tensor,  # i32[R]  0: padding, whose out is zero
) -> None:
    """Say what the kernel means."""
    wide = torch.promote_types(x.dtype, torch.float32)
    live = write_page.nonzero()[:, 0]
    source = read_page[live].long()
    old = arena[source].to(wide).masked_fill((source == 0)[:, None], 0)
    state = decay.to(wide) * old + x[live].to(wide)
    out.zero_()
    out[live] = (state * torch.rsqrt(state.square().mean(-1, keepdim=True) + _EPS)).to(out.dtype)
    arena[write_page[live].long()] = state.to(arena.dtype)


@triton.jit
def _leaky_step_kernel(
    arena_ptr,  # [N, page_stride]
    out_ptr,  # [R, D]
    x_ptr,  # [R, D]
    decay_ptr,  # f32[D]
    read_page_ptr,  # i32[R]
    write_page_ptr,  # i32[R]
    page_stride,  # elements
    out_stride,  # elements, row to row
    x_stride,
    D: tl.constexpr,
    TILE: tl.constexpr,  # power of two >= D
    EPS: tl.constexpr,
    DIVIDE: tl.constexpr,  # another rounding of the same
    READ_ON: tl.constexpr,  # wrong: reads into the next page, times zero
    WRITE_NULL: tl.constexpr,  # wrong: padding writes the null page
    LEAVE_OUT: tl.constexpr,  # wrong: padding leaves its out as it was
):
    row = tl.program_id(0).to(tl.int64)
    read_page = tl.load(read_page_ptr + row).to(tl.int64)
    write_page = tl.load(write_page_ptr + row).to(tl.int64)
    channel = tl.arange(0, TILE)
    inside = channel < D
    live = write_page != 0
    readable = (inside | READ_ON) & live & (read_page != 0)
    old = tl.load(arena_ptr + read_page * page_stride + channel, mask=readable, other=0.0)
    decay = tl.load(decay_ptr + channel, mask=inside, other=0.0)
    x = tl.load(x_ptr + row * x_stride + channel, mask=inside, other=0.0).to(tl.float32)
    state = decay * old.to(tl.float32) + x
    square = tl.sum(state * state, 0) / D + EPS
    out = state / tl.sqrt(square) if DIVIDE else state * tl.rsqrt(square)
    out = tl.where(live, out, 0.0)
    tl.store(out_ptr + row * out_stride + channel, out, mask=inside & (live | (not LEAVE_OUT)))
    tl.debug_barrier()  # in place: no thread may still have an old state to load
    writable = inside & (live | WRITE_NULL)
    tl.store(arena_ptr + write_page * page_stride + channel, state, mask=writable)


def launch(
    arena: Tensor,
    out: Tensor,
    x: Tensor,
    decay: Tensor,
    read_page: Tensor,
    write_page: Tensor,
    *,
    divide: bool = False,
    read_on: bool = False,
    write_null: bool = False,
    leave_out: bool = False,
    rows_adjacent: bool = False,  # wrong: takes x for a tensor without gaps
) -> None:
    """The right kernel, or one with a fault switched on."""
    rows, channels = x.shape
    _leaky_step_kernel[(rows,)](
        arena, out, x, decay, read_page, write_page, arena.stride(0), out.stride(0),
        channels if rows_adjacent else x.stride(0),
        D=channels, TILE=triton.next_power_of_2(channels), EPS=_EPS, DIVIDE=divide,
        READ_ON=read_on, WRITE_NULL=write_null, LEAVE_OUT=leave_out, num_warps=1,
    )  # fmt: skip


def _build(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Args:
    """In place, to another page, fresh, padding.  No page is poisoned: that is left to the suite."""
    page = 1 + torch.randperm(5, generator=generator, dtype=torch.int32)
    return {
        "arena": torch.randn((7, 96), generator=generator).to(dtype),  # the last page is not used
        "out": torch.zeros((4, 96), dtype=dtype),
        "x": torch.randn((4, 96), generator=generator).to(dtype),
        "decay": torch.rand(96, generator=generator),
        "read_page": page[[0, 1, 0, 3]] * torch.tensor([1, 1, 0, 1], dtype=torch.int32),
        "write_page": page[[0, 2, 4, 3]] * torch.tensor([1, 1, 1, 0], dtype=torch.int32),
    }


def _traffic(args: Args) -> tuple[int, int]:
    elements = args["x"].numel()
    return 2 * elements * (args["arena"].element_size() + args["x"].element_size()), 5 * elements


DECLARATION = {
    "cases": (OpCase("R4-D96", _build),),
    "tolerance": Tolerance(
        {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4},
        "fp32 arithmetic with one sum of D squares; 16 bits round results once",
    ),
    "traffic": _traffic,
}
