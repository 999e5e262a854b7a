"""
Gives pages to live requests and takes them back; every change of a block table becomes a delta.

A request owns the KV pages of its tokens and one running state page.  When the running column moves, or the
running page becomes a checkpoint, the request takes a new running page and the old one is only read by the
coming step: it goes to the plan's `released` list and is given back when that step is committed.  In cache
mode `all` the request keeps the pages of all its blocks to its end.
"""

from __future__ import annotations

from midstream.errors import CapacityError
from midstream.runtime.coordinator import Hit
from midstream.runtime.live import LiveTable
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

    def can_admit_any(self) -> bool:
        """False when not even a request of one token fits, whatever it hits."""
        return self.kv_pool.available >= 1 and self.state_pool.available >= 2

    def can_admit(self, hit: Hit, num_tokens: int) -> bool:
        """Whether `num_tokens` tokens, one more, and the state pages fit after holding the hit."""
        kv_new = -(-(num_tokens + 1) // self.kv_block) - len(hit.kv_pages)
        refcount = self.kv_pool.refcount
        kv_cached = sum(refcount(page) == 0 for page in hit.kv_pages)
        kv_cached += int(hit.tail_page > 0 and refcount(hit.tail_page) == 0)
        state_new = 2
        if self.keeps_all:
            state_new = max(2, self._columns(num_tokens + 1) - self._columns(hit.num_tokens) + 1)
        state_cached = int(hit.state_page > 0 and self.state_pool.refcount(hit.state_page) == 0)
        return (
            self.kv_pool.available - kv_cached >= kv_new
            and self.state_pool.available - state_cached >= state_new
        )

    def adopt(self, request: Request, hit: Hit) -> None:
        """Hold the pages of a hit for a request that is about to get a slot.

        What raises on the way leaves pages with the request: `release` gives them back.
        """
        self.index.hold(hit)
        request.kv_pages, request.resume_page, request.tail_page = (
            list(hit.kv_pages),
            hit.state_page,
            hit.tail_page,
        )
        if hit.tail_page:
            request.kv_pages += self.kv_pool.take(1)

    def write_tables(self, request: Request, deltas: dict[int, int]) -> None:
        """Enter the adopted KV pages into the tables of the request's new slot."""
        self._enter("kv_table", request.slot, 0, request.kv_pages, deltas)

    def grow(self, request: Request, begin: int, end: int, plan: StepPlan, more: int = 0) -> None:
        """Give the request what computing tokens [begin, end) needs, and `more` state pages to keep.

        Raises:
            CapacityError: a pool is short; nothing was taken.
        """
        first = len(request.kv_pages)
        kv_needed = -(-end // self.kv_block) - first
        col = self._columns(end) - 1
        moves = self._moves(request, begin, col)
        if kv_needed > self.kv_pool.available or moves + more > self.state_pool.available:
            raise CapacityError(
                f"request {request.request_id}: needs {kv_needed} KV pages and {moves + more} state pages, "
                f"{self.kv_pool.available} and {self.state_pool.available} are available; preempt"
            )
        if kv_needed > 0:
            request.kv_pages += self.kv_pool.take(kv_needed)
            pages = request.kv_pages[first:]
            self._enter("kv_table", request.slot, first, pages, plan.deltas)
        if moves:
            self._move(request, begin, col, plan)
        if more:
            request.state_pages += self.state_pool.take(more)
        if request.tail_page:
            self._copy_tail(request, begin, plan)

    def release(self, request: Request) -> None:
        """Give back all that the request owns.  Published pages stay cached."""
        # forget before releasing: whoever is interrupted and tries again releases nothing twice
        kv_pages, request.kv_pages = [request.tail_page, *request.kv_pages], []
        state_pages = [*request.state_pages, request.running_page, request.resume_page]
        request.state_pages = []
        request.running_page = request.resume_page = request.tail_page = 0
        self.kv_pool.release(kv_pages)
        self.state_pool.release(state_pages)

    def give_back(self, plan: StepPlan) -> None:
        """Release what only the plan holds, once its step is committed or given up; again is no harm."""
        plan.is_over = True
        for chunk in plan.chunks:
            self.give_back_exports(chunk)
        self.give_up_endings(plan)
        pages, plan.released = plan.released, []
        self.state_pool.release(pages)
        pages, plan.released_kv = plan.released_kv, []
        self.kv_pool.release(pages)

    def give_back_exports(self, chunk: Chunk) -> None:
        """Release the pages of a chunk's checkpoints."""
        pages, chunk.export_page = chunk.export_page, []
        self.state_pool.release(pages)

    def give_up_endings(self, plan: StepPlan) -> bool:
        """Release what ended requests left behind; False when there is nothing."""
        endings, plan.endings = plan.endings, []
        for ending in endings:
            self.kv_pool.release(ending.kv_pages)
            self.state_pool.release(ending.state_page)
        return bool(endings)

    def _columns(self, num_tokens: int) -> int:
        return -(-num_tokens // self.state_block)

    def _moves(self, request: Request, begin: int, col: int) -> bool:
        if request.running_page == 0:
            return True
        return bool(self.live.relocate[request.slot]) or col != self._columns(begin) - 1

    def _move(self, request: Request, begin: int, col: int, plan: StepPlan) -> None:
        slot, live, old = request.slot, self.live, request.running_page
        (request.running_page,) = self.state_pool.take(1)
        page = request.running_page
        plan.fresh.add(page)
        if old and live.relocate[slot]:
            # the same column may get the new page: name the old one outside of the table
            live.resume_page[slot] = old
            plan.deltas[self.layout.index("resume_page", slot)] = old
        live.relocate[slot] = False
        if old and self.keeps_all and begin % self.state_block == 0:
            request.state_pages.append(old)
        elif old:
            plan.released.append(old)
        if request.resume_page:
            plan.released.append(request.resume_page)
            request.resume_page = 0
        self._enter("state_table", slot, col, [page], plan.deltas)

    def _copy_tail(self, request: Request, begin: int, plan: StepPlan) -> None:
        """The first step of a request copies the KV page that others may go on writing."""
        page, request.tail_page = request.tail_page, 0
        plan.released_kv.append(page)
        plan.kv_copies.append((page, request.kv_pages[begin // self.kv_block]))

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
