"""What users may rely on when they serve requests: reuse, room, order, tokens and endings."""

from typing import Any

import pytest
import torch
from engine_rig import GREEDY, OPTIONS, draw, run
from oracles import Oracle, five_prompts, guarded_engine, serve
from tiny_models import VOCAB, build

import midstream
from midstream.runtime.text import ByteTokenizer


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


def test_min_tokens_puts_a_stop_string_off(device: torch.device) -> None:
    model = build("bamba", vocab_size=260).to(device)
    with guarded_engine(model, tokenizer=ByteTokenizer(), **OPTIONS) as engine:
        greedy = {"temperature": 0.0, "max_tokens": 20}
        whole = next(iter(engine.generate(["abc"], midstream.SamplingParams(**greedy))))
        assert whole.text
        params = midstream.SamplingParams(min_tokens=10, stop=whole.text[0], **greedy)
        assert len(next(iter(engine.generate(["abc"], params))).token_ids) >= 10


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


def test_prompts_may_come_from_an_iterator(model: Any) -> None:
    params = midstream.SamplingParams(max_tokens=2, **GREEDY)
    with midstream.Engine(model, **OPTIONS) as engine:
        outputs = list(engine.generate((p for p in ([5, 6], [7])), params))
    assert [out.prompt_token_ids for out in outputs] == [(5, 6), (7,)]
