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
from midstream.runtime.hashing import BlockHasher, as_keys
from midstream.runtime.live import I32, LiveTable
from midstream.runtime.ownership import PageOwnership
from midstream.runtime.plan import Chunk, Publication, StepPlan
from midstream.runtime.request import Lookup, Phase, Request
from midstream.runtime.slots import SlotLayout


class Scheduler:
    """Owner of the queue and of the live requests' order."""

    def __init__(
        self,
        live: LiveTable,
        layout: SlotLayout,
        ownership: PageOwnership,
        hasher: BlockHasher | None,
        max_step_tokens: int,
    ) -> None:
        """`hasher` None: no prefix is looked up, exported or published."""
        self.live = live
        self.layout = layout
        self.ownership = ownership
        self.hasher = hasher
        self.max_step_tokens = max_step_tokens
        self.waiting: list[Request] = []  # in order
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

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, request: Request) -> None:
        """Queue a request."""
        insort(self.waiting, request, key=lambda r: r.order)

    def drop(self, request: Request) -> None:
        """Forget a request, wherever it is.  Its pages go back; its row in a step in flight is void."""
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
        elif request.phase is not Phase.FINISHED:
            self._leave_slot(request)
        request.phase = Phase.FINISHED

    def next_step(self) -> StepPlan | None:
        """The next step, or None when nothing can move now."""
        plan = _empty_plan(self._unsent)
        try:
            return self._fill(plan)
        except BaseException:
            self.ownership.give_back(plan)
            raise

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

    def keys(self, request: Request, num_tokens: int) -> list[int]:
        """Block keys of the first `num_tokens` tokens of a live request, hashing what is new."""
        assert self.hasher is not None
        done, block = len(request.hashes), self.hasher.block
        if done < num_tokens // block:
            tokens = self.live.tokens[request.slot, done * block : num_tokens]
            self._extend_keys(request, tokens)
        return request.hashes

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
        begin = int(self.live.computed[request.slot])
        known = len(request.prompt) + len(request.outputs)
        end = min(known, begin + budget)
        if not self._make_room(request, begin, end, plan):
            return 0
        plan.chunks.append(Chunk(request, request.epoch, begin, end, samples=end == known))
        return end - begin

    def _choose_exports(self, plan: StepPlan, chunk: Chunk) -> None:
        """Checkpoints of a chunk: block boundaries, and the last grid positions of the prompt.

        The last one below `known` serves the same prompt again, the one at `known` its continuation.
        Exports take pages that no live request may need for its own next step; they never make one wait.
        """
        request, own = chunk.request, self.ownership
        grid, block = own.kv_block, own.state_block
        known = len(request.prompt) + len(request.outputs)
        wanted = set(range((chunk.begin // block + 1) * block, chunk.end + 1, block))
        wanted |= {(known - 1) // grid * grid, known // grid * grid}
        keys = self.keys(request, chunk.end)
        for position in sorted(p for p in wanted if chunk.begin < p <= chunk.end):
            if own.index.has_state(keys[position // grid - 1]):
                continue
            if position == chunk.end:
                self._publish_running(plan, request, position)
                self.live.relocate[request.slot] = bool(position % block)
            elif own.state_pool.available > len(self.running):
                (page,) = own.state_pool.take(1)
                chunk.export_position.append(position)
                chunk.export_page.append(page)

    # -- admission --------------------------------------------------------------------------------

    def _admit(self, plan: StepPlan, budget: int) -> None:
        for request in list(self.waiting):
            if budget <= 0 or not self.live.num_free or not self.ownership.can_admit_any():
                return
            if request.preempted_in != self._pass and self._try_admit(request, plan):
                budget -= self._add_chunk(plan, request, budget)

    def _try_admit(self, request: Request, plan: StepPlan) -> bool:
        own, num_known = self.ownership, len(request.prompt) + len(request.outputs)
        if self.hasher is not None and len(request.hashes) < num_known // self.hasher.block:
            new = request.known_tokens()[len(request.hashes) * own.kv_block :]
            self._extend_keys(request, new)
        hit = own.index.lookup(request.hashes, num_known - 1)
        if not own.can_admit(hit, num_known):
            return False
        known = request.known_tokens()
        own.adopt(request, hit)
        slot = self.live.take(request, known, hit.num_tokens)
        plan.deltas |= self.layout.admission(slot, hit.num_tokens, hit.state_page, request.sampling)
        own.write_tables(request, plan.deltas)
        self.waiting.remove(request)
        insort(self.running, request, key=lambda r: r.order)
        insort(self._prefilling, request, key=lambda r: r.order)
        request.phase = Phase.PREFILL
        if request.lookup is None:
            request.admitted_at = time.perf_counter()
            request.lookup = Lookup(
                num_known - 1, hit.kv_match_tokens, hit.state_match_tokens, hit.num_tokens
            )
        return True

    def _extend_keys(self, request: Request, tokens: I32) -> None:
        if self.hasher is not None:
            parent = request.hashes[-1] if request.hashes else None
            extra = b"" if request.hashes else request.root
            request.hashes += as_keys(self.hasher.extend(parent, tokens, extra))

    # -- room -------------------------------------------------------------------------------------

    def _make_room(self, request: Request, begin: int, end: int, plan: StepPlan) -> bool:
        """Grow the request, preempting later ones as needed; False when even that does not help."""
        while True:
            try:
                self.ownership.grow(request, begin, end, plan)
                return True
            except CapacityError:
                victim = self.running[-1]
                if victim.order <= request.order:
                    return False
                self._preempt(victim, plan)

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        """Take the slot and the pages away; the request starts again from a new lookup."""
        plan.chunks = [chunk for chunk in plan.chunks if chunk.request is not request]
        epoch = request.epoch
        self._leave_slot(request)
        request.phase = Phase.WAITING
        request.preempted_in = self._pass
        self.num_preemptions += 1
        self.preempted[epoch] = request
        self.add(request)

    def _leave_slot(self, request: Request) -> None:
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
        if self.hasher is not None:
            for chunk in plan.chunks:
                self._choose_exports(plan, chunk)
            self._publish_boundaries(plan, rows)
        plan.num_logprobs = int(live.num_logprobs[plan.slot].max())
        return plan

    def _publish_boundaries(self, plan: StepPlan, rows: I32) -> None:
        """Decoding rows whose running state comes to stand on a block boundary leave a checkpoint."""
        after = self.live.computed[rows]
        for slot in rows[after % self.ownership.state_block == 0].tolist():
            request = self.live.request[slot]
            assert request is not None
            self._publish_running(plan, request, int(self.live.computed[slot]))

    def _publish_running(self, plan: StepPlan, request: Request, position: int) -> None:
        page = request.running_page
        plan.publications.append(Publication(request, request.epoch, position, page))


def _empty_plan(deltas: dict[int, int]) -> StepPlan:
    none = np.zeros(0, np.int32)
    return StepPlan([], none, none, none, none, none.astype(np.int64), deltas, [], [], 0)
