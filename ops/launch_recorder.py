"""
Replays a launcher with the grids, numbers and addresses of one run: a CUDA graph, or the same on a CPU.

On the CPU a recording is the list of what was enqueued: kernels of Triton's interpreter and torch
operations on the tensors that they were given.  As in a CUDA graph, Python does not run again, results
land in the memory of the recorded run, and reading a value of a tensor is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from midstream.errors import ContractError

_READS_A_VALUE = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero")

Work = Callable[[], None]


def record(work: Work, device: torch.device) -> Work:
    """Run or capture `work`, which has run before, and return what replays it.

    Raises:
        ContractError: on the CPU, when `work` reads the value of a tensor.
        RuntimeError: on the GPU, when `work` waits for the device.
    """
    if device.type != "cuda":
        return _Recorder().record(work)
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


class _Recorder(TorchDispatchMode):
    """The work of one run, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._work: list[Work] = []
        self._in_kernel = False

    def record(self, work: Work) -> Work:
        launch = GridExecutor.__call__

        def run(executor: Any, *args: Any, **kwargs: Any) -> None:
            self._work.append(lambda: launch(executor, *args, **kwargs))
            self._in_kernel = True  # the interpreter moves its arguments with torch
            try:
                launch(executor, *args, **kwargs)
            finally:
                self._in_kernel = False

        GridExecutor.__call__ = run
        try:
            with self:
                work()
        finally:
            GridExecutor.__call__ = launch
        return self._replay

    def _replay(self) -> None:
        for step in self._work:
            step()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if name in _READS_A_VALUE and not self._in_kernel:
            raise ContractError(
                f"launcher: reads a value of a tensor ({name}), which a captured graph keeps for good; leave "
                "it on the device, or take it as an argument from the host"
            )
        result = func(*args, **kwargs)
        is_view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if not self._in_kernel and not is_view:
            self._work.append(lambda: _write_again(result, func(*args, **kwargs)))
        return result


def _write_again(kept: Any, new: Any) -> None:
    """Put new results where the recorded ones are; those of in-place operations are there already."""
    if isinstance(kept, Tensor):
        if kept is not new:
            kept.copy_(new)
    elif isinstance(kept, (tuple, list)):
        for one, other in zip(kept, new, strict=True):
            _write_again(one, other)
