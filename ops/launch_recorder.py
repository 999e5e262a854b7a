"""Replays a launcher with the grids, numbers and addresses of one run: a CUDA graph, or a tape on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from midstream.ops.tape_recorder import tape_of

Work = Callable[[], None]


def record(work: Work, device: torch.device) -> Work:
    """Run or capture `work`, which has run before, and return what replays it.

    Raises:
        ContractError: on the CPU, when `work` reads the value of a tensor.
        RuntimeError: on the GPU, when `work` waits for the device.
    """
    if device.type != "cuda":
        return tape_of(work).replay
    with _no_waiting():
        work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


@contextmanager
def _no_waiting() -> Iterator[None]:
    """An error that capture would raise too, but here it leaves no half-captured graph."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
