"""Graphs in pieces on a GPU: bit-equal to eager, no waits, hardly more memory than whole graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import five_prompts, guarded_engine, serve
from tiny_models import FAMILIES, VOCAB, build
from torch import Tensor

import midstream
from midstream.graphs.capture import GraphCapture
from midstream.graphs.dispatch import MODES, GraphKey, decode_key
from midstream.graphs.piecewise import PiecewiseCapture

pytestmark = pytest.mark.gpu

SMALL = {
    "state_block": 16, "kv_block": 4, "max_rows": 8, "num_state_pages": 120, "num_kv_pages": 400,
}  # fmt: skip
MB = 2**20


def memory_of(engine: midstream.Engine) -> list[Tensor]:
    pools, step = engine._parts.pools, engine._parts.runner.step
    return [pools.temporal, pools.conv, pools.kv, step.slots.flat, step.token, step.logprob]


def bits(tensors: list[Tensor]) -> list[Tensor]:
    torch.cuda.synchronize()
    return [tensor.clone().contiguous().view(torch.uint8) for tensor in tensors]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("compile", ["eager", "inductor"])
@pytest.mark.parametrize("graphs", ["full", "piecewise"])
def test_every_replay_is_bit_equal_to_the_same_step_run_eagerly(
    family: str, compile: str, graphs: str
) -> None:
    """Steps with prompt chunks and without, over the same padded buffers."""
    model = build(family, dtype=torch.bfloat16).cuda()
    with guarded_engine(model, compile=compile, graphs=graphs, **SMALL) as engine:
        runner, seen = engine._parts.runner, list[GraphKey]()

        def compare(key: GraphKey, *others: Any) -> list[Tensor]:
            view = runner._view(key)
            if key not in runner.ladder.keys:  # more chunks than any graph has
                return [runner.step.run(view, key.rows)]
            seen.append(key)
            before = [tensor.clone() for tensor in memory_of(engine)]
            assert runner.graphs.replay(key), key
            replayed = bits([*memory_of(engine), runner._logits[key]])
            for tensor, copy in zip(memory_of(engine), before, strict=True):
                tensor.copy_(copy)
            logits = runner.step.run(view, key.rows)
            eager = bits([*memory_of(engine), logits])
            for place, (a, b) in enumerate(zip(replayed, eager, strict=True)):
                assert torch.equal(a, b), (key, place)
            return [logits]

        runner._replay_or_run = compare  # type: ignore[method-assign]
        serve(engine, five_prompts(VOCAB), 12)
    assert {bool(key.chunks) for key in seen} == {True, False}
    assert all(key.in_pieces == (graphs == "piecewise") for key in seen)


@pytest.mark.parametrize("compile", ["eager", "inductor"])
def test_all_modes_give_equal_tokens(compile: str) -> None:
    prompts = [*five_prompts(VOCAB), *five_prompts(VOCAB, seed=1)]
    runs = {}
    for mode in MODES:
        with guarded_engine(
            build("bamba").cuda(), compile=compile, graphs=mode, max_step_tokens=64, **SMALL
        ) as engine:
            runs[mode] = [list(out.token_ids) for out in serve(engine, prompts, 20)]
            stats = engine.stats()
        # a step with many short chunks may have more of them than any graph
        least = 0 if mode == "off" else 0.8 * stats["steps"]
        assert stats["graph_replays"] >= least, (mode, stats["graph_fallbacks"])
        assert mode != "off" or not stats["graph_replays"]
    assert all(run == runs["off"] for run in runs.values())


def test_a_step_in_pieces_waits_for_nothing() -> None:
    with midstream.Engine(
        build("bamba").cuda(), compile="eager", graphs="piecewise", **SMALL
    ) as engine:
        params = midstream.SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
        for prompt in five_prompts(VOCAB):
            engine.add(prompt, params)
        for _ in range(6):
            engine.step()
        before = engine.stats()["graph_replays"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(10):
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert engine.stats()["graph_replays"] == before + 10
        while engine.num_unfinished:
            engine.step()


def bytes_of_a_long_step(engine: midstream.Engine, in_pieces: bool) -> int:
    """By which the pool grows when a step of 2,048 tokens is captured."""
    runner, key = engine._parts.runner, GraphKey(2048, 8, 80)
    recorder, view, logits = (
        GraphCapture(torch.device("cuda", 0)),
        runner._view(key),
        list[Tensor](),
    )
    capturer: Any = PiecewiseCapture(recorder) if in_pieces else recorder

    def run() -> None:
        logits[:] = [runner.step.run(view, key.rows)]

    with runner._blank_stage():
        graph = capturer.capture(run, runner.step.addresses, "long")
    if in_pieces:  # conv and scan of three layers, kv_write and attention of one
        assert graph.num_calls == 8 and 5 <= graph.num_graphs <= 9
    logits.clear()
    graph.release()
    recorder.release()
    return int(graph.memory_bytes)


def test_the_pieces_of_a_step_take_hardly_more_memory_than_the_whole_step() -> None:
    """Memory of a piece is used again by later pieces, as in one graph."""
    model = build("bamba", intermediate_size=8192).cuda()
    options = {"compile": "eager", "graphs": "off", "max_step_tokens": 2048} | SMALL
    with midstream.Engine(model, **options) as engine:
        whole = bytes_of_a_long_step(engine, in_pieces=False)
        pieces = bytes_of_a_long_step(engine, in_pieces=True)
    assert whole > 32 * MB
    assert pieces <= 1.2 * whole + 22 * MB, (pieces, whole)


def test_the_ladder_of_an_engine_takes_at_most_what_its_largest_graph_predicts() -> None:
    model = build("bamba", intermediate_size=8192, vocab_size=32000).cuda()
    options = SMALL | {"max_rows": 64, "num_state_pages": 300}
    with midstream.Engine(model, compile="eager", **options) as engine:
        runner = engine._parts.runner
        whole = runner.ladder.keys
        for keys in (runner.graph_keys, whole):  # those of the start, and with those that come late
            graphs = engine.stats()["graphs"]
            assert graphs["live"] == len(keys) > 10
            # the allocator takes small blocks from segments of 2 MB, medium ones from segments of 20 MB
            assert graphs["memory_bytes"] <= graphs["predicted_bytes"] + 22 * MB
            engine.release_graphs()
            assert engine.stats()["graphs"]["memory_bytes"] == 0
            runner.graphs.clear()
            runner.graphs.warm_up(whole, lambda key: None)


def test_an_engine_that_releases_its_graphs_gives_their_memory_back_and_serves_on() -> None:
    prompts = five_prompts(VOCAB)
    with guarded_engine(build("bamba").cuda(), compile="eager", **SMALL) as engine:
        want = [list(out.token_ids) for out in serve(engine, prompts, 10)]
        for prompt in prompts[1:3]:
            engine.add(
                prompt, midstream.SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
            )
        for _ in range(5):
            engine.step()
        pools = engine._parts.pools
        before = bits([pools.temporal[1:], pools.conv[1:], pools.kv[1:]])
        engine.release_graphs()
        engine.capture_graphs()
        after = bits([pools.temporal[1:], pools.conv[1:], pools.kv[1:]])
        assert all(map(torch.equal, before, after))
        engine.release_graphs()
        while engine.num_unfinished:
            engine.step()
        assert [list(out.token_ids) for out in serve(engine, prompts, 10)] == want
        stats = engine.stats()
    assert stats["graph_replays"] >= 0.8 * stats["steps"]
    assert stats["graphs"]["captured_late"] > 0


def test_a_model_on_another_device_than_the_current_one_is_served() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    prompts = five_prompts(VOCAB)
    runs = []
    for place in ("cuda:0", "cuda:1"):
        for mode in ("full", "piecewise"):
            assert torch.cuda.current_device() == 0
            with guarded_engine(
                build("bamba").to(place), compile="eager", graphs=mode, **SMALL
            ) as engine:
                runs.append([list(out.token_ids) for out in serve(engine, prompts, 10)])
                assert engine.stats()["graph_replays"] >= 0.8 * engine.stats()["steps"]
    assert all(run == runs[0] for run in runs)


def test_decode_in_pieces_replays_its_own_graphs() -> None:
    with midstream.Engine(
        build("bamba").cuda(), compile="eager", graphs="piecewise", **SMALL
    ) as engine:
        table = engine._parts.runner.graphs
        assert table.keys == [decode_key(rows, in_pieces=True) for rows in (1, 2, 4, 8)]
