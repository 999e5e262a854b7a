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
from numpy_rows import I32, I64
from percentiles import percentiles_us, seconds_of
from torch import Tensor

import midstream
from midstream.compiler.context import StepView
from midstream.compiler.layout import KvLayout, LayerState, StateLayout
from midstream.graphs.table import GraphKey
from midstream.ops import host_rows
from midstream.runtime import assembly
from midstream.runtime.device_step import DeviceStep
from midstream.runtime.hashing import BlockHasher, as_keys
from midstream.runtime.pages import PagePool
from midstream.runtime.prefix import PrefixIndex
from midstream.runtime.runner import StepRunner
from midstream.runtime.stage import Cut, StageLimits

GPU = torch.cuda.is_available()
NODES = 200  # of a graph: 8 for each of 24 layers, and the index work
BLOCK, KV_BLOCK = 64, 16  # tokens
STEPS = 4 * BLOCK  # measured
VOCAB, TOKEN = 512, 7  # ids of the prompts; the id that every row samples
ROWS = 1024  # of the index kernels
KERNELS = [name for name in vars(numpy_rows) if name.startswith(("fill_", "pad_"))]
PROMPT = 131072  # tokens of the prompt that is looked up


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

    def pages(columns: int) -> I32:
        return draw.integers(1, 9999, (ROWS, columns), np.int32)

    slot = draw.permutation(ROWS).astype(np.int32)
    computed = draw.integers(1, 1900, ROWS, np.int32)
    chunks = 16  # rows with a chunk; the others decode
    new = np.where(np.arange(ROWS) < chunks, np.int32(64), np.int32(1))
    tokens, live, no_exports = int(new.sum()), ROWS * 3 // 4, np.zeros(ROWS + 1, np.int32)
    kv_table, known, one = pages(2048 // KV_BLOCK), pages(2048), np.ones(ROWS, np.int32)
    state_col, resume_page = np.zeros((2, ROWS), np.int32)
    state_col[slot] = (computed - 1) // BLOCK
    state = state_col, resume_page, pages(2048 // BLOCK)
    cut = Cut(StageLimits(ROWS, tokens, ROWS, ROWS))

    def area() -> tuple[I32, I64]:
        words = np.full(cut.size, -77, np.int32)
        first = cut.start["row_start"]
        words[first : first + ROWS + 1] = np.concatenate([[0], new.cumsum()])
        return words, cut.starts

    return {
        "fill_decode_rows": (
            slot,
            computed,
            *state,
            kv_table,
            *area(),
            ROWS,
            BLOCK,
            KV_BLOCK,
            False,
        ),
        "fill_token_rows": (slot, computed, new, one, known, chunks, kv_table, *area(), KV_BLOCK),
        "fill_pages": (slot, computed, new, *state, *area(), BLOCK, False),
        "fill_chunks": (computed, new, no_exports, one[:0], one[:0], *area(), 64),
        "pad_step": (*area(), live, tokens - ROWS + live, live, ROWS, tokens, ROWS),
    }


@pytest.mark.parametrize("known", [False, True], ids=["cold", "memoised"])
def test_prefix_lookup(benchmark: Any, known: bool) -> None:
    """Hashes of a prompt of PROMPT tokens and the lookup of its pages; memoised: the lookup alone."""
    tokens = np.random.default_rng(2).integers(0, 32000, PROMPT, np.int32)
    hasher, blocks = BlockHasher(block=KV_BLOCK, key=bytes(16)), PROMPT // KV_BLOCK
    plain = BlockHasher(block=KV_BLOCK, key=bytes(16), compiled=False)
    assert np.array_equal(hasher.extend(None, tokens[:320]), plain.extend(None, tokens[:320]))
    keys, kv, state = as_keys(hasher.extend(None, tokens)), PagePool(blocks + 2), PagePool(9)
    index = PrefixIndex(kv, state, KV_BLOCK)
    for block, page in enumerate(kv.take(blocks)):
        index.publish_kv(keys, block, page)
    index.publish_state(keys, state.take(1)[0], (blocks - 1) * KV_BLOCK)

    def look_up() -> int:
        these = keys if known else as_keys(hasher.extend(None, tokens))
        return index.lookup(these, PROMPT - 1).num_tokens

    benchmark._timer = time.perf_counter
    result = benchmark.pedantic(look_up, rounds=100, warmup_rounds=3)
    assert result == (blocks - 1) * KV_BLOCK
    measure.describe(benchmark, None, tokens=PROMPT, **percentiles_us(seconds_of(benchmark)))
    seconds = timeit.repeat(partial(plain.extend, None, tokens[: PROMPT // 64]), repeat=3, number=1)
    benchmark.extra_info["python_hashes_us"] = round(64e6 * min(seconds), 1)
