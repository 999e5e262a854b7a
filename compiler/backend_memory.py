"""What holds graph memory for compiled functions: one capturer for each device, and all recorded calls."""

from __future__ import annotations

import threading
import weakref

import torch

from midstream.graphs.capture import GraphCapture
from midstream.graphs.captured import Capturer
from midstream.graphs.emulator import EmulatedCapture
from midstream.graphs.recorded import RecordedCalls

_lock = threading.Lock()
_capturers: dict[torch.device, Capturer] = {}  # that of the CPU emulates
_recorded: weakref.WeakSet[RecordedCalls] = weakref.WeakSet()


def capturer_of(device: torch.device) -> Capturer:
    """The one capturer of a device; what it records shares one memory pool."""
    with _lock:
        if device not in _capturers:
            new = GraphCapture(device) if device.type == "cuda" else EmulatedCapture()
            _capturers[device] = new
        return _capturers[device]


def note_recorded(recorded: RecordedCalls) -> None:
    """`release_all` shall release these calls while they live."""
    with _lock:
        _recorded.add(recorded)


def release_all() -> None:
    """Release every recording and every pool."""
    with _lock:
        for recorded in list(_recorded):
            recorded.release()
        for capturer in _capturers.values():
            capturer.release()
