"""
The nodes of a captured CUDA graph with every device address among their arguments, read through the driver.

Kernels of torch pass structures by value, so any aligned word of an argument that lies inside a segment of
torch's allocator counts as an address: words of a structure that the kernel does not use may hold what lay
there before, and then show as an address without an owner.  Memory that others allocated is not seen.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from midstream.graphs import driver

_KERNEL, _COPY, _FILL = 0, 1, 2  # CUgraphNodeType
_WORD = 8
_MOST_ARGUMENTS = 4096


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One node."""

    name: str
    addresses: tuple[int, ...]  # device addresses among its arguments
    is_readable: bool  # whether its arguments could be read


@dataclass(frozen=True, slots=True)
class Segment:
    """Device memory that torch's allocator took from the driver."""

    begin: int
    end: int
    is_of_graphs: bool  # in a private pool: memory that captures took


class _KernelParams(ctypes.Structure):  # CUDA_KERNEL_NODE_PARAMS_v2
    _fields_ = (
        ("func", ctypes.c_void_p),
        ("shape", ctypes.c_uint * 7),
        ("kernel_params", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    )


class _CopySide(ctypes.Structure):
    _fields_ = (
        ("place", ctypes.c_size_t * 4),
        ("memory_type", ctypes.c_int),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("reserved", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t * 2),
    )


class _CopyParams(ctypes.Structure):  # CUDA_MEMCPY3D
    _fields_ = (("source", _CopySide), ("target", _CopySide), ("extent", ctypes.c_size_t * 3))


class _FillParams(ctypes.Structure):  # CUDA_MEMSET_NODE_PARAMS
    _fields_ = (("target", ctypes.c_uint64), ("rest", ctypes.c_uint64 * 8))


def segments() -> list[Segment]:
    """All segments of torch's allocator, ascending."""
    found = torch.cuda.memory_snapshot()
    return sorted(
        (
            Segment(
                segment["address"],
                segment["address"] + segment["total_size"],
                tuple(segment["segment_pool_id"]) != (0, 0),
            )
            for segment in found
        ),
        key=lambda segment: segment.begin,
    )


def find_segment(address: int, ascending: Sequence[Segment]) -> Segment | None:
    """The segment that holds an address.

    >>> found = [Segment(100, 200, False), Segment(300, 400, True)]
    >>> [find_segment(n, found) == s for n, s in ((99, None), (100, found[0]), (200, None), (399, found[1]))]
    [True, True, True, True]
    """
    place = bisect_right(ascending, address, key=lambda segment: segment.begin) - 1
    if place < 0 or address >= ascending[place].end:
        return None
    return ascending[place]


def nodes_of(graph: int, ascending: Sequence[Segment]) -> list[GraphNode]:
    """Nodes of a `CUgraph`, as `CudaGraph.raw` gives it."""
    return [_node(handle, ascending) for handle in _handles(graph)]


def _handles(graph: int) -> list[int]:
    count = ctypes.c_size_t(driver.num_nodes(graph))
    handles = (ctypes.c_void_p * count.value)()
    _call("cuGraphGetNodes", ctypes.c_void_p(graph), handles, ctypes.byref(count))
    return [handle or 0 for handle in handles]


def _node(handle: int, ascending: Sequence[Segment]) -> GraphNode:
    kind = ctypes.c_int()
    _call("cuGraphNodeGetType", ctypes.c_void_p(handle), ctypes.byref(kind))
    if kind.value == _KERNEL:
        return _kernel(handle, ascending)
    if kind.value == _COPY:
        copy = _CopyParams()
        _call("cuGraphMemcpyNodeGetParams", ctypes.c_void_p(handle), ctypes.byref(copy))
        words = (copy.source.device, copy.target.device)
        return GraphNode("copy", _inside(words, ascending), True)
    if kind.value == _FILL:
        fill = _FillParams()
        _call("cuGraphMemsetNodeGetParams", ctypes.c_void_p(handle), ctypes.byref(fill))
        return GraphNode("fill", _inside((fill.target,), ascending), True)
    return GraphNode(f"node of type {kind.value}", (), True)


def _kernel(handle: int, ascending: Sequence[Segment]) -> GraphNode:
    params = _KernelParams()
    _call("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(handle), ctypes.byref(params))
    name = _name(params)
    if not params.kernel_params:
        return GraphNode(name, (), False)
    words: list[int] = []
    for place in range(_MOST_ARGUMENTS):
        size = _argument_size(params, place)
        if size is None:
            if not place:
                return GraphNode(name, (), False)
            break
        at = params.kernel_params[place]
        if at is not None:
            raw = ctypes.string_at(at, size - size % _WORD)
            words += (ctypes.c_uint64 * (len(raw) // _WORD)).from_buffer_copy(raw)
    return GraphNode(name, _inside(words, ascending), True)


def _inside(words: Sequence[int], ascending: Sequence[Segment]) -> tuple[int, ...]:
    return tuple(word for word in words if find_segment(word, ascending) is not None)


def _argument_size(params: _KernelParams, place: int) -> int | None:
    """Bytes of an argument, None behind the last."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    name, function = _of_function("GetParamInfo", params)
    code = getattr(driver.library(), name)(
        function, ctypes.c_size_t(place), ctypes.byref(offset), ctypes.byref(size)
    )
    return None if code else size.value


def _name(params: _KernelParams) -> str:
    text = ctypes.c_char_p()
    name, function = _of_function("GetName", params)
    _call(name, ctypes.byref(text), function)
    mangled = (text.value or b"?").decode()
    return str(torch._C._demangle(mangled))


def _of_function(suffix: str, params: _KernelParams) -> tuple[str, ctypes.c_void_p]:
    """A driver call for whichever of the two handles of a kernel is set."""
    if params.func:
        return f"cuFunc{suffix}", ctypes.c_void_p(params.func)
    return f"cuKernel{suffix}", ctypes.c_void_p(params.kern)


def _call(name: str, *args: object) -> None:
    code = getattr(driver.library(), name)(*args)
    if code:
        raise RuntimeError(
            f"CUDA driver: {name} gave error {code}; its meaning is in cuda.h under CUresult"
        )
