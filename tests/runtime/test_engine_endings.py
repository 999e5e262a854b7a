"""Whatever ends a request or an engine: abort, a broken step, another thread, close; the others go on."""

import gc
import threading
from typing import Any

import pytest
import torch
from engine_rig import GREEDY, OPTIONS, draw, run
from oracles import Oracle, five_prompts, guarded_engine, serve
from tiny_models import VOCAB, build

import midstream


@pytest.mark.parametrize("steps", range(6))
def test_abort_at_any_stage_leaves_the_others_and_the_books_right(
    model: Any, oracle: Oracle, steps: int
) -> None:
    prompts = five_prompts(VOCAB)
    params = midstream.SamplingParams(max_tokens=10, **GREEDY)
    with guarded_engine(model, max_step_tokens=32, **OPTIONS) as engine:
        handles = [engine.add(prompt, params) for prompt in prompts]
        outputs = [u.output for _ in range(steps) for u in engine.step() if u.output]
        engine.abort(handles[1])
        engine.abort(handles[3])
        engine.abort(midstream.Handle(999))
        outputs += run(engine)
        engine.check_books()
        by_id = {out.request_id: out for out in outputs}
        again = serve(engine, [prompts[1]], 10)[0]
    for handle, prompt in zip(handles, prompts, strict=True):
        out = by_id[handle.request_id]
        if out.finish_reason != "abort":
            assert list(out.token_ids) == oracle.greedy(prompt, 10)
    assert list(again.token_ids) == oracle.greedy(prompts[1], 10)


def test_outputs_that_wait_for_a_step_count_as_unfinished(model: Any) -> None:
    params = midstream.SamplingParams(max_tokens=2, **GREEDY)
    with guarded_engine(model, **OPTIONS) as engine:
        aborted, ended = engine.add(draw(9, 1), params), engine.add(draw(9, 2), params)
        engine.abort(aborted)
        assert engine.num_unfinished == 2
        list(engine.generate([draw(9, 3)], midstream.SamplingParams(max_tokens=9, **GREEDY)))
        assert engine.num_unfinished == 2  # both have ended, and nobody was told
        found = {out.request_id: out.finish_reason for out in run(engine)}
        assert found == {aborted.request_id: "abort", ended.request_id: "length"}
        assert engine.num_unfinished == 0


def test_a_stream_brings_each_token_once_and_leaving_it_aborts_the_rest(model: Any) -> None:
    prompts = five_prompts(VOCAB)[:3]
    params = midstream.SamplingParams(max_tokens=8, **GREEDY)
    with guarded_engine(model, **OPTIONS) as engine:
        got: dict[midstream.Handle, list[int]] = {}
        for update in engine.stream(prompts, params):
            got.setdefault(update.handle, []).extend(update.token_ids)
        assert list(got.values()) == [list(o.token_ids) for o in engine.generate(prompts, params)]
        for _ in engine.stream(prompts, params):
            break
        assert engine.num_unfinished == 0
        engine.step()
        engine.step()


