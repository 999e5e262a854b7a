"""
What the device at hand offers to a block, for launchers that choose a configuration by it.

A launcher must have a configuration for SMALL_SHARED_BYTES, the least that supported GPUs offer;
`midstream.ops.gates` compiles every kernel for both limits and fails where one does not fit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL_SHARED_BYTES = 99 * 1024  # of one block on sm_86, sm_89 and sm_120
LARGE_SHARED_BYTES = 227 * 1024  # of one block on sm_90 and sm_100
_PROCESSORS_WITHOUT_DEVICE = 8  # of the interpreter: few, so that small inputs take every path

_assumed_bytes: int | None = None


def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that one block may use; asked once per device, then remembered."""
    if _assumed_bytes is not None:
        return _assumed_bytes
    return _device_limit(device) if device.type == "cuda" else LARGE_SHARED_BYTES


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of the device."""
    if device.type != "cuda":
        return _PROCESSORS_WITHOUT_DEVICE
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _device_limit(device: torch.device) -> int:
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin  # type: ignore[attr-defined]


def fitting_stages(device: torch.device, stage_bytes: int, wanted: int) -> int:
    """Most stages of a loop, at most `wanted` and at least 2, whose buffers fit into shared memory.

    Never 1: Triton 3.6 then addresses the operands of dots outside of the shared memory.
    """
    return max(2, min(wanted, shared_limit(device) // stage_bytes))


@contextmanager
def assumed_shared_limit(num_bytes: int) -> Iterator[None]:
    """While active, launchers choose as on a device with this limit."""
    global _assumed_bytes
    before, _assumed_bytes = _assumed_bytes, num_bytes
    try:
        yield
    finally:
        _assumed_bytes = before
