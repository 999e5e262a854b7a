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
from midstream.runtime.explain import look_back
from midstream.runtime.live import I32, LiveTable
from midstream.runtime.ownership import PageOwnership
from midstream.runtime.plan import Chunk, StepPlan
from midstream.runtime.request import Phase, Request
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
        self.running: list[Request] = []  # in slots, in order
        self.preempted: dict[
            int, Request
        ] = {}  # by lost epoch; a step in flight may hold its token
        self.num_preemptions = 0
        self._prefilling: list[Request] = []  # those of them that have known tokens left, in order
        self._decoding: I32 = np.zeros(0, np.int32)  # slots in decode, in order
        self._decoding_stale = False
        self._pass = 0
        self._unsent: dict[int, int] = {}  # deltas of passes that came to no step
        self._flight: StepPlan | None = None  # the latest step; over once it is committed or lost

    @property
    def waiting(self) -> list[Request]:
        """The queue, in order."""
        return self.admission.waiting

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
        plan = StepPlan.empty(self._unsent)
        try:
            plan_or_none = self._fill(plan)
        except BaseException:
            self.ownership.give_back(plan)
            raise
        if plan_or_none is not None:
            self._flight = plan
        return plan_or_none

    def _fill(self, plan: StepPlan) -> StepPlan | None:
        self._pass += 1
        rows = self._extend_decoding(plan)
        epoch = self.live.epoch[rows]
        budget = self.max_step_tokens - len(rows)
        for request in list(self._prefilling):
            # an earlier request of this loop may have taken the slot away
            if budget > 0 and request.phase is Phase.PREFILL:
                budget -= self._add_chunk(plan, request, budget)
        self._admit(plan, budget)
        kept = self.live.epoch[rows] == epoch  # the others lost their slots to earlier requests
        return self._finish_plan(plan, rows[kept])

    def to_decode(self, request: Request) -> None:
        """The request's known tokens are scheduled; from the next step on it decodes."""
        request.phase = Phase.DECODE
        self._prefilling.remove(request)
        self._decoding_stale = True

    # -- decode ---------------------------------------------------------------------------------

    def _decode_rows(self) -> I32:
        """Slots that decode one token in this step."""
        if self._decoding_stale:
            slots = [r.slot for r in self.running if r.phase is Phase.DECODE]
            self._decoding = np.array(slots, np.int32)
            self._decoding_stale = False
        decoding = self._decoding
        due = self.live.computed[decoding] < self.live.last_computed[decoding]
        return decoding[due][: self.max_step_tokens]

    def _extend_decoding(self, plan: StepPlan) -> I32:
        """The decoding rows, with pages for those that need one; most need none and cost nothing here."""
        rows = self._decode_rows()
        epoch = self.live.epoch[rows]
        computed = self.live.computed[rows]
        needy = (computed % self.ownership.kv_block == 0) | self.live.relocate[rows]
        for slot in rows[needy].tolist():
            request = self.live.request[slot]
            # a request before it may have taken its slot
            if request is not None and request.phase is Phase.DECODE:
                begin = int(self.live.computed[slot])
                if not self._make_room(request, begin, begin + 1, plan):
                    self._preempt(request, plan)
        return rows[self.live.epoch[rows] == epoch]

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
        if budget <= 0 or not self.live.num_free:
            return
        for request, hit in self.admission.candidates(self._pass):
            self._start(request, hit, plan)
            budget -= self._add_chunk(plan, request, budget)
            if budget <= 0 or not self.live.num_free:
                return

    def _start(self, request: Request, hit: Hit, plan: StepPlan) -> None:
        """Put a waiting request into a slot, with the pages of its hit."""
        known = request.known_tokens()
        self._look_back(request, hit)
        try:
            self.ownership.adopt(request, hit)
            slot = self.live.take(request, known, hit.num_tokens)
        except BaseException:
            self.ownership.release(request)
            raise
        self.admission.remove(request)
        request.phase = Phase.PREFILL
        insort(self.running, request, key=lambda r: r.order)
        insort(self._prefilling, request, key=lambda r: r.order)
        plan.deltas |= self.layout.admission(slot, hit.num_tokens, hit.state_page, request.sampling)
        self.ownership.write_tables(request, plan.deltas)
        request.junction, request.boundaries = hit.junction, []

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
        self.ownership.index.expect_no_more(request.epoch)
        if unwritten is not None:
            self.checkpoints.leave(request, self._flight, unwritten)
        self._decoding_stale = True
        self.running.remove(request)
        if request.phase is Phase.PREFILL:
            self._prefilling.remove(request)
        self.live.release(request)
        self.ownership.release(request)

    # -- plan -------------------------------------------------------------------------------------

    def _finish_plan(self, plan: StepPlan, rows: I32) -> StepPlan | None:
        """Turn the decisions into row arrays and advance the host's counters; `rows` decode."""
        live = self.live
        chunk_slots = [chunk.request.slot for chunk in plan.chunks]
        plan.slot = np.concatenate([np.array(chunk_slots, np.int32), rows])
        if not plan.num_rows:
            self.ownership.give_back(plan)
            return None
        self._unsent = {}
        plan.num_computed = live.computed[plan.slot]
        plan.num_new = np.ones(plan.num_rows, np.int32)
        plan.samples = np.ones(plan.num_rows, np.int32)
        for row, chunk in enumerate(plan.chunks):
            plan.num_new[row] = chunk.end - chunk.begin
            plan.samples[row] = chunk.samples
            if chunk.samples:
                self.to_decode(chunk.request)
        plan.epoch = live.epoch[plan.slot]
        live.computed[plan.slot] += plan.num_new
        if self.checkpoints.is_on:
            self.checkpoints.take_pages(plan, len(self.running))
            self.checkpoints.at_boundaries(plan, rows)
        plan.num_logprobs = int(live.num_logprobs[plan.slot].max())
        return plan
