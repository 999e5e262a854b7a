"""`generate` of a compiled model gives the tokens of un-cached forwards."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from compiled_rig import GREEDY, NEW, greedy, left_padded, make
from tiny_models import FAMILIES, VOCAB, build, prompt
from torch import Tensor

import midstream
from midstream.compiler import compiled as compiled_module
from midstream.errors import CapacityError, ConfigError, ContractError
from midstream.graphs.emulator import EmulatedCapture


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=["eager", "graphs"])
def capturer(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> EmulatedCapture | None:
    """None, or what stands in for CUDA graphs in every model compiled by the test."""
    if request.param == "eager":
        return None
    recording = EmulatedCapture()
    monkeypatch.setattr(compiled_module, "_capturer", lambda lowered: recording)
    return recording


def want_rows(family: str, prompts: list[Tensor], new: int = NEW) -> list[list[int]]:
    twin = build(family)
    return [greedy(twin, ids, new)[len(ids) :].tolist() for ids in prompts]


def new_tokens(output: Tensor, width: int) -> list[list[int]]:
    return output[:, width:].tolist()


def test_generate_gives_the_tokens_of_full_forwards(
    family: str, capturer: EmulatedCapture | None
) -> None:
    prompts = [prompt(n, seed=n) for n in (17, 1)]
    with make(family) as compiled:
        for ids, want in zip(prompts, want_rows(family, prompts), strict=True):
            output = compiled.generate(ids[None], **GREEDY)
            assert new_tokens(output, len(ids)) == [want]
        stats = compiled.stats()
    assert stats["free_rows"] == 3
    how = "eager" if capturer is None else "replayed"
    assert stats["steps"] == {"prefill": 2, how: 2 * (NEW - 1)}


def test_one_graph_is_captured_for_each_batch_size(capturer: EmulatedCapture | None) -> None:
    with make() as compiled:
        for rows in (2, 1, 2, 3, 1):
            ids = torch.stack([prompt(9, seed=s) for s in range(rows)])
            want = want_rows("bamba", list(ids), 4)
            assert new_tokens(compiled.generate(ids, max_new_tokens=4, do_sample=False), 9) == want
        captured = sorted(compiled.stats()["graphs"])
    assert captured == ([] if capturer is None else [1, 2, 3])


def test_left_padding_enters_no_state(family: str, capturer: EmulatedCapture | None) -> None:
    prompts = [prompt(n, seed=n) for n in (2, 9, 21)]
    ids, mask = left_padded(prompts)
    with make(family) as compiled:
        output = compiled.generate(ids, attention_mask=mask, **GREEDY)
    assert new_tokens(output, ids.shape[1]) == want_rows(family, prompts)


def test_a_second_turn_continues_a_kept_cache(
    family: str, capturer: EmulatedCapture | None
) -> None:
    twin = build(family)
    with make(family) as compiled:
        cache = compiled.new_cache()
        ids = compiled.generate(prompt(10)[None], past_key_values=cache, **GREEDY)
        assert cache.get_seq_length() == 10 + NEW - 1
        ids = torch.cat([ids, prompt(5, seed=3)[None]], dim=1)
        output = compiled.generate(ids, past_key_values=cache, **GREEDY)
        assert compiled.stats()["steps"]["prefill"] == 2
    assert torch.equal(output[0], greedy(twin, ids[0], NEW))


def test_several_tokens_behind_a_cache_give_the_logits_of_one_forward(family: str) -> None:
    twin, ids = build(family), prompt(15)[None]
    with torch.no_grad():
        want = twin(ids, use_cache=False).logits
    with make(family) as compiled:
        output = compiled(ids[:, :10])
        cache = output["cache" if "cache" in output else "past_key_values"]
        parts = [output.logits] + [
            compiled(part, past_key_values=cache).logits
            for part in (ids[:, 10:11], ids[:, 11:14], ids[:, 14:])
        ]
    torch.testing.assert_close(
        torch.cat(parts, 1), want, rtol=0, atol=1e-4 * want.abs().max().item()
    )


def test_a_padded_batch_continues_with_several_tokens(capturer: EmulatedCapture | None) -> None:
    first = [prompt(n, seed=n) for n in (2, 9)]
    ids, mask = left_padded(first)
    more, more_mask = left_padded([prompt(n, seed=n + 50) for n in (6, 3)])
    whole = [
        torch.cat([one, row[keep.bool()]])
        for one, row, keep in zip(first, more, more_mask, strict=True)
    ]
    with make() as compiled:
        cache = compiled.new_cache()
        compiled(ids, attention_mask=mask, past_key_values=cache)
        output = compiled.generate(
            torch.cat([ids, more], 1),
            attention_mask=torch.cat([mask, more_mask], 1),
            past_key_values=cache,
            **GREEDY,
        )
    assert new_tokens(output, ids.shape[1] + more.shape[1]) == want_rows("bamba", whole)


def test_beams_equal_beams_without_a_cache(family: str, capturer: EmulatedCapture | None) -> None:
    ids = prompt(9)[None]
    beams = {"max_new_tokens": 10, "do_sample": False, "num_beams": 3}
    want = build(family).generate(ids, use_cache=False, **beams)
    with make(family) as compiled:
        output = compiled.generate(ids, **beams)
    assert torch.equal(output, want)


def test_beams_of_a_padded_batch_carry_their_lengths(capturer: EmulatedCapture | None) -> None:
    prompts = [prompt(n, seed=n) for n in (3, 8)]
    ids, mask = left_padded(prompts)
    beams = {"max_new_tokens": 6, "do_sample": False, "num_beams": 2}
    twin = build("bamba")
    want = [twin.generate(one[None], use_cache=False, **beams)[0, len(one) :] for one in prompts]
    with make(max_batch=4) as compiled:
        output = compiled.generate(ids, attention_mask=mask, **beams)
    assert new_tokens(output, 8) == [row.tolist() for row in want]


def test_rearranged_rows_take_their_lengths_along(capturer: EmulatedCapture | None) -> None:
    prompts = [prompt(n, seed=n) for n in (3, 8)]
    ids, mask = left_padded(prompts)
    want = want_rows("bamba", prompts)
    with make(max_batch=4) as compiled:
        cache = compiled.new_cache()
        first = compiled(ids, attention_mask=mask, past_key_values=cache).logits[:, -1].argmax(-1)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 2, 0]))
        order, found = [1, 1, 0], []
        best = first[order]
        for _ in range(NEW):
            found.append(best)
            best = compiled(best[:, None], past_key_values=cache).logits[:, 0].argmax(-1)
        assert compiled.stats()["free_rows"] == 1
    assert torch.stack(found, 1).tolist() == [want[row] for row in order]


def test_rows_may_be_rearranged_between_decode_steps(capturer: EmulatedCapture | None) -> None:
    prompts = [prompt(n, seed=n) for n in (3, 8, 5)]
    ids, mask = left_padded(prompts)
    twin = build("bamba")
    with make(max_batch=4) as compiled:
        cache = compiled.new_cache()
        compiled(ids, attention_mask=mask, past_key_values=cache)
        for step, order in enumerate(([2, 0, 1], [1, 1, 0], [0, 2], [1, 0], [0, 1, 1, 0], [3])):
            token = torch.arange(len(prompts))[:, None] + step + 3
            logits = compiled(token, past_key_values=cache).logits[:, 0]
            prompts = [torch.cat(pair) for pair in zip(prompts, token, strict=True)]
            for row, ids in enumerate(prompts):
                want = twin(ids[None], use_cache=False).logits[0, -1]
                torch.testing.assert_close(logits[row], want, rtol=1e-3, atol=1e-4)
            cache.reorder_cache(torch.tensor(order))
            prompts = [prompts[row] for row in order]


def test_a_step_that_failed_leaves_no_rows_of_another_cache_staged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = [prompt(n, seed=n) for n in (5, 8)]
    with make(max_batch=2) as compiled:
        one, other = compiled.new_cache(), compiled.new_cache()
        token = torch.tensor([[9]])
        for ids, cache in zip(prompts, (one, other), strict=True):
            compiled(ids[None], past_key_values=cache)
        compiled(token, past_key_values=one)
        steps = compiled._steps
        with monkeypatch.context() as patch:
            patch.setattr(steps, "_decode", lambda rows: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                compiled(token, past_key_values=other)
        found = compiled(token, past_key_values=one).logits[0, 0]
        want = build("bamba")(torch.cat([prompts[0], token[0], token[0]])[None], use_cache=False)
        torch.testing.assert_close(found, want.logits[0, -1], rtol=1e-3, atol=1e-4)


def test_caches_that_are_alive_take_turns(capturer: EmulatedCapture | None) -> None:
    prompts = [prompt(n, seed=n) for n in (5, 8, 3)]
    with make() as compiled:
        caches = [compiled.new_cache() for _ in prompts]
        best = [
            compiled(ids[None], past_key_values=cache).logits[:, -1:].argmax(-1)
            for ids, cache in zip(prompts, caches, strict=True)
        ]
        found = [[int(token)] for token in best]
        for _ in range(NEW - 1):
            for row, cache in enumerate(caches):
                logits = compiled(best[row], past_key_values=cache).logits
                best[row] = logits[:, -1:].argmax(-1)
                found[row].append(int(best[row]))
        assert found == want_rows("bamba", prompts)
        with pytest.raises(CapacityError, match="1 row wanted, 3 compiled for and 3 held"):
            compiled.generate(prompts[0][None], **GREEDY)
        del caches, cache
        gc.collect()
        compiled.generate(prompts[0][None], **GREEDY)


def test_a_copied_cache_goes_its_own_way(capturer: EmulatedCapture | None) -> None:
    stem, ends = prompt(20), [prompt(4, seed=1), prompt(6, seed=2)]
    want = want_rows("bamba", [torch.cat([stem, end]) for end in ends])
    with make() as compiled:
        cache = compiled.new_cache()
        compiled(stem[None], past_key_values=cache)
        found = []
        for end in ends:
            twin = copy.deepcopy(cache)
            ids = torch.cat([stem, end])[None]
            output = compiled.generate(ids, past_key_values=twin, **GREEDY)
            found += new_tokens(output, ids.shape[1])
    assert found == want


def test_logits_of_one_step_survive_the_next(capturer: EmulatedCapture | None) -> None:
    with make() as compiled:
        cache = compiled.new_cache()
        compiled(prompt(4)[None], past_key_values=cache)
        first = compiled(torch.tensor([[5]]), past_key_values=cache).logits
        kept = first.clone()
        compiled(torch.tensor([[9]]), past_key_values=cache)
        assert torch.equal(first, kept)


def test_without_a_cache_a_call_keeps_no_row(family: str) -> None:
    ids = prompt(9)[None]
    with make(family) as compiled:
        output = compiled.generate(ids, use_cache=False, max_new_tokens=5, do_sample=False)
        assert new_tokens(output, 9) == want_rows(family, [ids[0]], 5)
        assert compiled.stats()["free_rows"] == 3
        logits, *rest = compiled(ids, use_cache=False, return_dict=False)
        assert logits.shape == (1, 9, VOCAB)
        assert rest == []


@pytest.mark.parametrize("keep", [0, 1, 3, torch.tensor([2, 7])], ids=str)
def test_logits_are_kept_as_transformers_keeps_them(keep: Any) -> None:
    ids = prompt(9)[None]
    with torch.no_grad():
        want = build("bamba")(ids, use_cache=False, logits_to_keep=keep).logits
    with make() as compiled:
        got = compiled(ids, logits_to_keep=keep).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * want.abs().max().item())


def test_logits_of_right_padding_are_zeros_and_those_of_tokens_right() -> None:
    prompts = [prompt(3, seed=3), prompt(6)]
    ids, mask = left_padded(prompts)
    ids[0], mask[0] = ids[0].roll(3), mask[0].roll(3)
    with torch.no_grad():
        want = build("bamba")(prompts[0][None], use_cache=False).logits[0]
    with make() as compiled:
        logits = compiled(ids, attention_mask=mask).logits[0]
        with pytest.raises(ConfigError, match=r"rows \[0\] have padding where"):
            compiled(ids, attention_mask=mask, logits_to_keep=1)
    torch.testing.assert_close(logits[:3], want, rtol=0, atol=1e-4 * want.abs().max().item())
    assert not logits[3:].any()


def test_undo_gives_the_model_back_as_it_was(capturer: EmulatedCapture | None) -> None:
    model, ids = build("bamba"), prompt(9)[None]
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    want = model.generate(ids, **GREEDY)
    compiled = midstream.compile(model, max_len=64)
    compiled.generate(ids, **GREEDY)
    compiled.undo()
    compiled.undo()
    assert {path: dict(vars(module)) for path, module in model.named_modules()} == before
    assert torch.equal(model.generate(ids, **GREEDY), want)
    with pytest.raises(ContractError, match=r"used after undo\(\)"):
        compiled.generate(ids, **GREEDY)
    with pytest.raises(ContractError, match=r"used after undo\(\)"), compiled:
        pass
    if capturer is not None:
        assert capturer.memory_bytes == 0


def test_a_failure_while_compiling_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("bamba")
    before = dict(vars(model))

    def fail(lowered: object) -> None:
        raise RuntimeError("late")

    monkeypatch.setattr(compiled_module, "_capturer", fail)
    with pytest.raises(RuntimeError, match="late"):
        midstream.compile(model)
    assert dict(vars(model)) == before
    midstream.compile(model, graphs=False).undo()


def test_moved_weights_are_noticed_at_the_next_prompt(capturer: EmulatedCapture | None) -> None:
    twin, ids = build("bamba", seed=4), prompt(9)
    with make() as compiled:
        compiled.generate(ids[None], **GREEDY)
        for old, new in zip(compiled.model.parameters(), twin.parameters(), strict=True):
            old.data = new.data.clone()
        output = compiled.generate(ids[None], **GREEDY)
    assert torch.equal(output[0], greedy(twin, ids, NEW))


def test_a_full_row_is_refused_and_keeps_its_tokens(capturer: EmulatedCapture | None) -> None:
    with make(max_len=16) as compiled:
        cache = compiled.new_cache()
        compiled(prompt(16)[None], past_key_values=cache)
        with pytest.raises(CapacityError, match="would hold 17 tokens, compiled for max_len=16"):
            compiled(torch.tensor([[3]]), past_key_values=cache)
        assert cache.get_seq_length() == 16
        with pytest.raises(ContractError, match="padding in all new columns"):
            compiled(prompt(2)[None], attention_mask=torch.zeros(1, 2))


def test_a_compiled_model_says_what_it_holds_and_what_ran(
    capturer: EmulatedCapture | None,
) -> None:
    name = "CompiledModel of BambaForCausalLM on cpu"
    with make() as compiled:
        assert repr(compiled) == f"<{name}: 3 of 3 rows of 64 tokens free; steps: none; 0 graphs>"
        cache = compiled.new_cache()
        compiled.generate(prompt(5)[None], past_key_values=cache, **GREEDY)
        ran = "; ".join(
            (f"{NEW - 1} replayed", "1 graphs") if capturer else (f"{NEW - 1} eager", "0 graphs")
        )
        assert repr(compiled).startswith(f"<{name}: 2 of 3 rows of 64 tokens free; steps: ")
        assert ran in repr(compiled)
    assert repr(compiled) == f"<{name}: undone>"


def test_a_model_is_compiled_once_at_a_time() -> None:
    model = build("bamba")
    with (
        midstream.compile(model, max_len=64),
        pytest.raises(ContractError, match="lowered already"),
    ):
        midstream.compile(model)
    midstream.compile(model, max_len=64).undo()


def test_a_model_stays_compiled_where_the_handle_is_dropped_and_takes_its_memory_along() -> None:
    model, ids = build("bamba"), prompt(9)[None]
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    pools = weakref.ref(midstream.compile(model, max_len=64)._memory)
    gc.collect()
    assert "CompiledModel" in repr(model.forward.__closure__[0].cell_contents)
    assert torch.equal(model.generate(ids, **GREEDY)[0], greedy(build("bamba"), ids[0], NEW))
    midstream.restore(model)
    assert {path: dict(vars(module)) for path, module in model.named_modules()} == before
    gc.collect()
    assert pools() is None
    pools = weakref.ref(midstream.compile(model, max_len=64)._memory)
    del model
    gc.collect()
    assert pools() is None
