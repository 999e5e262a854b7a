"""
Anything may happen to the cache, in any order: no wrong reuse, no leak, no page of two owners, nobody stuck.

The device is a model of exact hashes (`hash_model.py`): whoever resumes from a wrong page, reads what was not
written or writes what is published is named at once.

    MIDSTREAM_LONG_TESTS=1 pytest tests/runtime/test_cache_machine.py     a million steps instead of 15,000
"""

import os

import pytest
from hash_model import answer
from host_rig import Case, Rig
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from midstream.runtime.pages import PagePool
from midstream.runtime.request import Phase


def text(length: int, seed: int = 0) -> list[int]:
    return [3 + (i * i + 5 * seed) % 29 for i in range(length)]


BOOKS = [text(40), text(40, seed=3), text(40)[:17] + text(23, seed=5)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small sizes, often the smallest that are allowed."""
    kv_block, max_len = draw(st.sampled_from((4, 2, 1))), draw(st.sampled_from((24, 40, 9)))
    mode = draw(st.sampled_from(("align", "align", "align", "all", "none")))
    state_block = kv_block * draw(st.sampled_from((2, 1, 3)))
    columns = -(-max_len // state_block) if mode == "all" else 0
    return Case(
        max_rows=draw(st.sampled_from((3, 5, 2, 1))),
        max_step_tokens=draw(st.sampled_from((16, 8, 5, 3, 1, 40))),
        kv_block=kv_block,
        state_block=state_block,
        num_state_pages=columns + draw(st.sampled_from((9, 6, 5, 4, 20))),
        num_kv_pages=-(-max_len // kv_block) + 1 + draw(st.sampled_from((8, 3, 1, 0, 12))),
        max_len=max_len,
        mode=mode,
        retention=draw(st.sampled_from(("auto", None, 0, kv_block, 3 * kv_block))),
        exports=draw(st.sampled_from((1, 1, None, 3))),
        waits=draw(st.sampled_from((True, True, False))),
        eviction=draw(st.sampled_from(("value", "value", "lru"))),
        patience=draw(st.sampled_from((64, 0, 2))),
    )


class CacheMachine(RuleBasedStateMachine):
    """Users, the scheduler, the device and bad luck."""

    @initialize(case=cases())
    def start(self, case: Case) -> None:
        self.rig = Rig(case)
        self.wanted: list[list[int]] = []

    @rule(
        book=st.integers(0, 2), shared=st.integers(0, 34), own=st.integers(0, 6),
        max_tokens=st.integers(1, 20), priority=st.sampled_from((0, 0, 0, 1, -1)),
        stop=st.sampled_from((None, None, 5, 11)), root=st.sampled_from((b"", b"", b"a")),
        marks=st.lists(st.integers(1, 39), max_size=2),
    )  # fmt: skip
    def add(
        self, book: int, shared: int, own: int, max_tokens: int, priority: int, stop: int | None,
        root: bytes, marks: list[int],
    ) -> None:  # fmt: skip
        prompt = (BOOKS[book][:shared] + text(own, seed=own) or [7])[: self.rig.case.max_len - 1]
        self._add(prompt, max_tokens, priority, stop, root, marks)

    @precondition(lambda self: self.rig.done)
    @rule(data=st.data(), own=st.integers(0, 5), max_tokens=st.integers(1, 9))
    def next_turn(self, data: st.DataObject, own: int, max_tokens: int) -> None:
        """A chat goes on where an answer ended."""
        before = self.rig.requests[data.draw(st.sampled_from(sorted(self.rig.done)))]
        prompt = [*before.prompt.tolist(), *before.outputs, *text(own, seed=own)]
        self._add(prompt[: self.rig.case.max_len - 1], max_tokens, 0, None, before.root, [])

    def _add(
        self, prompt: list[int], max_tokens: int, priority: int, stop: int | None, root: bytes,
        marks: list[int],
    ) -> None:  # fmt: skip
        marks = sorted(mark for mark in set(marks) if mark <= len(prompt))
        request = self.rig.add(
            prompt, max_tokens, priority=priority, stop=stop, root=root, marks=marks
        )
        self.wanted.append(answer(prompt, request.max_tokens, () if stop is None else (stop,)))

    @rule(count=st.integers(1, 9))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()

    @precondition(lambda self: self.rig.scheduler.num_unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        scheduler = self.rig.scheduler
        scheduler.drop(data.draw(st.sampled_from(scheduler.waiting + scheduler.running)))

    @precondition(lambda self: self.rig.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.rig.preempt(data.draw(st.sampled_from(self.rig.scheduler.running)))

    @rule(which=st.booleans(), part=st.integers(1, 9))
    def evict(self, which: bool, part: int) -> None:
        """Somebody needs pages for a moment."""
        pool = self.rig.kv_pool if which else self.rig.state_pool
        pool.release(pool.take(pool.available * part // 9))

    @rule()
    def reset(self) -> None:
        self.rig.index.reset()

    @rule(which=st.booleans(), calls=st.integers(0, 3))
    def fail_allocation(self, which: bool, calls: int) -> None:
        """Whatever a pass was about, the engine drops what ran and goes on."""
        pool = self.rig.kv_pool if which else self.rig.state_pool
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pool, "take", failing(pool, calls))
            try:
                plan = self.rig.schedule()
            except MemoryError:
                for request in list(self.rig.scheduler.running):
                    self.rig.scheduler.drop(request)
                return
        if plan is not None:
            self.rig.launch(plan)
            if len(self.rig.flights) > 1:
                self.rig.commit()

    @rule()
    def fail_launch(self) -> None:
        if plan := self.rig.schedule():
            self.rig.break_step(plan)

    @precondition(lambda self: self.rig.flights)
    @rule()
    def lose_step(self) -> None:
        self.rig.break_step(self.rig.flights.popleft()[0])

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "rig"):
            self.rig.index.check_books()
            self.rig.check_owners()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.run()
        for request, want in zip(self.rig.requests, self.wanted, strict=True):
            assert request.phase is Phase.FINISHED
            if request.request_id in self.rig.done:
                assert request.outputs == want
            assert request.outputs == want[: len(request.outputs)]


def failing(pool: PagePool, calls: int):  # type: ignore[no-untyped-def]
    """`take` that works `calls` times and then fails as memory does."""
    take, left = pool.take, [calls]

    def call(count: int) -> list[int]:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError("injected")
        return take(count)

    return call


_LONG = os.environ.get("MIDSTREAM_LONG_TESTS") == "1"
CacheMachine.TestCase.settings = settings(
    max_examples=27_000 if _LONG else 540,  # of 38 steps in the mean
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
test_whatever_happens_reuse_is_right_and_books_balance = CacheMachine.TestCase


def test_what_is_published_after_a_reset_does_not_stand_on_what_went() -> None:
    """A block whose beginning had been published under the same page is known by its request still."""
    machine = CacheMachine()
    machine.start(
        case=Case(max_rows=3, max_step_tokens=16, kv_block=4, state_block=8, num_state_pages=9,
                  num_kv_pages=19, max_len=40, exports=3)
    )  # fmt: skip
    machine.add(book=0, marks=[17], max_tokens=3, own=0, priority=0, root=b"", shared=22, stop=None)
    machine.step(count=1)
    machine.step(count=1)
    machine.step(count=4)
    machine.reset()
    machine.step(count=1)
    machine.books_balance()
    machine.teardown()
