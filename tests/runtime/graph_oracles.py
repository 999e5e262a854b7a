"""
What must hold whatever a graph replays: a mixed load on the emulator, under all oracles at once.

Answers are those of the exact model (warm equals cold, together equals alone, graph equals eager), with
poison in whatever no step may read, pages of others compared bit for bit (`Shadow`), and books that balance.
Work is done as late as a device may do it in one run, and at once in the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from emulated_rig import answer, emulation, new_hash_model, recordable_hashes
from hash_engine import hash_engine, settle
from hash_model import VOCAB

import midstream
from midstream.runtime import assembly

LOGPROB = 1 - math.log(VOCAB - 1 + math.e)  # of the next token; all others have LOGPROB - 1
_OPTIONS = {"max_step_tokens": 64, "max_len": 96, "num_state_pages": 40, "num_kv_pages": 110}
_FEW_DELTAS = 24  # per copy: admissions take several


def text(length: int, seed: int = 0) -> list[int]:
    return [3 + (i * i * 7 + i * (seed + 3) + 11 * seed) % 29 for i in range(length)]


LOAD = [(text(9), 14), (text(1, 1), 3), (text(33, 2), 30), (text(33, 2) + text(8, 5), 9),
        (text(17, 3), 1), (text(2, 4), 26), (text(24, 6), 12)]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """One engine that serves the load."""

    pace: str  # of the emulated queue
    shadow_every: int = 0
    few_deltas: bool = False  # changes of records take several copies


RUNS = (Run("late"), Run("early", few_deltas=True), Run("late", shadow_every=1, few_deltas=True))


def run_oracles(runs: Sequence[Run] = RUNS) -> None:
    """Raises AssertionError, or what a part of the engine raised, where anything is wrong."""
    for run in runs:
        with emulation(run.pace), _engine(run.few_deltas) as engine:
            engine.debug(poison=True, shadow_every=run.shadow_every)
            check_pools_are_untouched(engine)
            if not run.few_deltas:
                _watch_waits(engine)
            _serve_all(engine)
            check_graphs(engine)


def run_oracles_without_capture() -> None:
    """The same load, as a CPU runs it by itself."""
    for few_deltas in (False, True):
        with recordable_hashes(), _engine(few_deltas) as engine:
            _serve_all(engine)


def _serve_all(engine: midstream.Engine) -> None:
    serve_mixed_load(engine)
    serve_one_after_the_other(engine)
    recapture_between_steps(engine)
    change_weights(engine)


@contextmanager
def _engine(few_deltas: bool) -> Iterator[midstream.Engine]:
    limits = assembly.stage_limits
    with pytest.MonkeyPatch.context() as patch:
        if few_deltas:
            few = {"max_deltas": _FEW_DELTAS}
            patch.setattr(assembly, "stage_limits", lambda *args: replace(limits(*args), **few))
        with hash_engine(new_hash_model(), **_OPTIONS) as engine:
            yield engine


def check_pools_are_untouched(engine: midstream.Engine) -> None:
    """Capture has written no page that can be handed out, and no record."""
    pools, slots = engine._parts.pools, engine._parts.runner.step.slots
    engine._parts.runner.queue.synchronize()
    assert not slots.flat.any(), "capture wrote records of slots"
    for arena in (pools.temporal, pools.kv):
        assert not arena[1:].any(), "capture wrote a page"


def serve_mixed_load(engine: midstream.Engine) -> None:
    """Requests come and go, so that rows, slots and pages change hands; then all again, from saved state."""
    for _ in range(2):
        load = Load(engine)
        for turn, (prompt, count) in enumerate(LOAD):
            load.add(prompt, count, turn)
            for _ in range(turn % 3):
                load.check(engine.step())
        load.finish()


def serve_one_after_the_other(engine: midstream.Engine) -> None:
    """Each request gets the slot of the one before, and the last goes on inside a block of an answer."""
    long, short = LOAD[3][0], LOAD[5][0]
    said: list[int] = []
    for prompt, count, turn in ((long, 6, 1), (short, 26, 2), (short, 5, 0)):
        load = Load(engine)
        (said, _) = load.add(prompt if turn else prompt + said + [7, 8], count, turn)
        load.finish()


def recapture_between_steps(engine: midstream.Engine) -> None:
    """Graphs are given up and captured again while requests are half done."""
    load = Load(engine)
    for turn, (prompt, count) in enumerate(LOAD[:4]):
        load.add(prompt, count, turn)
    for _ in range(4):
        load.check(engine.step())
    before = _owned_pages(engine)
    engine.release_graphs()
    engine.capture_graphs()
    for name, pages in _owned_pages(engine).items():
        assert torch.equal(pages, before[name]), f"a recapture wrote pages of {name}"
    load.check(engine.step())
    engine.release_graphs()  # and each step captures what it needs
    load.finish()
    engine.capture_graphs()


def change_weights(engine: midstream.Engine) -> None:
    """New values in place, then at another address; what was saved under the old ones is not used again."""
    model = engine._parts.lowered.model
    for weight, moves in ((2, False), (5, True)):
        value = new_hash_model(weight).embedding.weight.data
        if moves:
            model.embedding.weight.data = value
        else:
            model.embedding.weight.data.copy_(value)
        engine.weights_changed()
        load = Load(engine, weight)
        for turn, (prompt, count) in enumerate(LOAD[2:4]):
            load.add(prompt, count, turn)
        load.finish()


def check_graphs(engine: midstream.Engine) -> None:
    """Every step replayed a graph, and no graph was captured but those that were planned."""
    stats = engine.stats()
    assert not stats["graph_fallbacks"], stats["graph_fallbacks"]
    assert stats["graph_replays"] == stats["steps"], stats
    num_keys = len(engine._parts.runner.graph_keys)
    assert stats["graphs"]["live"] == num_keys, "more graphs than planned"
    assert stats["graphs"]["captured_late"] <= num_keys, "captured again and again"


class Load:
    """Requests with the outputs that they must bring."""

    def __init__(self, engine: midstream.Engine, weight: int = 0) -> None:
        self.engine = engine
        self.weight = weight
        self.expected: dict[int, tuple[list[int], str]] = {}  # by request: tokens, reason

    def add(self, prompt: Sequence[int], count: int, turn: int) -> tuple[list[int], str]:
        """Every third request ends early, every third names an end that is too early.  Returns its output."""
        want, reason, extra = answer(prompt, count, self.weight), "length", dict[str, Any]()
        if turn % 3 == 1:
            never = next(t for t in range(3, VOCAB) if t not in want)
            extra = {"stop_token_ids": (never,), "min_tokens": count}
        elif turn % 3 == 2:
            place = max(want.index(token) for token in want)  # the last first sight of a token
            extra = {"stop_token_ids": (want[place],), "logprobs": 1 + turn % 2}
            want, reason = want[: place + 1], "stop"
        params = midstream.SamplingParams(max_tokens=count, temperature=0.0, **extra)
        handle = self.engine.add(prompt, params)
        self.expected[handle.request_id] = want, reason
        return want, reason

    def check(self, updates: list[Any]) -> None:
        """Outputs that arrived are right."""
        for update in updates:
            if update.output is not None:
                self._check_output(update.output)

    def finish(self) -> None:
        """Serve the rest; then nobody owns a page."""
        for output in settle(self.engine):
            self._check_output(output)
        assert not self.expected, f"requests without an output: {sorted(self.expected)}"

    def _check_output(self, output: midstream.Output) -> None:
        want, reason = self.expected.pop(output.request_id)
        assert list(output.token_ids) == want, f"tokens {output.token_ids}, expected {want}"
        assert output.finish_reason == reason, (output.finish_reason, output.error)
        for entry, token in zip(output.logprobs or (), output.token_ids, strict=False):
            assert entry.best[0][0] == entry.token_id == token, "log-probabilities of another step"
            values = [entry.logprob, *(value for _, value in entry.best)]
            assert values == pytest.approx([LOGPROB, LOGPROB, LOGPROB - 1][: len(values)])


def _owned_pages(engine: midstream.Engine) -> dict[str, torch.Tensor]:
    """Bits of all pages but the null page."""
    parts = engine._parts
    parts.runner.queue.synchronize()
    arenas = {"states": parts.pools.temporal, "KV": parts.pools.kv}
    return {name: arena[1:].clone().view(torch.int64) for name, arena in arenas.items()}


def _watch_waits(engine: midstream.Engine) -> None:
    """The host never waits for work that the same step has enqueued."""
    runner = engine._parts.runner
    queue: Any = runner.queue
    launch = runner.launch

    def watched(plan: Any) -> Any:
        before, captured = queue.num_enqueued, runner.graphs.num_captured_late
        flight = launch(plan)
        waited = queue.waited_for > before and runner.graphs.num_captured_late == captured
        assert not waited, "a launch waits for its own work"
        return flight

    runner.launch = watched  # type: ignore[method-assign]
