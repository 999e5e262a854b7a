"""
Time to the first token: a cold prompt, and one that shares a long prefix with an earlier prompt.

Physics: a cold prompt is bound by arithmetic (2 x parameters x tokens operations), a warm one by the work of
its own tokens, which is one read of the weights plus launches.

    pytest bench/first_token.py --benchmark-json=first_token.json      (--model B2)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import measure
import numpy as np
import pytest

import midstream

SHARED, OWN = 6000, 100
ROUNDS = 12


@pytest.fixture(scope="module")
def engine(model: Any, state_dtype: str) -> Iterator[midstream.Engine]:
    engine = midstream.Engine(
        model, max_len=8192, max_rows=32, num_kv_pages=8000, state_dtype=state_dtype
    )
    yield engine
    engine.close()


_seeds = count()


def _prompt(engine: midstream.Engine, length: int) -> Any:
    return np.random.default_rng(next(_seeds)).integers(3, engine._parts.intake.vocab_size, length)


def _first_token(engine: midstream.Engine, prompt: Any) -> midstream.Output:
    params = midstream.SamplingParams(max_tokens=1, temperature=0.0)
    return next(iter(engine.generate([prompt], params)))


def test_cold(benchmark: Any, engine: midstream.Engine, model_name: str) -> None:
    """6,100 tokens that nothing is known of."""
    _first_token(engine, _prompt(engine, SHARED + OWN))
    out: list[midstream.Output] = []
    benchmark.pedantic(
        lambda prompt: out.append(_first_token(engine, prompt)),
        setup=lambda: ((_prompt(engine, SHARED + OWN),), {}),
        rounds=ROUNDS,
    )
    assert all(o.num_cached_tokens == 0 for o in out)
    measure.describe(benchmark, model=model_name, tokens=SHARED + OWN)


def test_shared(benchmark: Any, engine: midstream.Engine, model_name: str) -> None:
    """6,000 shared tokens and 100 new ones."""
    shared = _prompt(engine, SHARED)
    _first_token(engine, shared)
    _first_token(engine, np.concatenate([shared, _prompt(engine, OWN)]))
    out: list[midstream.Output] = []
    benchmark.pedantic(
        lambda prompt: out.append(_first_token(engine, prompt)),
        setup=lambda: ((np.concatenate([shared, _prompt(engine, OWN)]),), {}),
        rounds=ROUNDS,
    )
    measure.describe(
        benchmark, model=model_name, tokens=SHARED + OWN, reused=out[-1].num_cached_tokens
    )


def test_short_cold(benchmark: Any, engine: midstream.Engine, model_name: str) -> None:
    """100 tokens from a zero state: what the warm case is compared with."""
    _first_token(engine, _prompt(engine, OWN))
    benchmark.pedantic(
        lambda prompt: _first_token(engine, prompt),
        setup=lambda: ((_prompt(engine, OWN),), {}),
        rounds=ROUNDS,
    )
    measure.describe(benchmark, model=model_name, tokens=OWN)
