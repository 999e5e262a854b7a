"""The host half of an engine over a device that is a few lines of Python: plans in, exact tokens out."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise

import numpy as np
from hash_model import VOCAB, HashMemory, HashRow, answer

from midstream.runtime.admission import Admission
from midstream.runtime.chains import Chains
from midstream.runtime.checkpoints import Checkpoints
from midstream.runtime.commit import Committer, StepResult
from midstream.runtime.eviction import ValueEvictor
from midstream.runtime.hashing import BlockHasher, as_keys
from midstream.runtime.live import LiveTable
from midstream.runtime.ownership import PageOwnership
from midstream.runtime.pages import PagePool
from midstream.runtime.plan import StepPlan
from midstream.runtime.prefix import PrefixIndex
from midstream.runtime.request import Request
from midstream.runtime.retention import Retention
from midstream.runtime.sampling import SamplingParams
from midstream.runtime.scheduler import Scheduler
from midstream.runtime.slots import NO_COL, SlotLayout, SlotSampling


@dataclass(frozen=True)
class Case:
    """Sizes of a rig."""

    max_rows: int = 4
    max_step_tokens: int = 16
    kv_block: int = 4
    state_block: int = 8
    num_state_pages: int = 30
    num_kv_pages: int = 80
    max_len: int = 64
    mode: str = "align"
    retention: str | int | None = None  # every boundary
    exports: int | None = 1  # export alignment of the model's scans
    waits: bool = True
    eviction: str = "value"
    patience: int = 64

    @property
    def block(self) -> int:
        """Tokens of a column of the state table."""
        return self.max_len if self.mode == "none" else self.state_block


class Rig:
    """Schedules, runs and commits as `Engine.step` does, one step in flight."""

    def __init__(self, case: Case | None = None) -> None:
        self.case = case = Case() if case is None else case
        layout = SlotLayout(
            case.max_rows, -(-case.max_len // case.block), -(-case.max_len // case.kv_block)
        )
        self.live = LiveTable(layout, case.max_len)
        self.kv_pool = PagePool(case.num_kv_pages, "kv")
        self.state_pool = PagePool(case.num_state_pages, "state")
        self.index = PrefixIndex(
            self.kv_pool, self.state_pool, case.kv_block, eviction=case.eviction
        )
        self.ownership = PageOwnership(
            self.live, layout, self.kv_pool, self.state_pool, self.index, case.kv_block, case.block,
            case.mode == "all",
        )  # fmt: skip
        hasher = None
        if case.mode != "none":
            hasher = BlockHasher(block=case.kv_block, key=bytes(16))
        chains = Chains(hasher, self.live)
        every = None if case.mode == "all" else case.retention
        self.checkpoints = Checkpoints(
            self.live,
            self.ownership,
            chains,
            Retention(every, case.block, case.kv_block),
            case.exports,
            few=2,
        )
        self.admission = Admission(self.ownership, chains, case.waits, case.patience)
        self.scheduler = Scheduler(
            self.live,
            layout,
            self.ownership,
            self.checkpoints,
            self.admission,
            case.max_step_tokens,
        )
        self.committer = Committer(self.live, self.ownership, self.scheduler)
        self.device = Device(layout, case)
        self.device.memory.books = (self.state_pool, self.kv_pool)
        self.device.memory.protected = self.index.protected
        self.flights: deque[tuple[StepPlan, StepResult]] = deque()
        self.requests: list[Request] = []
        self.done: dict[int, list[int]] = {}  # outputs by request id

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        priority: int = 0,
        stop: int | None = None,
        root: bytes = b"",
        marks: Sequence[int] = (),
    ) -> Request:
        stop_ids = () if stop is None else (stop,)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=stop_ids)
        request = Request(
            request_id=len(self.requests),
            prompt=np.array(prompt, np.int32),
            params=params,
            sampling=SlotSampling(params, 0, stop_ids, 0),
            max_tokens=min(max_tokens, self.case.max_len - len(prompt)),
            priority=priority,
            root=root,
            streamed=False,
            watched=False,
            marks=tuple(marks),
        )
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def schedule(self) -> StepPlan | None:
        """The next plan, checked for what every plan must satisfy."""
        plan = self.scheduler.next_step()
        for queue in (self.scheduler.waiting, self.scheduler.running):
            assert queue == sorted(queue, key=lambda request: request.order)
        if plan is not None:
            assert 0 < plan.num_rows == len(set(plan.slot.tolist())) <= self.case.max_rows
            assert plan.num_new.min() >= 1 and plan.num_new.sum() <= self.case.max_step_tokens
            assert plan.kind == ("chunk" if plan.chunks else "decode")
        return plan

    def launch(self, plan: StepPlan) -> None:
        """Run a step; its result waits for `commit`."""
        self.device.memory.poison()
        self.flights.append((plan, self.device.run(plan, self.live)))
        self.committer.prepare(plan)  # early: much may happen until it is committed

    def commit(self) -> None:
        """Apply the oldest result."""
        for arrival in self.committer.commit(*self.flights.popleft()):
            if arrival.finish_reason is not None:
                self.finish(arrival.request)

    def step(self) -> bool:
        """One turn of the engine; False when nothing is left to do."""
        plan = self.schedule()
        if plan is not None:
            self.launch(plan)
        idle = plan is None and not self.flights
        if len(self.flights) > 1 or (plan is None and self.flights):
            self.commit()
        return not idle

    def preempt(self, request: Request) -> None:
        """As a pass does that needs the request's room."""
        self.scheduler._preempt(request, StepPlan.empty())

    def break_step(self, plan: StepPlan) -> None:
        """What `Engine` does with a step that failed."""
        epochs = set(plan.epoch.tolist())
        for request in [r for r in self.scheduler.running if r.epoch in epochs]:
            self.scheduler.drop(request)
        self.ownership.give_back(plan)

    def finish(self, request: Request) -> None:
        self.scheduler.drop(request, keep=True)
        self.done[request.request_id] = request.outputs

    def run(self) -> None:
        """Step to the end; then everything has finished and nobody owns a page."""
        for turn in count():
            if not self.step():
                break
            assert turn < 5000, "stuck"
        assert not self.scheduler.num_unfinished, "requests wait for ever"
        self.check_idle()

    def check_owners(self) -> None:
        """Every hold of a page is accounted for: by a live request, or by a step in flight."""
        for pool, held in (
            (self.kv_pool, self._kv_holds()),
            (self.state_pool, self._state_holds()),
        ):
            counts = Counter(page for page in held if page)
            found = {p: pool.refcount(p) for p in range(1, pool.num_pages) if pool.refcount(p)}
            assert found == counts, f"{pool.name}: held {found}, accounted for {dict(counts)}"
        running = [page for r in self.scheduler.running if (page := self.running_page(r))]
        assert len(running) == len(set(running)), f"two requests run on one page: {running}"

    def running_page(self, request: Request) -> int:
        """State page that the next tokens of a request in a slot update, 0 if none."""
        return int(self.live.running_page[request.slot])

    def _kv_holds(self) -> list[int]:
        pages = [page for r in self.scheduler.running for page in self._kv_pages(r)]
        for plan, _ in self.flights:
            pages += plan.released_kv
            pages += [page for ending in plan.endings for page in ending.kv_pages]
        return pages

    def _kv_pages(self, request: Request) -> list[int]:
        return [*self.live.kv_pages(request.slot), request.tail_page]

    def _state_holds(self) -> list[int]:
        pages: list[int] = []
        for r in self.scheduler.running:
            pages += [self.running_page(r), r.resume_page, *r.state_pages]
        for plan, _ in self.flights:
            pages += plan.released + [ending.state_page for ending in plan.endings]
            pages += [page for chunk in plan.chunks for page in chunk.export_page]
        return pages

    def check_idle(self) -> None:
        self.index.check_books()
        self.check_bare()
        assert self.kv_pool.num_owned == self.state_pool.num_owned == 0
        assert self.live.num_free == self.case.max_rows

    def check_bare(self) -> None:
        """Every cached KV page that no state can use is among those that go first."""
        evictor = self.index._evictor
        if isinstance(evictor, ValueEvictor):
            cached = self.kv_pool.cached_pages()
            assert {p for p in cached if not self.index.is_useful(p)} <= set(evictor._bare)

    def serve(self, prompt: Sequence[int], max_tokens: int = 4) -> Request:
        """One request, to its end, with the right answer."""
        request = self.add(prompt, max_tokens)
        self.run()
        assert self.done[request.request_id] == answer(prompt, max_tokens)
        return request

    def has_state(self, prompt: Sequence[int], position: int) -> bool:
        """Whether a prompt may resume at `position`."""
        hasher = self.checkpoints.chains.hasher
        assert hasher is not None
        keys = as_keys(hasher.extend(None, np.array(prompt[:position], np.int32)))
        return self.index.has_state(keys[-1])


