"""What a compiled model cannot serve is refused in our words, before anything runs or changes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from compiled_rig import GREEDY, NEW, greedy, left_padded, make
from tiny_models import FAMILIES, VOCAB, build, prompt
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, StaticCache

import midstream
from midstream.compiler import row_memory
from midstream.compiler.lowering import cache_argument
from midstream.compiler.row_cache import MidstreamCache
from midstream.errors import CapacityError, ConfigError, ContractError, UnsupportedError


def test_what_a_forward_cannot_give_is_refused_by_name() -> None:
    ids = prompt(5)[None]
    with make() as compiled:
        for name in ("output_hidden_states", "output_attentions"):
            with pytest.raises(UnsupportedError, match=f"the forward got {name}"):
                compiled(ids, **{name: True})
        with pytest.raises(UnsupportedError, match="the forward got labels"):
            compiled(ids, labels=ids)
        with pytest.raises(ConfigError, match="input_ids is None"):
            compiled(inputs_embeds=None)
        with pytest.raises(ConfigError, match=r"input_ids are torch.float32, expected token ids"):
            compiled(ids.float())
        with pytest.raises(UnsupportedError, match="attention_mask is a tensor of 4 dimensions"):
            compiled(ids, attention_mask=torch.ones(1, 1, 5, 5))
        with pytest.raises(UnsupportedError, match="position_ids of row 0 are"):
            compiled(ids, position_ids=torch.arange(3, 8)[None])
        with pytest.raises(ContractError, match=r"position_ids are \(1, 4\), expected \(1, 5\)"):
            compiled(ids, position_ids=torch.arange(4)[None])
        with pytest.raises(ConfigError, match=r"input_ids are on meta, expected cpu, where"):
            compiled(ids.to("meta"))
        for keep in ("a", 1.5, torch.tensor([5]), torch.tensor([-6]), torch.tensor([]), [1], -5):
            with pytest.raises(ConfigError, match=r"logits_to_keep is .*, expected a number of"):
                compiled(ids, logits_to_keep=keep)
        assert compiled(ids, logits_to_keep=None).logits.shape[1] == 5
        assert compiled(ids, logits_to_keep=torch.tensor([-1, 0])).logits.shape[1] == 2
        assert compiled.stats()["free_rows"] == 3


def test_a_second_thread_is_refused_and_harms_nobody() -> None:
    ids, refusals = prompt(5)[None], []

    def call() -> None:
        for refused in (partial(compiled.generate, ids), partial(compiled, ids), compiled.undo):
            with pytest.raises(
                ContractError, match="one thread at a time; give each thread a model"
            ):
                refused()
            refusals.append(refused)

    def look(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return scores

    with make() as compiled:
        found = compiled.generate(ids, logits_processor=LogitsProcessorList([look]), **GREEDY)
        assert len(refusals) == 3 * NEW
    assert found[0].equal(greedy(build("bamba"), ids[0], NEW))


def test_a_call_that_fails_holds_no_rows_whoever_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(*args: Any) -> torch.Tensor:
        raise KeyboardInterrupt

    ids = prompt(5)[None]
    with make(max_batch=1) as compiled:
        with pytest.raises(KeyboardInterrupt) as kept:
            compiled.generate(ids, logits_processor=LogitsProcessorList([stop]), **GREEDY)
        found = compiled.generate(ids, **GREEDY)
        monkeypatch.setattr(MidstreamCache, "remember", stop)  # the last of a forward
        with pytest.raises(KeyboardInterrupt) as kept_too:
            compiled(ids)
        assert compiled.stats()["free_rows"] == 1
        assert kept.tb is not None and kept_too.tb is not None
    assert found[0].equal(greedy(build("bamba"), ids[0], NEW))


def test_what_generate_cannot_do_is_refused_before_anything_runs() -> None:
    ids = prompt(5)[None]
    with make() as compiled:
        with pytest.raises(UnsupportedError, match="output_hidden_states"):
            compiled.generate(
                ids, output_hidden_states=True, return_dict_in_generate=True, **GREEDY
            )
        for name in ("offloaded", "static"):
            with pytest.raises(UnsupportedError, match=f"cache_implementation='{name}'"):
                compiled.generate(ids, cache_implementation=name, **GREEDY)
        with pytest.raises(CapacityError, match=r"may reach 104 tokens, compiled for max_len=64"):
            compiled.generate(ids, max_new_tokens=100, do_sample=False)
        assert not compiled.stats()["steps"]


@pytest.mark.parametrize("through", ["arguments", "generation_config"])
@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
        ({"assistant_early_exit": 1}, "assisted generation"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
        ({"dola_layers": "low"}, "dola generation"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_ways_to_generate_that_need_more_than_logits_are_refused_in_our_words_and_the_next_call_works(
    options: dict[str, Any], mode: str, through: str
) -> None:
    ids = prompt(5)[None]
    with make() as compiled:
        kwargs: dict[str, Any] = GREEDY | options
        if through == "generation_config":
            kwargs = {"generation_config": GenerationConfig(**kwargs)}
        with pytest.raises(UnsupportedError) as refused:
            compiled.generate(ids, **kwargs)
        assert f"midstream.compile: generate was asked for {mode}, expected" in str(refused.value)
        assert next(iter(options)) in str(refused.value).partition("; leave out ")[2]
        assert not compiled.stats()["steps"]
        compiled.generate(ids, **GREEDY)


def test_an_assistant_is_refused_and_the_way_back_lets_transformers_speak_for_itself() -> None:
    model, ids = build("bamba"), prompt(5)[None]
    with (
        midstream.compile(model, max_len=64) as compiled,
        pytest.raises(UnsupportedError, match="leave out assistant_model, "),
    ):
        compiled.generate(ids, assistant_model=build("bamba"), **GREEDY)
    with pytest.raises(ValueError, match="assisted") as refused:
        model.generate(ids, prompt_lookup_num_tokens=3, **GREEDY)
    assert not isinstance(refused.value, UnsupportedError)


def test_continuous_batching_of_transformers_is_refused_and_leaves_the_generation_config_alone() -> (
    None
):
    ids = prompt(5)[None]
    with make() as compiled:
        before = compiled.model.generation_config.to_dict()
        for call in (
            lambda: compiled.model.generate_batch(ids.tolist()),
            lambda: compiled.model.init_continuous_batching(),
            lambda: compiled.generate(ids, cache_implementation="paged", **GREEDY),
        ):
            with pytest.raises(UnsupportedError, match=r"continuous batching .*midstream\.Engine"):
                call()
        assert compiled.model.generation_config.to_dict() == before


@pytest.mark.parametrize(
    ("prompts", "found"),
    [
        ([[3, 4]], r"list \[\[3, 4\]\]"),
        ("hello", "str 'hello'"),
        (torch.tensor([3, 4]), r"a tensor of shape \(2,\)"),
    ],
    ids=["list", "text", "one row"],
)
def test_prompts_that_are_no_batch_of_ids_are_refused(prompts: Any, found: str) -> None:
    with make() as compiled:
        for arguments in ((prompts,), ()):
            named = {} if arguments else {"input_ids": prompts}
            with pytest.raises(ConfigError, match=f"generate got {found}, expected token ids"):
                compiled.generate(*arguments, **named, **GREEDY)


@pytest.mark.parametrize("shape", [(1, 4), (1, 6), (2, 5)], ids=str)
def test_a_mask_that_is_not_that_of_the_prompts_is_refused_with_both_shapes(
    shape: tuple[int, int],
) -> None:
    with make() as compiled:
        with pytest.raises(ContractError) as refused:
            compiled.generate(prompt(5)[None], attention_mask=torch.ones(shape), **GREEDY)
        assert f"attention_mask is {shape} and the prompts are (1, 5), expected as" in str(
            refused.value
        )
        with pytest.raises(UnsupportedError, match=r"attention_mask is list, expected .batch, col"):
            compiled.generate(prompt(5)[None], attention_mask=[[1] * 5], **GREEDY)
        assert not compiled.stats()["steps"]


@pytest.mark.parametrize("wrong", [VOCAB, -1, 10**12])
def test_token_ids_that_the_model_lacks_are_refused_and_hurt_nobody(wrong: int) -> None:
    ids = prompt(5)[None]
    bad = ids.clone()
    bad[0, 2] = wrong
    with make() as compiled:
        for call in (compiled, compiled.generate, compiled.model.generate):
            with pytest.raises(ConfigError, match=f"token ids from .* expected 0 to {VOCAB - 1};"):
                call(bad)
        assert compiled.stats()["free_rows"] == 3
        output = compiled.generate(ids, **GREEDY)
        padded, mask = left_padded([prompt(3), prompt(9)])
        padded[~mask.bool()] = -100  # padding is not looked up
        compiled(padded, attention_mask=mask)
    assert torch.equal(output[0], greedy(build("bamba"), ids[0], NEW))


def test_caches_of_others_are_refused() -> None:
    ids = prompt(5)[None]
    with make() as compiled, make() as other:
        config = compiled.model.config
        for cache in (DynamicCache(config=config), StaticCache(config=config, max_cache_len=16)):
            with pytest.raises(UnsupportedError, match=f"the cache is a {type(cache).__name__}"):
                compiled.generate(ids, past_key_values=cache, **GREEDY)
            with pytest.raises(UnsupportedError, match=f"the cache is a {type(cache).__name__}"):
                compiled(ids, past_key_values=cache)
        with pytest.raises(UnsupportedError, match="of another compiled model"):
            compiled(ids, past_key_values=other.new_cache())


def test_a_cache_refuses_to_step_back_and_other_batches() -> None:
    with make() as compiled:
        cache = compiled.new_cache()
        compiled(prompt(5)[None], past_key_values=cache)
        with pytest.raises(UnsupportedError, match=r"crop\(\) was called"):
            cache.crop(-1)
        for order in ([1], [-1], []):
            with pytest.raises(
                ContractError, match="of it were asked for, expected some of 0 to 0"
            ):
                cache.batch_select_indices(torch.tensor(order, dtype=torch.int64))
        assert repr(cache) == "<MidstreamCache: 1 row of 5 tokens>"
        with pytest.raises(
            ContractError, match="holds 1 row of 5 tokens, and this turn has 2 rows"
        ):
            compiled(torch.tensor([[3], [4]]), past_key_values=cache)
        with pytest.raises(ContractError, match=r"attention_mask is \(1, 2\), expected \(1, 7\)"):
            compiled(prompt(2)[None], past_key_values=cache, attention_mask=torch.ones(1, 2))
        with pytest.raises(ContractError, match=r"shows \[4\] tokens in the columns of the cache"):
            mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1]])
            compiled(prompt(2)[None], past_key_values=cache, attention_mask=mask)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_that_outlived_its_compiled_model_is_refused_wherever_it_is_used(
    family: str,
) -> None:
    model, ids = build(family), prompt(9)[None]
    with midstream.compile(model, max_len=64) as compiled:
        cache, empty = compiled.new_cache(), compiled.new_cache()
        compiled(ids[:, :5], past_key_values=cache)
    uses: list[Callable[[], Any]] = [
        lambda: model(ids[:, :1], **{cache_argument(model): cache}),
        lambda: model(ids[:, 5:], **{cache_argument(model): cache}),
        lambda: model(ids[:, 5:], **{cache_argument(model): empty}),
        lambda: model.generate(ids, **{cache_argument(model): cache}, **GREEDY),
        lambda: copy.deepcopy(cache),
    ]
    for use in uses:
        with pytest.raises(ContractError, match=r"MidstreamCache: .* after undo\(\) of"):
            use()
    with midstream.compile(model, max_len=64) as compiled:
        for call in (compiled, compiled.generate):
            with pytest.raises(ContractError, match=r"MidstreamCache: .* after undo\(\) of"):
                call(ids, past_key_values=cache)
    assert repr(cache) == "<MidstreamCache: of a model that was given back>"
    cache.reset()
    assert not cache.rows


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_in_a_model_that_is_not_compiled_is_refused(family: str) -> None:
    model = build(family)
    with make(family) as compiled, pytest.raises(UnsupportedError, match="leave this one out"):
        model(prompt(5)[None], **{cache_argument(model): compiled.new_cache()})


@pytest.mark.parametrize("memory", ["more than the host", "more than can be taken"])
def test_rows_that_no_memory_holds_are_refused_by_the_options_that_decide(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("bamba")
    before = dict(vars(model))
    rows = 10**8
    if memory == "more than the host":
        rows = 2
        monkeypatch.setattr(row_memory, "host_memory", lambda: 1000)
    else:
        monkeypatch.setattr(row_memory, "host_memory", lambda: 10**18)
    with pytest.raises(CapacityError) as refused:
        midstream.compile(model, max_batch=rows, max_len=64)
    message = str(refused.value)
    assert f"midstream.compile: max_batch={rows} rows of max_len=64 tokens take " in message
    assert message.endswith("; lower max_batch or max_len")
    assert dict(vars(model)) == before


def test_options_that_cannot_work_are_refused_before_the_model_is_touched() -> None:
    model = build("bamba")
    before = dict(vars(model))
    refused = {
        "max_batch=0": {"max_batch": 0},
        "max_len='4k'": {"max_len": "4k"},
        "compile='tvm'": {"compile": "tvm"},
        "state_dtype='int8'": {"state_dtype": "int8"},
        r"state_dtype=\[\]": {"state_dtype": []},
        "kv_block='16'": {"kv_block": "16"},
        "midstream.compile: kv_block=48; expected a power of two": {"kv_block": 48},
        "graphs='full'; expected True or False": {"graphs": "full"},
        "exceeds the": {"max_len": 10**9},
        "max_batch=100000000000000000000; expected at most": {"max_batch": 10**20},
        "unknown option 'max_batchs'; did you mean 'max_batch'": {"max_batchs": 2},
        "unknown option 'tokens'; known: max_batch, max_len, ": {"tokens": 2},
    }
    for message, options in refused.items():
        with pytest.raises(ConfigError, match=message):
            midstream.compile(model, **options)
    model.config.output_hidden_states = True
    with pytest.raises(UnsupportedError, match="sets output_hidden_states"):
        midstream.compile(model)
    del model.config.output_hidden_states
    assert dict(vars(model)) == before
