"""Captures steps into CUDA graphs.  No other file that serves begins a capture."""

from __future__ import annotations

import logging
import traceback
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from midstream.errors import ContractError, MidstreamError
from midstream.graphs import driver
from midstream.graphs.captured import Addresses, Captured, Step, capture_whole

_log = logging.getLogger("midstream.graphs")


class CudaGraph:
    """One captured CUDA graph.  The owner replays on the stream that is current."""

    def __init__(self, graph: torch.cuda.CUDAGraph, name: str, memory_bytes: int) -> None:
        self.name = name
        self.memory_bytes = memory_bytes
        self.seconds = 0.0
        self.num_nodes = driver.num_nodes(graph.raw_cuda_graph())
        self._graph: torch.cuda.CUDAGraph | None = graph

    @property
    def raw(self) -> int:
        """The `cudaGraph_t`, for audits; valid until `release`."""
        return self._held().raw_cuda_graph()

    @property
    def is_released(self) -> bool:
        return self._graph is None

    def replay(self) -> None:
        self._held().replay()

    def release(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.reset()

    def _held(self) -> torch.cuda.CUDAGraph:
        if self._graph is None:
            raise ContractError(
                f"{self.name}: this graph was released, expected a live one; capture it again"
            )
        return self._graph


class GraphCapture:
    """Records on one stream of one device into one shared memory pool, whatever device is current.

    Warm-up runs use the same stream: what happens once (compilation, workspaces, lazy modules) happens
    there.  The first step is run twice before it is recorded, later ones once.  Nothing else may run on the
    device meanwhile; other threads may, on streams of their own.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self.device)
        self._pool: Any = None
        self._graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()
        self._open: torch.cuda.CUDAGraph | None = None
        self._reserved = 0  # bytes of the allocator when the open capture began
        self._warm_ups = 2

    def capture(self, step: Step, addresses: Addresses, name: str) -> Captured:
        """Run `step` to warm it up, record it, and return what replays it.

        Raises:
            ContractError: when a bound buffer moved (a graph would go on reading the old one), or when
                the step does what cannot be recorded, naming the line that did.
        """
        graph = capture_whole(self, step, addresses, name)
        _log.info(
            "captured %s: %d nodes, %.0f ms, %.1f MB",
            name, graph.num_nodes, 1e3 * graph.seconds, graph.memory_bytes / 1e6,
        )  # fmt: skip
        return graph

    @contextmanager
    def recording(self, name: str) -> Iterator[None]:
        """Make the device and the capture stream current, behind all work of the stream before."""
        with torch.cuda.device(self.device):
            outer = torch.cuda.current_stream()
            self._stream.wait_stream(outer)
            try:
                with torch.cuda.stream(self._stream):
                    yield from self._abandoning(name)
            finally:
                outer.wait_stream(self._stream)

    def _abandoning(self, name: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._abandon()
            place = traceback.extract_tb(error.__traceback__)[-1]
            traceback.clear_frames(error.__traceback__)  # their tensors would keep the memory
            torch.cuda.empty_cache()
            named = named_error(error, name, place)
            if named is None:
                raise
            raise named from error

    def warm_up(self, step: Step) -> None:
        """Run `step` on the capture stream; its memory goes back to the device."""
        for _ in range(self._warm_ups):
            step()
        self._warm_ups = 1
        self._stream.synchronize()
        torch.cuda.empty_cache()

    def begin(self) -> None:
        """Record what follows on the current stream, which is the one of `recording`."""
        if all(graph.is_released for graph in self._graphs):
            # torch never shares a pool again that the last graph has left
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._reserved = torch.cuda.memory_reserved(self.device)
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._open = graph

    def end(self, name: str) -> CudaGraph:
        """Stop recording."""
        assert self._open is not None, "end() without begin()"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # a piece may be
            self._open.capture_end()
        graph, self._open = self._open, None
        grown = torch.cuda.memory_reserved(self.device) - self._reserved
        captured = CudaGraph(graph, name, grown)
        self._graphs.add(captured)
        graph.instantiate()
        return captured

    def enqueuing(self, work: Step) -> Step:
        """`work` itself: launches on the current stream are in order."""
        return work

    def _abandon(self) -> None:
        """Stop recording and forget it; the memory goes back once nobody holds a tensor of it."""
        graph, self._open = self._open, None
        if graph is None:
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            try:
                graph.capture_end()
            except RuntimeError:
                # CUDA has dropped the capture, and torch stopped halfway: its pool and its generators still
                # count it.  An empty capture in its place lets torch go the whole way.
                driver.begin_capture(self._stream.cuda_stream)
                graph.capture_end()
        graph.reset()

    def release(self) -> None:
        """Release every graph and the pool, when the device is done with them."""
        torch.cuda.synchronize(self.device)
        for graph in list(self._graphs):
            graph.release()
        self._graphs.clear()
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()


def named_error(
    error: BaseException, name: str, place: traceback.FrameSummary
) -> ContractError | None:
    """What to raise instead of CUDA's "not permitted while capturing"; None where the error says enough."""
    says_enough = isinstance(error, (MidstreamError, torch.OutOfMemoryError))
    about_capture = isinstance(error, RuntimeError) and "captur" in str(error).lower()
    if says_enough or not about_capture:
        return None
    text = str(error).partition("\n")[0]
    return ContractError(
        f"{name}: capture failed in `{place.line}` ({place.filename}:{place.lineno}): {text}; expected "
        "work that is enqueued on the current stream and never waits; leave values on the device, and do "
        "copies from the host outside of the step"
    )