class Device:
    """Slot memory and pages; applies the rules of ops/advance.py without drafts, copy-free."""

    def __init__(self, layout: SlotLayout, case: Case) -> None:
        self.layout = layout
        self.block = case.block
        self.memory = HashMemory.allocate(case.num_state_pages, case.num_kv_pages, case.kv_block)
        self.slots = np.full(
            layout.num_elements, 2**30, np.int32
        )  # nothing may be taken for granted
        self.kinds: list[str] = []

    def run(self, plan: StepPlan, live: LiveTable) -> StepResult:
        for index, value in live.deltas.items():
            self.slots[index] = value
        live.deltas.clear()
        for source, target in plan.kv_copies:
            self.memory.kv[target] = self.memory.kv[source]
        rows = [self._row(plan, live, row) for row in range(plan.num_rows)]
        tokens = np.array(self.memory.run(rows), np.int32)
        tokens[plan.samples == 0] = -1
        for slot, row, token in zip(plan.slot.tolist(), rows, tokens.tolist(), strict=True):
            self._set("computed", slot, row.begin + len(row.tokens))
            self._set("last_token", slot, token)
        self.kinds.append(plan.kind)
        return StepResult(tokens, np.zeros(len(tokens), np.float32), None, None)

    def _row(self, plan: StepPlan, live: LiveTable, row: int) -> HashRow:
        slot, begin = int(plan.slot[row]), int(plan.num_computed[row])
        end = begin + int(plan.num_new[row])
        assert self._get("computed", slot) == begin
        tokens, exports = [self._get("last_token", slot)], []
        if row < len(plan.chunks):
            chunk = plan.chunks[row]
            assert (chunk.begin, chunk.end, chunk.request.slot) == (begin, end, slot)
            tokens = live.tokens[slot, begin:end].tolist()
            exports = list(zip(chunk.export_position, chunk.export_page, strict=True))
            assert all(a < b for a, b in pairwise([begin, *chunk.export_position, end]))
        assert all(0 <= token < VOCAB for token in tokens)
        before, after = self._get("state_col", slot), (end - 1) // self.block
        source = self._get("resume_page", slot)
        if not source and before != NO_COL:
            source = self._get("state_table", slot, before)
        self._set("state_col", slot, after)
        self._set("resume_page", slot, 0)
        target = self._get("state_table", slot, after)
        last = (end - 1) // self.memory.kv_block
        kv_pages = [self._get("kv_table", slot, col) for col in range(last + 1)]
        return HashRow(begin, tokens, source, kv_pages, [*exports, (end, target)])

    def _get(self, name: str, slot: int, col: int = 0) -> int:
        assert 0 <= col < self.layout.widths[name]
        return int(self.slots[self.layout.index(name, slot, col)])

    def _set(self, name: str, slot: int, value: int) -> None:
        self.slots[self.layout.index(name, slot)] = value
