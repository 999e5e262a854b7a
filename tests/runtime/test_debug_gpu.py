"""Poison and shadow mode on a GPU: no bit changes, and every replay equals an eager run."""

from typing import Any

import pytest
import torch
from oracles import five_prompts, serve
from tiny_models import FAMILIES, VOCAB, build

import midstream

pytestmark = pytest.mark.gpu

TINY = {
    "state_block": 16, "kv_block": 4, "max_rows": 4, "num_state_pages": 60, "num_kv_pages": 200,
    "max_step_tokens": 64, "compile": "eager",
}  # fmt: skip


def outputs(engine: midstream.Engine) -> list[Any]:
    return [
        (out.token_ids, out.logprobs) for out in serve(engine, five_prompts(VOCAB), 10, logprobs=2)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_replay_has_the_bits_of_an_eager_run(family: str) -> None:
    with midstream.Engine(build(family, dtype=torch.bfloat16).cuda(), **TINY) as engine:
        engine.debug(shadow_every=1)
        outputs(engine)
        shadow, stats = engine._parts.runner.shadow, engine.stats()
        assert shadow is not None and shadow.num_compared == stats["graph_replays"] > 10


def test_poison_changes_no_bit() -> None:
    found = []
    for poison in (False, True):
        with midstream.Engine(build("bamba").cuda(), **TINY) as engine:
            engine.debug(poison=poison)
            found.append(outputs(engine))
    assert found[0] == found[1]


def test_a_gpu_is_not_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTREAM_EMULATE", "late")
    with pytest.raises(midstream.ConfigError, match="expected a model on the CPU"):
        midstream.Engine(build("bamba").cuda(), **TINY)
