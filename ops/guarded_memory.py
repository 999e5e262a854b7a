"""
Arguments of an op inside larger memory whose every other byte is known, so that strays show.

A tensor gets memory before and behind it, and pages of an arena lie a little further apart than they are
long.  That memory, and the gaps between the rows of a view, hold a `Filling`.  What an op reads of it
changes the result; what it writes there is found afterwards.  Guards are wide enough that an index which
was read from one leads into another: a stray fails a check instead of killing the process.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.ops.registry import LAUNCH_ALIGN, Args

_GUARD_BYTES = 4096  # at least, on either side
_GUARD_PAGES = 2  # at least, or as many rows of a tensor that has rows


@dataclass(frozen=True, slots=True)
class Filling:
    """What stands where an op must not read."""

    name: str
    floating: float | None  # None: a large number, which survives where a maximum swallows NaN
    below: bool  # ids of -2, below any; else one past the largest id of the argument

    def value(self, tensor: Tensor) -> float:
        if tensor.is_floating_point():
            return torch.finfo(tensor.dtype).max / 2 if self.floating is None else self.floating
        if tensor.dtype == torch.bool or not tensor.numel():
            return 1
        limit = torch.iinfo(tensor.dtype)
        if self.below:
            return max(-2, limit.min)
        return min(int(tensor.max()) + 1, limit.max)


FILLINGS = (Filling("NaN or -2", float("nan"), True), Filling("large numbers", None, False))


@dataclass(frozen=True, slots=True)
class _Guarded:
    """One tensor, the memory around it, and that memory before the run."""

    view: Tensor
    memory: Tensor
    before: Tensor

    def only_view_written(self) -> bool:
        """All bytes but those of the view are as they were."""
        start = self.view.storage_offset()
        want = self.before.clone()
        want.as_strided(self.view.shape, self.view.stride(), start).copy_(self.view)
        return same_bits(self.memory, want)

    def unwritten(self) -> bool:
        return same_bits(self.memory, self.before)


class GuardedArgs:
    """Copies of `args`, guarded; `args` has them under their names."""

    def __init__(self, args: Args, arenas: Collection[str], filling: Filling) -> None:
        self._guarded = {
            name: _guard(value, name in arenas, filling)
            for name, value in args.items()
            if isinstance(value, Tensor)
        }
        self.args: Args = args | {name: g.view for name, g in self._guarded.items()}

    def strays(self, written: Collection[str]) -> list[str]:
        """What else was written than the arguments that may be: one line for each argument."""
        found = []
        for name, guarded in self._guarded.items():
            if not guarded.only_view_written():
                found.append(f"memory around {name} was written")
            elif name not in written and not guarded.unwritten():
                found.append(f"{name} was written, which the schema does not mark")
        return found


def _guard(tensor: Tensor, is_arena: bool, filling: Filling) -> _Guarded:
    align = LAUNCH_ALIGN // tensor.element_size()
    stride = list(tensor.stride())
    if is_arena:
        stride[0] += align
    step = stride[0] if stride else 1
    guard = max(_GUARD_BYTES // tensor.element_size(), _GUARD_PAGES * step)
    guard = -(-guard // align) * align
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, stride, strict=True))
    span = span if tensor.numel() else 0
    memory = torch.full(
        (2 * guard + span,), filling.value(tensor), dtype=tensor.dtype, device=tensor.device
    )
    view = memory.as_strided(tensor.shape, stride, guard).copy_(tensor)
    return _Guarded(view, memory, memory.clone())


def same_bits(have: Tensor, want: Tensor) -> bool:
    """Equal dtype, shape and bytes; NaN equals itself."""
    return (
        have.dtype == want.dtype
        and have.shape == want.shape
        and torch.equal(
            have.contiguous().view(-1).view(torch.uint8),
            want.contiguous().view(-1).view(torch.uint8),
        )
    )
