"""
Compiles plain Python functions for the host by Numba, with a cache that processes may share.

Numba replaces each cache file as a whole, but an entry is two files, an index and the code: two
processes that save at once can leave an index that names the other's code.  So one process at a time
reads or writes an entry, under a file lock next to it.  And Numba looks at a function's own file to see
whether an entry is stale; here helpers and constants come from other files of this folder too.

Where Numba is missing, or NUMBA_DISABLE_JIT is set, functions stay as they are: same results, slowly.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock

try:
    import numba
    from numba.core.caching import FunctionCache
    from numba.extending import register_jitable
except ImportError:
    numba = None
    FunctionCache = object

_F = TypeVar("_F", bound=Callable[..., object])
_log = logging.getLogger(__name__)

COMPILES = numba is not None and not numba.config.DISABLE_JIT


def inlined(function: _F) -> _F:
    """A helper of compiled functions; plain Python elsewhere."""
    return register_jitable(function) if COMPILES else function


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled at its first call for given types.

    It holds no interpreter lock and counts no references (`_nrt`): counts in a loop can take ten times
    as long as its work.  So it cannot allocate, which the compiler checks.
    """
    if not COMPILES:
        return function
    dispatcher = numba.njit(nogil=True, error_model="numpy", _nrt=False)(function)
    try:
        dispatcher._cache = SharedCache(function)  # what njit(cache=True) does with its own class
    except RuntimeError as error:  # no directory that can be written
        _log.info("%s is compiled anew in every process: %s", function.__name__, error)
    compiled_function: Callable[..., Any] = dispatcher
    return compiled_function


class SharedCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache of one function, with each entry read and written by one process at a time."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__(function)
        self._lock_path = Path(self.cache_path) / "midstream.lock"
        file = self._cache_file
        file._source_stamp = (file._source_stamp, sources_stamp(Path(__file__).parent))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        with FileLock(self._lock_path):
            return super().load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        with FileLock(self._lock_path):
            super().save_overload(sig, data)


@functools.cache
def sources_stamp(folder: Path) -> str:
    """Changes with any file that a compiled function may have taken code or constants from."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("host_*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
