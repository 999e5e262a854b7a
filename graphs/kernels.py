"""What the device does while a callable runs: kernels by name and time, from torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, slots=True)
class Kernel:
    """One piece of work on the device: a kernel, a copy or a fill."""

    name: str
    begin_us: float
    end_us: float


def kernels_of(run: Callable[[], object]) -> list[Kernel]:
    """What `run` makes the device do, in order of its beginning.  Waits for the device; needs a GPU."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        run()
        torch.cuda.synchronize()
    kernels = [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in found.events() or ()
        if event.device_type == DeviceType.CUDA
    ]
    return sorted(kernels, key=lambda kernel: kernel.begin_us)


def idle_share(kernels: Iterable[Kernel]) -> float:
    """Part of the time from the first beginning to the last end in which no kernel runs.

    >>> idle_share([Kernel("a", 0, 4), Kernel("b", 2, 6), Kernel("c", 7, 8)])
    0.125
    """
    busy, begin, end = 0.0, None, 0.0
    for kernel in sorted(kernels, key=lambda kernel: kernel.begin_us):
        if begin is None:
            begin = end = kernel.begin_us
        busy += max(0.0, kernel.end_us - max(end, kernel.begin_us))
        end = max(end, kernel.end_us)
    if begin is None or end <= begin:
        return 0.0
    return 1.0 - busy / (end - begin)
