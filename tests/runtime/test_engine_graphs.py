"""What an engine captures and when, on the CPU: release and rebuild, late captures, weights that move."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from hash_engine import settle
from oracles import Oracle, five_prompts, guarded_engine, serve
from tiny_models import VOCAB, build

import midstream
from midstream.graphs.dispatch import GraphKey
from midstream.graphs.emulator import EmulatedCapture


def greedy(max_tokens: int) -> midstream.SamplingParams:
    return midstream.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> EmulatedCapture:
    """Engines of this test capture their steps."""
    recorder = EmulatedCapture()
    monkeypatch.setattr("midstream.runtime.assembly.new_capturer", lambda *args: recorder)
    return recorder


TINY = {
    "state_block": 16, "kv_block": 4, "max_rows": 4, "num_state_pages": 60, "num_kv_pages": 200,
    "max_step_tokens": 64, "compile": "eager",
}  # fmt: skip


def tokens(outputs: list[midstream.Output]) -> list[list[int]]:
    return [list(out.token_ids) for out in outputs]


def cached_bytes(engine: midstream.Engine) -> list[torch.Tensor]:
    """The contents of all pages but the null page, which warm-up runs may write."""
    pools, slots = engine._parts.pools, engine._parts.runner.step.slots
    own = [pools.temporal[1:], pools.conv[1:], pools.kv[1:], slots.flat]
    return [tensor.clone().view(torch.uint8) for tensor in own]


@pytest.mark.usefixtures("recorder")
def test_decode_and_short_prompts_replay_graphs_and_nothing_falls_back() -> None:
    with guarded_engine(build("bamba"), **TINY) as engine:
        serve(engine, five_prompts(VOCAB), 6)
        stats = engine.stats()
    assert stats["graph_replays"] == stats["steps"] and not stats["graph_fallbacks"]
    assert stats["graphs"]["live"] == 4 and not stats["graphs"]["captured_late"]  # 1, 2, 4; 64


@pytest.mark.parametrize("graphs", ["full", "piecewise"])
@pytest.mark.usefixtures("recorder")
def test_graphs_are_released_and_captured_again_between_requests_and_within(graphs: str) -> None:
    """Faults R12 and G1: no live or cached page changes, and the tokens are those of an engine left alone."""
    prompts, oracle = five_prompts(VOCAB), Oracle(build("bamba"))
    want = [oracle.greedy(prompt, 8) for prompt in prompts[1:3]]
    params = greedy(8)
    with guarded_engine(build("bamba"), **TINY, graphs=graphs) as engine:
        handles = [engine.add(prompt, params) for prompt in prompts[1:3]]
        for _ in range(4):
            engine.step()
        num_live = engine.stats()["graphs"]["live"]
        before = cached_bytes(engine)
        engine.release_graphs()
        assert engine.stats()["graphs"]["live"] == 0
        engine.capture_graphs()
        assert all(map(torch.equal, before, cached_bytes(engine)))
        engine.release_graphs()  # and the rest captures what it needs
        outputs = [out for out in settle(engine) if out]
        stats = engine.stats()
    assert [out.request_id for out in outputs] == [handle.request_id for handle in handles]
    assert tokens(outputs) == want
    assert stats["graph_replays"] == stats["steps"]
    assert 0 < stats["graphs"]["live"] < num_live and stats["graphs"]["captured_late"] > 0


@pytest.mark.usefixtures("recorder")
def test_a_capture_in_the_middle_of_serving_leaves_the_staged_step_as_it_was() -> None:
    prompts, oracle = five_prompts(VOCAB), Oracle(build("bamba"))
    with guarded_engine(build("bamba"), **TINY, graphs="piecewise") as engine:
        first = engine.add(prompts[1], greedy(12))
        for _ in range(4):
            engine.step()
        engine.add(prompts[2], greedy(4))  # a chunk step beside a decoding row
        outputs = sorted(settle(engine), key=lambda out: out.request_id)
        assert engine.stats()["graphs"]["captured_late"] >= 1
    assert tokens(outputs) == [oracle.greedy(prompts[1], 12), oracle.greedy(prompts[2], 4)]
    assert outputs[0].request_id == first.request_id


@pytest.mark.usefixtures("recorder")
def test_prompts_of_any_length_and_number_take_no_more_graphs_than_the_ladder_has() -> None:
    """Fault H4."""
    draw = np.random.default_rng(3)
    with guarded_engine(build("bamba"), **TINY, graphs="piecewise") as engine:
        prompts = [draw.integers(3, VOCAB, n).tolist() for n in draw.integers(1, 90, 12)]
        serve(engine, prompts, 2)
        stats, ladder = engine.stats()["graphs"], engine.config.graphs
    assert stats["live"] <= len(ladder.keys) == 4 and not stats["evicted"]


@pytest.mark.usefixtures("recorder")
def test_a_prompt_tail_of_one_token_beside_decodes_replays_no_decode_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fault G5: the tail has the shape of a decode step, its request says that it is none."""
    shapes: list[GraphKey] = []
    replay = midstream.graphs.table.GraphTable.replay
    monkeypatch.setattr(
        "midstream.graphs.table.GraphTable.replay",
        lambda self, key: (shapes.append(key), replay(self, key))[1],
    )
    prompt = five_prompts(VOCAB)[3]
    oracle = Oracle(build("bamba"))
    with guarded_engine(build("bamba"), **TINY) as engine:
        decoding = engine.add([5, 6, 7], greedy(6))
        engine.step()
        tail = engine.add(prompt[:64], greedy(4))  # 63 beside the decoding row, then 1
        outputs = sorted(settle(engine), key=lambda out: out.request_id)
    assert [out.request_id for out in outputs] == [decoding.request_id, tail.request_id]
    assert tokens(outputs) == [oracle.greedy([5, 6, 7], 6), oracle.greedy(prompt[:64], 4)]
    assert all(key.tokens_per_row == 1 for key in shapes if not key.chunks)
    assert sum(bool(key.chunks) for key in shapes) >= 3


