"""Keeps other threads out of what only one can use at a time."""

from __future__ import annotations

import threading
from types import TracebackType

from midstream.errors import ContractError


class OneThread:
    """A context that one thread may be in, also several times at once; others are refused at once.

    Raises:
        ContractError: on entering, where another thread is inside.
    """

    def __init__(self, who: str, during: str, own: str) -> None:
        self._told = (
            f"{who}: a second thread called it during {during}, expected one thread at a time; give each "
            f"thread {own} of its own, or put a lock around their calls"
        )
        self._inside = threading.RLock()

    def __enter__(self) -> None:
        if not self._inside.acquire(blocking=False):
            raise ContractError(self._told)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._inside.release()
