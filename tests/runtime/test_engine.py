"""What users may rely on when they serve requests: reuse, endings, errors, room, order."""

import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch
from oracles import Oracle, five_prompts, guarded_engine, serve
from tiny_models import VOCAB, build

import midstream
from midstream.runtime.explain import REASONS
from midstream.runtime.text import ByteTokenizer

OPTIONS = {
    "state_block": 16,
    "kv_block": 4,
    "max_rows": 8,
    "num_state_pages": 60,
    "num_kv_pages": 200,
}
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(build("bamba"))


@pytest.fixture
def model(device: torch.device) -> Any:
    return build("bamba").to(device)


def draw(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


# -- reuse ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "more"), [(80, 10), (112, 16)])
def test_a_hit_inside_a_block_leaves_the_shared_page_byte_identical(
    model: Any, oracle: Oracle, first: int, more: int
) -> None:
    prompt = draw(first, 1)
    options = {"kv_block": 16, "max_rows": 4, "num_state_pages": 20, "num_kv_pages": 60}
    with guarded_engine(model, state_block=64, **options) as engine:
        serve(engine, [prompt], 3)
        parts = engine._parts
        cached = [p for p in range(1, 20) if parts.ownership.state_pool.is_published(p)]
        before = {p: page_bytes(engine, p) for p in cached}
        longer = prompt + draw(more, 2)
        out = serve(engine, [longer], 12)[0]
        assert out.num_cached_tokens == first
        assert list(out.token_ids) == oracle.greedy(longer, 12)
        assert all(torch.equal(page_bytes(engine, p), before[p]) for p in cached)


def page_bytes(engine: midstream.Engine, page: int) -> torch.Tensor:
    pools = engine._parts.pools
    return torch.cat([a[page].view(torch.uint8) for a in (pools.temporal, pools.conv)]).clone()


def test_the_same_prompt_again_computes_at_least_one_token(model: Any, oracle: Oracle) -> None:
    prompt = draw(32, 3)
    with guarded_engine(model, **OPTIONS) as engine:
        first, second = (serve(engine, [prompt], 8)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 28)
    assert list(first.token_ids) == list(second.token_ids) == oracle.greedy(prompt, 8)


def test_a_turn_that_follows_an_answer_resumes_inside_the_answer(
    model: Any, oracle: Oracle
) -> None:
    prompt = draw(30, 4)
    with guarded_engine(model, **OPTIONS) as engine:
        answer = list(serve(engine, [prompt], 40)[0].token_ids)
        follow_up = prompt + answer + draw(5, 5)
        out = serve(engine, [follow_up], 6)[0]
    assert out.num_cached_tokens >= 64
    assert list(out.token_ids) == oracle.greedy(follow_up, 6)


def test_requests_of_different_salts_share_nothing(model: Any) -> None:
    prompt = draw(40, 6)
    params = midstream.SamplingParams(max_tokens=2, **GREEDY)
    with guarded_engine(model, **OPTIONS) as engine:
        reused = []
        for salt in ("a", "b", "a"):
            engine.add(prompt, params, salt=salt)
            reused.append(run(engine)[0].num_cached_tokens)
    assert reused == [0, 0, 36]


def test_weights_changed_forgets_saved_state(model: Any) -> None:
    prompt = draw(40, 7)
    with guarded_engine(model, **OPTIONS) as engine:
        serve(engine, [prompt], 2)
        engine.weights_changed()
        assert serve(engine, [prompt], 2)[0].num_cached_tokens == 0


# -- room -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_mode", ["align", "none"])
@pytest.mark.parametrize("pages", [{"num_state_pages": 9}, {"num_kv_pages": 60}])
def test_preempted_requests_resume_and_give_the_same_tokens(
    model: Any, oracle: Oracle, cache_mode: str, pages: dict[str, int]
) -> None:
    prompts = five_prompts(VOCAB)
    options = OPTIONS | pages
    with guarded_engine(model, cache_mode=cache_mode, max_step_tokens=64, **options) as engine:
        outputs = serve(engine, prompts, 40)
        preemptions = engine.stats()["preemptions"]
    assert [list(out.token_ids) for out in outputs] == [oracle.greedy(p, 40) for p in prompts]
    if "num_kv_pages" in pages:
        assert preemptions > 0


def test_mode_all_and_marks_on_no_grid_bring_the_tokens_of_the_model(
    model: Any, oracle: Oracle
) -> None:
    shared, tails = draw(45, 3), [draw(n, n) for n in (7, 12)]
    with guarded_engine(model, cache_mode="all", **OPTIONS | {"max_len": 80}) as engine:
        for place, tail in enumerate(tails):
            prompt = shared + tail
            params = midstream.SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
            engine.add(prompt, params, checkpoint_at=[len(shared)])
            (output,) = run(engine)
            assert list(output.token_ids) == oracle.greedy(prompt, 5)
            assert output.num_cached_tokens == (len(shared) if place else 0)


def test_sampled_tokens_do_not_depend_on_preemption_or_company(model: Any) -> None:
    prompts = five_prompts(VOCAB)
    params = [
        midstream.SamplingParams(
            max_tokens=30, temperature=1.3, top_p=0.9, top_k=50, seed=i, ignore_eos=True
        )
        for i in range(5)
    ]
    with guarded_engine(model, **OPTIONS) as engine:
        alone = [
            next(iter(engine.generate([p], s))).token_ids
            for p, s in zip(prompts, params, strict=True)
        ]
    with guarded_engine(model, **OPTIONS | {"num_kv_pages": 60}) as engine:
        crowded = [out.token_ids for out in engine.generate(prompts, params)]
        assert engine.stats()["preemptions"] > 0
    assert crowded == alone


def test_a_request_that_cannot_start_does_not_block_a_smaller_one(model: Any) -> None:
    with guarded_engine(model, **OPTIONS | {"num_kv_pages": 60}) as engine:
        params = midstream.SamplingParams(max_tokens=12, **GREEDY)
        handles = [engine.add(draw(n, n), params) for n in (150, 120, 10)]
        order = [u.handle for _ in range(200) for u in engine.step() if u.output]
    assert sorted(order, key=lambda h: h.request_id) == handles
    assert order.index(handles[2]) < order.index(handles[1])


def test_smaller_priority_goes_first(model: Any) -> None:
    with guarded_engine(model, **OPTIONS | {"max_rows": 1}) as engine:
        params = midstream.SamplingParams(max_tokens=3, **GREEDY)
        handles = [engine.add(draw(9, i), params, priority=p) for i, p in enumerate((2, 1, 0))]
        order = [u.handle for _ in range(40) for u in engine.step() if u.output]
    assert order == handles[::-1]


# -- endings ----------------------------------------------------------------------------------------


def test_generation_ends_at_max_tokens_a_stop_token_or_the_longest_length(
    model: Any, oracle: Oracle
) -> None:
    prompt = draw(20, 8)
    want = oracle.greedy(prompt, 30)
    stop = next(t for i, t in enumerate(want) if i > 5 and t not in want[:i])
    place = want.index(stop)
    with guarded_engine(model, **OPTIONS, max_len=40) as engine:
        params = midstream.SamplingParams(max_tokens=60, temperature=0, stop_token_ids=(stop,))
        out = next(iter(engine.generate([prompt], params)))
        assert (list(out.token_ids), out.finish_reason) == (want[: place + 1], "stop")
        out = serve(engine, [prompt], 60)[0]
        assert (list(out.token_ids), out.finish_reason) == (want[:20], "length")
        one = serve(engine, [prompt], 1)[0]
        assert (list(one.token_ids), one.finish_reason) == (want[:1], "length")


def test_min_tokens_puts_a_stop_token_off(model: Any, oracle: Oracle) -> None:
    prompt = draw(20, 8)
    stop = oracle.greedy(prompt, 1)[0]
    with guarded_engine(model, **OPTIONS) as engine:
        params = midstream.SamplingParams(
            max_tokens=9, min_tokens=5, temperature=0, stop_token_ids=(stop,)
        )
        out = next(iter(engine.generate([prompt], params)))
    assert stop not in out.token_ids[:5] and len(out.token_ids) >= 5


def test_a_stop_string_ends_the_answer_and_is_not_part_of_the_text(device: torch.device) -> None:
    model = build("bamba", vocab_size=260).to(device)
    with guarded_engine(model, tokenizer=ByteTokenizer(), **OPTIONS) as engine:
        whole = next(
            iter(engine.generate(["abc"], midstream.SamplingParams(max_tokens=30, temperature=0)))
        )
        assert whole.text is not None
        stop = whole.text[4:6]
        params = midstream.SamplingParams(max_tokens=30, temperature=0, stop=stop)
        updates = list(engine.stream(["abc"], params))
    output = updates[-1].output
    assert output is not None and output.finish_reason == "stop"
    assert (
        output.text
        == whole.text[: whole.text.index(stop)]
        == "".join(u.text or "" for u in updates)
    )


def test_logprobs_are_those_of_the_full_forward(model: Any, oracle: Oracle) -> None:
    prompt = draw(20, 9)
    with guarded_engine(model, **OPTIONS) as engine:
        out = serve(engine, [prompt], 6, logprobs=3)[0]
    assert out.logprobs is not None and len(out.logprobs) == 6
    ids = prompt + list(out.token_ids)
    with torch.no_grad():
        full = oracle.model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    for i, entry in enumerate(out.logprobs):
        want = full[len(prompt) - 1 + i]
        assert entry.token_id == out.token_ids[i]
        assert entry.logprob == pytest.approx(want[entry.token_id].item(), abs=1e-3)
        assert [t for t, _ in entry.best] == want.topk(3).indices.tolist()
        assert [v for _, v in entry.best] == pytest.approx(want.topk(3).values.tolist(), abs=1e-3)


# -- abort, streams, close --------------------------------------------------------------------------


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


def test_close_gives_the_model_back_unchanged() -> None:
    model, ids = build("bamba"), torch.tensor([draw(20, 12)])
    before = model(ids, use_cache=False).logits
    engine = midstream.Engine(model, **OPTIONS)
    engine.close()
    engine.close()
    assert torch.equal(model(ids, use_cache=False).logits, before)
    with pytest.raises(midstream.ContractError, match="closed"):
        engine.add([1])


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


# -- errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], midstream.ConfigError, "empty"),
        ([1, VOCAB], midstream.ConfigError, "token ids from 1 to 128"),
        ([-1], midstream.ConfigError, "token ids from -1"),
        ([[1, 2]], midstream.ConfigError, "2 dimensions"),
        ([1.5], midstream.ConfigError, "whole numbers"),
        ("text", midstream.ConfigError, "no tokenizer"),
        ([5] * 5000, midstream.CapacityError, "5000 tokens"),
    ],
)
def test_a_bad_prompt_is_refused_and_the_others_go_on(
    model: Any, oracle: Oracle, prompt: Any, error: type[Exception], message: str
) -> None:
    good = draw(10, 14)
    with guarded_engine(model, **OPTIONS) as engine:
        engine.add(good, midstream.SamplingParams(max_tokens=4, **GREEDY))
        engine.step()
        with pytest.raises(error, match=message):
            engine.add(prompt)
        with pytest.raises(error, match=message):
            list(engine.generate([good, prompt]))
        assert list(run(engine)[0].token_ids) == oracle.greedy(good, 4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cache_mode": "algin"}, midstream.ConfigError, "cache_mode='algin'; expected one of"),
        ({"state_block": 24, "kv_block": 16}, midstream.ConfigError, "not a multiple"),
        ({"max_row": 3}, midstream.ConfigError, "did you mean 'max_rows'"),
        ({"memory": "lots"}, midstream.ConfigError, "share of the free memory such as"),
        ({"memory": "1KiB"}, midstream.ConfigError, "holds"),
        ({"max_rows": 0}, midstream.ConfigError, "max_rows=0"),
        ({"hash_key": "12"}, midstream.ConfigError, "32 hexadecimal"),
        ({"num_kv_pages": 3, "max_len": 500}, midstream.ConfigError, "exceeds"),
    ],
)
def test_a_bad_option_is_refused_and_the_model_is_untouched(
    model: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        midstream.Engine(model, **options)
    midstream.Engine(model, **OPTIONS).close()


def run(engine: midstream.Engine) -> list[midstream.Output]:
    """Step until nothing is left; outputs in order of arrival."""
    outputs = [u.output for u in engine.step() if u.output]
    while engine.num_unfinished:
        outputs += [u.output for u in engine.step() if u.output]
    return outputs


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


def test_an_engine_says_what_it_serves_and_how_full_it_is(model: Any) -> None:
    with guarded_engine(model, **OPTIONS) as engine:
        engine.add(draw(9, 16))
        engine.step()
        engine.add(draw(9, 17))
        device = next(model.parameters()).device
        start = f"<Engine of BambaForCausalLM on {device}: 1 requests running, 1 waiting; pages owned: kv "
        assert repr(engine).startswith(start)
        assert repr(engine).endswith(f"; 1 steps, {engine.stats()['graph_replays']} replayed>")
        engine.abort(midstream.Handle(0))
        engine.abort(midstream.Handle(1))
        run(engine)
    assert repr(engine) == f"<Engine of BambaForCausalLM on {device}: closed after 1 steps>"


@pytest.mark.parametrize(
    "tokenizer", ["bytes", ByteTokenizer, 5, object()], ids=["name", "class", "number", "object"]
)
def test_what_is_no_tokenizer_is_refused_and_the_model_is_untouched(
    model: Any, tokenizer: Any
) -> None:
    with pytest.raises(
        midstream.ConfigError, match=r"tokenizer=.*expected None or an object with enc"
    ):
        midstream.Engine(model, tokenizer, **OPTIONS)
    midstream.Engine(model, **OPTIONS).close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"poison": "yes"},
        {"poison": 1},
        {"shadow_every": True},
        {"shadow_every": -1},
        {"shadow_every": 1.5},
    ],
)
def test_odd_switches_of_debug_are_refused(model: Any, wrong: dict[str, Any]) -> None:
    with (
        guarded_engine(model, **OPTIONS) as engine,
        pytest.raises(midstream.ConfigError, match="expected True or False, and a whole number"),
    ):
        engine.debug(**wrong)