@pytest.mark.usefixtures("recorder")
def test_twelve_requests_on_six_slots_wait_for_each_other_and_decode_in_graphs() -> None:
    """Fault G3: one number bounds slots, batches and captured sizes."""
    options = TINY | {"max_rows": 6}
    prompts, oracle = five_prompts(VOCAB)[1:4] * 4, Oracle(build("bamba"))
    with guarded_engine(build("bamba"), **options) as engine:
        assert engine.config.graph_rows == (1, 2, 4, 6)
        outputs = serve(engine, prompts, 3)
        assert not engine.stats()["graph_fallbacks"]
    assert tokens(outputs) == [oracle.greedy(prompt, 3) for prompt in prompts]


# -- weights that move ----------------------------------------------------------------------------------


def other_weights(model: Any) -> list[torch.Tensor]:
    """Put other weights in the place of the model's, as a loader does that assigns; returns the old."""
    old = [parameter.data for parameter in model.parameters()]
    for parameter, other in zip(
        model.parameters(), build("bamba", seed=9).parameters(), strict=True
    ):
        parameter.data = other.data
    return old


@pytest.mark.usefixtures("recorder")
def test_weights_that_moved_while_the_engine_was_idle_are_captured_again_and_old_states_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Fault G2, without a call of `weights_changed`."""
    prompt, model = five_prompts(VOCAB)[1], build("bamba")
    with guarded_engine(model, **TINY) as engine:
        serve(engine, [prompt], 4)
        other_weights(model)
        with caplog.at_level(logging.WARNING, "midstream"):
            (out,) = serve(engine, [prompt], 4)
        assert "tensors of the model moved" in caplog.text
        assert engine.stats()["graph_replays"] == engine.stats()["steps"]
    assert list(out.token_ids) == Oracle(build("bamba", seed=9)).greedy(prompt, 4)
    assert out.num_cached_tokens == 0


@pytest.mark.usefixtures("recorder")
def test_weights_changed_captures_again_where_they_moved_and_not_where_they_were_overwritten() -> (
    None
):
    prompt, model = five_prompts(VOCAB)[1], build("bamba")
    want = Oracle(build("bamba", seed=9)).greedy(prompt, 4)
    with guarded_engine(model, **TINY) as engine:
        seconds = engine.stats()["graphs"]["capture_seconds"]
        model.load_state_dict(build("bamba", seed=9).state_dict())
        engine.weights_changed()
        assert engine.stats()["graphs"]["capture_seconds"] == seconds
        assert tokens(serve(engine, [prompt], 4)) == [want]
        other_weights(model)
        engine.weights_changed()
        assert engine.stats()["graphs"]["capture_seconds"] > seconds
        assert tokens(serve(engine, [prompt], 4)) == [want]


@pytest.mark.usefixtures("recorder")
def test_weights_that_move_under_running_requests_end_them_with_an_error() -> None:
    prompt, model = five_prompts(VOCAB)[1], build("bamba")
    with guarded_engine(model, **TINY) as engine:
        engine.add(prompt, greedy(90))
        for _ in range(3):
            engine.step()
        kept = other_weights(model)  # else the emulator says at once that they were freed
        with pytest.raises(midstream.ContractError, match="moved while requests were running"):
            for _ in range(70):
                engine.step()
        assert kept
        (out,) = settle(engine)
        assert out.finish_reason == "error" and len(out.token_ids) < 66
        assert tokens(serve(engine, [prompt], 3)) == [
            Oracle(build("bamba", seed=9)).greedy(prompt, 3)
        ]
