"""
Decides what the next step computes: who decodes, who gets a prompt chunk, who is admitted, who is preempted.

First come, first served within a priority.  Decoding rows go first (one token each), then prompts in
progress, then waiting requests; one that cannot move does not stop those behind it.  A request that needs
room takes it from live requests that come after it in order.
"""

from __future__ import annotations

import time
from bisect import insort

import numpy as np

from midstream.errors import CapacityError
from midstream.runtime.admission import Admission
from midstream.runtime.checkpoints import Checkpoints
from midstream.runtime.coordinator import Hit
from midstream.runtime.decoding import DecodePasses
from midstream.runtime.explain import look_back
from midstream.runtime.live import I32, LiveTable
from midstream.runtime.ownership import PageOwnership
from midstream.runtime.plan import Chunk, StepPlan, new_rows
from midstream.runtime.request import Phase, Request
from midstream.runtime.running import Running
from midstream.runtime.slots import SlotLayout


class Scheduler:
    """Owner of the live requests' order."""

    def __init__(
        self,
        live: LiveTable,
        layout: SlotLayout,
        ownership: PageOwnership,
        checkpoints: Checkpoints,
        admission: Admission,
        max_step_tokens: int,
    ) -> None:
        self.live = live
        self.layout = layout
        self.ownership = ownership
        self.checkpoints = checkpoints
        self.admission = admission
        self.max_step_tokens = max_step_tokens
        self.preempted: dict[
            int, Request
        ] = {}  # by lost epoch; a step in flight may hold its token
        self.num_preemptions = 0
        self.starting: Request | None = None  # gets its slot at this moment, or failed to
        self._running = Running(layout.num_slots)
        self._prefilling: list[Request] = []  # those of them that have known tokens left, in order
        self._pass = 0
        self._flight: StepPlan | None = None  # the latest step; over once it is committed or lost
        self._plans: list[StepPlan] = []  # whose rows are used again once they are over
        self._passes = DecodePasses(live, ownership, self._running, checkpoints.boundaries)

    @property
    def waiting(self) -> list[Request]:
        """The queue, in order."""
        return self.admission.waiting

    @property
    def running(self) -> list[Request]:
        """Requests in slots, in order."""
        return self._running.requests

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.admission.add(request)

    def drop(self, request: Request, keep: bool = False) -> None:
        """Forget a request, wherever it is.  Its pages go back; its row in a step in flight is void.

        `keep`: the answer is complete, so that its last state is worth keeping.
        """
        if request.phase is Phase.WAITING:
            self.admission.remove(request)
        elif request.phase is not Phase.FINISHED:
            self._leave_slot(request, set() if keep else None)
        request.phase = Phase.FINISHED

    def next_step(self) -> StepPlan | None:
        """The next step, or None when nothing can move now."""
        plan = StepPlan(self._take_rows())
        self._plans.append(plan)
        try:
            self._fill(plan)
        except BaseException:
            self.ownership.give_back(plan)
            raise
        if not plan.num_rows:
            self.ownership.give_back(plan)
            return None
        self._flight = plan
        return plan

    def _take_rows(self) -> I32:
        """Rows of a plan that is over, or new ones."""
        for place, plan in enumerate(self._plans):
            if plan.is_over:
                del self._plans[place]
                return plan.rows
        return new_rows(self.layout.num_slots)

    def _fill(self, plan: StepPlan) -> None:
        self._pass += 1
        preemptions = self.num_preemptions
        self._add_decoding(plan)
        budget = self.max_step_tokens - plan.num_rows
        for request in list(self._prefilling):
            # an earlier request of this loop may have taken the slot away
            if budget > 0 and request.phase is Phase.PREFILL:
                budget -= self._add_chunk(plan, request, budget)
        if budget > 0 and self.waiting and self.live.num_free:
            self._admit(plan, budget)
        if self.num_preemptions > preemptions:
            self._drop_lost_rows(plan)
        self._finish_plan(plan)

    def to_decode(self, request: Request) -> None:
        """The request's known tokens are scheduled; from the next step on it decodes."""
        request.phase = Phase.DECODE
        self._prefilling.remove(request)
        self.live.decodes[request.slot] = True

    # -- decode ---------------------------------------------------------------------------------

    def _add_decoding(self, plan: StepPlan) -> None:
        """A row for each decoding request, with the pages of its next token."""
        place, served = 0, -1
        while True:
            place = self._passes.add_rows(plan, place, served, self.max_step_tokens)
            if place == len(self.running):
                return
            request = self.running[place]
            self._serve(request, plan)
            served = place if request.slot >= 0 else -1

    def _serve(self, request: Request, plan: StepPlan) -> None:
        """Give a decoding request its pages where none is free, or take its slot away."""
        begin = int(self.live.computed[request.slot])
        if not self._make_room(request, begin, begin + 1, plan):
            self._preempt(request, plan)

    def _drop_lost_rows(self, plan: StepPlan) -> None:
        """Take out rows whose slots were lost to earlier requests."""
        kept = self.live.epoch[plan.slot] == plan.epoch
        num_kept = int(np.count_nonzero(kept))
        plan.rows[:, :num_kept] = plan.rows[:, : plan.num_rows][:, kept]
        plan.num_rows = num_kept

    # -- chunks ---------------------------------------------------------------------------------

    def _add_chunk(self, plan: StepPlan, request: Request, budget: int) -> int:
        """Schedule the next known tokens of a request; the number of tokens, 0 when there is no room."""
        checkpoints = self.checkpoints
        begin = int(self.live.computed[request.slot])
        known = len(request.prompt) + len(request.outputs)
        end = min(known, begin + budget)
        wanted = checkpoints.wanted(request, begin, end)
        end = checkpoints.end_of_chunk(begin, end, wanted)
        wanted = {position: guess for position, guess in wanted.items() if position <= end}
        kept = checkpoints.kept_by_request(wanted, end)
        if not self._make_room(request, begin, end, plan, len(kept)):
            return 0
        chunk = Chunk(request, request.epoch, begin, end, samples=end == known, wanted=wanted)
        plan.chunks.append(chunk)
        checkpoints.begin(chunk, kept)
        return end - begin

    # -- admission --------------------------------------------------------------------------------

    def _admit(self, plan: StepPlan, budget: int) -> None:
        for request, hit in self.admission.candidates(self._pass):
            self._start(request, hit)
            budget -= self._add_chunk(plan, request, budget)
            if budget <= 0 or not self.live.num_free:
                return

    def _start(self, request: Request, hit: Hit) -> None:
        """Put a waiting request into a slot, with the pages of its hit."""
        live, self.starting = self.live, request
        self._look_back(request, hit)
        slot = live.take(request, request.known_tokens(), hit.num_tokens)
        try:
            self.ownership.adopt(request, hit)
        except BaseException:
            self.ownership.release(request)
            live.release(request)
            raise
        self.admission.remove(request)
        request.phase = Phase.PREFILL
        self._running.add(request)
        insort(self._prefilling, request, key=lambda r: r.order)
        live.deltas.put(
            self.layout.admission(slot, hit.num_tokens, hit.state_page, request.sampling)
        )
        self.checkpoints.chains.enter(request)
        request.junction, request.boundaries = hit.junction, []
        self.starting = None

    def _look_back(self, request: Request, hit: Hit) -> None:
        """Count what the request found; what it found first is what it reports."""
        asked, is_on = request.num_known - 1, self.checkpoints.is_on
        lookup = look_back(self.ownership.index, request.hashes, hit, asked, is_on)
        self.admission.counters.count(lookup, request.lookup is not None)
        if request.lookup is None:
            request.admitted_at = time.perf_counter()
            request.lookup = lookup

    # -- room -------------------------------------------------------------------------------------

    def _make_room(
        self, request: Request, begin: int, end: int, plan: StepPlan, more: int = 0
    ) -> bool:
        """Grow the request, taking from what is kept and from later ones; False when that does not help."""
        while True:
            try:
                self.ownership.grow(request, begin, end, plan, more)
                return True
            except CapacityError:
                if self._flight is not None and self.ownership.give_up_endings(self._flight):
                    continue
                victim = self.running[-1]
                if victim.order <= request.order:
                    return False
                self._preempt(victim, plan)

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        """Take the slot and the pages away; the request starts again from a new lookup."""
        for chunk in plan.chunks:
            if chunk.request is request:
                self.ownership.give_back_exports(chunk)
        plan.chunks = [chunk for chunk in plan.chunks if chunk.request is not request]
        epoch = request.epoch
        self._leave_slot(request, plan.fresh)
        request.phase = Phase.WAITING
        request.preempted_in = self._pass
        self.num_preemptions += 1
        self.preempted[epoch] = request
        self.add(request)

    def _leave_slot(self, request: Request, unwritten: set[int] | None) -> None:
        """`unwritten`: state pages that nothing has written yet; None: keep no state of the request."""
        self.ownership.index.expected.end(request.epoch)
        if unwritten is not None:
            self.checkpoints.leave(request, self._flight, unwritten)
        self._running.remove(request)
        if request.phase is Phase.PREFILL:
            self._prefilling.remove(request)
        try:
            self.ownership.release(request)
        finally:
            self.live.release(request)

    # -- plan -------------------------------------------------------------------------------------

    def _finish_plan(self, plan: StepPlan) -> None:
        """Put the chunks in front of the decoding rows and advance the host's counters."""
        if plan.chunks:
            self._put_chunks_first(plan)
        due = self._passes.advance(plan)
        if plan.chunks and self.checkpoints.is_on:
            self.checkpoints.take_pages(plan, len(self.running))
        if due:
            self.checkpoints.at_boundaries(plan, due)

    def _put_chunks_first(self, plan: StepPlan) -> None:
        rows, num_chunks = plan.rows, len(plan.chunks)
        rows[:, num_chunks : num_chunks + plan.num_rows] = rows[:, : plan.num_rows]
        plan.num_rows += num_chunks
        for row, chunk in enumerate(plan.chunks):
            slot, num_new = chunk.request.slot, chunk.end - chunk.begin
            page = self.live.running_page[slot]
            rows[:, row] = slot, chunk.begin, num_new, chunk.samples, chunk.epoch, page, 0, 0
            if chunk.samples:
                self.to_decode(chunk.request)
