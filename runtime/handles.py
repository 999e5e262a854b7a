"""What users hold of a request: its name, and the news of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from midstream.errors import ConfigError
from midstream.runtime.request import Output


@dataclass(frozen=True, slots=True)
class Handle:
    """Names a request of an engine."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Update:
    """News of one request: a token that arrived, and the output when it was the last."""

    handle: Handle
    token_ids: tuple[int, ...]
    text: str | None
    output: Output | None


def id_of(handle: Any) -> int:
    """The number of a request.  Raises ConfigError for what is no handle."""
    if not isinstance(handle, Handle):
        raise ConfigError(
            f"Engine: {handle!r} is no handle; expected what `add` returned; keep it with the request"
        )
    return handle.request_id
