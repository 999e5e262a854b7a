"""Ctrl-C between two turns of the engine, never inside one: books and pages are whole when it is raised."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold SIGINT back until the block ends; a second one gets through at once.

    Only the main thread may touch signal handlers; in other threads nothing is held back.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[tuple[Any, ...]] = []

    def hold(*args: Any) -> None:
        held.append(args)
        if len(held) > 1:
            handler(*args)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if len(held) == 1:
        handler(*held[0])
