"""
Gives pages to live requests and takes them back; every change of a block table becomes a delta.

A request owns the KV pages of its tokens and one running state page.  When the running column moves, or the
running page becomes a checkpoint, the request takes a new running page and the old one is only read by the
coming step: it goes to the plan's `released` list and is given back when that step is committed.  In cache
mode `all` the request keeps the pages of all its blocks to its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from midstream.errors import CapacityError
from midstream.runtime.coordinator import Hit
from midstream.runtime.live import I32, LiveTable
from midstream.runtime.pages import PagePool
from midstream.runtime.plan import Chunk, StepPlan
from midstream.runtime.prefix import PrefixIndex
from midstream.runtime.request import Request
from midstream.runtime.slots import SlotLayout


class PageOwnership:
    """Allocation for requests; knows pools and tables, no order and no budget."""

    def __init__(
        self,
        live: LiveTable,
        layout: SlotLayout,
        kv_pool: PagePool,
        state_pool: PagePool,
        index: PrefixIndex,
        kv_block: int,
        state_block: int,
        keeps_all: bool = False,
    ) -> None:
        """`keeps_all`: cache mode `all`."""
        self.live = live
        self.layout = layout
        self.kv_pool = kv_pool
        self.state_pool = state_pool
        self.index = index
        self.kv_block = kv_block
        self.state_block = state_block
        self.keeps_all = keeps_all

    def pages_by_pool(self) -> dict[str, dict[str, int]]:
        """Free, cached and owned pages of both pools."""
        return {
            name: {"free": pool.num_free, "cached": pool.num_cached, "owned": pool.num_owned}
            for name, pool in (("kv", self.kv_pool), ("state", self.state_pool))
        }

    def can_admit_any(self) -> bool:
        """False when not even a request of one token fits, whatever it hits."""
        return self.kv_pool.available >= 1 and self.state_pool.available >= 2

    def can_admit(self, hit: Hit, num_tokens: int) -> bool:
        """Whether `num_tokens` tokens, one more, and the state pages fit after holding the hit."""
        kv_new = -(-(num_tokens + 1) // self.kv_block) - len(hit.kv_pages)
        kv_cached = self.kv_pool.num_unheld(hit.kv_pages)
        kv_cached += int(hit.tail_page > 0 and self.kv_pool.refcount(hit.tail_page) == 0)
        state_new = 2
        if self.keeps_all:
            state_new = max(2, self._columns(num_tokens + 1) - self._columns(hit.num_tokens) + 1)
        state_cached = int(hit.state_page > 0 and self.state_pool.refcount(hit.state_page) == 0)
        return (
            self.kv_pool.available - kv_cached >= kv_new
            and self.state_pool.available - state_cached >= state_new
        )

    def adopt(self, request: Request, hit: Hit) -> None:
        """Hold the pages of a hit for a request that has just got a slot.

        What raises on the way leaves pages with the request: `release` gives them back.
        """
        self.index.hold(hit)
        request.resume_page, request.tail_page = hit.state_page, hit.tail_page
        self._enter_kv(request.slot, hit.kv_pages)
        if hit.tail_page:
            self._enter_kv(request.slot, self.kv_pool.take(1))

    def grow(self, request: Request, begin: int, end: int, plan: StepPlan, more: int = 0) -> None:
        """Give the request what computing tokens [begin, end) needs, and `more` state pages to keep.

        Raises:
            CapacityError: a pool is short; nothing was taken.
        """
        kv_needed = -(-end // self.kv_block) - int(self.live.num_kv_pages[request.slot])
        col = self._columns(end) - 1
        moves = self._moves(request, begin, col)
        if kv_needed > self.kv_pool.available or moves + more > self.state_pool.available:
            raise CapacityError(
                f"request {request.request_id}: needs {kv_needed} KV pages and {moves + more} state pages, "
                f"{self.kv_pool.available} and {self.state_pool.available} are available; preempt"
            )
        if kv_needed > 0:
            self._enter_kv(request.slot, self.kv_pool.take(kv_needed))
        if moves:
            self._move(request, begin, col, plan)
        if more:
            request.state_pages += self.state_pool.take(more)
        if request.tail_page:
            self._copy_tail(request, begin, plan)

    def hand_over_kv(self, slot: int, first: int, last: int) -> list[int]:
        """Take KV pages [first, last) out of a slot that is being left; the caller holds them."""
        pages = self.live.kv_pages(slot)
        rest = pages[:first] + pages[last:]
        self.live.kv_table[slot, : len(rest)] = rest
        self.live.num_kv_pages[slot] = len(rest)
        return pages[first:last]

    def release(self, request: Request) -> None:
        """Give back all that a request owns that is in a slot.  Published pages stay cached."""
        slot, live = request.slot, self.live
        # forget before releasing: whoever is interrupted and tries again releases nothing twice
        num_held = int(live.num_kv_pages[slot])
        kv_pages = np.empty(num_held + 1, np.int32)
        kv_pages[0], kv_pages[1:] = request.tail_page, live.kv_table[slot, :num_held]
        state_pages = [*request.state_pages, int(live.running_page[slot]), request.resume_page]
        live.num_kv_pages[slot] = live.running_page[slot] = 0
        request.state_pages = []
        request.resume_page = request.tail_page = 0
        self.kv_pool.release(kv_pages)
        self.state_pool.release(state_pages)

    def give_back(self, plan: StepPlan) -> None:
        """Release what only the plan holds, once its step is committed or given up; again is no harm."""
        plan.is_over = True
        for chunk in plan.chunks:
            self.give_back_exports(chunk)
        self.give_up_endings(plan)
        if plan.released:
            pages, plan.released = plan.released, []
            self.state_pool.release(pages)
        if plan.released_kv:
            pages, plan.released_kv = plan.released_kv, []
            self.kv_pool.release(pages)

    def give_back_exports(self, chunk: Chunk) -> None:
        """Release the pages of a chunk's checkpoints."""
        pages, chunk.export_page = chunk.export_page, []
        self.state_pool.release(pages)

    def give_up_endings(self, plan: StepPlan) -> bool:
        """Release what ended requests left behind; False when there is nothing."""
        if not plan.endings:
            return False
        endings, plan.endings = plan.endings, []
        for ending in endings:
            self.index.expected.end(ending.epoch)
            self.kv_pool.release(ending.kv_pages)
            self.state_pool.release(ending.state_page)
        return True

    def _columns(self, num_tokens: int) -> int:
        return -(-num_tokens // self.state_block)

    def _moves(self, request: Request, begin: int, col: int) -> bool:
        if not self.live.running_page[request.slot]:
            return True
        return bool(self.live.relocate[request.slot]) or col != self._columns(begin) - 1

    def _move(self, request: Request, begin: int, col: int, plan: StepPlan) -> None:
        slot, live = request.slot, self.live
        old, (page,) = int(live.running_page[slot]), self.state_pool.take(1)
        if old and live.relocate[slot]:
            # the same column may get the new page: name the old one outside of the table
            live.deltas.put({self.layout.index("resume_page", slot): old})
        live.relocate[slot] = False
        live.running_page[slot] = page
        live.deltas.put({self.layout.index("state_table", slot, col): page})
        self.moved(request, begin, old, page, plan)

    def moved_rows(self, moves: I32, plan: StepPlan) -> None:
        """The running pages of decoding requests moved: `moves` [2, n] has their slots and what they left."""
        live = self.live
        slots, left = moves.tolist()
        for slot, old in zip(slots, left, strict=True):
            request = live.request[slot]
            assert request is not None
            self.moved(request, int(live.computed[slot]), old, int(live.running_page[slot]), plan)

    def moved(self, request: Request, begin: int, old: int, page: int, plan: StepPlan) -> None:
        """The next tokens of a request, which stands at `begin`, go to `page`; `old` has been left."""
        plan.fresh.add(page)
        if old and self.keeps_all and begin % self.state_block == 0:
            request.state_pages.append(old)
        elif old:
            plan.released.append(old)
        if request.resume_page:
            plan.released.append(request.resume_page)
            request.resume_page = 0

    def _copy_tail(self, request: Request, begin: int, plan: StepPlan) -> None:
        """The first step of a request copies the KV page that others may go on writing."""
        page, request.tail_page = request.tail_page, 0
        plan.released_kv.append(page)
        target = int(self.live.kv_table[request.slot, begin // self.kv_block])
        plan.kv_copies.append((page, target))

    def _enter_kv(self, slot: int, pages: Sequence[int] | I32) -> None:
        """Append KV pages to a slot's table."""
        live = self.live
        first = int(live.num_kv_pages[slot])
        live.kv_table[slot, first : first + len(pages)] = pages
        live.num_kv_pages[slot] = first + len(pages)
        live.deltas.put_row(self.layout.index("kv_table", slot, first), pages)
