"""The calls of the CUDA driver that torch does not offer."""

from __future__ import annotations

import ctypes
from functools import cache

_THREAD_LOCAL = 1  # CUstreamCaptureMode


def num_nodes(graph: int) -> int:
    """Device operations of a `CUgraph`, as `CUDAGraph.raw_cuda_graph` gives it."""
    count = ctypes.c_size_t()
    _check(library().cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count)))
    return count.value


def begin_capture(stream: int) -> None:
    """Begin a capture on a raw stream that torch knows nothing of."""
    _check(library().cuStreamBeginCapture_v2(ctypes.c_void_p(stream), _THREAD_LOCAL))


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA driver: error {code}; its meaning is in cuda.h under CUresult")


@cache
def library() -> ctypes.CDLL:
    """The driver itself."""
    return ctypes.CDLL("libcuda.so.1")
