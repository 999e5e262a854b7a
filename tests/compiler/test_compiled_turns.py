"""Turns of a kept cache: what begins otherwise than the cache is refused, and nobody waits to find out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from compiled_rig import greedy, left_padded
from test_host_reads import NoHostReads
from tiny_models import build, prompt
from torch import Tensor

import midstream
from midstream.compiler import compiled as compiled_module
from midstream.errors import ContractError
from midstream.graphs.emulator import EmulatedCapture

_NEW = 6
GREEDY = {"max_new_tokens": _NEW, "do_sample": False}


@pytest.fixture(autouse=True, params=["eager", "graphs"])
def capturer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "graphs":
        recording = EmulatedCapture()
        monkeypatch.setattr(compiled_module, "_capturer", lambda lowered: recording)


def make() -> midstream.CompiledModel:
    return midstream.compile(build("bamba"), max_batch=4, max_len=64)


def changed(ids: Tensor, row: int, column: int) -> Tensor:
    other = ids.clone()
    other[row, column] = 3 if other[row, column] != 3 else 4
    return other


def with_turn(ids: Tensor, length: int = 5) -> Tensor:
    return torch.cat([ids, prompt(length, seed=3).expand(len(ids), -1)], 1)


@pytest.mark.parametrize("through", ["handle", "model"])
@pytest.mark.parametrize("column", [0, 9, 10, 14])  # of the prompt 10, of the answer 5
def test_a_turn_that_begins_otherwise_is_refused_with_the_token_and_the_cache_goes_on(
    column: int, through: str
) -> None:
    with make() as compiled:
        generate: Any = compiled.generate if through == "handle" else compiled.model.generate
        cache = compiled.new_cache()
        kept: dict[str, Any] = {compiled._cache_name: cache}
        ids = with_turn(generate(prompt(10)[None], **kept, **GREEDY))
        other = changed(ids, 0, column)
        with pytest.raises(ContractError) as refused:
            generate(other, **kept, **GREEDY)
        assert f"in row 0 the turns before differ from those in the cache: token {column} is " in (
            text := str(refused.value)
        )
        assert f"is {other[0, column]}, expected {ids[0, column]}, as it was computed" in text
        output = generate(ids, **kept, **GREEDY)
    assert torch.equal(output[0], greedy(build("bamba"), ids[0], _NEW))


def test_a_shorter_turn_is_refused_in_words_of_turns() -> None:
    with make() as compiled:
        cache = compiled.new_cache()
        ids = compiled.generate(prompt(10)[None], past_key_values=cache, **GREEDY)
        for length in (3, 10 + _NEW - 1):
            with pytest.raises(ContractError) as refused:
                compiled.generate(ids[:, :length], past_key_values=cache, **GREEDY)
            assert (
                f"this turn has {length} tokens, and its cache holds 15 of the turns before"
                in str(refused.value)
            )
        compiled.generate(ids, past_key_values=cache, **GREEDY)


@pytest.mark.parametrize(
    ("held", "turn"), [(1, 2), (2, 1), (2, 3)], ids=lambda rows: f"{rows} rows"
)
def test_a_turn_of_other_rows_is_refused_with_both_numbers_and_the_cache_goes_on(
    held: int, turn: int
) -> None:
    with make() as compiled:
        cache = compiled.new_cache()
        ids = compiled.generate(prompt(10)[None].expand(held, -1), past_key_values=cache, **GREEDY)
        other = with_turn(ids[:1]).expand(turn, -1)
        rows = {1: "1 row", 2: "2 rows", 3: "3 rows"}
        expected = (
            f"holds {rows[held]} of 15 tokens, and this turn has {rows[turn]}; expected as many"
        )
        short = other[:, :3] if held % turn else other  # as when the turns before are forgotten
        for wrong in (other, short):
            with pytest.raises(ContractError, match=expected):
                compiled.generate(wrong, past_key_values=cache, **GREEDY)
        with pytest.raises(ContractError, match=expected):
            mask = torch.ones_like(other)
            compiled.generate(other[:, 15:], attention_mask=mask, past_key_values=cache, **GREEDY)
        with pytest.raises(ContractError, match=expected):
            compiled(other[:, 15:], past_key_values=cache)
        compiled.generate(with_turn(ids), past_key_values=cache, **GREEDY)


def test_new_tokens_alone_are_taken_behind_a_mask_of_all_turns() -> None:
    with make() as compiled:
        cache = compiled.new_cache()
        ids = with_turn(compiled.generate(prompt(10)[None], past_key_values=cache, **GREEDY))
        held = cache.get_seq_length()
        output = compiled.generate(
            ids[:, held:], attention_mask=torch.ones_like(ids), past_key_values=cache, **GREEDY
        )
    assert torch.equal(output[0, -_NEW:], greedy(build("bamba"), ids[0], _NEW)[-_NEW:])


def test_what_stands_in_padding_may_differ_and_tokens_of_any_row_may_not() -> None:
    ids, mask = left_padded([prompt(4, seed=1), prompt(9, seed=2)])
    with make() as compiled:
        cache = compiled.new_cache()
        ids = compiled.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
        ids = with_turn(ids)
        mask = torch.cat([mask, mask.new_ones(2, ids.shape[1] - mask.shape[1])], 1)
        with pytest.raises(ContractError, match="in row 1 the turns before differ"):
            compiled.generate(
                changed(ids, 1, 0), attention_mask=mask, past_key_values=cache, **GREEDY
            )
        ids[0, :5] = 99
        compiled.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)


def test_token_ids_follow_copies_rearranged_rows_and_resets() -> None:
    with make() as compiled:
        cache = compiled.new_cache()
        two = torch.stack([prompt(10, seed=1), prompt(10, seed=2)])
        ids = with_turn(compiled.generate(two, past_key_values=cache, **GREEDY))
        twin = copy.deepcopy(cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        with pytest.raises(ContractError, match="turns before differ"):
            compiled.generate(ids, past_key_values=cache, **GREEDY)
        compiled.generate(ids.flip(0), past_key_values=cache, **GREEDY)
        compiled.generate(ids, past_key_values=twin, **GREEDY)
        cache.reset()
        output = compiled.generate(prompt(7)[None], past_key_values=cache, **GREEDY)
    assert torch.equal(output[0], greedy(build("bamba"), prompt(7), _NEW))


def test_a_cache_filled_in_inference_mode_goes_on_outside_of_it() -> None:
    with make() as compiled:
        cache = compiled.new_cache()
        with torch.inference_mode():
            ids = compiled.generate(prompt(10)[None], past_key_values=cache, **GREEDY).clone()
            cache.reorder_cache(torch.tensor([0]))
        ids = torch.tensor(ids.tolist())
        compiled.generate(with_turn(ids), past_key_values=cache, **GREEDY)


def test_a_decode_step_reads_no_token_on_the_host() -> None:
    with make() as compiled:
        cache = compiled.new_cache()
        compiled(prompt(10)[None], past_key_values=cache)
        compiled(torch.tensor([[3]]), past_key_values=cache)
        with NoHostReads():
            for token in torch.arange(40).view(-1, 1, 1):
                compiled(token, past_key_values=cache)
        held = torch.cat([prompt(10), torch.tensor([3]), torch.arange(40)])[None]
        cache.check_beginning(with_turn(held))
