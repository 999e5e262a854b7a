"""Ctrl-C between two turns of the engine, never inside one: books and pages are whole when it is raised."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # without the enumerations of `signal`, which take longer than a turn's own work
import threading
from signal import SIGINT
from typing import Any


class deferred_interrupt:
    """Hold SIGINT back until the block ends; a second one gets through at once.

    Only the main thread may touch signal handlers; in other threads nothing is held back.
    """

    __slots__ = ("_handler", "_held")

    def __enter__(self) -> None:
        self._held: list[tuple[Any, ...]] = []
        self._handler: Any = None
        if threading.get_ident() == threading.main_thread().ident:
            handler = _signal.getsignal(SIGINT)
            if callable(handler):
                self._handler = handler
                _signal.signal(SIGINT, self._hold)

    def __exit__(self, *exc: object) -> None:
        if self._handler is not None:
            _signal.signal(SIGINT, self._handler)
            if len(self._held) == 1 and exc[0] is None:
                self._handler(*self._held[0])

    def _hold(self, *args: Any) -> None:
        self._held.append(args)
        if len(self._held) > 1:
            self._handler(*args)
