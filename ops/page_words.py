"""
Pages of an arena as 64-bit words, and the fixed grid of programs that shares the work on them.

How much there is to do is known on the device only, so the grid has as many programs as stay resident,
and each goes through the work in turn.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.errors import ContractError

WORD = 8  # bytes; two words make one 128-bit access
PROGRAMS_PER_SM = 12  # fixed grid: how much moves is known on the device only
REGISTERS = 80  # of a thread, at most, so that all programs of 64 threads are resident
_PROGRAMS_EMULATED = 3  # in the interpreter


@triton.jit
def wide_offset(index, stride):
    """Distance of a page or table row from the first one; widened first: it passes 2**31 early."""
    return index.to(tl.int64) * stride


@triton.jit
def copy_words(
    target_ptr, source_ptr, begin, words, step, TILE: tl.constexpr
):  # fmt: skip
    """Copy the tiles that start at begin, begin + step, ... of a page of so many words."""
    for start in range(begin, words, step):
        word = start + tl.arange(0, TILE)
        tile = tl.load(source_ptr + word, mask=word < words)
        tl.store(target_ptr + word, tile, mask=word < words)


@functools.cache
def resident_programs(device: torch.device) -> int:
    """Programs of the fixed grid."""
    if device.type != "cuda":
        return _PROGRAMS_EMULATED
    return torch.cuda.get_device_properties(device).multi_processor_count * PROGRAMS_PER_SM


def page_words(op: str, name: str, arena: Tensor) -> Tensor:
    """The arena as 64-bit words.

    Raises:
        ContractError: 128-bit accesses cannot reach all of a page.
    """
    page_bytes, stride_bytes = (n * arena.element_size() for n in (arena.shape[1], arena.stride(0)))
    if page_bytes % (2 * WORD) or (page_bytes and stride_bytes % (2 * WORD)):
        raise ContractError(
            f"{op}: pages of {name} must be multiples of 16 bytes, got {page_bytes} bytes "
            f"every {stride_bytes}; build arenas from StateLayout"
        )
    return as_dtype(arena, torch.int64)


def as_dtype(arena: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bytes under another dtype; torch refuses to view pages without elements."""
    return arena.view(dtype) if arena.shape[1] else arena.new_empty(arena.shape, dtype=dtype)
