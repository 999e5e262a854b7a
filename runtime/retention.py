"""
At which positions of a prompt a state is kept.

Always: the last two positions of the KV grid (one for the same prompt again, one for its continuation), the
last state block before the end (for a prompt that differs in its last words), the junction where others with
the same beginning part from it, and what the application marked.  Besides these:

    0        nothing
    n        every n tokens
    None     every state block
    "auto"   state blocks at powers of two, the largest eight up to the end of the prompt: whatever beginning
             a second request shares, half of it at least has a state; more than that once it was seen
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_MOST_GUESSES = 8  # checkpoints of a prompt that nobody asked for


@dataclass(frozen=True, slots=True)
class Retention:
    """`every`: what the table above says.

    >>> keep = Retention("auto", state_block=64, grid=16)
    >>> keep.positions(0, 1000, known=1000)
    {64: True, 128: True, 256: True, 512: True, 960: False, 992: False}
    >>> Retention(256, 64, 16).positions(300, 800, known=1000, marks=[301])
    {301: False, 512: False, 768: False}
    """

    every: str | int | None
    state_block: int
    grid: int

    def positions(
        self, begin: int, end: int, known: int, junction: int = 0, marks: Iterable[int] = ()
    ) -> dict[int, bool]:
        """Positions in (begin, end], ascending; True for a guess that nobody asked for.

        Args:
            known: tokens of the prompt, and of outputs that are computed again.
            junction: length of the beginning that others have without a state; 0 for none.
            marks: positions that the application wants.
        """
        grid, block = self.grid, self.state_block
        asked = {(known - 1) // grid * grid, known // grid * grid, (known - 1) // block * block}
        asked.update(marks)
        asked.add(junction)
        if self.interval:
            asked.update(
                range((begin // self.interval + 1) * self.interval, end + 1, self.interval)
            )
        guesses = self._guesses(known) - asked
        inside = sorted(p for p in asked | guesses if begin < p <= end)
        return {position: position in guesses for position in inside}

    @property
    def interval(self) -> int:
        """Tokens between states that stay, in answers too; 0: only the latest of an answer stays."""
        if self.every is None:
            return self.state_block
        return self.every if isinstance(self.every, int) else 0

    def _guesses(self, known: int) -> set[int]:
        if self.every != "auto" or known < self.state_block:
            return set()
        last = (known // self.state_block).bit_length() - 1
        first = max(0, last - _MOST_GUESSES + 1)
        return {self.state_block << power for power in range(first, last + 1)}
