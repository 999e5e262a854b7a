"""
Gives pages to live requests and takes them back; every change of a block table becomes a delta.

A request owns the KV pages of its tokens and one running state page.  When the running column moves, or the
running page becomes a checkpoint, the request takes a new running page and the old one is only read by the
coming step: it goes to the plan's `released` list and is given back when that step is committed.
"""

from __future__ import annotations

from midstream.errors import CapacityError
from midstream.runtime.live import LiveTable
from midstream.runtime.pages import PagePool
from midstream.runtime.plan import StepPlan
from midstream.runtime.prefix import Hit, PrefixIndex
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
    ) -> None:
        self.live = live
        self.layout = layout
        self.kv_pool = kv_pool
        self.state_pool = state_pool
        self.index = index
        self.kv_block = kv_block
        self.state_block = state_block

    def can_admit_any(self) -> bool:
        """False when not even a request of one token fits, whatever it hits."""
        return self.kv_pool.available >= 1 and self.state_pool.available >= 2

    def can_admit(self, hit: Hit, num_tokens: int) -> bool:
        """Whether `num_tokens` tokens, one more, and two running pages fit after holding the hit."""
        kv_new = -(-(num_tokens + 1) // self.kv_block) - len(hit.kv_pages)
        kv_cached = sum(self.kv_pool.refcount(page) == 0 for page in hit.kv_pages)
        state_cached = int(hit.state_page > 0 and self.state_pool.refcount(hit.state_page) == 0)
        return (
            self.kv_pool.available - kv_cached >= kv_new
            and self.state_pool.available - state_cached >= 2
        )

    def adopt(self, request: Request, hit: Hit) -> None:
        """Hold the pages of a hit for a request that is about to get a slot."""
        self.index.hold(hit)
        request.kv_pages = list(hit.kv_pages)
        request.resume_page = hit.state_page

    def write_tables(self, request: Request, deltas: dict[int, int]) -> None:
        """Enter the adopted KV pages into the tables of the request's new slot."""
        self._enter("kv_table", request.slot, 0, request.kv_pages, deltas)

    def grow(self, request: Request, begin: int, end: int, plan: StepPlan) -> None:
        """Give the request what computing tokens [begin, end) needs.

        Raises:
            CapacityError: a pool is short; nothing was taken.
        """
        slot = request.slot
        col = -(-end // self.state_block) - 1
        first = len(request.kv_pages)
        kv_needed = -(-end // self.kv_block) - first
        moves = self._moves(request, begin, col)
        if kv_needed > self.kv_pool.available or moves > self.state_pool.available:
            raise CapacityError(
                f"request {request.request_id}: needs {kv_needed} KV pages and {int(moves)} state pages, "
                f"{self.kv_pool.available} and {self.state_pool.available} are available; preempt"
            )
        if kv_needed > 0:
            pages = self.kv_pool.take(kv_needed)
            request.kv_pages += pages
            self._enter("kv_table", slot, first, pages, plan.deltas)
        if moves:
            self._move(request, col, plan)

    def release(self, request: Request) -> None:
        """Give back all that the request owns.  Published pages stay cached."""
        # forget before releasing: whoever is interrupted and tries again releases nothing twice
        kv_pages, request.kv_pages = request.kv_pages, []
        state_pages = [request.running_page, request.resume_page]
        request.running_page = request.resume_page = 0
        self.kv_pool.release(kv_pages)
        self.state_pool.release(state_pages)

    def give_back(self, plan: StepPlan) -> None:
        """Release what only the plan holds, once its step is committed or given up; again is no harm."""
        for chunk in plan.chunks:
            pages, chunk.export_page = chunk.export_page, []
            self.state_pool.release(pages)
        pages, plan.released = plan.released, []
        self.state_pool.release(pages)

    def _moves(self, request: Request, begin: int, col: int) -> bool:
        if request.running_page == 0:
            return True
        return bool(self.live.relocate[request.slot]) or col != -(-begin // self.state_block) - 1

    def _move(self, request: Request, col: int, plan: StepPlan) -> None:
        slot, live = request.slot, self.live
        (page,) = self.state_pool.take(1)
        if request.running_page and live.relocate[slot]:
            # the same column may get the new page: name the old one outside of the table
            live.resume_page[slot] = request.running_page
            plan.deltas[self.layout.index("resume_page", slot)] = request.running_page
        live.relocate[slot] = False
        plan.released += [p for p in (request.running_page, request.resume_page) if p]
        request.running_page, request.resume_page = page, 0
        self._enter("state_table", slot, col, [page], plan.deltas)

    def _enter(
        self,
        table: str,
        slot: int,
        first_col: int,
        pages: list[int],
        deltas: dict[int, int],
    ) -> None:
        mirror = self.live.kv_table if table == "kv_table" else self.live.state_table
        mirror[slot, first_col : first_col + len(pages)] = pages
        start = self.layout.index(table, slot, first_col)
        deltas.update(zip(range(start, start + len(pages)), pages, strict=True))
