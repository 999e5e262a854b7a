"""
What the modes of `graphs` are worth: time to the first token of several prompt lengths, and a decode step.

Prompts that are bound by launches gain from graphs, longer ones are bound by arithmetic (2 x parameters x
tokens operations) and lose what padding to a captured size costs.

    pytest bench/graph_modes.py --benchmark-json=graph_modes.json      (B2: 150 s, most of it start-up)
    pytest bench/graph_modes.py -k "full and not piecewise"            (a mode at a time)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import measure
import numpy as np
import pytest
import torch

import midstream
from midstream.graphs.dispatch import MODES

LENGTHS = (100, 400, 600, 1000, 1500, 2000) if torch.cuda.is_available() else (10, 20)
ROUNDS = 11 if torch.cuda.is_available() else 2
_seeds = count()


# the default comes first: a run that is cut short has measured it
@pytest.fixture(scope="module", params=sorted(MODES, key="full".__ne__))
def engine(request: Any, model: Any, state_dtype: str) -> Iterator[midstream.Engine]:
    """Few rows, so that what is measured is not start-up."""
    with midstream.Engine(
        model, graphs=request.param, max_len=4096, max_rows=8, state_dtype=state_dtype,
        cache_mode="none",
    ) as engine:  # fmt: skip
        yield engine


@pytest.mark.parametrize("tokens", LENGTHS)
def test_first_token(
    benchmark: Any, engine: midstream.Engine, tokens: int, model_name: str
) -> None:
    """A prompt alone from a zero state."""
    params = midstream.SamplingParams(max_tokens=1, temperature=0.0)
    vocab = engine._parts.intake.vocab_size

    def serve(prompt: Any) -> None:
        next(iter(engine.generate([prompt], params)))

    def prompt() -> tuple[tuple[Any], dict[str, Any]]:
        return (np.random.default_rng(next(_seeds)).integers(3, vocab, tokens),), {}

    for _ in range(2):  # captures what is captured late
        serve(prompt()[0][0])
    before = engine.stats()["graph_replays"]
    benchmark.pedantic(serve, setup=prompt, rounds=ROUNDS)
    replays = engine.stats()["graph_replays"] - before
    measure.describe(
        benchmark, model=model_name, tokens=tokens, replays_per_prompt=replays / ROUNDS,
        graphs=engine.stats()["graphs"],
    )  # fmt: skip


def test_decode(benchmark: Any, engine: midstream.Engine, model_name: str) -> None:
    """Steps of 8 decoding rows."""
    params = midstream.SamplingParams(max_tokens=2000, temperature=0.0)
    vocab = engine._parts.intake.vocab_size
    draw = np.random.default_rng(next(_seeds))
    handles = [engine.add(draw.integers(3, vocab, 30), params) for _ in range(8)]
    for _ in range(8):
        engine.step()
    benchmark._timer = time.perf_counter
    benchmark.pedantic(engine.step, iterations=10, rounds=ROUNDS, warmup_rounds=2)
    measure.describe(benchmark, model=model_name, rows=8)
    for handle in handles:
        engine.abort(handle)
    for _ in range(3):
        engine.step()
