"""Bytes to pages: exact sums, and a reported capacity that runs."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hash_model import answer
from host_rig import Case, Rig
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream import ConfigError
from midstream.runtime import planner
from midstream.runtime.config import EngineConfig, ModelLimits
from midstream.runtime.planner import PageBytes, capacity, describe, parse_memory

MIB = 2**20
LIMITS = ModelLimits(max_positions=1000, state_page_bytes=3 * MIB, kv_page_bytes=MIB, is_cuda=False)


def plan_pages(config: EngineConfig, limits: ModelLimits, free_bytes: int) -> tuple[int, int]:
    page_bytes = PageBytes(limits.state_page_bytes, limits.kv_page_bytes)
    return planner.plan_pages(config, page_bytes, limits.max_positions, free_bytes)


def test_pages_are_planned_from_the_stated_mix() -> None:
    # 2 rows of 1000 tokens: 63 KV pages each, and the null page; four states per block, two per row
    config = EngineConfig(max_rows=2, memory=10_000 * MIB)
    assert plan_pages(config, LIMITS, 0) == (2 * 2 + 4 * 127 * 16 // 64 + 4, 127)
    # half of a small budget goes to KV, the rest to states
    assert plan_pages(replace(config, memory=100 * MIB), LIMITS, 0) == (16, 50)
    assert plan_pages(replace(config, memory="50%"), LIMITS, 200 * MIB) == (16, 50)
    # given numbers are taken from the budget first
    assert plan_pages(replace(config, memory=100 * MIB, num_kv_pages=70), LIMITS, 0) == (10, 70)
    assert plan_pages(replace(config, memory=100 * MIB, num_state_pages=30), LIMITS, 0) == (30, 10)
    assert plan_pages(replace(config, memory=1, num_state_pages=30, num_kv_pages=9), LIMITS, 0) == (
        30,
        9,
    )


@settings(deadline=None)  # a busy machine is no fault of the plan
@given(
    budget=st.integers(1, 10**6),
    state_bytes=st.integers(0, 5000),
    kv_bytes=st.integers(0, 500),
    max_rows=st.integers(1, 64),
    max_len=st.sampled_from((None, 16, 500)),
    num_state_pages=st.sampled_from((None, 4, 50)),
    num_kv_pages=st.sampled_from((None, 33, 200)),
)
def test_planned_pages_fit_the_budget_or_are_refused(
    budget: int, state_bytes: int, kv_bytes: int, **options: Any
) -> None:
    config = EngineConfig(memory=budget, **options)
    limits = ModelLimits(None, state_bytes, kv_bytes, is_cuda=False)
    try:
        num_state, num_kv = plan_pages(config, limits, 0)
    except ConfigError as error:
        assert f"({budget:,} bytes)" in str(error)
        if found := re.search("set memory to ([0-9,]+) bytes or more", str(error)):
            least = int(found[1].replace(",", ""))
            assert least > budget
            plan_pages(replace(config, memory=least), limits, 0)
        return
    assert num_state >= 4 and num_kv >= 2
    if None in (config.num_state_pages, config.num_kv_pages):
        assert num_state * state_bytes + num_kv * kv_bytes <= budget


def test_a_budget_that_holds_no_sequence_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        ConfigError,
        match=r"memory='4MiB' .*holds 0 state pages of 3,145,728 bytes and 2 KV pages of 1,048,576 bytes; "
        "expected at least 4 and 2; set memory to 25,165,824 bytes or more$",
    ):
        plan_pages(EngineConfig(memory="4MiB"), LIMITS, 0)
    with pytest.raises(ConfigError, match=r"holds 1 state pages.*and 1 KV pages.*or change num_kv"):
        plan_pages(EngineConfig(memory="4MiB", num_kv_pages=1), LIMITS, 0)


def test_pages_that_are_more_than_the_memory_for_both_kinds_are_refused_by_name() -> None:
    for name, need in (("num_state_pages", 40 * 3 * MIB), ("num_kv_pages", 40 * MIB)):
        with pytest.raises(
            ConfigError,
            match=rf"{name}=40 takes {need:,} of memory='4MiB' \(4,194,304 bytes\); exp",
        ):
            plan_pages(EngineConfig(memory="4MiB", **{name: 40}), LIMITS, 0)


@pytest.mark.parametrize(
    ("memory", "num_bytes"),
    [
        ("80%", 800),
        ("100%", 1000),
        ("0.5 %", 5),
        (12345, 12345),
        ("12345", 12345),
        ("1.5KiB", 1536),
        ("2 mb", 2_000_000),
        ("3GiB", 3 * 2**30),
        ("3GB", 3 * 10**9),
        ("9B", 9),
        ("100TiB", 100 * 2**40),
        ("1.5GB", 1_500_000_000),
        ("2TB", 2 * 10**12),
    ],
)
def test_memory_is_a_share_or_an_amount(memory: str | int, num_bytes: int) -> None:
    assert parse_memory(memory, 1000) == num_bytes


@pytest.mark.parametrize(
    ("memory", "why"),
    [
        ("0%", "a share is above 0% and at most 100%"),
        ("101%", "a share is above 0% and at most 100%"),
        ("-5%", "neither may be negative"),
        ("nan%", "write a number and one of"),
        ("", "write a number and one of"),
        ("lots", "write a number and one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB and %"),
        ("8 gigs", "GIGS is no unit, known are B, KB,"),
        ("8PiB", "PIB is no unit, known are B, KB,"),
        ("infB", "write a number and one of"),
        ("1e400GB", "write a number and one of"),
        ("9" * 400, "write a number and one of"),
        ("-5GiB", "neither may be negative"),
        ("0MB", "an amount is one byte at least"),
        ("0.4", "an amount is one byte at least"),
        ("0", "an amount is one byte at least"),
        (-1, "neither may be negative"),
        (0, "an amount is one byte at least"),
        (0.8, "write a share as '80%'"),
        (True, "write a number and one of"),
        (None, "write a number and one of"),
    ],
)
def test_memory_that_is_neither_is_refused_with_the_reason(memory: Any, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_memory(memory, 1000)
    assert str(refused.value) == (
        f"Engine: memory={memory!r}; expected a share of the free memory such as '80%', or an amount "
        f"such as '8GiB' or a whole number of bytes; {refused.value.args[0].rpartition('; ')[2]}"
    )
    assert why in str(refused.value)


def test_a_mix_is_planned_exactly_and_equals_a_count_by_hand() -> None:  # L3
    # 8 sequences of 100 tokens: 7 KV pages and 3 state pages each, with the null pages and a spare
    config = EngineConfig(mix="8x100", memory=8 * 3 * 3 * MIB + 2 * 3 * MIB + 57 * MIB)
    assert plan_pages(config, LIMITS, 0) == (26, 57)
    with pytest.raises(
        ConfigError, match=r"needs 57 KV pages .* and 26 state pages .* expected at most"
    ):
        plan_pages(replace(config, memory=int(config.memory) - 1), LIMITS, 0)
    with pytest.raises(ConfigError, match="num_kv_pages are given"):
        plan_pages(replace(config, num_kv_pages=9), LIMITS, 0)
    more = plan_pages(replace(config, memory=1000 * MIB), LIMITS, 0)
    assert more[0] > 26 and more[1] > 57 and more[0] * 3 + more[1] <= 1000


@pytest.mark.parametrize(("mode", "pages"), [("none", 1), ("align", 3), ("all", 512 + 2)])
def test_b1_state_pages_of_a_sequence(mode: str, pages: int) -> None:
    """B-1 (32,768 tokens, blocks of 64): 1, 2 and 512 without drafts.  Ours count what steps in flight still
    read as well, so that a sequence that was admitted never waits for it."""
    assert planner.state_pages(mode, 32768, 64) == pages


def test_the_plan_is_printed_as_a_sum_with_what_it_runs() -> None:
    text = describe("align", 100, 16, 64, 26, 57, PageBytes(3 * MIB, MIB))
    assert (
        "57 KV pages of 1,048,576 bytes + 26 state pages of 3,145,728 bytes = 141,557,760 bytes"
        in text
    )
    assert text.endswith("7 KV and 3 state pages for a sequence of 100 tokens: 8 of them at once")


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_the_capacity_that_is_reported_runs_at_once_without_preemption(mode: str) -> None:  # L3
    mix = planner.Mix(5, 37)
    state = mix.sequences * planner.state_pages(mode, mix.length, 8) + 2
    kv = mix.sequences * planner.kv_pages(mix.length, 4) + 1
    assert capacity(mode, mix.length, 4, 8, state, kv) == mix.sequences
    for fewer in ((state - 1, kv), (state, kv - 1)):
        assert capacity(mode, mix.length, 4, 8, *fewer) == mix.sequences - 1
    rig = Rig(
        Case(
            mode=mode,
            max_rows=5,
            max_len=37,
            num_state_pages=state,
            num_kv_pages=kv,
            max_step_tokens=64,
        )
    )
    prompts = [[3 + (i * i + seed) % 29 for i in range(9)] for seed in range(5)]
    for prompt in prompts:
        rig.add(prompt, 28)
    for _ in range(4):
        rig.step()
    assert len(rig.scheduler.running) == mix.sequences
    rig.run()
    assert rig.scheduler.num_preemptions == 0
    assert rig.done == {i: answer(prompt, 28) for i, prompt in enumerate(prompts)}


@pytest.mark.parametrize(
    "options", [{"max_rows": 1}, {"max_len": 50}, {}], ids=["rows", "length", "positions"]
)
def test_a_mix_that_no_step_or_sequence_can_hold_is_refused(options: dict[str, int]) -> None:
    config = EngineConfig(mix="4x100", memory="1GiB", **options)
    with pytest.raises(ConfigError, match="expected a mix within both"):
        plan_pages(config, LIMITS if options else replace(LIMITS, max_positions=64), 0)
