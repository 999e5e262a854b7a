"""What an engine refuses, and what it says of itself and of its requests."""

from typing import Any

import numpy as np
import pytest
import torch
from engine_rig import GREEDY, OPTIONS, draw, run
from oracles import Oracle, guarded_engine
from tiny_models import VOCAB, build

import midstream
from midstream.runtime.explain import REASONS
from midstream.runtime.text import ByteTokenizer


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], midstream.ConfigError, "empty"),
        ([1, VOCAB], midstream.ConfigError, "token ids from 1 to 128"),
        ([-1], midstream.ConfigError, "token ids from -1"),
        ([[1, 2]], midstream.ConfigError, r"a list whose item 0 is \[1, 2\]; expected text or"),
        ([3, 1.5], midstream.ConfigError, "a list whose item 1 is 1.5; .*whole numbers"),
        ([{"role": "user"}], midstream.ConfigError, "item 0 is {'role': 'user'}; .*chat_template"),
        (None, midstream.ConfigError, "the prompt is None, a NoneType"),
        (np.zeros((2, 3)), midstream.ConfigError, r"a ndarray of float64, shape \(2, 3\)"),
        (torch.ones(2).requires_grad_(), midstream.ConfigError, "a Tensor of torch.float32"),
        (
            torch.ones(2, device="meta"),
            midstream.ConfigError,
            r"a Tensor of torch.float32, shape \(2,\)",
        ),
        ({"input_ids": [1]}, midstream.ConfigError, "a dict with 'input_ids'"),
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


def test_more_logprobs_than_the_vocabulary_has_are_refused_and_hurt_nobody() -> None:
    with guarded_engine(build("bamba", vocab_size=10), **OPTIONS) as engine:
        params = midstream.SamplingParams(max_tokens=4, **GREEDY)
        engine.add([3, 4, 5], params)
        with pytest.raises(midstream.ConfigError, match="vocabulary has 10"):
            engine.add([3, 4, 6], midstream.SamplingParams(logprobs=20))
        assert [out.finish_reason for out in run(engine)] == ["length"]


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
    "wrong",
    [{"priority": None}, {"priority": 1.5}, {"salt": 3}, {"checkpoint_at": 3}, {"stream": "yes"}],
)
def test_a_refused_request_leaves_nothing_behind(model: Any, wrong: dict[str, Any]) -> None:
    with midstream.Engine(model, **OPTIONS) as engine:
        with pytest.raises(midstream.ConfigError, match="expected"):
            engine.add([5] * 5, **wrong)
        assert engine.num_unfinished == 0
        engine.add([5] * 5, checkpoint_at=np.array([3]), priority=np.int64(1))
        with pytest.raises(midstream.ConfigError, match="3 is no handle"):
            engine.abort(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompts", [{"input_ids": [[1, 2]]}, {(1, 2), (3,)}])
def test_prompts_that_are_no_list_are_refused(model: Any, prompts: Any) -> None:
    with midstream.Engine(model, **OPTIONS) as engine:
        for call in (engine.generate, engine.stream):
            with pytest.raises(
                midstream.ConfigError, match=r'expected a list of .*pass \["input_ids"\]'
            ):
                call(prompts)


def test_a_handle_of_another_engine_is_refused_and_ends_nothing(oracle: Oracle) -> None:
    prompt, params = draw(9, 1), midstream.SamplingParams(max_tokens=3, **GREEDY)
    with (
        guarded_engine(build("bamba"), **OPTIONS) as one,
        guarded_engine(build("bamba"), **OPTIONS) as other,
    ):
        handle, foreign = one.add(prompt, params), other.add(prompt, params)
        assert handle != foreign
        for call in (one.abort, one.explain):
            with pytest.raises(midstream.ConfigError, match="is a handle of another engine"):
                call(foreign)
        assert [list(out.token_ids) for out in run(one)] == [oracle.greedy(prompt, 3)]


def test_whole_numbers_of_numpy_are_options(model: Any) -> None:
    with midstream.Engine(model, **OPTIONS | {"max_rows": np.int64(2)}) as engine:
        assert type(engine.config.max_rows) is int and engine.config.max_rows == 2


def test_a_slot_stays_free_where_its_request_cannot_be_written(
    model: Any, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As often as there are slots, so that one lost each time would leave none."""
    prompt, params = draw(9, 1), midstream.SamplingParams(max_tokens=3, **GREEDY)
    with guarded_engine(model, **OPTIONS) as engine:
        live, rows = engine._parts.scheduler.live, engine.config.max_rows
        for _ in range(rows):
            with monkeypatch.context() as patch:
                patch.setattr(live, "watched", None)  # written late
                engine.add(prompt, params)
                while engine._ledger.open:
                    with pytest.raises(TypeError):
                        engine.step()
            assert run(engine)[0].finish_reason == "error"
        assert live.num_free == rows
        assert [list(o.token_ids) for o in engine.generate([prompt], params)] == [
            oracle.greedy(prompt, 3)
        ]


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
        engine._turns.fail([engine._ledger.open[0]], "no room")
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
