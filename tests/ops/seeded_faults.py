"""
Break the kernels on purpose, one line at a time, and see that a test falls.

Works on a copy of the tree; every fault of `fault_list.FAULTS` replaces one piece of text, which must occur
exactly once, and runs the tests that ought to notice.  Exit status 1 when a fault went unnoticed, when its
text is gone, or when the unbroken tests fail.  Runs outside CI: about half a minute a fault.

    python tests/ops/seeded_faults.py                  # all of them, and docs/seeded-faults.md anew
    python tests/ops/seeded_faults.py sample ssd_step  # those of these files, table untouched
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from fault_list import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "seeded-faults.md"
TIME_LIMIT = 600  # seconds for the tests of one fault; a hanging kernel is noticed too


def main() -> int:
    faults = [f for f in FAULTS if not sys.argv[1:] or Path(f.file).stem in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place) / "tree"
        _copy(tree)
        tests = sorted({test for fault in faults for test in fault.tests})
        if _run(tree, tests, stop=False)[0]:
            print("the unbroken tests fail", *tests)
            return 1
        outcome = {fault: _try(tree, fault) for fault in faults}
    if not sys.argv[1:]:
        TABLE.write_text(_table(outcome))
    missed = [fault.name for fault, noticed in outcome.items() if not noticed]
    print(f"{len(faults)} faults, {len(missed)} unnoticed", *missed)
    return 1 if missed else 0


def _copy(tree: Path) -> None:
    """The working tree as it is, without what git ignores."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout
    tree.mkdir()
    copy = ["cp", "--parents", "--no-dereference", "--target-directory", str(tree)]
    present = [n for n in names.decode().split("\0") if n and (ROOT / n).exists()]
    subprocess.run([*copy, *present], cwd=ROOT, check=True)


def _try(tree: Path, fault: Fault) -> str:
    """The test that noticed the fault; empty when none did."""
    path = tree / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        print(f"{fault.name}: {fault.old!r} occurs {text.count(fault.old)} times in {fault.file}")
        return ""
    path.write_text(text.replace(fault.old, fault.new))
    start = perf_counter()
    try:
        status, noticed = _run(tree, list(fault.tests), stop=True)
    finally:
        path.write_text(text)
    found = noticed if status == 1 else "time limit" if status == 124 else ""
    print(f"{fault.name:44} {perf_counter() - start:5.0f} s  {found or 'UNNOTICED'}", flush=True)
    return found


def _run(tree: Path, tests: list[str], stop: bool) -> tuple[int, str]:
    """Exit status of pytest, 124 after the time limit, and the first test that failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rf", *tests]
    env = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command + ["-x"] * stop,
            cwd=tree, env=env, capture_output=True, text=True, timeout=TIME_LIMIT if stop else None,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 124, ""
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED")]
    if done.returncode not in (0, 1):
        print(done.stdout[-2000:], done.stderr[-2000:])
    return done.returncode, failed[0] if failed else ""


def _table(outcome: dict[Fault, str]) -> str:
    """docs/seeded-faults.md."""
    lines = [
        "# Faults that were put into the kernels on purpose",
        "",
        "Each was one line in a copy of the tree; the last column is the first test that fell.",
        "`python tests/ops/seeded_faults.py` repeats it and writes this table.",
        "",
        "| file | fault | noticed by |",
        "|---|---|---|",
    ]
    for fault, noticed in outcome.items():
        test = noticed.removeprefix("tests/ops/").replace("|", "\\|")
        lines.append(f"| {fault.file} | {fault.name} | `{test or 'nothing'}` |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
