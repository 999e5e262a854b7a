"""What is said of a prompt's reuse is said in words of options."""

from __future__ import annotations

import pytest

from midstream.runtime.explain import REASONS, sentence
from midstream.runtime.request import Lookup


@pytest.mark.parametrize(
    ("reason", "option"), [("all", "kv_block"), ("evicted", "memory"), ("off", "cache_mode")]
)
def test_a_reason_names_the_option_that_decides(reason: str, option: str) -> None:
    assert option in sentence(Lookup(101, 96, 96, 96, reason))
    assert option in REASONS[reason]


def test_a_prompt_that_reused_all_it_could_is_told_so() -> None:
    assert sentence(Lookup(101, 96, 96, 96, "all")) == (
        "reused 96 of 101 tokens; attention matches 96, the longest saved state is at 96; all of it, but "
        "for less than one KV page (kv_block tokens)"
    )
