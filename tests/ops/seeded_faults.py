"""
Break the kernels on purpose, one line at a time, and see that a test falls.

Works on copies of the tree; every fault of `fault_list.FAULTS` replaces one piece of text, which must occur
exactly once, and runs the tests that ought to notice.  The test that falls must pass without the fault.
Exit status 1 when a fault went unnoticed or its text is gone.  Runs outside CI: some five minutes.

    python tests/ops/seeded_faults.py                  # all of them, and docs/seeded-faults.md anew
    python tests/ops/seeded_faults.py sample ssd_step  # those of these files, table untouched
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from fault_list import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "seeded-faults.md"
WORKERS = 2
TIME_LIMIT = 600  # seconds for the tests of one fault; a hanging kernel is noticed too


def main() -> int:
    faults = [f for f in FAULTS if not sys.argv[1:] or Path(f.file).stem in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as place:
        trees: SimpleQueue[Path] = SimpleQueue()
        for worker in range(WORKERS):
            _copy(Path(place) / str(worker))
            trees.put(Path(place) / str(worker))
        with ThreadPoolExecutor(WORKERS) as pool:
            noticed = pool.map(lambda fault: _try(trees, fault), faults)
            outcome = dict(zip(faults, noticed, strict=True))
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


def _try(trees: SimpleQueue[Path], fault: Fault) -> str:
    """What noticed the fault; empty when nothing did."""
    text = (ROOT / fault.file).read_text()
    if text.count(fault.old) != 1:
        print(f"{fault.name}: {fault.old!r} occurs {text.count(fault.old)} times in {fault.file}")
        return ""
    tree = trees.get()
    path = tree / fault.file
    path.write_text(text.replace(fault.old, fault.new))
    try:
        found = _first_failure(tree, fault.tests)
    finally:
        path.write_text(text)
    if "::" in found and _first_failure(tree, (found,)):
        print(f"{fault.name}: {found} fails without the fault too")
        found = ""
    trees.put(tree)
    print(f"{fault.file:32} {fault.name:60} {found or 'UNNOTICED'}", flush=True)
    return found


def _first_failure(tree: Path, tests: tuple[str, ...]) -> str:
    """The first test that fails, or how the process ended otherwise; empty when all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rf", "-x", *tests]
    env = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=env, capture_output=True, text=True, timeout=TIME_LIMIT
        )
    except subprocess.TimeoutExpired:
        return "the time limit"
    if done.returncode < 0:
        return "a crash of the interpreter"
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED")]
    return failed[0] if failed else ""


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
