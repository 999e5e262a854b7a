"""
Launches that may begin before the one in front of them has ended (programmatic dependent launch).

A kernel that calls `after_previous` first may be scheduled while the kernel in front of it drains: its
programs then take their places and wait there until all of that kernel's writes are visible, so the
gap between two kernels shrinks.  It must touch no memory before: the numbers that it reads may be what
is being written.  From then on the next kernel may do the same.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl
from triton.runtime.driver import driver

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
