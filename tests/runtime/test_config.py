"""From what the user asked to what the engine runs with."""

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from midstream import ConfigError
from midstream.graphs.dispatch import MODES, GraphKey, smallest_fit
from midstream.graphs.ladder import ladder_of
from midstream.runtime.config import (
    EngineConfig,
    ModelLimits,
    ResolvedConfig,
    chunk_ladder,
    engine_config,
    ladder,
    resolve,
)
from midstream.runtime.stage import stage_limits

MIB = 2**20
LIMITS = ModelLimits(max_positions=1000, state_page_bytes=3 * MIB, kv_page_bytes=MIB, is_cuda=False)


def resolved(
    limits: ModelLimits = LIMITS, free_bytes: int = 1000 * MIB, **options: Any
) -> ResolvedConfig:
    return resolve(EngineConfig(**options), limits, free_bytes)


# -- resolve ----------------------------------------------------------------------------------------


def test_resolve_leaves_nothing_open_and_what_was_given_as_it_is() -> None:
    given_fields = {
        "cache_mode": "none", "state_block": 32, "kv_block": 8, "max_rows": 5, "max_step_tokens": 77,
        "max_len": 99, "num_state_pages": 11, "num_kv_pages": 22, "migration": "precopy",
        "compile": "inductor",
    }  # fmt: skip
    config = resolved(**given_fields)
    assert all(getattr(config, name) == value for name, value in given_fields.items())
    defaults = resolved()
    for field in fields(ResolvedConfig):
        assert field.name == "hash_key" or getattr(defaults, field.name) is not None
    assert (defaults.migration, defaults.compile) == ("copyfree", "eager")
    assert resolved(replace(LIMITS, is_cuda=True)).compile == "inductor"
    assert resolved(state_dtype="bfloat16").state_dtype == torch.bfloat16
    assert resolved(hash_key="0f" * 16).hash_key == b"\x0f" * 16