def test_a_switch_of_debug_that_is_not_named_stays_as_it_was(model: Any) -> None:
    def switches() -> tuple[bool, int]:
        shadow = engine._parts.runner.shadow
        return engine._parts.runner.poison, 0 if shadow is None else shadow.every

    with midstream.Engine(model, **OPTIONS) as engine:
        assert switches() == (False, 0)
        engine.debug(poison=True)
        engine.debug(shadow_every=8)
        assert switches() == (True, 8)
        compared = engine._parts.runner.shadow
        engine.debug()
        engine.debug(poison=None, shadow_every=None)
        assert switches() == (True, 8)
        engine.debug(poison=False)
        assert switches() == (False, 8)
        assert engine._parts.runner.shadow is compared  # it counts on
        engine.debug(shadow_every=0)
        assert switches() == (False, 0)


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
    with pytest.raises(midstream.ContractError, match="engine is closed"):
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


def test_a_request_that_ended_before_it_was_looked_up_is_explained(model: Any) -> None:
    with midstream.Engine(model, **OPTIONS) as engine:
        handle = engine.add(draw(9, 1))
        assert engine.explain(handle) == "waiting: not looked up yet"
        engine.abort(handle)
        assert engine.explain(handle) == "aborted while waiting: it was not looked up"
        run(engine)
    options = OPTIONS | {"num_kv_pages": 4, "num_state_pages": 4}
    with midstream.Engine(model, **options) as engine:
        handle = engine.add(draw(8, 1))
        engine._fail([engine._requests[0]], "no room")
        assert engine.explain(handle) == "failed while waiting: it was not looked up; no room"


