"""What only a GPU can show of compiled models: captured steps give the tokens and bits of eager ones."""

from __future__ import annotations

import pytest
import torch
from compiled_rig import greedy, left_padded
from tiny_models import FAMILIES, build, prompt
from torch import Tensor

import midstream
from midstream.errors import ConfigError, ContractError

pytestmark = pytest.mark.gpu

_NEW = 10
OPTIONS = {"max_batch": 3, "max_len": 64, "compile": "eager"}


def decoded(compiled: midstream.CompiledModel, ids: Tensor, tokens: Tensor) -> Tensor:
    """Logits [T, B, L] of decode steps of `tokens` [T, B] behind prompts `ids` [B, W]."""
    cache = compiled.new_cache()
    compiled(ids, past_key_values=cache)
    return torch.cat(
        [compiled(step[:, None], past_key_values=cache).logits.transpose(0, 1) for step in tokens]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_replays_equal_full_forwards(family: str) -> None:
    prompts = [prompt(n, seed=n).cuda() for n in (9, 2)]
    twin = build(family).cuda()
    want = [greedy(twin, ids, _NEW)[len(ids) :].tolist() for ids in prompts]
    ids, mask = left_padded([one.cpu() for one in prompts])
    with midstream.compile(build(family).cuda(), **OPTIONS) as compiled:
        output = compiled.generate(
            ids.cuda(), attention_mask=mask.cuda(), max_new_tokens=_NEW, do_sample=False
        )
        stats = compiled.stats()
    assert output[:, ids.shape[1] :].tolist() == want
    assert stats["steps"] == {"prefill": 1, "replayed": _NEW - 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_replay_has_the_bits_of_the_same_step_run_eagerly(rows: int, dtype: torch.dtype) -> None:
    ids = torch.stack([prompt(12, seed=row) for row in range(rows)]).cuda()
    tokens = torch.stack([prompt(rows, seed=50 + step) for step in range(6)]).cuda()
    found = []
    for graphs in (True, False):
        model = build("bamba", dtype=dtype).cuda()
        with midstream.compile(model, graphs=graphs, **OPTIONS) as compiled:
            found.append(decoded(compiled, ids, tokens))
            assert list(compiled.stats()["graphs"]) == ([rows] if graphs else [])
    assert torch.equal(found[0], found[1])


def test_a_capture_touches_no_row_of_a_cache_that_is_alive() -> None:
    ids, pair = prompt(12)[None].cuda(), torch.stack([prompt(5), prompt(5, seed=1)]).cuda()
    tokens = prompt(6, seed=9)[:, None].cuda()
    with midstream.compile(build("bamba").cuda(), **OPTIONS) as compiled:
        want = decoded(compiled, ids, tokens)
        cache = compiled.new_cache()
        compiled(ids, past_key_values=cache)
        found = []
        for step in range(6):
            if step == 3:
                compiled.generate(pair, max_new_tokens=4, do_sample=False)  # captures two rows
            logits = compiled(tokens[step][:, None], past_key_values=cache).logits
            found.append(logits.transpose(0, 1))
        assert sorted(compiled.stats()["graphs"]) == [1, 2]
    assert torch.equal(torch.cat(found), want)


def test_a_decode_step_never_waits_for_the_device() -> None:
    with midstream.compile(build("bamba").cuda(), **OPTIONS) as compiled:
        cache = compiled.new_cache()
        compiled(prompt(12)[None].cuda(), past_key_values=cache)
        token = prompt(1)[None].cuda()
        compiled(token, past_key_values=cache)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(4):
                compiled(token, past_key_values=cache)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_beams_equal_beams_without_a_cache() -> None:
    ids = prompt(9)[None].cuda()
    beams = {"max_new_tokens": 8, "do_sample": False, "num_beams": 3}
    want = build("bamba").cuda().generate(ids, use_cache=False, **beams)
    with midstream.compile(build("bamba").cuda(), **OPTIONS) as compiled:
        assert torch.equal(compiled.generate(ids, **beams), want)


def test_undo_gives_the_memory_back() -> None:
    model, ids = build("bamba").cuda(), prompt(9)[None].cuda()
    model.generate(ids, max_new_tokens=3, do_sample=False)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with midstream.compile(model, **OPTIONS) as compiled:
        compiled.generate(ids, max_new_tokens=3, do_sample=False)
    del compiled
    torch.cuda.synchronize()
    workspace = 32 * 2**20  # of cuBLAS, which keeps one for every stream that it ran on
    assert torch.cuda.memory_allocated() <= before + workspace + 2**20


def test_inductor_gives_the_tokens_of_full_forwards() -> None:
    ids = prompt(9).cuda()
    want = greedy(build("bamba").cuda(), ids, _NEW)
    options = OPTIONS | {"compile": "inductor"}
    with midstream.compile(build("bamba").cuda(), **options) as compiled:
        output = compiled.generate(ids[None], max_new_tokens=_NEW, do_sample=False)
    assert torch.equal(output[0], want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_o5_a_model_on_the_second_gpu_generates_whichever_is_current(graphs: bool) -> None:
    ids = prompt(9).to("cuda:1")
    want = greedy(build("bamba").to("cuda:1"), ids, _NEW)
    for current in (0, 1):
        with (
            torch.cuda.device(current),
            midstream.compile(build("bamba").to("cuda:1"), graphs=graphs, **OPTIONS) as compiled,
        ):
            output = compiled.generate(ids[None], max_new_tokens=_NEW, do_sample=False)
            assert torch.cuda.current_device() == current
        assert torch.equal(output[0], want)


def test_remembering_the_tokens_of_a_cache_makes_no_decode_step_wait() -> None:
    tokens = prompt(10, seed=9)[:, None, None].cuda()
    with midstream.compile(build("bamba").cuda(), **OPTIONS) as compiled:
        cache = compiled.new_cache()
        compiled(prompt(12)[None].cuda(), past_key_values=cache)
        for token in tokens[:2]:  # captures
            compiled(token, past_key_values=cache)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for token in tokens[2:]:
                compiled(token, past_key_values=cache)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        whole = torch.cat([prompt(12).cuda(), tokens.flatten(), tokens[0, 0]])[None]
        cache.check_beginning(whole)
        whole[0, 15] += 1
        with pytest.raises(ContractError, match=r"in row 0 the turns before differ .* token 15 is"):
            cache.check_beginning(whole)


def test_a_token_id_out_of_range_is_refused_before_it_stops_the_device() -> None:
    ids = prompt(9)[None].cuda()
    with midstream.compile(build("bamba").cuda(), **OPTIONS) as compiled:
        want = compiled(ids).logits
        with pytest.raises(ConfigError, match=r"token ids from .* to 128; expected 0 to 127"):
            compiled(torch.where(ids == ids[0, 3], 128, ids))
        assert torch.equal(compiled(ids).logits, want)
