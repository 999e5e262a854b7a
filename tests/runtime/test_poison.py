"""Poison mode: what no step may read holds nonsense, and a step that reads it shows."""

from collections.abc import Iterator
from typing import Any

import pytest
from emulated_rig import answer, emulation, new_hash_model
from hash_engine import hash_engine, settle

import midstream
from midstream.graphs.dispatch import GraphKey
from midstream.ops.tape import garbage
from midstream.runtime.poison import used_lengths

PROMPTS = [[3 + (i * i + seed) % 29 for i in range(n)] for seed, n in enumerate((9, 4, 17))]
GREEDY = midstream.SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture(params=["captured", "eager"])
def engine(request: pytest.FixtureRequest) -> Iterator[midstream.Engine]:
    if request.param == "eager":
        with hash_engine(max_step_tokens=64) as plain:
            yield plain
        return
    with emulation(), hash_engine(new_hash_model(), max_step_tokens=64) as captured:
        yield captured


def test_stale_entries_of_staged_buffers_and_old_results_are_nonsense(
    engine: midstream.Engine,
) -> None:
    engine.add(PROMPTS[0], GREEDY)
    for _ in range(4):
        engine.step()
    runner = engine._parts.runner
    runner.queue.synchronize()
    fields, nonsense = runner.step.stage.device, garbage(runner.step.token.dtype)
    for name, used in used_lengths(
        GraphKey(1, 1, 0), num_deltas=len(fields["delta_index"])
    ).items():
        assert (fields[name][used:] == nonsense).all(), name
        assert not (fields[name][:used] == nonsense).any() or name.startswith("delta"), name
    assert runner.step.token.eq(nonsense).tolist() == [False, True, True, True]
    assert runner.step.logprob.isnan().tolist() == [False, True, True, True]
    assert runner.step.move_to.eq(nonsense).all()
    settle(engine)


def test_answers_stay_the_same_and_poison_can_be_switched_off(engine: midstream.Engine) -> None:
    want = [answer(prompt, 12) for prompt in PROMPTS]
    for poison in (True, False, True):
        engine.debug(poison=poison)
        assert [list(out.token_ids) for out in engine.generate(PROMPTS, GREEDY)] == want


@pytest.mark.parametrize("poison", [True, False])
def test_a_step_that_reads_behind_its_rows_shows_only_with_poison(
    engine: midstream.Engine, poison: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults A3 and A4: what lies behind a step's own entries is mostly harmless, and mostly looks right."""
    engine.debug(poison=poison)
    step: Any = engine._parts.runner.step
    seen: list[int] = []
    apply = step.apply_deltas

    def reads_behind() -> None:
        seen.extend(step.stage.device["position"][-1:].tolist())
        apply()

    monkeypatch.setattr(step, "apply_deltas", reads_behind)
    engine._parts.runner.capturer = None  # eager steps, which may look
    list(engine.generate(PROMPTS, GREEDY))
    assert (garbage(step.token.dtype) in seen) == poison