def test_a_request_is_explained_by_handle_output_or_number_and_every_reason_has_its_meaning(
    model: Any,
) -> None:
    with midstream.Engine(model, **OPTIONS) as engine:
        params = midstream.SamplingParams(max_tokens=2, **GREEDY)
        (out,) = engine.generate([draw(20, 1)], params)
        told = engine.explain(midstream.Handle(out.request_id))
        assert told == engine.explain(out) == engine.explain(out.request_id)
        assert REASONS["unknown"] in told
        for wrong in ("0", None, True, 1.0):
            with pytest.raises(midstream.ConfigError, match="is no handle; expected what `add`"):
                engine.explain(wrong)  # type: ignore[arg-type]
        with pytest.raises(midstream.ContractError, match="request 7 is not known here"):
            engine.explain(7)
    meanings = midstream.Engine.explain.__doc__ or ""
    for reason in REASONS:
        assert f"\n            {reason}: " in meanings


def test_stats_and_config_can_be_read_after_close(model: Any) -> None:
    with guarded_engine(model, **OPTIONS) as engine:
        serve(engine, [draw(9, 16)], 3)
        before = engine.stats()
    assert engine.stats() == before
    assert engine.config.state_block == OPTIONS["state_block"]


@pytest.mark.parametrize(
    ("what", "message"),
    [("bench/models/bytes", "load_model"), (None, "expected a causal language model")],
)
def test_what_is_no_model_is_refused(what: Any, message: str) -> None:
    with pytest.raises(midstream.ConfigError, match=message):
        midstream.Engine(what)


