"""The decoding rows of a step: the passes of ops/host_decode.py, bound once to their arrays."""

from __future__ import annotations

from functools import partial

import numpy as np

from midstream.ops import host_decode
from midstream.runtime.live import I32, LiveTable
from midstream.runtime.ownership import PageOwnership
from midstream.runtime.plan import StepPlan
from midstream.runtime.running import Running


class DecodePasses:
    """Bound, because naming thirty arrays in each step would take longer than the passes over 256 rows."""

    def __init__(
        self,
        live: LiveTable,
        ownership: PageOwnership,
        running: Running,
        boundaries: tuple[int, int],
    ) -> None:
        """`boundaries`: states on multiples of either number are kept; 0 for none."""
        own, start, num_slots = ownership, ownership.layout.start, len(live.request)
        self.ownership = ownership
        self.running = running
        self._moves: I32 = np.zeros((2, num_slots), np.int32)
        self._due: I32 = np.zeros(num_slots, np.int32)
        self._tally: I32 = np.zeros(4, np.int32)
        self._plan = partial(
            host_decode.plan_decode, running.slots, live.slots, live.kv_table,
            live.deltas.table, live.deltas.count, start["kv_table"], start["state_table"],
            own.layout.widths["state_table"], start["resume_page"], own.kv_pool.books,
            own.state_pool.books, own.kv_block, own.state_block, *boundaries, self._moves, self._tally,
        )  # fmt: skip
        self._advance = partial(host_decode.advance_rows, live.slots, self._due, self._tally)

    def add_rows(self, plan: StepPlan, begin: int, served: int, most_rows: int) -> int:
        """A row for each running request from place `begin` on that decodes, with the pages of its token.

        Returns:
            The place of the first request that finds no free page.  The caller serves it, and goes on
            there with that as `served`.  The number of running requests when all have their rows.
        """
        end = len(self.running.requests)
        place: int = self._plan(begin, end, served, plan.rows, plan.num_rows, most_rows)
        plan.num_rows, num_moves, _, _ = self._tally.tolist()
        if num_moves:
            self.ownership.moved_rows(self._moves[:, :num_moves], plan)
        return place

    def advance(self, plan: StepPlan) -> list[int]:
        """Count the tokens of a whole plan; the slots whose states come to stand on a boundary."""
        self._advance(plan.rows, plan.num_rows, len(plan.chunks))
        _, _, num_due, plan.num_logprobs = self._tally.tolist()
        return self._due[:num_due].tolist() if num_due else []
