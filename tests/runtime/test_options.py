"""Options are refused when they are written down, in an order that leads to what works."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from midstream.errors import ConfigError
from midstream.runtime.options import EngineConfig


@pytest.mark.parametrize(
    "name",
    ["max_rows", "max_step_tokens", "graph_tokens", "max_len", "num_kv_pages", "num_state_pages", "kv_block",
     "state_block", "retention"],
)  # fmt: skip
@pytest.mark.parametrize("value", [2**30 + 1, 10**20])
def test_a_number_beyond_32_bits_is_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"Engine: {name}={value}; expected at most 1073741824"):
        EngineConfig(**{name: value})


@pytest.mark.parametrize(("block", "near"), [(3, "2 or 4"), (48, "32 or 64"), (17, "16 or 32")])
def test_a_kv_block_that_no_kernel_can_address_is_refused_before_anything_that_follows_from_it(
    block: int, near: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig(kv_block=block)  # state_block is no multiple of it either
    assert str(refused.value) == (
        f"Engine: kv_block={block}; expected a power of two; choose e.g. kv_block={near}, and for "
        "state_block a multiple of it"
    )


@pytest.mark.parametrize("block", [1, 2, 64, 1024])
def test_every_power_of_two_is_a_kv_block(block: int) -> None:
    assert EngineConfig(kv_block=block, state_block=1024).kv_block == block


def test_an_unknown_name_is_refused_with_its_neighbour() -> None:
    with pytest.raises(ConfigError, match="unknown option 'max_row'; did you mean 'max_rows'"):
        EngineConfig(max_row=4)
    with pytest.raises(ConfigError, match="unknown option 'zzz'; known: cache_mode, state_block, "):
        replace(EngineConfig(max_rows=4), zzz=1)
    assert pickle.loads(pickle.dumps(EngineConfig(max_rows=4))) == EngineConfig(max_rows=4)
