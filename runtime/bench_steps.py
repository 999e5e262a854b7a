"""
One decode step as `midstream bench graphs` compares it, and how a step is measured.

    eager            transformers' forward with its static cache
    compile          the same under torch.compile(dynamic=False)
    reduce-overhead  the same under torch.compile(mode="reduce-overhead")
    backend          the same under torch.compile(backend="midstream")
    midstream        the step of midstream.compile: captured where there is a GPU
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from midstream.compiler.backend import midstream_backend
from midstream.compiler.compiled import CompiledModel, compile
from midstream.compiler.lowering import cache_argument
from midstream.graphs.kernels import idle_share, kernels_of

PATHS = ("eager", "compile", "reduce-overhead", "backend", "midstream")
SLOW_PATHS = (
    "compile",
    "reduce-overhead",
    "backend",
)  # minutes for a model of a billion parameters
MAX_LEN = 1024
_PROMPT = 16
_PROFILED = 5  # calls
_AT_ONCE = 5  # calls between two looks at the clock
_HOST_CALLS = 20
_FIRST_CALLS = 3
MOST_CALLS = MAX_LEN - _PROMPT - _FIRST_CALLS - _HOST_CALLS - _PROFILED  # one token each

Step = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Timing:
    """One step, measured.  Where there is no GPU, `device_us` is wall time."""

    device_us: tuple[float, float, float]  # p20, p50, p80
    host_us: float  # until the call returns, with an idle device behind it
    first_s: float  # of the first calls: compilation and capture
    num_kernels: float | None  # for one call, from the profiler
    idle_share: float | None  # of the device between first and last kernel
    num_compilations: int  # in the first calls
    num_recompilations: int  # after them


@contextmanager
def decoding(path: str, model: Any, compiled: CompiledModel | None, rows: int) -> Iterator[Step]:
    """A callable that decodes one more token for each of `rows` rows; `compiled` on path "midstream"."""
    if path == "midstream":
        assert compiled is not None
        cache = compiled.new_cache()
        yield _step(model, model, cache, rows)
        cache.reset()
        return
    from transformers import StaticCache

    torch._dynamo.reset()
    run = model
    if path == "compile":
        run = torch.compile(model, dynamic=False)
    elif path == "reduce-overhead":
        run = torch.compile(model, dynamic=False, mode="reduce-overhead")
    elif path == "backend":
        run = torch.compile(model, dynamic=False, backend=midstream_backend)
    yield _step(model, run, StaticCache(config=model.config, max_cache_len=MAX_LEN), rows)
    torch._dynamo.reset()


def compiled_for(model: Any, rows: int) -> CompiledModel:
    """The model of path "midstream", with room for `rows` rows."""
    return compile(model, max_batch=rows, max_len=MAX_LEN)


def measure(step: Step, calls: int) -> Timing:
    """Time a step that has not run yet; `calls` steps for the percentiles."""
    begin, before = time.perf_counter(), _compilations()
    for _ in range(_FIRST_CALLS):
        step()
    _wait()
    first_s, warm = time.perf_counter() - begin, _compilations()
    host = statistics.median(_host_seconds(step) for _ in range(min(_HOST_CALLS, calls)))
    p20, p50, p80 = _percentiles(_device_seconds(step, calls))
    num_kernels, idle = _profile(step)
    return Timing(
        device_us=(1e6 * p20, 1e6 * p50, 1e6 * p80),
        host_us=1e6 * host,
        first_s=first_s,
        num_kernels=num_kernels,
        idle_share=idle,
        num_compilations=warm - before,
        num_recompilations=_compilations() - warm,
    )


def _step(model: Any, run: Any, cache: Any, rows: int) -> Step:
    """Prefill without compilation; what is returned decodes with `run`."""
    device, name = model.device, cache_argument(model)
    ids = torch.arange(3, 3 + _PROMPT, device=device).expand(rows, -1)
    token = ids[:, :1].contiguous()
    position = torch.full((rows, 1), _PROMPT, device=device)
    with torch.no_grad():
        model(ids, position_ids=torch.arange(_PROMPT, device=device)[None], **{name: cache})

    @torch.no_grad()
    def step() -> Tensor:
        logits: Tensor = run(input_ids=token, position_ids=position, **{name: cache}).logits
        position.add_(1)
        return logits

    return step


def _host_seconds(step: Step) -> float:
    _wait()
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def _device_seconds(step: Step, calls: int) -> list[float]:
    """Seconds of one call, several times; from events where there is a GPU."""
    found = []
    for _ in range(max(3, calls // _AT_ONCE)):
        if torch.cuda.is_available():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(_AT_ONCE):
                step()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3 / _AT_ONCE)
        else:
            started = time.perf_counter()
            for _ in range(_AT_ONCE):
                step()
            found.append((time.perf_counter() - started) / _AT_ONCE)
    return found


def _percentiles(seconds: list[float]) -> tuple[float, float, float]:
    cuts = statistics.quantiles(seconds, n=10, method="inclusive")
    return cuts[1], cuts[4], cuts[7]


def _profile(step: Step) -> tuple[float | None, float | None]:
    """Kernels of one call, and the share of the time in which none runs."""
    if not torch.cuda.is_available():
        return None, None

    def run() -> None:
        for _ in range(_PROFILED):
            step()

    kernels = kernels_of(run)
    return len(kernels) / _PROFILED, idle_share(kernels)


def _compilations() -> int:
    counters = torch._dynamo.utils.counters
    return int(counters["stats"]["unique_graphs"])


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
