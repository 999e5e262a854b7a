"""
Compile every Triton kernel for the target GPUs, without one.

What it does: runs the launchers of all ops on CPU tensors; instead of being launched, a kernel is compiled.
The first, largest, widest, worst and best aligned cases, in bf16 and fp32, are compiled for sm_90, with the
shared memory of a large GPU and with 99 KiB; the best aligned one is compiled for sm_100 too.  Then it reads
what the compiler made (ops/gate_rules.py has the rules and the exceptions) and compares it with the record
(tests/ops/kernels_triton_*.txt).
What it prints: one line per compiled kernel; then what failed.
Exit status: 1 when a kernel does not compile or breaks a rule, or when the record differs; 2 under
TRITON_INTERPRET, because the interpreter and the compiler cannot share a process.

    python -m midstream.ops.gates                       # all ops
    python -m midstream.ops.gates ssd_step kv_write     # some of them
    python -m midstream.ops.gates --all-cases kv_write  # and all of their cases, without the record
    python -m midstream.ops.gates --accept              # record what is compiled now
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
import triton

import midstream.ops
from midstream.errors import ConfigError
from midstream.ops.gate_rows import check_op
from midstream.ops.gate_rules import GateRow
from midstream.ops.kernel_golden import (
    Key,
    Values,
    differences,
    golden_path,
    read_golden,
    summary,
    write_golden,
)
from midstream.ops.registry import OPS

_PROCESSES = min(2, os.cpu_count() or 1)


def import_all_ops() -> None:
    """Import every module of `midstream.ops`, so that `OPS` is complete."""
    for module in pkgutil.iter_modules(midstream.ops.__path__):
        if module.name != "gates":
            importlib.import_module(f"midstream.ops.{module.name}")


def selected(names: list[str]) -> list[str]:
    """The named ops, or all of them.

    Raises:
        ConfigError: a name is no op.
    """
    unknown = sorted(set(names) - set(OPS))
    if unknown:
        raise ConfigError(f"gates: unknown ops {unknown}; known: {', '.join(sorted(OPS))}")
    return names or sorted(OPS)


def run_op(name: str, all_cases: bool) -> tuple[list[GateRow], list[str]]:
    """Check one op in a process that may know no ops yet."""
    import_all_ops()
    return check_op(OPS[name], all_cases)


def print_rows(rows: Iterable[GateRow]) -> None:
    """One line per kernel."""
    for row in rows:
        facts = row.facts
        print(
            f"sm_{row.arch:<4} {row.limit_bytes // 1024:4}K {row.op:24} {facts.kernel:24} {facts.warps:5} "
            f"{facts.registers:4} {facts.spill_bytes:5} {facts.shared_bytes:7} {facts.load_bytes:4} "
            f"{facts.store_bytes:5} {facts.wide_percent:4}% {row.seconds:4.1f}  {row.case}",
            flush=True,
        )


def compare(found: dict[Key, Values], names: set[str]) -> list[str]:
    """What differs from the record, as faults; of the named ops."""
    path = golden_path()
    golden = {key: values for key, values in read_golden(path).items() if key[2] in names}
    if not path.exists():
        print(f"no record of triton {triton.__version__}: {path.name} is made by --accept")
        return []
    lines = differences(golden, found)
    advice = f"{path.name} differs; look at each line, then run with --accept to record them"
    return [*lines, advice] if lines else []


def accept(found: dict[Key, Values], names: set[str]) -> None:
    """Record these kernels in place of all that are recorded of the named ops and of ops that are gone."""
    path = golden_path()
    kept = {k: v for k, v in read_golden(path).items() if k[2] in OPS and k[2] not in names}
    write_golden(path, kept | found)
    print(f"{path}: {len(found)} kernels recorded, {len(kept)} kept")


def main() -> int:
    """Run the gates; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ops", nargs="*")
    parser.add_argument("--all-cases", action="store_true")
    parser.add_argument("--accept", action="store_true")
    options = parser.parse_args()
    if triton.knobs.runtime.interpret:
        print(
            "gates: TRITON_INTERPRET is set, so kernels cannot be compiled; unset it",
            file=sys.stderr,
        )
        return 2
    import_all_ops()
    names = selected(options.ops)
    print(f"triton {triton.__version__} | torch {torch.__version__}")
    print(
        f"{'target':7} {'limit':5} {'op':24} {'kernel':24} warps regs spill  shared "
        "load store wide    s  case"
    )
    rows, faults = [], []
    with ProcessPoolExecutor(_PROCESSES, mp_context=get_context("spawn")) as pool:
        for made, wrong in pool.map(run_op, names, [options.all_cases] * len(names)):
            print_rows(made)
            rows += made
            faults += wrong
    found = summary(rows)
    if options.accept:
        accept(found, set(names))
    elif not options.all_cases:
        faults += compare(found, set(names))
    print(*faults, f"{len(faults)} faults", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
