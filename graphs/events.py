"""What happened to recorded calls: counts, and one log line for the first of each reason."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

_log = logging.getLogger("midstream.graphs")


@dataclass(slots=True)
class Events:
    """Counters that several recorded calls may share."""

    num_recordings: int = 0
    num_replays: int = 0
    num_adoptions: int = 0  # calls whose state tensors were moved to where a recording binds them
    num_releases: int = 0  # recordings that made room for others
    recorded_again: Counter[str] = field(
        default_factory=Counter
    )  # why no recording of before would do
    eager: Counter[str] = field(
        default_factory=Counter
    )  # reason -> calls that ran without a recording

    @property
    def num_eager(self) -> int:
        return self.eager.total()

    def count_recording(self, name: str, reason: str) -> None:
        """A call was recorded, because of `reason`."""
        self.num_recordings += 1
        self.recorded_again[reason] += 1
        _log.info("%s: recorded: %s", name, reason)

    def count_adoption(self, name: str) -> None:
        """The state tensors of a call were moved."""
        if not self.num_adoptions:
            _log.info(
                "%s: state tensors of a new owner were moved to where recordings bind them", name
            )
        self.num_adoptions += 1

    def count_eager(self, name: str, reason: str) -> None:
        """A call ran without a recording."""
        if not self.eager[reason]:
            _log.warning("%s: a call runs without a recording: %s", name, reason)
        self.eager[reason] += 1