def test_layers_that_share_a_module_are_refused() -> None:
    model = build("bamba")
    model.model.layers[0] = model.model.layers[1]
    with pytest.raises(midstream.UnsupportedError, match="share a module"):
        midstream.Engine(model, **OPTIONS)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([1, 2, 3], None, r"pass \[text\] or"),
        ([[1], [2, 999]], None, "prompt 1: "),
        ([[1]], {"max_tokens": 3}, "params is dict"),
        ([[1]], midstream.SamplingParams(stop_token_ids=(5000,)), "never produce"),
    ],
)
def test_bad_calls_of_generate_say_what_to_pass(
    model: Any, prompts: Any, params: Any, message: str
) -> None:
    with (
        guarded_engine(model, **OPTIONS) as engine,
        pytest.raises(midstream.ConfigError, match=message),
    ):
        list(engine.generate(prompts, params))


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


def test_more_logprobs_than_the_vocabulary_has_are_refused_and_hurt_nobody() -> None:
    with guarded_engine(build("bamba", vocab_size=10), **OPTIONS) as engine:
        params = midstream.SamplingParams(max_tokens=4, **GREEDY)
        engine.add([3, 4, 5], params)
        with pytest.raises(midstream.ConfigError, match="vocabulary has 10"):
            engine.add([3, 4, 6], midstream.SamplingParams(logprobs=20))
        assert [out.finish_reason for out in run(engine)] == ["length"]