def test_a_step_that_breaks_ends_its_requests_and_leaves_the_books_balanced(
    model: Any, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = draw(20, 13)
    with guarded_engine(model, **OPTIONS) as engine:
        handle = engine.add(prompt, midstream.SamplingParams(max_tokens=9, **GREEDY))
        engine.step()

        def broken(*args: Any) -> None:
            raise RuntimeError("device lost")

        with monkeypatch.context() as patch:
            patch.setattr(engine._parts.runner.step, "run", broken)
            with pytest.raises(RuntimeError, match="device lost"):
                engine.step()
        outputs = run(engine)
        assert [(o.request_id, o.finish_reason) for o in outputs] == [(handle.request_id, "error")]
        assert "device lost" in (outputs[0].error or "")
        engine.check_books()
        assert list(serve(engine, [prompt], 9)[0].token_ids) == oracle.greedy(prompt, 9)


def test_nan_logits_end_the_request_with_an_error_and_leave_no_checkpoint(
    oracle: Oracle, device: torch.device
) -> None:
    model = build("bamba").to(device)
    with torch.no_grad():
        model.get_input_embeddings().weight[3] = float("nan")
    good = [t for t in draw(20, 15) if t != 3]
    with guarded_engine(model, **OPTIONS) as engine:
        params = midstream.SamplingParams(max_tokens=6, **GREEDY)
        bad, fine = engine.add([3] * 40, params), engine.add(good, params)
        outputs = {out.request_id: out for out in run(engine)}
        assert outputs[bad.request_id].finish_reason == "error"
        assert "NaN" in (outputs[bad.request_id].error or "")
        assert list(outputs[fine.request_id].token_ids) == oracle.greedy(good, 6)
        assert serve(engine, [[3] * 40], 2)[0].num_cached_tokens == 0


def test_a_second_thread_during_a_step_is_refused_and_harms_nobody(
    model: Any, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals: list[str] = []
    with guarded_engine(model, **OPTIONS) as engine:
        whole = engine._turns.turn

        def call() -> None:
            calls = (
                engine.step,
                lambda: engine.add(prompt),
                lambda: engine.abort(handle),
                engine.close,
            )
            for refused in calls:
                with pytest.raises(midstream.ContractError) as caught:
                    refused()
                refusals.append(str(caught.value))

        def turn() -> None:
            other = threading.Thread(target=call)
            other.start()
            other.join()
            whole()

        monkeypatch.setattr(engine._turns, "turn", turn)
        prompt, handle = draw(20, 1), midstream.Handle(0)
        assert list(serve(engine, [prompt], 3)[0].token_ids) == oracle.greedy(prompt, 3)
    assert refusals and all("one thread at a time" in text for text in refusals)


def test_two_engines_in_one_process_do_not_disturb_each_other(oracle: Oracle) -> None:
    prompts = [draw(30, 10), draw(45, 11)]
    with (
        guarded_engine(build("bamba"), **OPTIONS) as one,
        guarded_engine(build("qwen3_next"), **OPTIONS) as two,
    ):
        params = midstream.SamplingParams(max_tokens=12, **GREEDY)
        for engine in (one, two):
            for prompt in prompts:
                engine.add(prompt, params)
        outputs: list[midstream.Output] = []
        while one.num_unfinished or two.num_unfinished:
            outputs += [u.output for u in one.step() if u.output]
            two.step()
    assert [list(out.token_ids) for out in outputs] == [oracle.greedy(p, 12) for p in prompts]


def test_two_models_that_share_a_config_object_are_lowered_apart() -> None:
    one = build("bamba")
    two = type(one)(one.config).eval().requires_grad_(False)
    two.load_state_dict(build("bamba", seed=5).state_dict())
    other = Oracle(build("bamba", seed=5))
    prompt = draw(12, 17)
    first = midstream.Engine(one, **OPTIONS)
    assert Oracle(two).greedy(prompt, 3) == other.greedy(prompt, 3)  # not lowered, not disturbed
    with guarded_engine(two, **OPTIONS) as second:
        first.close()
        assert list(serve(second, [prompt], 6)[0].token_ids) == other.greedy(prompt, 6)
    assert Oracle(two).greedy(prompt, 3) == other.greedy(prompt, 3)
    assert Oracle(one).greedy(prompt, 3) == Oracle(build("bamba")).greedy(prompt, 3)


def test_close_gives_the_model_back_unchanged() -> None:
    model, ids = build("bamba"), torch.tensor([draw(20, 12)])
    before = model(ids, use_cache=False).logits
    engine = midstream.Engine(model, **OPTIONS)
    engine.close()
    engine.close()
    assert torch.equal(model(ids, use_cache=False).logits, before)
    with pytest.raises(midstream.ContractError, match="closed"):
        engine.add([1])


def test_a_dropped_engine_gives_the_model_back(oracle: Oracle) -> None:
    model = build("bamba")
    engine = midstream.Engine(model, **OPTIONS)
    with pytest.raises(midstream.ContractError, match=r"close\(\) the Engine"):
        midstream.Engine(model, **OPTIONS)
    del engine
    gc.collect()
    with guarded_engine(model, **OPTIONS) as engine:
        assert list(serve(engine, [[5, 6, 7]], 4)[0].token_ids) == oracle.greedy([5, 6, 7], 4)


def test_restore_closes_an_engine_that_serves_the_model(oracle: Oracle) -> None:
    model = build("bamba")
    engine = midstream.Engine(model, **OPTIONS)
    engine.add([5, 6, 7])
    midstream.restore(model)
    with pytest.raises(midstream.ContractError, match="engine is closed"):
        engine.step()
    assert oracle.greedy([5, 6, 7], 2) == Oracle(model).greedy([5, 6, 7], 2)


def test_close_ends_what_is_unfinished_and_leaves_no_request_and_no_owned_page(model: Any) -> None:
    params = midstream.SamplingParams(max_tokens=50, **GREEDY)
    engine = midstream.Engine(model, **OPTIONS)
    running = engine.add(draw(20, 1), params)
    stream = engine.stream([draw(30, 2)], params)
    next(stream)
    waiting = engine.add(draw(9, 3), params)
    assert engine.num_unfinished == 3
    ownership = engine._parts.ownership
    engine.close()
    stats = engine.stats()
    assert (engine.num_unfinished, stats["running"], stats["waiting"]) == (0, 0, 0)
    for pool in stats["pages"].values():
        assert pool["owned"] == 0
    ownership.index.check_books()
    assert "reused 0 of 19 tokens" in engine.explain(running)
    assert engine.explain(waiting) == "aborted while waiting: it was not looked up"
    with pytest.raises(midstream.ContractError, match="engine was closed"):
        next(stream)


def test_a_device_that_is_lost_while_closing_still_gives_the_model_back(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict(vars(model))
    engine = midstream.Engine(model, **OPTIONS)
    engine.add(draw(20, 1))
    engine.step()

    def lost(*args: Any) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine._parts.runner, "wait", lost)
    with pytest.raises(RuntimeError, match="device lost"):
        engine.close()
    assert dict(vars(model)) == before
    assert (engine.num_unfinished, engine.stats()["running"]) == (0, 0)
    engine.close()


def test_a_closed_engine_is_not_entered(model: Any) -> None:
    engine = midstream.Engine(model, **OPTIONS)
    engine.close()
    with pytest.raises(midstream.ContractError) as refused, engine:
        pass
    assert str(refused.value) == (
        "Engine: the engine is closed; expected an open one; make a new one, or close it later"
    )


def test_an_iterator_says_what_its_engine_left_unfinished(model: Any) -> None:
    engine = midstream.Engine(model, **OPTIONS)
    updates = engine.stream([draw(9, 16), draw(5, 16)], midstream.SamplingParams(max_tokens=4))
    next(updates)
    engine.close()
    with pytest.raises(
        midstream.ContractError, match="closed with 2 of 2 requests of this iterator"
    ):
        list(updates)


def test_stats_and_config_can_be_read_after_close(model: Any) -> None:
    with guarded_engine(model, **OPTIONS) as engine:
        serve(engine, [draw(9, 16)], 3)
        before = engine.stats()
    assert engine.stats() == before
    assert engine.config.state_block == OPTIONS["state_block"]
