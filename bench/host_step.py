"""
The host's part of a decode step: what Python does from one launch to the next, and its index kernels.

Physics: none; the host must be ready before the device is.  The engine is the real one from `Engine.step`
down to the launch, but its graphs hold as many one-element kernels as a model has nodes (on the CPU nothing),
and its tokens are made up.  Every step starts with an idle device, so that the host waits for nothing.
`quiet_step` times steps in which no row needs a page; `block` all steps of 64-token blocks, rows at
any place of their blocks.  Index kernels stand next to their plain twins and to NumPy.

    pytest bench/host_step.py --benchmark-json=host_step.json
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import measure
import numpy as np
import numpy_rows
import pytest
import torch
from numpy_rows import I32
from percentiles import percentiles_us, seconds_of
from torch import Tensor

import midstream
from midstream.compiler.context import StepView
from midstream.compiler.layout import KvLayout, LayerState, StateLayout
from midstream.graphs.table import GraphKey
from midstream.ops import host_rows
from midstream.runtime import assembly
from midstream.runtime.device_step import DeviceStep
from midstream.runtime.runner import StepRunner

GPU = torch.cuda.is_available()
NODES = 200  # of a graph: 8 for each of 24 layers, and the index work
BLOCK, KV_BLOCK = 64, 16  # tokens
STEPS = 4 * BLOCK  # measured
VOCAB, TOKEN = 512, 7  # ids of the prompts; the id that every row samples
ROWS = 1024  # of the index kernels
KERNELS = [name for name in vars(numpy_rows) if name.startswith(("fill_", "pad_"))]


class NoModel(torch.nn.Embedding):
    """As much of a model as the engine looks at."""

    config = SimpleNamespace(max_position_embeddings=4096)

    def get_input_embeddings(self) -> NoModel:
        return self


class NoLayers:
    """In place of a lowered model: small pages, no layers."""

    def __init__(self) -> None:
        self.model, self.device, self.dtype = NoModel(VOCAB, 1), measure.device(), torch.float32
        layer = LayerState(0, "ssd", (1, 1, 32), conv_window_rows=3, conv_channels=32)
        self.layout = StateLayout.of([layer], self.dtype, self.dtype)
        self.kv_layout = KvLayout((1,), kv_heads=1, head_dim=1, dtype=self.dtype, kv_block=KV_BLOCK)

    def bind(self, pools: object) -> None:
        pass

    def undo(self) -> None:
        pass


class NoWork(DeviceStep):
    """A step of NODES one-element kernels; the sampled tokens are there already."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.token.fill_(TOKEN)

    def run(self, view: StepView, rows: int) -> Tensor:
        for _ in range(NODES):
            self.num_moves.add_(0)
        return self.logprob

    def addresses(self) -> dict[str, int]:
        """None: on the CPU every launch would check them."""
        return {}


class NoLaunch(StepRunner):
    """Without a GPU there is nothing to launch."""

    def _replay_or_run(self, key: GraphKey) -> Tensor:
        return super()._replay_or_run(key) if GPU else self.step.logprob


