"""Lowered models compute what their un-lowered twins compute, however a sequence is cut into steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiler_rig import Live, PagedRig
from tiny_models import FAMILIES, build, prompt
from torch import Tensor

from midstream.compiler import lower

_PROMPT = 24
_NEW = 5
# fp32 sums in another order: 2e-5 of the scale is the largest difference seen over all cases here
_RELATIVE = 1e-4


def full_logits(model: Any, ids: Tensor) -> Tensor:
    """Logits [T, L] of the un-cached forward, the definition."""
    with torch.no_grad():
        logits: Tensor = model(ids[None], use_cache=False).logits[0]
    return logits


def assert_close(got: Tensor, want: Tensor) -> None:
    scale = want.abs().max().item()
    torch.testing.assert_close(got, want, rtol=0.0, atol=_RELATIVE * scale)


def prefill(rig: PagedRig, live: Live, ids: Tensor, lengths: list[int]) -> Tensor:
    """Run the prompt in chunks; returns the logits after each, [chunks, L]."""
    parts = ids[: sum(lengths)].split(lengths)
    return torch.cat([rig.chunk([(live, part)]) for part in parts])


def check_continuation(rig: PagedRig, live: Live, ids: Tensor, want: Tensor) -> None:
    """Decode the rest of `ids` token by token and compare each step."""
    for place in range(live.length, len(ids)):
        got = rig.decode([(live, int(ids[place]))])
        assert_close(got[0], want[place])


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("in_place", [False, True], ids=["fresh-page", "in-place"])
@pytest.mark.parametrize("lengths", [[24], [13, 11], [1, 23], [2, 1, 21]], ids=str)
def test_chunks_and_decode_equal_the_full_forward(
    family: str, lengths: list[int], in_place: bool
) -> None:
    ids = prompt(_PROMPT + _NEW)
    want = full_logits(build(family), ids)
    rig = PagedRig(lower(build(family)), in_place=in_place)
    live = rig.start()
    ends = torch.tensor(lengths).cumsum(0) - 1
    assert_close(prefill(rig, live, ids, lengths), want[ends])
    check_continuation(rig, live, ids, want)


def test_decode_from_the_first_token_equals_the_full_forward(family: str) -> None:
    ids = prompt(6)
    rig = PagedRig(lower(build(family)))
    check_continuation(rig, rig.start(), ids, full_logits(build(family), ids))


def test_rows_of_a_mixed_step_do_not_see_each_other(family: str) -> None:
    twin, rig = build(family), PagedRig(lower(build(family)))
    ids = [prompt(n, seed=n) for n in (30, 20, 9, 12)]
    want = [full_logits(twin, one) for one in ids]
    long, short, fresh, late = (rig.start() for _ in ids)
    rig.chunk([(long, ids[0][:17]), (short, ids[1][:19])])
    # a continued prompt, a decode row, a fresh prompt of one token and a fresh prompt
    work = [(long, ids[0][17:28]), (short, ids[1][19:]), (fresh, ids[2][:1]), (late, ids[3][:10])]
    got = rig.chunk(work, padding=3, padding_tokens=5)
    assert_close(got, torch.stack([want[0][27], want[1][19], want[2][0], want[3][9]]))
    got = rig.decode([(late, int(ids[3][10])), (fresh, int(ids[2][1])), (long, int(ids[0][28]))])
    assert_close(got, torch.stack([want[3][10], want[2][1], want[0][28]]))


def test_padded_rows_change_no_result_and_no_page(family: str) -> None:
    rig, padded = (PagedRig(lower(build(family))) for _ in range(2))
    ids = prompt(_PROMPT + 1)
    lives = rig.start(), padded.start()
    for one, live in zip((rig, padded), lives, strict=True):
        prefill(one, live, ids, [_PROMPT])
    token = int(ids[-1])
    alone = rig.decode([(lives[0], token)])
    among = padded.decode([(lives[1], token)], padding=4)
    assert_close(among, alone)
    unused = padded.unused_state_pages()
    for arena in (padded.pools.temporal, padded.pools.conv):
        assert arena[unused].isnan().all()
    assert padded.pools.kv[0].isnan().all()


def test_a_sequence_resumes_from_a_state_exported_inside_a_chunk(family: str) -> None:
    ids, other = prompt(150), prompt(40, seed=5)
    twin, rig = build(family), PagedRig(lower(build(family)))
    first = rig.start()
    assert_close(rig.chunk([(first, ids)], export_after={0: 100})[0], full_logits(twin, ids)[-1])
    branch = torch.cat([ids[:100], other])
    second = rig.resume(first, 100)
    page = first.exported[100]
    before = rig.pools.temporal[page].clone(), rig.pools.conv[page].clone()
    got = rig.chunk([(second, other)])
    assert_close(got[0], full_logits(twin, branch)[-1])
    assert _same_bits(before[0], rig.pools.temporal[page])
    assert _same_bits(before[1], rig.pools.conv[page])


def test_time_steps_are_clamped_in_decode_and_chunks_alike() -> None:
    # softplus(dt + dt_bias) lies between 0.1 and 2 here: both limits bite
    limits = {"time_step_limit": (0.3, 0.6)}
    ids = prompt(_PROMPT + _NEW)
    want = full_logits(build("bamba", **limits), ids)
    free = full_logits(build("bamba"), ids)
    assert (want - free).abs().max() > 0.05
    rig = PagedRig(lower(build("bamba", **limits)))
    live = rig.start()
    prefill(rig, live, ids, [13, 11])
    check_continuation(rig, live, ids, want)


@pytest.mark.parametrize("groups", [1, 4], ids="G{}".format)
def test_groups_of_b_and_c_are_shared_by_the_right_heads(groups: int) -> None:
    ids = prompt(_PROMPT + 2)
    want = full_logits(build("bamba", mamba_n_groups=groups), ids)
    rig = PagedRig(lower(build("bamba", mamba_n_groups=groups)))
    live = rig.start()
    assert_close(prefill(rig, live, ids, [_PROMPT])[0], want[_PROMPT - 1])
    check_continuation(rig, live, ids, want)


def test_bf16_state_stays_close_to_float32_state(family: str) -> None:
    ids = prompt(_PROMPT + _NEW)
    want = full_logits(build(family), ids)
    lowered = lower(build(family), temporal_dtype=torch.bfloat16)
    rig = PagedRig(lowered)
    live = rig.start()
    prefill(rig, live, ids, [_PROMPT])
    got = torch.cat([rig.decode([(live, int(token))]) for token in ids[_PROMPT:]])
    # each step rounds the state to 8 bits
    assert (got - want[_PROMPT:]).abs().max() < 0.05 * want.abs().max()


def test_bf16_model_errs_no_more_than_transformers(family: str) -> None:
    ids = prompt(40)
    exact = full_logits(build(family), ids)
    own = full_logits(build(family, dtype=torch.bfloat16), ids).float()
    rig = PagedRig(lower(build(family, dtype=torch.bfloat16)))
    live = rig.start()
    got = torch.cat([rig.decode([(live, int(token))]) for token in ids]).float()
    # mean over positions: where two experts nearly tie, rounding may pick the other one
    assert _mean_error(got, exact) < 1.5 * _mean_error(own, exact)


def _mean_error(got: Tensor, want: Tensor) -> float:
    return (got - want).square().mean(-1).sqrt().mean().item()


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
