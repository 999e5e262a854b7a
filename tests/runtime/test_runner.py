"""How a plan is launched: padded shapes, counted fallbacks, results that stay until they are read."""

from typing import Any

import pytest
import torch
from hash_engine import hash_engine, settle
from hash_model import answer

import midstream
from midstream.graphs.table import GraphKey

PROMPTS = [[3 + (i * i + seed) % 29 for i in range(n)] for seed, n in enumerate((9, 4, 17))]


def greedy(max_tokens: int, **options: Any) -> midstream.SamplingParams:
    return midstream.SamplingParams(max_tokens=max_tokens, temperature=0.0, **options)


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[GraphKey]:
    """Shapes of the steps that ran."""
    ran: list[GraphKey] = []
    run = midstream.runtime.runner.StepRunner._replay_or_run
    monkeypatch.setattr(
        "midstream.runtime.runner.StepRunner._replay_or_run",
        lambda self, key, plan: (ran.append(key), run(self, key, plan))[1],
    )
    return ran


@pytest.mark.parametrize(("graphs", "rows"), [("full", 4), ("off", 3)])
def test_decode_steps_are_padded_to_a_captured_size(
    shapes: list[GraphKey], graphs: str, rows: int
) -> None:
    with hash_engine(graphs=graphs, max_step_tokens=64) as engine:
        list(engine.generate(PROMPTS, greedy(5)))
    assert [key for key in shapes if not key.chunks] == [GraphKey(rows, rows, 0)] * 4


def test_a_step_with_chunks_has_two_rows_two_chunks_and_eight_tokens_at_least(
    shapes: list[GraphKey],
) -> None:
    with hash_engine(max_step_tokens=64) as engine:
        list(engine.generate([[5]], greedy(1)))
        list(engine.generate([PROMPTS[0]], greedy(1)))
    # 1 token in 1 chunk; 9 tokens, cut at 8
    assert shapes == [GraphKey(8, 2, 2), GraphKey(16, 2, 2)]


def test_every_step_without_a_graph_is_counted_with_its_cause() -> None:
    with hash_engine() as engine:
        list(engine.generate(PROMPTS, greedy(5)))
        stats = engine.stats()
    assert (
        stats["graph_fallbacks"] == {"no CUDA device": stats["steps"]}
        and not stats["graph_replays"]
    )


def test_results_stay_until_their_step_is_committed() -> None:
    with hash_engine() as engine:
        runner = engine._parts.runner
        engine.add(PROMPTS[0], greedy(9))
        for _ in range(3):
            engine.step()
        (flight,) = engine._turns.flights
        token = runner.wait(flight).token
        before = token.copy()
        engine.step()  # launches one more, then commits this one
        assert token.tolist() == before.tolist() == answer(PROMPTS[0], 9)[2:3]
        settle(engine)


def test_a_row_in_the_middle_of_its_prompt_brings_no_token() -> None:
    with hash_engine(max_step_tokens=8) as engine:
        engine.add(PROMPTS[2], greedy(1))
        engine.step()
        (flight,) = engine._turns.flights
        assert engine._parts.runner.wait(flight).token.tolist() == [-1]


def test_logprobs_are_as_many_as_the_request_asked_for() -> None:
    with hash_engine(max_step_tokens=64) as engine:
        params = [greedy(4, logprobs=n) for n in (3, 0)] + [greedy(4)]
        outputs = list(engine.generate(PROMPTS, params))
    assert outputs[2].logprobs is None
    for out, asked in zip(outputs, (3, 0), strict=False):
        assert out.logprobs is not None
        assert [entry.token_id for entry in out.logprobs] == list(out.token_ids)
        assert [len(entry.best) for entry in out.logprobs] == [asked] * 4
        for entry in out.logprobs[: asked * 4]:
            assert entry.best[0] == (entry.token_id, pytest.approx(entry.logprob))


def test_a_buffer_that_moved_is_named_before_the_next_step_runs() -> None:
    with hash_engine() as engine:
        handle = engine.add(PROMPTS[0], greedy(4))
        step = engine._parts.runner.step
        kept, step.move_to = step.move_to, torch.zeros_like(step.move_to)
        with pytest.raises(midstream.ContractError, match="StepRunner: the buffers move_to moved"):
            engine.step()
        step.move_to = kept
        (out,) = settle(engine)
    assert (out.request_id, out.finish_reason) == (handle.request_id, "error")