Start = Callable[[Sequence[int]], midstream.Engine]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Engines that decode prompts of the given lengths, one row each."""
    monkeypatch.setattr(assembly, "check_model", lambda model: None)
    monkeypatch.setattr(assembly, "lower", lambda *args, **options: NoLayers())
    monkeypatch.setattr(assembly, "DeviceStep", NoWork)
    monkeypatch.setattr(assembly, "StepRunner", NoLaunch)

    def run(lengths: Sequence[int]) -> midstream.Engine:
        rows = len(lengths)
        engine = midstream.Engine(
            NoModel(VOCAB, 1),
            compile="eager",
            state_block=BLOCK,
            kv_block=KV_BLOCK,
            max_rows=rows,
            max_len=1024,
            max_step_tokens=sum(lengths),  # all of them start in one step
            num_kv_pages=1 + 1024 // KV_BLOCK * rows,
            num_state_pages=8 * rows,
        )
        params = midstream.SamplingParams(max_tokens=900, temperature=0.0)
        draw = np.random.default_rng(rows)
        for n in lengths:
            engine.add(draw.integers(0, VOCAB, n), params)
        for _ in range(8):
            engine.step()
        assert engine.stats()["running"] == rows
        return engine

    return run


@pytest.mark.parametrize("num_rows", [256, 1024])
def test_quiet_step(benchmark: Any, start: Start, num_rows: int) -> None:
    """No row needs a page and none fills one: all rows are at the same place of their blocks."""
    engine = start([24] * num_rows)
    computed = engine._parts.scheduler.live.computed

    def to_quiet_step() -> None:
        while computed[0] % KV_BLOCK in (0, KV_BLOCK - 1):
            engine.step()
        wait_for_device()

    measure_steps(benchmark, engine, to_quiet_step)


@pytest.mark.parametrize("num_rows", [256, 1024])
def test_block(benchmark: Any, start: Start, num_rows: int) -> None:
    """Rows at random places: in a step each 16th row needs a KV page, each 64th leaves a checkpoint."""
    lengths = np.random.default_rng(num_rows).integers(BLOCK, 2 * BLOCK, num_rows)
    engine = start(lengths.tolist())
    measure_steps(benchmark, engine, wait_for_device)
    benchmark.extra_info["mean_us"] = round(1e6 * float(np.mean(seconds_of(benchmark))), 3)


def measure_steps(benchmark: Any, engine: midstream.Engine, setup: Callable[[], None]) -> None:
    """Time `Engine.step`, and then, in more steps, its parts."""
    benchmark._timer = time.perf_counter
    benchmark.pedantic(engine.step, setup=setup, rounds=STEPS, warmup_rounds=KV_BLOCK)
    total = percentiles_us(seconds_of(benchmark))
    parts, replays = time_parts(engine, setup), engine.stats()["graph_replays"]
    assert replays >= STEPS or not GPU
    measure.describe(benchmark, None, nodes=NODES if GPU else 0, **total, parts=parts)
    engine.check_books()
    engine.close()


def time_parts(engine: midstream.Engine, setup: Callable[[], None]) -> dict[str, dict[str, float]]:
    """Percentiles of what `Engine.step` calls; `stage` is a part of `launch`."""
    parts = engine._parts
    watched = {
        "schedule": (parts.scheduler, "next_step"),
        "stage": (parts.runner.step.stage, "write_decode"),
        "launch": (parts.runner, "launch"),
        "wait": (parts.runner, "wait"),
        "commit": (parts.committer, "commit"),
    }
    seconds = {name: _watch(*where) for name, where in watched.items()}
    for _ in range(BLOCK):
        setup()
        engine.step()
    return {name: percentiles_us(values) for name, values in seconds.items()}


def _watch(owner: Any, method: str) -> list[float]:
    """Seconds of each call of a method from now on."""
    seconds, call = list[float](), getattr(owner, method)

    def timed(*args: Any) -> Any:
        begin = time.perf_counter()
        result = call(*args)
        seconds.append(time.perf_counter() - begin)
        return result

    setattr(owner, method, timed)
    return seconds


def wait_for_device() -> None:
    if GPU:
        torch.cuda.synchronize()


@pytest.mark.parametrize("name", KERNELS)
def test_index_kernel(benchmark: Any, name: str) -> None:
    """A kernel over ROWS rows: single tokens, and 16 chunks of 64 tokens."""
    compiled, plain = getattr(host_rows, name), getattr(host_rows, name + "_py")
    slower = {"python": plain, "numpy": getattr(numpy_rows, name)}
    args = index_arguments()[name]
    result = compiled(*args)
    for form in slower.values():
        same = index_arguments()[name]
        assert form(*same) == result
        np.testing.assert_equal(same, args)

    benchmark._timer = time.perf_counter
    benchmark.pedantic(compiled, args=args, iterations=20, rounds=100, warmup_rounds=3)
    this = percentiles_us(seconds_of(benchmark))
    measure.describe(benchmark, None, rows=ROWS, **this)
    for other, form in slower.items():
        seconds = timeit.repeat(partial(form, *args), repeat=20, number=1)
        times = percentiles_us(seconds)
        benchmark.extra_info |= {
            other: times,
            f"vs_{other}": round(times["p50_us"] / this["p50_us"], 1),
        }


def index_arguments() -> dict[str, tuple[Any, ...]]:
    """Arguments of each kernel, drawn anew but always alike; pads fill the last quarter of the rows."""
    draw = np.random.default_rng(1)

    def out(length: int) -> I32:
        return np.full(length, -77, np.int32)

    def pages(columns: int) -> I32:
        return draw.integers(1, 9999, (ROWS, columns), np.int32)

    slot = draw.permutation(ROWS).astype(np.int32)
    computed = draw.integers(1, 1900, ROWS, np.int32)
    new = np.where(np.arange(ROWS) < 16, np.int32(64), np.int32(1))
    starts = np.concatenate([[0], new.cumsum()]).astype(np.int32)
    tokens, live, no_exports = int(starts[-1]), ROWS * 3 // 4, np.zeros(ROWS + 1, np.int32)
    kv_table, column = pages(2048 // KV_BLOCK), computed // KV_BLOCK
    state_col, resume_page = np.zeros((2, ROWS), np.int32)
    state_col[slot] = (computed - 1) // BLOCK
    state = state_col, resume_page, pages(2048 // BLOCK)
    read_and_write = out(ROWS), out(ROWS)
    return {
        "fill_row_starts": (new, out(ROWS + 1)),
        "fill_positions": (computed, new, starts, out(tokens)),
        "fill_kv_slots": (slot, computed, new, starts, kv_table, KV_BLOCK, out(tokens)),
        "fill_pages": (slot, computed, new, *state, BLOCK, False, *read_and_write),
        "fill_chunks": (
            starts, computed, new, kv_table[:, 0].copy(), no_exports, out(0), out(0), 64,
            out(ROWS + 1), out(ROWS), out(ROWS), out(ROWS + 1),
        ),
        "pad_rows": (
            live, int(starts[live]), out(ROWS), starts.copy(), *read_and_write, out(tokens),
            out(tokens), out(tokens),
        ),
        "pad_chunks": (live, live, out(ROWS + 1), out(ROWS), out(ROWS), out(ROWS + 1)),
        "fill_deltas": (kv_table, slot, column, column + 1, 99, out(ROWS), out(ROWS), 0),
        "fill_decode_rows": (
            slot, computed, *state, kv_table, BLOCK, KV_BLOCK, False, out(ROWS), out(ROWS + 1),
            out(ROWS), out(ROWS), out(ROWS), *read_and_write,
        ),
    }  # fmt: skip
