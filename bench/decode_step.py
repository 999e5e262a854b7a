"""
The whole decode step in steady state: index work, layers, sampling, counters.

Physics: a step reads all weights once and reads and writes the state of every row, so its floor is
(weights + 2 x rows x state) / copy rate.  `device` replays the captured step on the device's clock;
`engine` is the wall time per step of the engine serving those rows, host work included.

    pytest bench/decode_step.py --benchmark-json=decode.json      (--model B2 --rows 1,32,256)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import measure
import numpy as np
import pytest
from reference_models import Floor

import midstream
from midstream.graphs.table import decode_key

PROMPT = 64
BLOCK = 1024  # longer than a measurement, so that replays of one step stay inside a block


_startup_s: dict[int, float] = {}  # of each engine, by identity


@pytest.fixture(scope="module")
def engine(model: Any, row_counts: list[int], state_dtype: str) -> Iterator[midstream.Engine]:
    begin = time.perf_counter()
    engine = midstream.Engine(
        model, state_block=BLOCK, max_len=4096, max_rows=max(row_counts), state_dtype=state_dtype
    )
    _startup_s[id(engine)] = time.perf_counter() - begin
    yield engine
    engine.close()


def start_rows(engine: midstream.Engine, rows: int) -> list[midstream.Handle]:
    """Serve `rows` random prompts until all of them decode."""
    draw = np.random.default_rng(rows)
    vocab = engine._parts.intake.vocab_size
    params = midstream.SamplingParams(max_tokens=3000, temperature=0.0)
    handles = [engine.add(draw.integers(3, vocab, PROMPT), params) for _ in range(rows)]
    for _ in range(8):
        engine.step()
    assert engine.stats()["running"] == rows
    return handles


def stop_rows(engine: midstream.Engine, handles: list[midstream.Handle]) -> None:
    for handle in handles:
        engine.abort(handle)
    for _ in range(3):
        engine.step()
    engine.check_books()


def test_device(benchmark: Any, engine: midstream.Engine, rows: int, model_name: str) -> None:
    """Replays of one captured step."""
    handles = start_rows(engine, rows)
    runner = engine._parts.runner
    key = decode_key(rows)

    def replay() -> None:
        if not runner.graphs.replay(key):
            runner.step.run(runner.step.stage.decode_view(rows), rows)

    benchmark._timer = measure.clock()
    benchmark.pedantic(replay, iterations=20, rounds=30, warmup_rounds=2)
    floor = Floor.of(engine._parts.lowered.model, engine._parts.lowered.layout.page_bytes)
    measure.describe(
        benchmark,
        floor.step_bytes(rows),
        model=model_name,
        rows=rows,
        startup_s=_startup_s[id(engine)],
    )
    stop_rows(engine, handles)


def test_engine(benchmark: Any, engine: midstream.Engine, rows: int, model_name: str) -> None:
    """Steps of the engine, one in flight."""
    handles = start_rows(engine, rows)
    benchmark._timer = time.perf_counter
    benchmark.pedantic(engine.step, iterations=10, rounds=30, warmup_rounds=2)
    floor = Floor.of(engine._parts.lowered.model, engine._parts.lowered.layout.page_bytes)
    measure.describe(benchmark, floor.step_bytes(rows), model=model_name, rows=rows)
    stop_rows(engine, handles)
