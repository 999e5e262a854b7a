"""
The host's part of a decode step: what Python does from one launch to the next, and its index kernels.

Physics: none; the host must be ready before the device is.  The engine is the real one from `Engine.step`
down to the launch, but its graphs hold as many one-element kernels as a model has nodes (on the CPU nothing),
and its tokens are made up.  Every step starts with an idle device, so that the host waits for nothing.
`quiet_step` times steps in which no row needs a page; `block` all steps of 64-token blocks, rows at
any place of their blocks; `plan_and_stage` what must be done between the tokens of two steps, next to the
same passes in plain Python.  Index kernels stand next to their plain twins and to NumPy.

    pytest bench/host_step.py --benchmark-json=host_step.json
    CUDA_VISIBLE_DEVICES= pytest bench/host_step.py     the host of a GPU machine alone, under a minute
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import measure
import numpy as np
import numpy_rows
import pytest
import torch
from no_work import BLOCK, GPU, KV_BLOCK, NODES, TOKEN, decoding_engine
from numpy_rows import I32, I64
from percentiles import percentiles_us, seconds_of

import midstream
from midstream.ops import host_decode, host_rows
from midstream.runtime.admission import Admission
from midstream.runtime.chains import Chains
from midstream.runtime.commit import StepResult
from midstream.runtime.hashing import BlockHasher, as_keys
from midstream.runtime.keys import Keys
from midstream.runtime.live import LiveTable
from midstream.runtime.ownership import PageOwnership
from midstream.runtime.pages import PagePool
from midstream.runtime.plan import StepPlan
from midstream.runtime.prefix import PrefixIndex
from midstream.runtime.request import Request
from midstream.runtime.slots import SlotLayout, SlotSampling
from midstream.runtime.stage import Cut, StageLimits

STEPS = 4 * BLOCK  # measured
ROWS = 1024  # of the index kernels
PASSES = [
    (host_decode, "plan_decode"), (host_decode, "advance_rows"), (host_rows, "fill_decode_step"),
]  # fmt: skip
KERNELS = [name for name in vars(numpy_rows) if name.startswith(("fill_", "pad_"))]
PROMPT = 131072  # tokens of the prompt that is looked up


Start = Callable[[Sequence[int]], midstream.Engine]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    return partial(decoding_engine, monkeypatch)


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


@pytest.mark.parametrize("num_rows", [256, 1024])
def test_plan_and_stage(
    benchmark: Any, start: Start, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedule and stage of a quiet step."""
    host = Host(start([24] * num_rows))
    benchmark._timer = time.perf_counter
    benchmark.pedantic(host.plan_and_stage, setup=host.to_quiet_step, rounds=STEPS)
    this = percentiles_us(seconds_of(benchmark))
    measure.describe(benchmark, None, rows=num_rows, **this)
    for module, name in PASSES:
        monkeypatch.setattr(module, name, getattr(module, name + "_py"))
    host, seconds = Host(start([24] * num_rows)), []
    for _ in range(9):
        host.to_quiet_step()
        seconds.append(timeit.timeit(host.plan_and_stage, number=1))
    plain = percentiles_us(seconds)
    ratio = round(plain["p50_us"] / this["p50_us"], 1)
    benchmark.extra_info |= {"python": plain, "vs_python": ratio}


