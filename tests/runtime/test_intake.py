"""A prompt that is too long is refused with the option that would make room for it."""

from __future__ import annotations

import pytest
from tiny_models import build

from midstream import CapacityError, ConfigError
from midstream.runtime.config import EngineConfig, ModelLimits, resolve
from midstream.runtime.intake import Intake

POOLS = {"kv_block": 4, "state_block": 8, "num_kv_pages": 6, "num_state_pages": 8}


def intake(**options: int) -> Intake:
    limits = ModelLimits(None, state_page_bytes=1, kv_page_bytes=1, is_cuda=False)
    return Intake(build("bamba"), None, resolve(EngineConfig(**POOLS, **options), limits, 10**9))


@pytest.mark.parametrize(
    ("options", "advice"),
    [({"max_len": 12}, "raise max_len"), ({}, "raise memory or num_kv_pages")],
    ids=["max_len", "pages"],
)
def test_a_prompt_without_room_is_refused_with_the_option_that_bounds_it(
    options: dict[str, int], advice: str
) -> None:
    with pytest.raises(CapacityError, match=rf"; shorten the prompt, or {advice}"):
        intake(**options).request([5] * 40, None, 0, None, False)


@pytest.mark.parametrize("beyond", [2**31, 2**64, -(2**64)])
def test_a_number_that_is_no_token_id_is_refused_by_its_value(beyond: int) -> None:
    with pytest.raises(ConfigError, match=f"token ids from .*{beyond}.*; expected 0 to"):
        intake().request([5, beyond], None, 0, None, False)
