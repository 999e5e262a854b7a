"""
Copy state pages into another pool, whose temporal states may have another dtype.

For a pool of compact checkpoints: running states in float32, published ones in bfloat16, and back when
a request resumes.  Listed page i goes from page `page_from[i]` to page `page_to[i]` of the other pool;
convolution windows keep their dtype.  The pools share no memory; no page is listed twice as a
destination.

Error: to a wider dtype none; to a narrower one half a unit in the last place, nearest even, that is
2 ** -8 of a value for bfloat16 (8 significant bits) and 2 ** -11 for float16, as long as the value is
normal there.  What was narrow before comes back bit for bit.

Letters: R capacity of the list, N pages, E elements of a page.
Traffic: the bytes of a page in both pools per listed page, nothing when nothing is listed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.errors import ContractError
from midstream.ops.page_words import (
    REGISTERS,
    copy_words,
    page_words,
    resident_programs,
    wide_offset,
)
from midstream.ops.registry import EXACT, Args, OpCase, define_op

_PIECE = 1024  # elements of a temporal page that a program converts per turn
_CONV_TILE = 512  # words of a convolution page that it copies per turn
_WARPS = 2


def page_convert_ref(
    to_temporal: Tensor,  # [N', E]   another dtype than `temporal`, or the same
    to_conv: Tensor,  # [N', Ec]
    temporal: Tensor,  # [N, E]
    conv: Tensor,  # [N, Ec]
    page_from: Tensor,  # i32[R]   pages of the source pool
    page_to: Tensor,  # i32[R]     pages of the other one
    num_pages: Tensor,  # i32[1]    entries in use
) -> None:
    """Say what the kernel means, one page at a time."""
    count = int(num_pages)
    for source, target in zip(page_from[:count].tolist(), page_to[:count].tolist(), strict=True):
        to_temporal[target] = temporal[source].to(to_temporal.dtype)
        to_conv[target] = conv[source]


@triton.jit
def _rounded(value, dtype: tl.constexpr):
    """To the nearest number of a dtype, ties to even; NaN stays NaN."""
    if (dtype == tl.bfloat16) & (value.dtype != tl.bfloat16):  # bits: the interpreter truncates
        wide = value.to(tl.float32)
        bits = wide.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nearest = tl.where(wide == wide, nearest, 0x7FC0)
        return nearest.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return value.to(dtype)


@triton.jit
def _page_convert_kernel(
    to_temporal_ptr,  # [N', E]
    to_conv_ptr,  # i64[N', conv_words]
    temporal_ptr,  # [N, E]
    conv_ptr,  # i64[N, conv_words]
    page_from_ptr,  # i32[R]
    page_to_ptr,  # i32[R]
    num_pages_ptr,  # i32[1]
    to_temporal_stride,  # elements from page to page
    to_conv_stride,  # words from page to page
    temporal_stride,
    conv_stride,
    elements,
    conv_words,
    PIECE: tl.constexpr,
    CONV_TILE: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    program = tl.program_id(0)
    num_pages = tl.load(num_pages_ptr)
    pieces = tl.cdiv(elements, PIECE)
    tiles = tl.cdiv(conv_words, CONV_TILE)
    for turn in range(program, num_pages * pieces, PROGRAMS):
        source = wide_offset(tl.load(page_from_ptr + turn // pieces), temporal_stride)
        target = wide_offset(tl.load(page_to_ptr + turn // pieces), to_temporal_stride)
        element = (turn % pieces) * PIECE + tl.arange(0, PIECE)
        inside = element < elements
        value = tl.load(temporal_ptr + source + element, mask=inside, other=0.0)
        value = _rounded(value, to_temporal_ptr.dtype.element_ty)
        tl.store(to_temporal_ptr + target + element, value, mask=inside)
    for turn in range(PROGRAMS - 1 - program, num_pages * tiles, PROGRAMS):  # idle programs first
        source = wide_offset(tl.load(page_from_ptr + turn // tiles), conv_stride)
        target = wide_offset(tl.load(page_to_ptr + turn // tiles), to_conv_stride)
        begin = (turn % tiles) * CONV_TILE
        copy_words(
            to_conv_ptr + target, conv_ptr + source, begin, conv_words, conv_words, CONV_TILE
        )


def _launch(
    to_temporal: Tensor, to_conv: Tensor, temporal: Tensor, conv: Tensor, page_from: Tensor,
    page_to: Tensor, num_pages: Tensor,
) -> None:  # fmt: skip
    if to_temporal.shape[1] != temporal.shape[1] or to_conv.shape[1] != conv.shape[1]:
        raise ContractError(
            f"page_convert: pages of both pools must have as many elements, got "
            f"{temporal.shape[1]} and {to_temporal.shape[1]} temporal, {conv.shape[1]} and "
            f"{to_conv.shape[1]} of convolutions; build both pools from one model's StateLayout"
        )
    if to_conv.dtype != conv.dtype:
        raise ContractError(
            f"page_convert: windows are copied, got {conv.dtype} and {to_conv.dtype}; give both "
            "pools the model's dtype"
        )
    for name, arena in (("temporal", temporal), ("to_temporal", to_temporal)):
        page_words("page_convert", name, arena)
    words, to_words = (
        page_words("page_convert", name, arena)
        for name, arena in (("conv", conv), ("to_conv", to_conv))
    )
    programs = resident_programs(temporal.device)
    _page_convert_kernel[(programs,)](
        to_temporal, to_words, temporal, words, page_from, page_to, num_pages,
        to_temporal.stride(0), to_words.stride(0), temporal.stride(0), words.stride(0),
        temporal.shape[1], words.shape[1],
        PIECE=_PIECE, CONV_TILE=_CONV_TILE, PROGRAMS=programs, num_warps=_WARPS,
        maxnreg=REGISTERS,
    )  # fmt: skip


@dataclass(frozen=True)
class _Case:
    """Pages of `dtype` become pages of `target`; None: of the other dtype of float32 and bfloat16."""

    elements: int = 3136  # two pieces, the second one partial
    conv_elements: int = 4160  # in 16 or 32 bits: two tiles, the second one partial
    pages: int = 3
    target: torch.dtype | None = None

    def id(self) -> str:
        name = "other" if self.target is None else str(self.target).removeprefix("torch.")
        return f"E{self.elements}-conv{self.conv_elements}-pages{self.pages}-to_{name}"

    def __call__(self, gen: torch.Generator, dtype: torch.dtype, device: torch.device) -> Args:
        narrow = torch.bfloat16 if dtype == torch.float32 else torch.float32
        nan = float("nan")
        temporal = torch.randn(6, self.elements, generator=gen).to(dtype)
        temporal[:, ::7] *= 2.0**-13  # subnormal in float16
        conv = torch.randn(6, self.conv_elements, generator=gen).to(dtype)
        args: Args = {
            "to_temporal": torch.full((8, self.elements), nan, dtype=self.target or narrow),
            "to_conv": torch.full((8, self.conv_elements), nan, dtype=dtype),
            "temporal": temporal,
            "conv": conv,
            "page_from": torch.tensor([5, 2, 2, 4], dtype=torch.int32),  # 2 is read twice
            "page_to": torch.tensor([1, 6, 2, 7], dtype=torch.int32),
            "num_pages": torch.tensor([self.pages], dtype=torch.int32),
        }
        return {name: value.to(device) for name, value in args.items()}


_CASES = tuple(
    OpCase(c.id(), c)
    for c in (
        _Case(),
        _Case(pages=0),
        _Case(pages=1),
        _Case(elements=64),  # less than a piece
        _Case(elements=0),  # a model of short convolutions only
        _Case(conv_elements=0),  # a model without convolutions
        _Case(target=torch.float32),
        _Case(target=torch.bfloat16),
    )
)


def _traffic(args: Args) -> tuple[int, int]:
    arenas = (args[name] for name in ("to_temporal", "to_conv", "temporal", "conv"))
    return sum(a.shape[1] * a.element_size() for a in arenas) * int(args["num_pages"]), 0


page_convert = define_op(
    "page_convert(Tensor(a!) to_temporal, Tensor(b!) to_conv, Tensor temporal, Tensor conv, "
    "Tensor page_from, Tensor page_to, Tensor num_pages) -> ()",
    cuda=_launch,
    cpu=page_convert_ref,
    cases=_CASES,
    tolerance=EXACT,  # against torch's own rounding
    traffic=_traffic,
    arenas=("to_temporal", "to_conv", "temporal", "conv"),
    results=(),
)
