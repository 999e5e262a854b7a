"""What users hold of a request: its name, and the news of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from midstream.errors import ConfigError
from midstream.runtime.request import Output


@dataclass(frozen=True, slots=True)
class Handle:
    """Names a request of an engine."""

    request_id: int
    engine: int | None = field(default=None, repr=False)  # its number; None: of whichever is asked


@dataclass(frozen=True, slots=True)
class Update:
    """News of one request: a token that arrived, and the output when it was the last."""

    handle: Handle
    token_ids: tuple[int, ...]
    text: str | None
    output: Output | None


def id_of(handle: Any, engine: int) -> int:
    """The number of a request.  Raises ConfigError for what is no handle of this engine."""
    if not isinstance(handle, Handle):
        raise ConfigError(
            f"Engine: {handle!r} is no handle; expected what `add` returned; keep it with the request"
        )
    if handle.engine not in (None, engine):
        raise ConfigError(
            f"Engine: {handle!r} is a handle of another engine; expected what `add` of this one returned; "
            "ask the engine that it came from"
        )
    return handle.request_id
