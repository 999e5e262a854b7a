"""
Launches that may begin before the one in front of them has ended (programmatic dependent launch).

A kernel that calls `after_previous` may be scheduled while the kernel in front of it drains: its programs
then take their places and wait in this call until all of that kernel's writes are visible, so the gap
between two kernels shrinks.  From then on the next kernel may do the same.

Before the call a kernel may read what the one in front does not write, for no other can still be at work:
one that lets the next begin early has itself waited for all before it, and one that does not has ended.
So these rules make it safe to read the arguments of `READ_EARLY` before the call, and nothing else:

* A kernel that calls `after_previous` writes no page numbers, offsets or counts, and nothing before it.
* Whatever else writes them (`advance`, copies, torch's kernels) never lets the next kernel begin early.
* A caller's own kernel that lets the next begin early has waited before, and does not write them either.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl
from triton.runtime.driver import driver

READ_EARLY = ("offset", "read_page", "write_page")  # arguments of ops
_FIRST_ARCHITECTURE = 90  # compute capability times ten


@triton.jit
def after_previous(DEPENDENT: tl.constexpr):
    """Wait for the kernel in front, then let the one behind take its places."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def dependent_launch() -> dict[str, Any]:
    """Arguments of the launch of a kernel that has `DEPENDENT: tl.constexpr` and begins as said above."""
    if triton.knobs.runtime.interpret or not _is_known_to_the_gpu():
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}


@functools.cache
def _is_known_to_the_gpu() -> bool:
    target = driver.active.get_current_target()
    return target.backend == "cuda" and target.arch >= _FIRST_ARCHITECTURE
