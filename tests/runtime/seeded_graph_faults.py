"""
Puts a fault of `graph_faults.FAULTS` into the engine of this process, and takes it out again.

A fault replaces pieces of text in the source of functions, each of which must occur exactly once.

    python tests/runtime/seeded_graph_faults.py     # all of them, and docs/graph-faults.md anew
"""

from __future__ import annotations
import __future__

import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_faults import FAULTS, Edit, Fault
from graph_oracles import run_oracles, run_oracles_without_capture

TABLE = Path(__file__).resolve().parents[2] / "docs" / "graph-faults.md"


@contextmanager
def seeded(fault: Fault) -> Iterator[None]:
    """The engine with a fault.  Raises LookupError where the text that it replaces is gone."""
    edits: dict[str, list[Edit]] = {}
    for edit in fault.edits:
        edits.setdefault(edit.target, []).append(edit)
    with pytest.MonkeyPatch.context() as patch:
        for target, some in edits.items():
            owner, name = _place(target)
            value = _rewritten(some, getattr(owner, name)) if some[0].old else eval(some[0].new)
            patch.setattr(owner, some[0].install_as or name, value)
        yield


def noticed_by(fault: Fault, oracles: Callable[[], None] = run_oracles) -> str:
    """What the oracles say of the engine with a fault; empty when they say nothing."""
    with seeded(fault), torch.random.fork_rng():
        try:
            oracles()
        except (NameError, AttributeError, SyntaxError, TypeError):
            raise  # the fault itself is written wrongly
        except Exception as error:
            return _said(error)
    return ""


def _place(target: str) -> tuple[Any, str]:
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(f"midstream.{module}")
    holder, _, name = path.rpartition(".")
    return (attrgetter(holder)(owner) if holder else owner), name


def _rewritten(edits: list[Edit], function: Any) -> Any:
    """The function with other text, in place of what it was defined with (decorators included)."""
    plain = inspect.unwrap(function.fget if isinstance(function, property) else function)
    source = textwrap.dedent(inspect.getsource(plain))
    for edit in edits:
        if source.count(edit.old) != 1:
            raise LookupError(
                f"{edit.target}: {edit.old!r} occurs {source.count(edit.old)} times, expected once; the code "
                "has changed: write the fault anew"
            )
        source = source.replace(edit.old, edit.new)
    flags = __future__.annotations.compiler_flag
    code = compile(source, f"<fault in {edits[0].target}>", "exec", flags, dont_inherit=True)
    made: dict[str, Any] = {}
    exec(code, plain.__globals__, made)
    return made[plain.__name__]


def _said(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if not text:  # a plain assert: the line that fell
        frame = inspect.getinnerframes(error.__traceback__)[-1]
        text = " ".join(frame.code_context or [""]).strip()
    return f"{type(error).__name__}: {text}"


def _table(outcome: dict[Fault, tuple[str, str]]) -> str:
    """docs/graph-faults.md."""
    unseen = sum(not plain for _, plain in outcome.values())
    lines = [
        "# Faults of captured steps that were put into the engine on purpose",
        "",
        "Each is a small change of the running code, on the model of what others have shipped: A padding and",
        "index buffers, B state of an earlier owner, D and F order of copies and results, G and H captured",
        "steps, R wishes of users. A mixed load on the CPU emulator of capture must notice every one, and",
        f"says nothing of the healthy engine; the tests do it all. {unseen} of {len(outcome)} do not show",
        "where the same load runs on the CPU without capture and without a queue (last column).",
        "`python tests/runtime/seeded_graph_faults.py` repeats it and writes this table.",
        "",
        "| group | place | fault | what the oracles said | without capture |",
        "|---|---|---|---|---|",
    ]
    for fault, (said, plain) in outcome.items():
        place = fault.edits[0].target.replace(":", " ")
        cell = _cell(said) or "nothing"
        lines.append(
            f"| {fault.group} | `{place}` | {fault.name} | {cell} | {'noticed' if plain else 'unseen'} |"
        )
    return "\n".join(lines) + "\n"


def _cell(said: str) -> str:
    """Fit for a table: without addresses of lists, and not too long."""
    return said[:110].replace("|", "\\|").replace("`", "'").strip()


def main() -> int:
    outcome = {}
    for fault in FAULTS:
        outcome[fault] = noticed_by(fault), noticed_by(fault, run_oracles_without_capture)
        print(f"{fault.group:4} {fault.name:70} {outcome[fault][0] or 'UNNOTICED'}", flush=True)
    TABLE.write_text(_table(outcome))
    missed = [fault.name for fault, (said, _) in outcome.items() if not said]
    print(f"{len(FAULTS)} faults, {len(missed)} unnoticed", *missed)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
