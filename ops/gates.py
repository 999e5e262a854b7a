"""
Compile every Triton kernel for the target GPU, without one.

What it does: runs the launchers of all ops on their first and their two largest cases, in bf16 and
fp32, on CPU tensors; instead of being launched, a kernel is compiled for sm_90.
What it prints: one line per compiled kernel with the registers of a thread, the bytes that a thread
spills and the shared memory of a block; then what failed.
Exit status: 1 when a kernel does not compile, spills, or wants more shared memory than a block has;
2 under TRITON_INTERPRET, because the interpreter and the compiler cannot share a process.

    python -m midstream.ops.gates                       # all ops
    python -m midstream.ops.gates ssd_step kv_write     # some of them
    python -m midstream.ops.gates --all-cases kv_write  # and all of their cases
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from time import perf_counter
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.errors import TritonError
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import midstream.ops
from midstream.errors import ConfigError
from midstream.ops.registry import OPS, OpCase, OpSpec
from midstream.ops.testing import build_args

TARGET = GPUTarget("cuda", 90, 32)
MAX_SHARED_BYTES = 227 * 1024  # of one block on sm_90
DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one compiled kernel takes from the GPU."""

    op: str
    kernel: str
    case: str  # the first case that needed it
    warps: int
    registers: int  # of a thread
    spill_bytes: int  # of a thread
    shared_bytes: int  # of a block
    seconds: float

    def faults(self) -> list[str]:
        """Why this kernel must not ship."""
        found = []
        if self.spill_bytes:
            found.append(
                f"spills {self.spill_bytes} bytes a thread; use smaller tiles or more warps"
            )
        if self.shared_bytes > MAX_SHARED_BYTES:
            found.append(
                f"wants {self.shared_bytes} bytes of shared memory, a block has {MAX_SHARED_BYTES}"
            )
        return [f"{self.op}: {self.kernel} of {self.case} {fault}" for fault in found]


class _CompileOnlyDriver:
    """Stands in for the CUDA driver: names the target, owns no device."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET


@dataclass(frozen=True, slots=True)
class Attempt:
    """A kernel that was compiled instead of launched."""

    kernel: str
    result: CompiledKernel | TritonError | RuntimeError
    seconds: float


@contextmanager
def compile_only() -> Iterator[list[Attempt]]:
    """While active, launching a kernel only compiles it; yields the growing list of attempts."""
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


def check_op(spec: OpSpec, cases: tuple[OpCase, ...]) -> tuple[list[Compiled], list[str]]:
    """Compile an op's kernels for these cases; returns what compiled and what is wrong."""
    compiled: dict[str, Compiled] = {}
    faults: list[str] = []
    for case, dtype in product(cases, DTYPES):
        label = f"{case.id}-{str(dtype).removeprefix('torch.')}"
        with compile_only() as attempts:
            spec.launch(**build_args(case, dtype, torch.device("cpu")))
        for attempt in attempts:
            if not isinstance(attempt.result, CompiledKernel):
                what = f"{attempt.kernel} of {label} does not compile: {attempt.result}"
                faults.append(f"{spec.name}: {what}")
            elif attempt.result.hash not in compiled:
                row = _measure(spec.name, label, attempt, attempt.result)
                compiled[attempt.result.hash] = row
                faults += row.faults()
    return list(compiled.values()), faults


def _measure(op: str, case: str, attempt: Attempt, compiled: CompiledKernel) -> Compiled:
    registers, stack_bytes = resource_usage(compiled.asm["cubin"])
    warps, shared_bytes = compiled.metadata.num_warps, compiled.metadata.shared
    return Compiled(
        op, attempt.kernel, case, warps, registers, stack_bytes, shared_bytes, attempt.seconds
    )


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread; Triton kernels have no stack but for spilled registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = re.findall(r"REG:(\d+) STACK:(\d+)", text)
    return max(int(reg) for reg, _ in used), max(int(stack) for _, stack in used)


def telling_cases(spec: OpSpec) -> tuple[OpCase, ...]:
    """The base case and the two with the largest inputs."""

    def elements(case: OpCase) -> int:
        args = build_args(case, torch.float32, torch.device("cpu"))
        return sum(value.numel() for value in args.values() if isinstance(value, torch.Tensor))

    largest = sorted(spec.cases, key=elements)[-2:]
    return tuple({case.id: case for case in (spec.cases[0], *largest)}.values())


def import_all_ops() -> None:
    """Import every module of `midstream.ops`, so that `OPS` is complete."""
    for module in pkgutil.iter_modules(midstream.ops.__path__):
        if module.name != "gates":
            importlib.import_module(f"midstream.ops.{module.name}")


def selected(names: list[str]) -> list[OpSpec]:
    """The named ops, or all of them.

    Raises:
        ConfigError: a name is no op.
    """
    unknown = sorted(set(names) - set(OPS))
    if unknown:
        raise ConfigError(f"gates: unknown ops {unknown}; known: {', '.join(sorted(OPS))}")
    return [OPS[name] for name in names or sorted(OPS)]


def main() -> int:
    """Run the gates; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ops", nargs="*")
    parser.add_argument("--all-cases", action="store_true")
    options = parser.parse_args()
    if triton.knobs.runtime.interpret:
        print(
            "gates: TRITON_INTERPRET is set, so kernels cannot be compiled; unset it",
            file=sys.stderr,
        )
        return 2
    driver.set_active(_CompileOnlyDriver())  # for good: this process never launches
    import_all_ops()
    print(f"target sm_{TARGET.arch} | triton {triton.__version__} | torch {torch.__version__}")
    print(f"{'op':24} {'kernel':24} warps  regs spill  shared    s  case")
    faults = []
    for spec in selected(options.ops):
        rows, found = check_op(spec, spec.cases if options.all_cases else telling_cases(spec))
        faults += found
        for row in rows:
            print(
                f"{row.op:24} {row.kernel:24} {row.warps:5} {row.registers:5} {row.spill_bytes:5} "
                f"{row.shared_bytes:7} {row.seconds:4.1f}  {row.case}",
                flush=True,
            )
    print(*faults, f"{len(faults)} faults", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
