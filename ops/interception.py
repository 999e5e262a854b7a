"""
Lets one thread see every call of an op before it runs, e.g. to end a graph there.

While nobody looks, an op call costs one comparison more.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from midstream.errors import ContractError

Implementation = Callable[..., None]
Interceptor = Callable[[str, Implementation, tuple[Any, ...], dict[str, Any]], None]

_interceptor: Interceptor | None = None
_thread = 0  # whose calls it sees
_taking = threading.Lock()


@contextmanager
def intercepting(interceptor: Interceptor) -> Iterator[None]:
    """Inside the block, op calls of this thread go to `interceptor(name, implementation, args, kwargs)`.

    It decides whether and when to call the implementation.  Other threads are not affected.
    Raises:
        ContractError: inside of another such block of the same thread.
    """
    global _interceptor, _thread
    if _thread == threading.get_ident():
        raise ContractError(
            "intercepting: op calls of this thread are intercepted already, expected one interceptor; leave "
            "the outer block first"
        )
    with _taking:  # captures of other threads wait for their turn
        _thread, _interceptor = threading.get_ident(), interceptor
        try:
            yield
        finally:
            _thread, _interceptor = 0, None


def interceptable(name: str, implementation: Implementation) -> Implementation:
    """`implementation`, whose calls `intercepting` sees under `name`."""

    @functools.wraps(implementation)
    def call(*args: Any, **kwargs: Any) -> None:
        seen = _interceptor
        if seen is None or _thread != threading.get_ident():
            implementation(*args, **kwargs)
        else:
            seen(name, implementation, args, kwargs)

    return call
