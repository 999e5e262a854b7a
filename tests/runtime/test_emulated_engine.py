"""Tiny models with every step captured and replayed by the emulator: tokens, reuse, endings as without it."""

from collections.abc import Iterator
from functools import cache
from itertools import combinations, product

import pytest
import torch
from emulated_rig import emulation
from oracles import Oracle, five_prompts, guarded_engine, serve
from test_engine_endings import (  # noqa: F401
    test_abort_at_any_stage_leaves_the_others_and_the_books_right,
)
from test_engine_requests import (  # noqa: F401
    test_a_hit_inside_a_block_leaves_the_shared_page_byte_identical,
    test_a_turn_that_follows_an_answer_resumes_inside_the_answer,
    test_generation_ends_at_max_tokens_a_stop_token_or_the_longest_length,
    test_preempted_requests_resume_and_give_the_same_tokens,
    test_sampled_tokens_do_not_depend_on_preemption_or_company,
    test_weights_changed_forgets_saved_state,
)
from tiny_models import FAMILIES, VOCAB, build

import midstream

TINY = {
    "state_block": 16, "kv_block": 4, "max_rows": 4, "num_state_pages": 60, "num_kv_pages": 200,
    "max_step_tokens": 64, "compile": "eager",
}  # fmt: skip


@pytest.fixture
def device() -> torch.device:
    """Also where there is a GPU."""
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    with emulation(tokens=(64,)):
        yield


CHOICES = (
    FAMILIES,
    ("copyfree", "precopy"),
    ("full", "piecewise", "full+piecewise"),
    ("late", "early", "7"),
)
RUNS = [
    ("bamba", "copyfree", "full", "late"),
    ("qwen3_next", "copyfree", "full", "early"),
    ("bamba", "precopy", "full", "7"),
    ("qwen3_next", "copyfree", "piecewise", "late"),
    ("bamba", "precopy", "piecewise", "early"),
    ("qwen3_next", "precopy", "piecewise", "7"),
    ("bamba", "precopy", "full+piecewise", "late"),
    ("bamba", "copyfree", "full+piecewise", "early"),
    ("qwen3_next", "copyfree", "full+piecewise", "7"),
]


def test_every_pair_of_choices_is_in_one_of_the_runs() -> None:
    for one, other in combinations(range(len(CHOICES)), 2):
        assert {(run[one], run[other]) for run in RUNS} == set(
            product(CHOICES[one], CHOICES[other])
        )


@cache
def oracle_of(family: str) -> Oracle:
    return Oracle(build(family))


@pytest.mark.parametrize(("family", "migration", "graphs", "pace"), RUNS)
def test_tokens_equal_full_forwards_although_every_step_is_a_replay(
    family: str, migration: str, graphs: str, pace: str
) -> None:
    prompts, full = five_prompts(VOCAB), oracle_of(family)
    short, late = ((64,), ()) if graphs == "piecewise" else ((16,), (64,))
    with (
        emulation(pace, short, late),
        guarded_engine(build(family), migration=migration, graphs=graphs, **TINY) as engine,
    ):
        alone = [serve(engine, [prompt], 10)[0] for prompt in prompts]
        together = serve(engine, prompts, 24)
        stats = engine.stats()
        forms = {key.in_pieces for key in engine._parts.runner.graphs.captured if key.chunks}
    assert forms == {"full": {False}, "piecewise": {True}, "full+piecewise": {False, True}}[graphs]
    for prompt, one, other in zip(prompts, alone, together, strict=True):
        assert list(one.token_ids) == full.greedy(prompt, 10)
        assert list(other.token_ids) == full.greedy(prompt, 24)
    assert stats["graph_replays"] == stats["steps"] and not stats["graph_fallbacks"]
    assert all(out.num_cached_tokens >= 32 for out in together[1:4])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_replay_is_bit_equal_to_the_same_step_run_eagerly(
    family: str, dtype: torch.dtype
) -> None:
    with guarded_engine(build(family, dtype=dtype), **TINY) as engine:
        engine.debug(poison=True, shadow_every=3)
        serve(engine, five_prompts(VOCAB), 12)
        assert engine._parts.runner.shadow.num_compared >= 5  # type: ignore[union-attr]


def test_poison_changes_no_bit() -> None:
    runs = []
    for poison in (False, True):
        with guarded_engine(build("bamba"), **TINY) as engine:
            engine.debug(poison=poison)
            outputs = serve(engine, five_prompts(VOCAB), 12, logprobs=3)
            runs.append([(out.token_ids, out.logprobs) for out in outputs])
    assert runs[0] == runs[1]


def test_a_device_is_not_emulated_beside_a_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from midstream.runtime.assembly import new_queue

    with pytest.raises(midstream.ConfigError, match="MIDSTREAM_EMULATE=late with a model on cuda"):
        new_queue(torch.device("cuda"), "late")
