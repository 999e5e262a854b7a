"""Keeps recorded calls of one device in order when the current stream changes between them."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


class StreamOrder:
    """Recordings share memory, so the work of one call must end before that of the next begins."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._last: torch.cuda.Stream | None = None
        self._last_raw: int | None = None

    def enter(self) -> int:
        """Let the current stream wait for the calls before; its number."""
        if self.device.type != "cuda":
            return 0
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)
        if raw != self._last_raw:
            stream = torch.cuda.current_stream(self.device)
            if self._last is not None:
                stream.wait_stream(self._last)
            self._last, self._last_raw = stream, raw
        return raw

    def device_guard(self) -> AbstractContextManager[object] | None:
        """What makes the device current; None where it is."""
        if self.device.type != "cuda" or torch.cuda.current_device() == self.device.index:
            return None
        return torch.cuda.device(self.device)


_orders: dict[torch.device, StreamOrder] = {}


def order_of(device: torch.device) -> StreamOrder:
    """The one order of a device."""
    return _orders.setdefault(device, StreamOrder(device))
