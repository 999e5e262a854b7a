"""Two processes with an engine each share one device, and neither notices the other."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from threading import Barrier

import pytest
import torch
from oracles import five_prompts, guarded_engine, serve
from tiny_models import VOCAB, build

SMALL = {
    "state_block": 16, "kv_block": 4, "max_rows": 4, "num_state_pages": 40, "num_kv_pages": 120,
    "max_step_tokens": 64, "compile": "eager",
}  # fmt: skip
_TOKENS = 24
_PATIENCE_S = 200  # imports included

_both: Barrier  # of a child


def _meet(both: Barrier) -> None:
    """What a child begins with."""
    global _both
    _both = both
    if not torch.cuda.is_available():
        os.environ["MIDSTREAM_EMULATE"] = "late"


def _serve_rounds(device: str, seed: int, num_rounds: int) -> tuple[list[list[list[int]]], int]:
    """Tokens of each round, and replays, of an engine whose graphs stand when the other's do."""
    with guarded_engine(build("bamba", seed=seed).to(device), **SMALL) as engine:
        _both.wait(_PATIENCE_S)
        rounds = [
            [list(out.token_ids) for out in serve(engine, five_prompts(VOCAB), _TOKENS)]
            for _ in range(num_rounds)
        ]
        return rounds, engine.stats()["graph_replays"]


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def test_two_processes_replay_graphs_on_one_device_as_if_alone(device: str) -> None:
    wants = []
    for seed in (0, 1):
        with guarded_engine(build("bamba", seed=seed).to(device), graphs="off", **SMALL) as engine:
            outputs = serve(engine, five_prompts(VOCAB), _TOKENS)
            wants.append([list(out.token_ids) for out in outputs])
    assert wants[0] != wants[1]

    context = get_context("spawn")
    with ProcessPoolExecutor(2, context, _meet, (context.Barrier(2),)) as processes:
        # one leaves, with all its memory, while the other works
        asked = [(0, 4), (1, 1)]
        children = [processes.submit(_serve_rounds, device, *one) for one in asked]
        for (seed, num_rounds), child in zip(asked, children, strict=True):
            rounds, replays = child.result(_PATIENCE_S)
            assert rounds == [wants[seed]] * num_rounds
            assert replays > _TOKENS * num_rounds // 2