def test_min_tokens_puts_a_stop_string_off(device: torch.device) -> None:
    model = build("bamba", vocab_size=260).to(device)
    with guarded_engine(model, tokenizer=ByteTokenizer(), **OPTIONS) as engine:
        greedy = {"temperature": 0.0, "max_tokens": 20}
        whole = next(iter(engine.generate(["abc"], midstream.SamplingParams(**greedy))))
        assert whole.text
        params = midstream.SamplingParams(min_tokens=10, stop=whole.text[0], **greedy)
        assert len(next(iter(engine.generate(["abc"], params))).token_ids) >= 10


@pytest.mark.parametrize(
    "options",
    [
        {"cache_mode": "all", "num_state_pages": 4, "num_kv_pages": 4},
        {"kv_block": 1, "state_block": 1, "num_state_pages": 4, "num_kv_pages": 2},
    ],
    ids=["all", "one-token-pages"],
)
def test_pools_too_small_for_any_sequence_are_refused_and_the_model_is_given_back(
    model: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(midstream.ConfigError, match="expected room for at least 2"):
        midstream.Engine(model, max_rows=1, **options)
    with midstream.Engine(model, max_rows=1, max_len=32) as engine:
        assert len(list(engine.generate([[5, 6]], midstream.SamplingParams(max_tokens=2)))) == 1


@pytest.mark.parametrize(
    "wrong", [{"priority": None}, {"priority": 1.5}, {"salt": 3}, {"checkpoint_at": 3}]
)
def test_a_refused_request_leaves_nothing_behind(model: Any, wrong: dict[str, Any]) -> None:
    with midstream.Engine(model, **OPTIONS) as engine:
        with pytest.raises(midstream.ConfigError, match="expected"):
            engine.add([5] * 5, **wrong)
        assert engine.num_unfinished == 0
        engine.add([5] * 5, checkpoint_at=np.array([3]), priority=np.int64(1))
        with pytest.raises(midstream.ConfigError, match="3 is no handle"):
            engine.abort(3)  # type: ignore[arg-type]


def test_prompts_may_come_from_an_iterator(model: Any) -> None:
    params = midstream.SamplingParams(max_tokens=2, **GREEDY)
    with midstream.Engine(model, **OPTIONS) as engine:
        outputs = list(engine.generate((p for p in ([5, 6], [7])), params))
    assert [out.prompt_token_ids for out in outputs] == [(5, 6), (7,)]


def test_a_second_thread_during_a_step_is_refused_and_harms_nobody(
    model: Any, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals: list[str] = []
    with guarded_engine(model, **OPTIONS) as engine:
        whole = engine._turn_whole

        def call() -> None:
            for refused in (engine.step, lambda: engine.add(prompt), lambda: engine.abort(handle)):
                with pytest.raises(midstream.ContractError) as caught:
                    refused()
                refusals.append(str(caught.value))

        def turn() -> None:
            other = threading.Thread(target=call)
            other.start()
            other.join()
            whole()

        monkeypatch.setattr(engine, "_turn_whole", turn)
        prompt, handle = draw(20, 1), midstream.Handle(0)
        assert list(serve(engine, [prompt], 3)[0].token_ids) == oracle.greedy(prompt, 3)
    assert refusals and all("one thread at a time" in text for text in refusals)
