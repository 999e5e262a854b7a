"""What users hold of a request: its name, and the news of it."""

from __future__ import annotations

from dataclasses import dataclass, field

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
