"""Compile kernels for a GPU that is not there: launchers run, and what they launch is only compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.errors import TritonError
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


class _AbsentGPU:
    """Stands in for the CUDA driver: names the target, owns no device."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_device(self) -> int:
        return self._target.arch  # compiled kernels are remembered by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@dataclass(frozen=True, slots=True)
class Attempt:
    """A kernel that was compiled instead of launched."""

    kernel: str
    result: CompiledKernel | TritonError | RuntimeError
    seconds: float


@contextmanager
def compile_only(arch: int) -> Iterator[list[Attempt]]:
    """While active, launching a kernel only compiles it for sm_<arch>; yields the growing list.

    Replaces Triton's driver for good: a process that has entered here must not launch any more.
    """
    driver.set_active(_AbsentGPU(arch))
    launch = JITFunction.run
    attempts: list[Attempt] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        start = perf_counter()
        try:
            result = launch(self, *args, grid=grid, warmup=True, **kwargs)
        except (TritonError, RuntimeError) as error:  # RuntimeError: a compiler pass failed
            result = error
        attempts.append(Attempt(self.fn.__name__, result, perf_counter() - start))

    JITFunction.run = run
    try:
        yield attempts
    finally:
        JITFunction.run = launch
