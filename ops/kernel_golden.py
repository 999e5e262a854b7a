"""
The recorded facts of all compiled kernels, and what differs from them.

One text file per release of Triton, one kernel a line, sorted; a change of a kernel shows as a changed
line.  Spills, warps and access widths must be equal.  Registers and shared memory may shrink, and grow by
MORE_REGISTERS and by an eighth; the share of wide accesses may grow, and shrink by LESS_WIDE points.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import triton

from midstream.ops.gate_rules import GateRow

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "ops"
MORE_REGISTERS = 16
LESS_WIDE = 5  # percent of the bytes

Key = tuple[str, ...]  # target, shared memory limit, op, kernel, case
Values = tuple[int, ...]  # in the order of _COLUMNS

_COLUMNS = ("warps", "registers", "spilled", "shared", "load", "store", "wide%")
_HEAD = f"# target limit op kernel case | {' '.join(_COLUMNS)}"


def golden_path() -> Path:
    """The file of the installed release of Triton; in a checkout only."""
    return FOLDER / f"kernels_triton_{triton.__version__.replace('.', '_')}.txt"


def summary(rows: Iterable[GateRow]) -> dict[Key, Values]:
    """What is recorded of each kernel.  Kernels launched twice by a case are numbered."""
    found: dict[Key, Values] = {}
    for row in rows:
        facts, turn = row.facts, 1
        name = facts.kernel
        place = (f"sm_{row.arch}", f"{row.limit_bytes // 1024}K", row.op)
        while (*place, name, row.case) in found:
            turn += 1
            name = f"{facts.kernel}#{turn}"
        found[*place, name, row.case] = (
            facts.warps, facts.registers, facts.spill_bytes, facts.shared_bytes,
            facts.load_bytes, facts.store_bytes, facts.wide_percent,
        )  # fmt: skip
    return found


def read_golden(path: Path) -> dict[Key, Values]:
    """The recorded kernels; none where there is no file."""
    if not path.exists():
        return {}
    lines = [line for line in path.read_text().splitlines() if line and line[0] != "#"]
    halves = [line.split(" | ") for line in lines]
    return {tuple(key.split()): tuple(map(int, values.split())) for key, values in halves}


def write_golden(path: Path, kernels: Mapping[Key, Values]) -> None:
    """Replace the file."""
    lines = [f"{' '.join(key)} | {' '.join(map(str, kernels[key]))}" for key in sorted(kernels)]
    path.write_text("\n".join((_HEAD, *lines, "")))


def differences(golden: Mapping[Key, Values], found: Mapping[Key, Values]) -> list[str]:
    """Readable lines, one per kernel that is new, gone or out of bounds."""
    lines = []
    for key in sorted(golden.keys() | found.keys()):
        name = " ".join(key)
        if key not in found:
            lines.append(f"- {name}: recorded, but not compiled any more")
        elif key not in golden:
            lines.append(f"+ {name}: compiled, but not recorded")
        elif changed := _changes(golden[key], found[key]):
            lines.append(f"! {name}: {', '.join(changed)}")
    return lines


def _changes(golden: Values, found: Values) -> list[str]:
    texts = []
    for name, before, now in zip(_COLUMNS, golden, found, strict=True):
        if name == "registers":
            fine = now <= before + MORE_REGISTERS
        elif name == "shared":
            fine = now <= before + before // 8
        elif name == "wide%":
            fine = now >= before - LESS_WIDE
        else:
            fine = now == before
        if not fine:
            texts.append(f"{name} {before} -> {now}")
    return texts
