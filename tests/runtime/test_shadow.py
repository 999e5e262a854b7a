"""Shadow mode: a replay that differs from an eager run is named by buffer and row; nothing else changes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulated_rig import answer, emulation, new_hash_model
from graph_faults import FAULTS, Edit, Fault
from hash_engine import hash_engine, settle
from seeded_graph_faults import seeded
from tiny_models import build

import midstream

PROMPTS = [[3 + (i * i + seed) % 29 for i in range(n)] for seed, n in enumerate((9, 4, 17))]
GREEDY = midstream.SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    with emulation():
        yield


def serve(engine: midstream.Engine) -> list[list[int]]:
    return [list(out.token_ids) for out in engine.generate(PROMPTS, GREEDY)]


def engine_of(**options: Any) -> Any:
    return hash_engine(new_hash_model(), max_step_tokens=64, **options)


@pytest.mark.parametrize("every", [1, 3])
def test_answers_stay_the_same_and_every_nth_step_is_compared(every: int) -> None:
    with engine_of() as engine:
        engine.debug(shadow_every=every)
        assert serve(engine) == [answer(prompt, 12) for prompt in PROMPTS]
        shadow, stats = engine._parts.runner.shadow, engine.stats()
        assert shadow is not None
        assert shadow.num_compared == stats["steps"] // every
        assert stats["graph_replays"] == stats["steps"]


@pytest.mark.parametrize(
    ("name", "buffer"),
    [
        ("the number of live rows is a number of Python", r"slots\.(last_token|computed), slot"),
        ("logits of the warm-up run are read", "logits, row"),
    ],
)
def test_a_fault_of_the_replay_is_named_by_buffer_and_row(name: str, buffer: str) -> None:
    fault = next(f for f in FAULTS if f.name == name)
    with seeded(fault), engine_of() as engine:
        engine.debug(shadow_every=1)
        with pytest.raises(midstream.ContractError, match=rf"differ, first in {buffer} \d+: found"):
            serve(engine)
        _give_up(engine)


_LATER = """logits = self.lowered.forward(type(view)(**{
        **{name: getattr(view, name) for name in view.__dataclass_fields__},
        "position": view.position + self.__dict__.get("num_live", 0)}))"""
FROZEN_SHIFT = Fault(
    "G9",
    "positions are shifted by a number of Python",
    (
        Edit("runtime.device_step:DeviceStep.run", "logits = self.lowered.forward(view)", _LATER),
        Edit(
            "runtime.runner:StepRunner.launch",
            "self._look_for_moves()",
            "self.step.num_live = plan.num_rows; self._look_for_moves()",
        ),
    ),
)


def test_a_frozen_number_in_a_real_model_shows_in_the_pages_of_the_row() -> None:
    options = {"state_block": 16, "kv_block": 4, "max_rows": 4, "max_step_tokens": 64}
    pools = {"num_state_pages": 30, "num_kv_pages": 60}
    with (
        seeded(FROZEN_SHIFT),
        midstream.Engine(build("bamba"), compile="eager", **options, **pools) as engine,
    ):
        engine.debug(shadow_every=1)
        with pytest.raises(
            midstream.ContractError, match=r"chunks differ, first in (temporal|kv), page \d+: found"
        ):
            serve(engine)


def test_a_page_that_nobody_planned_to_write_is_named() -> None:
    with engine_of() as engine:
        engine.debug(shadow_every=1)
        engine.add(PROMPTS[0], GREEDY)
        engine.step()
        runner = engine._parts.runner
        replay = runner.graphs.replay

        def stray(key: Any) -> bool:
            found = replay(key)
            runner.queue.run(lambda: engine._parts.pools.temporal[17].fill_(1.0))
            return found

        runner.graphs.replay = stray  # type: ignore[method-assign]
        with pytest.raises(midstream.ContractError, match="wrote page 17 of temporal"):
            engine.step()
        runner.graphs.replay = replay  # type: ignore[method-assign]
        _give_up(engine)


def test_a_mismatch_ends_the_requests_of_the_step_and_no_others() -> None:
    with engine_of() as engine:
        engine.add(PROMPTS[0], GREEDY)
        engine.step()
        engine.debug(shadow_every=1)
        memory = engine._parts.runner.step.slots.src_off
        run = engine._parts.runner.step.run

        def other(view: Any, rows: int) -> torch.Tensor:
            logits = run(view, rows)
            memory.fill_(5)  # the eager run does what the graph does not
            return logits

        engine._parts.runner.step.run = other  # type: ignore[method-assign]
        with pytest.raises(
            midstream.ContractError, match=r"first in slots\.src_off, slot 0: found 0, expected 5"
        ):
            engine.step()
        engine.debug(shadow_every=0)
        engine.add(PROMPTS[1], GREEDY)
        outputs = settle(engine)
    assert [out.finish_reason for out in outputs] == ["error", "length"]
    assert list(outputs[1].token_ids) == answer(PROMPTS[1], 12)


def test_off_nothing_is_compared() -> None:
    with engine_of() as engine:
        engine.debug(shadow_every=1)
        engine.debug(shadow_every=0)
        serve(engine)
        assert engine._parts.runner.shadow is None
        with pytest.raises(
            midstream.ConfigError, match=r"shadow_every=-1\); expected True or False"
        ):
            engine.debug(shadow_every=-1)


def _give_up(engine: midstream.Engine) -> None:
    engine.debug(shadow_every=0)
    for request_id in list(engine._ledger.open):
        engine.abort(midstream.Handle(request_id))
