"""
How the suites measure: on the device's clock, next to the copy rate of the same run, gated on correctness.

    pytest bench/decode_step.py --benchmark-json=out.json

Every row carries `extra_info`: bytes, GB/s, the fraction of the floor, card, versions, commit.
"""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
import triton

from midstream.graphs.capture import GraphCapture

_COPY_BYTES = 2**32
_SHORTEST, _LONGEST = 2**20, 2**28  # bytes of a copy whose time is taken
_COLD_BYTES = 2**30 if torch.cuda.is_available() else 2**20  # several times what a cache holds


def device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class DeviceClock:
    """A timer for pytest-benchmark: seconds on the device, read through events.

    The time between two readings is that of the work enqueued between them, launch gaps included.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._last = torch.cuda.Event(enable_timing=True)
        self._last.record()

    def __call__(self) -> float:
        now = torch.cuda.Event(enable_timing=True)
        now.record()
        now.synchronize()
        # a sum of short times: one float32 since the start is 4 us coarse after a minute
        self._seconds += self._last.elapsed_time(now) / 1e3
        self._last = now
        return self._seconds


@cache
def clock() -> Callable[[], float]:
    """The device's clock, or the host's where there is no GPU."""
    return DeviceClock() if torch.cuda.is_available() else time.perf_counter


@cache
def copy_rate() -> float:
    """Bytes per second, read plus written, of a device-to-device copy in this run (median of 9)."""
    size = _COPY_BYTES if torch.cuda.is_available() else 2**26
    source = torch.empty(size, dtype=torch.uint8, device=device()).random_()
    target = torch.empty_like(source)
    now, seconds = clock(), []
    for _ in range(12):
        begin = now()
        target.copy_(source)
        seconds.append(now() - begin)
    return 2 * size / sorted(seconds[3:])[4]


def captured(work: Callable[[], None], name: str) -> Callable[[], None]:
    """Replays `work` as one CUDA graph; on the CPU `work` itself."""
    if not torch.cuda.is_available():
        return work
    return GraphCapture(device()).capture(work, dict, name).replay


@cache
def copy_us(moved: int) -> float:
    """Microseconds of moving `moved` bytes, read and written together, from one place to another.

    The quicker of the driver's copy and of a kernel of torch's, in a graph of many that walk through more
    memory than a cache holds.  Short ones are far from `copy_rate`.
    """
    copied = min(
        max(moved, _SHORTEST), _LONGEST
    )  # shorter ones take as long, longer ones as many times
    pairs = max(1, _COLD_BYTES // copied)
    halves = torch.zeros(pairs, 2, copied // 8, dtype=torch.int32, device=device())

    def copy_all() -> None:
        for source, target in halves:
            target.copy_(source)

    def negate_all() -> None:
        for source, target in halves:
            torch.neg(source, out=target)

    now, times = clock(), []
    for work in (copy_all, negate_all):
        replay = captured(work, "copies")
        seconds = []
        for _ in range(9):
            begin = now()
            replay()
            seconds.append(now() - begin)
        times.append(sorted(seconds[2:])[3])
    return 1e6 * min(times) / pairs * max(1, moved / copied)


def describe(benchmark: Any, moved_bytes: int | None = None, **extra: Any) -> None:
    """Attach what a reader of the result needs; call it after the measurement."""
    benchmark.extra_info.update(environment(), **extra)
    if moved_bytes is not None and benchmark.stats is not None:
        median = benchmark.stats.stats.median
        floor = moved_bytes / copy_rate()
        benchmark.extra_info.update(
            bytes=moved_bytes,
            gb_per_s=round(moved_bytes / median / 1e9, 1),
            copy_gb_per_s=round(copy_rate() / 1e9, 1),
            floor_ms=round(1e3 * floor, 4),
            of_floor=round(floor / median, 4),
        )


@cache
def environment() -> dict[str, str]:
    """Card, versions and commit."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return {
        "card": card or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "commit": _commit(),
    }


def _commit() -> str:
    root = Path(__file__).parents[1]
    marker = root / ".commit"  # where the tree travels without its history
    if marker.is_file():
        return marker.read_text().strip()
    command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