@pytest.mark.parametrize(
    ("max_len", "max_positions", "num_kv_pages", "longest"),
    [
        (None, 1000, 101, 1000),
        (None, None, 101, 1600),  # the model sets no limit: what the KV pages hold
        (None, 1000, 11, 160),
        (50, 1000, 101, 50),
        (160, None, 11, 160),
    ],
)
def test_the_longest_sequence_is_the_least_of_wish_model_and_pages(
    max_len: int | None, max_positions: int | None, num_kv_pages: int, longest: int
) -> None:
    limits = replace(LIMITS, max_positions=max_positions)
    config = resolved(limits, max_len=max_len, num_kv_pages=num_kv_pages, num_state_pages=4)
    assert config.max_len == longest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_len": 1001, "num_kv_pages": 101},
            r"max_len=1001 exceeds the 1000 positions of the model",
        ),
        (
            {"max_len": 161, "num_kv_pages": 11},
            r"max_len=161 exceeds the 160 tokens that the KV pages",
        ),
        ({"max_len": 1}, "max_len=1; expected a whole number >= 2"),
        ({"num_state_pages": 3}, "num_state_pages=3; expected a whole number >= 4"),
        ({"num_kv_pages": 1}, "num_kv_pages=1; expected a whole number >= 2"),
        ({"max_rows": True}, "max_rows=True"),
        ({"kv_block": 0}, "kv_block=0"),
        ({"max_step_tokens": 2.0}, "max_step_tokens=2.0"),
        ({"state_block": 40}, "state_block=40 is not a multiple of kv_block=16.*state_block=48"),
        ({"retention": -1}, "retention=-1"),
        ({"retention": True}, "retention=True"),
        ({"retention": 40}, "retention=40 is not a multiple of kv_block=16.*retention=48"),
        ({"eviction": "fifo"}, "eviction='fifo'; expected one of 'value', 'lru'"),
        ({"wait_for_prefix": 1}, "wait_for_prefix=1; expected True or False"),
        ({"mix": "64"}, "mix='64'; expected sequences x tokens of each"),
        ({"cache_mode": "some"}, "cache_mode='some'; expected one of 'none', 'align', 'all'"),
        ({"graph_tokens": 0}, "graph_tokens=0; expected a whole number >= 1"),
        ({"graphs": "on"}, "graphs='on'; expected one of 'off', 'piecewise', 'full'"),
        ({"migration": "copy"}, "expected one of 'auto', 'copyfree', 'precopy'"),
        ({"state_dtype": "float16"}, "state_dtype='float16'"),
        ({"compile": "aot"}, "compile='aot'"),
        ({"hash_key": "xyz"}, "hash_key='xyz'; expected 32 hexadecimal digits"),
        ({"hash_key": "00" * 15}, "expected 32 hexadecimal digits"),
    ],
)
def test_what_can_never_work_is_refused_with_the_value(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(**options)


def test_mode_all_keeps_every_block_and_a_sequence_is_no_longer_than_its_states_fit() -> None:
    config = resolved(cache_mode="all", num_state_pages=9, num_kv_pages=60, max_rows=2)
    assert config.retention is None and config.max_len == 5 * 64
    with pytest.raises(ConfigError, match="max_len=321 exceeds the 320 tokens whose states"):
        resolved(cache_mode="all", num_state_pages=9, num_kv_pages=60, max_len=321)


def test_an_unknown_option_names_its_neighbour_or_all_that_there_are() -> None:
    assert engine_config({"max_rows": 3}) == EngineConfig(max_rows=3)
    with pytest.raises(ConfigError, match="did you mean 'kv_block'"):
        engine_config({"kv_blok": 3})
    with pytest.raises(ConfigError, match=r"known: cache_mode, .*hash_key"):
        engine_config({"zzz": 3})


# -- captured shapes --------------------------------------------------------------------------------


@given(st.integers(1, 1100))
def test_the_ladder_ascends_to_the_maximum_and_pads_little(max_rows: int) -> None:
    sizes = ladder(max_rows)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == max_rows and sizes[0] == 1
    for below, size in itertools.pairwise(sizes):
        assert size <= 2 * below and size - below <= 32


@given(st.integers(1, 300), st.integers(1, 3000), st.sampled_from((16, 64, 8192)))
def test_every_captured_shape_fits_into_the_stage(
    max_rows: int, max_step_tokens: int, block: int
) -> None:
    limits = stage_limits(max_rows, max_step_tokens, block)
    keys = ladder_of(MODES["full"], max_rows, max_step_tokens, max_step_tokens).chunk
    assert set(keys) >= set(chunk_ladder(max_rows, max_step_tokens))
    assert list(keys) == sorted(set(keys))
    for key in keys:
        assert key.tokens <= limits.max_step_tokens
        assert 2 <= key.rows <= limits.max_rows
        assert 2 <= key.chunks <= limits.max_chunks
    assert max(ladder(min(max_rows, max_step_tokens))) <= limits.max_rows


def test_captured_chunk_steps_take_a_few_rows_or_all() -> None:
    keys = chunk_ladder(256, 8192)
    assert [(key.tokens, key.rows) for key in keys] == [
        (64, 8), (128, 8), (256, 8), (256, 256), (512, 8), (512, 256),
    ]  # fmt: skip
    assert smallest_fit(GraphKey(65, 2, 3), keys) == GraphKey(128, 8, 20)
    assert chunk_ladder(4, 63) == ()


def test_each_mode_captures_its_ladder_and_off_captures_nothing() -> None:
    for mode, forms in MODES.items():
        config = resolved(graphs=mode, graph_tokens=1000)
        assert config.graphs == ladder_of(forms, config.max_rows, config.max_step_tokens, 1000)
        long = resolved(graphs=mode).graphs
        assert long == ladder_of(forms, config.max_rows, config.max_step_tokens, 8192)
    config = resolved(graphs="off")
    assert config.graphs.keys == () == config.graph_rows == config.graph_chunks
    # a decode step has no more rows than a step has tokens
    assert resolved(max_rows=100, max_step_tokens=6).graph_rows == (1, 2, 4, 6)
