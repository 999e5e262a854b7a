"""
Bring the per-slot memory on the device up to date with what the host changed since the last step.

All per-slot arrays (tables, counters, sampling parameters) live in one flat `memory`; the host
sends the changed words as (index, value) pairs.  Only the first `count` pairs hold; no index
appears twice.

Letters: n words of memory, C capacity of a step's changes.
Traffic: 12 bytes a change (index and value read, value written).  No arithmetic: bit-exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.errors import ContractError
from midstream.ops.registry import EXACT, Args, OpCase, define_op

_TILE = 512  # changes a program applies


def scatter_slots_ref(memory: Tensor, index: Tensor, value: Tensor, count: Tensor) -> None:
    """Say what the kernel means."""
    live = int(count)
    memory[index[:live].long()] = value[:live]


@triton.jit
def _scatter_slots_kernel(
    memory_ptr,  # i32[n]
    index_ptr,  # i32[C]
    value_ptr,  # i32[C]
    count_ptr,  # i32[1]
    TILE: tl.constexpr,
):
    entry = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = entry < tl.load(count_ptr)
    index = tl.load(index_ptr + entry, mask=live)
    value = tl.load(value_ptr + entry, mask=live)
    tl.store(memory_ptr + index, value, mask=live)


def _launch(memory: Tensor, index: Tensor, value: Tensor, count: Tensor) -> None:
    if index.shape != value.shape or index.dim() != 1:
        raise ContractError(
            f"scatter_slots: index and value must be lists of one length, got {tuple(index.shape)} "
            f"and {tuple(value.shape)}; cut both views from one staging area"
        )
    grid = (triton.cdiv(index.shape[0], _TILE),)
    if grid[0]:
        _scatter_slots_kernel[grid](memory, index, value, count, TILE=_TILE)


@dataclass(frozen=True)
class _Case:
    words: int = 4000
    capacity: int = 1100  # three programs, the last one partial
    count: int = 700

    def __call__(self, gen: torch.Generator, dtype: torch.dtype, device: torch.device) -> Args:
        index = torch.randperm(self.words, generator=gen)[: self.capacity]  # behind `count`: stale
        value = torch.randint(-(2**31), 2**31 - 1, (self.capacity,), generator=gen)
        return {
            "memory": torch.arange(self.words, dtype=torch.int32, device=device),
            "index": index.to(device, torch.int32),
            "value": value.to(device, torch.int32),
            "count": torch.tensor([self.count], dtype=torch.int32, device=device),
        }


_CASES = tuple(
    OpCase(f"n{c.words}-C{c.capacity}-count{c.count}", c)
    for c in (
        _Case(),
        _Case(count=0),
        _Case(count=1100),  # full
        _Case(words=1, capacity=1, count=1),
        _Case(capacity=0, count=0),
    )
)


def _traffic(args: Args) -> tuple[int, int]:
    return 12 * int(args["count"]), 0


scatter_slots = define_op(
    "scatter_slots(Tensor(a!) memory, Tensor index, Tensor value, Tensor count) -> ()",
    cuda=_launch,
    cpu=scatter_slots_ref,
    cases=_CASES,
    tolerance=EXACT,
    traffic=_traffic,
)
