"""Capture of one callable into a CUDA graph.  No other file that serves names `torch.cuda.graph`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from midstream.errors import ContractError

Replay = Callable[[], None]

_WARM_UPS = 2  # runs before capture: compilation, workspaces and autotuning happen here

_log = logging.getLogger("midstream.graphs")


class GraphCapture:
    """Captures on one stream into one shared memory pool.

    The owner replays on the stream that is current; captures happen while nothing else runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def capture(
        self, step: Callable[[], None], addresses: Callable[[], Mapping[str, int]], name: str
    ) -> Replay:
        """Run `step` to warm it up, record it, and return what replays it.

        Args:
            step: enqueues work of fixed shapes on the current stream; must not wait for the device.
            addresses: of all buffers that the graph binds, by name.
        Raises:
            ContractError: when a bound buffer moved; a graph would go on reading the old one.
        """
        begin = time.perf_counter()
        before = dict(addresses())
        with torch.cuda.device(self.device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    step()
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                step()
            torch.cuda.current_stream().wait_stream(self._stream)
        check_addresses(before, addresses(), name)
        _log.info("captured %s in %.0f ms", name, 1e3 * (time.perf_counter() - begin))
        return graph.replay


def check_addresses(before: Mapping[str, int], after: Mapping[str, int], name: str) -> None:
    """Raise ContractError if a buffer moved between two looks."""
    moved = [key for key, address in after.items() if before.get(key) != address]
    if moved:
        raise ContractError(
            f"{name}: the buffers {', '.join(moved)} moved since they were bound; expected fixed addresses; "
            "write into them in place, or capture again"
        )
