"""Debugging switches come from the environment, and a misspelt one is an error."""

from typing import Any

import pytest
from hash_engine import HashLanguageModel, hash_engine

import midstream
from midstream import ConfigError
from midstream.runtime.settings import Settings, read_settings


@pytest.mark.parametrize(
    ("environ", "poison"),
    [
        ({}, False),
        ({"MIDSTREAM_POISON": "0"}, False),
        ({"MIDSTREAM_POISON": "1"}, True),
        ({"POISON": "1", "midstream_poison": "1", "PATH": "/bin"}, False),
    ],
)
def test_only_a_known_switch_that_is_on_counts(environ: dict[str, str], poison: bool) -> None:
    assert read_settings(environ) == Settings(poison=poison)


@pytest.mark.parametrize(
    ("value", "pace"), [("late", "late"), ("early", "early"), ("7", 7), ("0", None), ("", None)]
)
def test_emulation_is_late_early_or_drawn_from_a_seed(value: str, pace: Any) -> None:
    assert read_settings({"MIDSTREAM_EMULATE": value}) == Settings(emulate=pace)


def test_shadow_is_a_number_of_steps() -> None:
    assert read_settings({"MIDSTREAM_SHADOW": "8"}) == Settings(shadow_every=8)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("SHADOW", "often", "a whole number, 0 for never"),
        ("SHADOW", "-1", "a whole number, 0 for never"),
        ("EMULATE", "on", "late, early or a seed"),
    ],
)
def test_an_odd_value_of_the_others_is_refused(name: str, value: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"MIDSTREAM_{name}={value!r}; expected {expected}"):
        read_settings({f"MIDSTREAM_{name}": value})


@pytest.mark.parametrize("value", ["", "true", "yes", "2", " 1"])
def test_an_odd_value_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=f"MIDSTREAM_POISON={value!r}; expected 0 or 1"):
        read_settings({"MIDSTREAM_POISON": value})


@pytest.mark.parametrize("name", ["MIDSTREAM_POISN", "MIDSTREAM_", "MIDSTREAM_POISON_2"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"variable {name}; known: MIDSTREAM_EMULATE, MIDSTREAM_POISON, "
    ):
        read_settings({name: "1"})


def test_the_engine_reads_the_environment_before_it_touches_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MIDSTREAM_POISN", "1")
    model = HashLanguageModel()
    with pytest.raises(ConfigError, match="MIDSTREAM_POISN"):
        midstream.Engine(model)
    assert not model.lowered


def test_poison_fills_free_pages_and_no_others() -> None:
    with hash_engine() as engine:
        list(engine.generate([[5] * 21], midstream.SamplingParams(max_tokens=4, temperature=0.0)))
        engine.add([6, 7])
        engine.step()  # poisons, then launches
        parts = engine._parts
        for arena, pool in (
            (parts.pools.temporal, parts.ownership.state_pool),
            (parts.pools.kv, parts.ownership.kv_pool),
        ):
            free = pool.free_pages()
            assert free and arena[[0, *free]].isnan().all()
            kept = [page for page in range(1, pool.num_pages) if pool.is_published(page)]
            assert kept and not arena[kept].isnan().any()
