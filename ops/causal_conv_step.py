"""
Depthwise causal convolution of one new token per row, over a paged window of earlier inputs.

    y[d] = act(bias[d] + sum_w weight[d, w] * window[w, d])        window = the last W inputs, newest last

The page keeps the newest W - 1 inputs, token by token.  A row reads its window from `read_page` and leaves
the moved window in `write_page`; the two may be equal.
`offset`, `read_page` and `write_page` are read early: ops/dependent_launch.py says who may write them.

Letters: R rows, D channels, W taps, N pages.
Traffic: 2 * (W - 1) * D elements of state and 2 * D of activations per row.
Source: the convolution is torch's `conv1d` with groups = D and W - 1 zeros in front.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from midstream.errors import ContractError
from midstream.ops.case_data import decode_pages, draw, draw_pitched, element_offset, poisoned_arena
from midstream.ops.dependent_launch import after_previous, dependent_launch
from midstream.ops.paged_state import aligned_elements, state_region
from midstream.ops.registry import NULL_PAGE, Args, OpCase, Tolerance, define_op

_TILE = 256  # channels of a program: 16 bytes of bf16 per thread of one warp
_NULL_PAGE = tl.constexpr(NULL_PAGE)


def causal_conv_step_ref(
    arena: Tensor,  # [N, Ec]        region [W - 1, D] at `offset`
    out: Tensor,  # [R, D]
    x: Tensor,  # [R, D]
    weight: Tensor,  # [D, W]
    bias: Tensor | None,  # [D]
    offset: Tensor,  # i64[1]         elements
    read_page: Tensor,  # i32[>= R]  NULL_PAGE: zeros
    write_page: Tensor,  # i32[>= R]  NULL_PAGE: padding
    silu: bool,
) -> None:
    """Say what the kernel means, all rows at once."""
    rows, channels = x.shape
    taps = weight.shape[1]
    region = state_region(arena, offset, taps - 1, channels)
    live = write_page[:rows].nonzero().squeeze(1)
    source = read_page[live].long()
    history = region[source].masked_fill((source == NULL_PAGE)[:, None, None], 0)
    window = torch.cat([history.to(x.dtype), x[live, None]], 1)
    out.zero_()
    out[live] = convolve_ref(window, weight, bias, silu)[:, 0].to(out.dtype)
    region[write_page[live].long()] = window[:, 1:].to(arena.dtype)


def convolve_ref(window: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """[..., n + W - 1, D] inputs -> [..., n, D] outputs, in fp32 or better."""
    wide = torch.promote_types(window.dtype, torch.float32)
    steps = window.to(wide).unfold(-2, weight.shape[1], 1)  # [..., n, D, W]
    y = (steps * weight.to(wide)).sum(-1)
    if bias is not None:
        y = y + bias.to(wide)
    return F.silu(y) if silu else y


@triton.jit
def _causal_conv_step_kernel(
    arena_ptr,  # [N, page_stride]
    out_ptr,  # [R, D]
    x_ptr,  # [R, D]
    weight_ptr,  # [D, W]
    bias_ptr,  # [D] or None
    offset_ptr,  # i64[1]
    read_page_ptr,  # i32[R]
    write_page_ptr,  # i32[R]
    page_stride,  # elements
    out_stride,
    x_stride,
    D: tl.constexpr,
    W: tl.constexpr,
    W_TILE: tl.constexpr,  # power of two >= W
    WEIGHT_STRIDE: tl.constexpr,  # from channel to channel; taps are adjacent
    TILE: tl.constexpr,  # channels of a program
    ALIGN: tl.constexpr,  # elements on which pages and regions start
    SILU: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    write_page = tl.load(write_page_ptr + row).to(tl.int64)
    read_page = tl.load(read_page_ptr + row).to(tl.int64)
    offset = tl.load(offset_ptr)
    after_previous(DEPENDENT)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = channel < D
    if write_page == _NULL_PAGE:
        tl.store(out_ptr + row * out_stride + channel, tl.zeros([TILE], tl.float32), mask=inside)
        return
    source = tl.multiple_of(read_page * page_stride + offset, ALIGN)
    target = tl.multiple_of(write_page * page_stride + offset, ALIGN)

    # inputs of all taps as one tile: W - 1 rows of the window, then the new token
    tap = tl.arange(0, W_TILE)[:, None]
    old = (tap < W - 1) & (read_page != _NULL_PAGE) & inside[None, :]
    new = (tap == W - 1) & inside[None, :]
    history_ptrs = arena_ptr + source + tap * D + channel[None, :]
    x_ptrs = x_ptr + row * x_stride + tap * 0 + channel[None, :]
    history = tl.load(history_ptrs, mask=old, other=0.0).to(tl.float32)
    window = tl.where(new, tl.load(x_ptrs, mask=new, other=0.0).to(tl.float32), history)
    weight_tap = tl.arange(0, W_TILE)[None, :]
    weight_ptrs = weight_ptr + channel[:, None] * WEIGHT_STRIDE + weight_tap
    weight = tl.load(weight_ptrs, mask=(weight_tap < W) & inside[:, None], other=0.0)
    y = tl.sum(window * weight.to(tl.float32).trans(), axis=0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        y = y / (1 + tl.exp(-y))
    tl.store(out_ptr + row * out_stride + channel, y, mask=inside)

    # In place: a row goes where the row before it was.  All warps have loaded the window, whichever of
    # them stores it (a tile smaller than the block is loaded by all of them and stored by one).
    tl.debug_barrier()
    moved = (tap >= 1) & (tap < W) & inside[None, :]
    tl.store(arena_ptr + target + (tap - 1) * D + channel[None, :], window, mask=moved)


def _launch(
    arena: Tensor,
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offset: Tensor,
    read_page: Tensor,
    write_page: Tensor,
    silu: bool,
) -> None:
    check_conv_args("causal_conv_step", out, x, weight)
    rows, (channels, taps) = x.shape[0], weight.shape
    if rows == 0:
        return
    # without fusion lanes that hold the same sum agree in its last bit, whichever of them is heard
    _causal_conv_step_kernel[(rows, triton.cdiv(channels, _TILE))](
        arena, out, x, weight, bias, offset, read_page, write_page,
        arena.stride(0), out.stride(0), x.stride(0),
        D=channels, W=taps, W_TILE=triton.next_power_of_2(taps), WEIGHT_STRIDE=weight.stride(0),
        TILE=_TILE, ALIGN=aligned_elements(arena), SILU=silu, num_warps=1,
        enable_fp_fusion=False, **dependent_launch(),
    )  # fmt: skip


def check_conv_args(op: str, out: Tensor, x: Tensor, weight: Tensor) -> None:
    """Raises ContractError where a kernel would read or write the wrong elements."""
    if out.shape != x.shape or x.stride(1) != 1 or out.stride(1) != 1:
        raise ContractError(
            f"{op}: x {tuple(x.shape)} with strides {x.stride()} and out {tuple(out.shape)} with strides "
            f"{out.stride()} must have equal shapes and adjacent channels; slice whole rows"
        )
    if weight.shape[0] != x.shape[1] or weight.shape[1] < 2 or weight.stride(1) != 1:
        raise ContractError(
            f"{op}: weight {tuple(weight.shape)} with strides {weight.stride()} must be [{x.shape[1]} "
            "channels, at least 2 taps] with adjacent taps; squeeze the middle axis of a conv1d weight"
        )


def _build(
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    channels: int,
    taps: int,
    gap: int,
    bias: bool,
    silu: bool,
) -> Args:
    """Rows in turn: in place, to another page, fresh, padding; `gap` NaNs between rows of x and weight."""
    pages, read_page, write_page = decode_pages(rows, generator)
    start, size = 64, (taps - 1) * channels
    return {
        "arena": poisoned_arena(generator, pages, start, size, read_page.tolist(), dtype),
        "out": torch.full((rows, channels), float("nan"), dtype=dtype),
        "x": draw_pitched(generator, rows, channels, dtype=dtype, gap=gap),
        "weight": draw_pitched(generator, channels, taps, dtype=dtype, gap=gap),
        "bias": draw(generator, channels, dtype=dtype) if bias else None,
        "offset": element_offset(start),
        "read_page": read_page,
        "write_page": write_page,
        "silu": silu,
    }


def _case(
    rows: int = 5,
    channels: int = 24,
    taps: int = 4,
    gap: int = 0,
    bias: bool = True,
    silu: bool = True,
) -> OpCase:
    options = f"{'-bias' * bias}{'-silu' * silu}{f'-gap{gap}' if gap else ''}"
    build = partial(_build, rows=rows, channels=channels, taps=taps, gap=gap, bias=bias, silu=silu)
    return OpCase(f"R{rows}-D{channels}-W{taps}{options}", build)


def _traffic(args: Args) -> tuple[int, int]:
    rows, channels = args["x"].shape
    taps = args["weight"].shape[1]
    state = 2 * (taps - 1) * channels * args["arena"].element_size()
    return rows * (state + 2 * channels * args["x"].element_size()), 2 * rows * channels * taps


CASES = (
    _case(),
    _case(rows=1),
    _case(channels=20, gap=7),  # no 16-byte access possible
    _case(channels=264, gap=8),  # a partial second tile
    _case(rows=2, channels=512),  # all accesses can be 128 bits wide, as in real models
    _case(taps=2),
    _case(taps=3, gap=1),  # taps that are no power of two are padded to one
    _case(taps=5),
    _case(taps=6, bias=False),
    _case(taps=7, gap=3, silu=False),
    _case(taps=8),
    _case(bias=False),
    _case(silu=False),
    _case(bias=False, silu=False),
)

causal_conv_step = define_op(
    "causal_conv_step(Tensor(a!) arena, Tensor(b!) out, Tensor x, Tensor weight, Tensor? bias, "
    "Tensor offset, Tensor read_page, Tensor write_page, bool silu) -> ()",
    cuda=_launch,
    cpu=causal_conv_step_ref,
    cases=CASES,
    tolerance=Tolerance(
        {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4},
        "a sum of W products in fp32 and a fast exp; bf16 rounds the result once (2 ** -8), and so "
        "does fp16 (2 ** -11)",
    ),
    traffic=_traffic,
)