class Host:
    """What the host does to a step, without a device."""

    def __init__(self, engine: midstream.Engine) -> None:
        parts = self.parts = engine._parts
        for flight in engine._turns.flights:
            parts.committer.commit(flight.plan, parts.runner.wait(flight))
        engine._turns.flights.clear()
        self.plan: StepPlan | None = None
        rows = len(parts.scheduler.running)
        self.result = StepResult(
            np.full(rows, TOKEN, np.int32), np.zeros(rows, np.float32), None, None
        )

    def plan_and_stage(self) -> None:
        parts, step = self.parts, self.parts.runner.step
        self.plan = plan = parts.scheduler.next_step()
        assert plan is not None
        step.stage.write_decode(plan, parts.scheduler.live.deltas, plan.num_rows)

    def to_quiet_step(self) -> None:
        while True:
            if self.plan is not None:
                self.parts.committer.commit(self.plan, self.result)
            if self.parts.scheduler.live.computed[0] % KV_BLOCK not in (0, KV_BLOCK - 1):
                break
            self.plan_and_stage()
        wait_for_device()


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
    """Percentiles of `Engine.step` and of what it calls, over the same steps; `stage` is a part of `launch`.

    Compare parts with the step next to them: a machine that others use may have slowed down since the
    step was timed alone.
    """
    parts = engine._parts
    watched = {
        "step": (engine, "step"),
        "schedule": (parts.scheduler, "next_step"),
        "stage": (parts.runner.step.stage, "write_decode"),
        "launch": (parts.runner, "launch"),
        "wait": (parts.runner, "wait"),
        "commit": (parts.committer, "commit"),
    }
    seconds = {name: _watch(*where) for name, where in watched.items()}
    of_steps: dict[str, list[float]] = {name: [] for name in watched}
    for _ in range(STEPS):
        setup()
        for values in seconds.values():  # the set-up may have made steps
            values.clear()
        engine.step()
        for name, values in seconds.items():
            of_steps[name] += values
    return {name: percentiles_us(values) for name, values in of_steps.items()}


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

    slot, computed = draw.permutation(ROWS), draw.integers(1, 1900, ROWS)
    chunks = 16  # rows with a chunk; the others decode
    new = np.where(np.arange(ROWS) < chunks, 64, 1)
    tokens, live, no_exports = int(new.sum()), ROWS * 3 // 4, np.zeros(ROWS + 1, np.int32)
    kv_table, known, none = pages(2048 // KV_BLOCK), pages(2048), no_exports[:0]
    rows = np.ones((host_decode.ROW_FIELDS, ROWS), np.int32)
    rows[[host_decode.SLOT, host_decode.COMPUTED, host_decode.NEW]] = slot, computed, new
    rows[host_decode.KV_SLOT] = draw.integers(1, 9999, ROWS)
    deltas = pages(ROWS)[:3].copy(), np.full(1, ROWS // KV_BLOCK, np.int32), ROWS
    cut = Cut(StageLimits(ROWS, tokens, ROWS, ROWS))

    def area() -> tuple[I32, I64]:
        words = np.full(cut.size, -77, np.int32)
        first = cut.start["row_start"]
        words[first : first + ROWS + 1] = np.concatenate([[0], new.cumsum()])
        return words, cut.starts

    return {
        "fill_deltas": (*deltas, *area()),
        "fill_decode_step": (rows, ROWS, *deltas, *area(), ROWS),
        "fill_token_rows": (rows, ROWS, known, chunks, kv_table, *area(), KV_BLOCK),
        "fill_chunks": (rows, ROWS, no_exports, none, none, *area(), 64),
        "pad_step": (*area(), live, tokens - ROWS + live, live, ROWS, tokens, ROWS),
    }


@pytest.mark.parametrize("known", [False, True], ids=["cold", "asked_again"])
def test_prefix_lookup(benchmark: Any, known: bool) -> None:
    """A prompt of PROMPT tokens whose pages are known.

    Cold: its hashes and the lookup.  Asked again: whether a waiting request may start now, in a later step,
    after others have changed the index.
    """
    tokens = np.random.default_rng(2).integers(0, 32000, PROMPT, np.int32)
    hasher, blocks = BlockHasher(block=KV_BLOCK, key=bytes(16)), PROMPT // KV_BLOCK
    plain = BlockHasher(block=KV_BLOCK, key=bytes(16), compiled=False)
    assert np.array_equal(hasher.extend(None, tokens[:320]), plain.extend(None, tokens[:320]))
    keys, kv, state = as_keys(hasher.extend(None, tokens)), PagePool(blocks + 9), PagePool(9)
    index = PrefixIndex(kv, state, KV_BLOCK)
    for block, page in enumerate(pages := kv.take(blocks)):
        index.publish_kv(keys, block, page)
    index.publish_state(keys, checkpoint := state.take(1)[0], (blocks - 1) * KV_BLOCK)
    kv.release(pages)
    state.release(checkpoint)
    admission = waiting_request(tokens, index, hasher)

    def cold() -> int:
        cold_keys = Keys()
        cold_keys.append(hasher.extend(None, tokens))
        return index.lookup(cold_keys, PROMPT - 1).num_tokens

    def asked_again() -> int:
        ((_, hit),) = admission.candidates(0)
        return hit.num_tokens

    def others_change_the_index() -> None:
        index.expected.add(0, keys[0], KV_BLOCK)
        index.expected.end(0)

    benchmark._timer = time.perf_counter
    result = benchmark.pedantic(
        asked_again if known else cold, setup=others_change_the_index, rounds=100, warmup_rounds=3
    )
    assert result == (blocks - 1) * KV_BLOCK
    measure.describe(benchmark, None, tokens=PROMPT, **percentiles_us(seconds_of(benchmark)))
    seconds = timeit.repeat(partial(plain.extend, None, tokens[: PROMPT // 64]), repeat=3, number=1)
    pages_us = [
        timeit.timeit(lambda: index.lookup(keys, PROMPT - 1).kv_pages, number=1) for _ in range(20)
    ]
    benchmark.extra_info |= {
        "python_hashes_us": round(64e6 * min(seconds), 1),
        "lookup_and_pages": percentiles_us(pages_us),
    }


def waiting_request(tokens: I32, index: PrefixIndex, hasher: BlockHasher) -> Admission:
    """A queue of one request."""
    assert index.state_pool is not None
    layout = SlotLayout(1, PROMPT // BLOCK + 1, PROMPT // KV_BLOCK + 1)
    live = LiveTable(layout, PROMPT + 1)
    ownership = PageOwnership(live, layout, index.kv_pool, index.state_pool, index, KV_BLOCK, BLOCK)
    params = midstream.SamplingParams(max_tokens=1, temperature=0.0)
    admission = Admission(ownership, Chains(hasher, live))
    request = Request(
        request_id=0, prompt=tokens, params=params, sampling=SlotSampling(params, 0, (), 0),
        max_tokens=1, priority=0, root=b"", streamed=False, watched=False,
    )  # fmt: skip
    admission.add(request)
    return admission
