"""
A decode callable at batch 1: as transformers runs it, as torch compiles it, and at two levels of midstream.

    eager      model(input_ids, cache=static cache, position_ids=...)
    compile    the same call under torch.compile(dynamic=False)
    backend    the same call under torch.compile(backend="midstream"): level 1
    compiled   the same call of midstream.compile(model), with its own cache: level 2
    engine     one captured step of the engine, sampling included

Time on the device is the benchmark's; `host_us` is the host's time for one call while the device is idle,
`first_call_s` what compiling and capturing took.  `generate` is the wall time per decoded token of
transformers' loop (that of one token, the prompt, is taken off), next to the same loop around a forward
that returns at once (`stub`).  Goals: level 1 takes at most a quarter of `compile` and 1.5 times `engine`,
level 2 at most 1.15 times `engine`.

    pytest bench/level_one_two.py --benchmark-json=levels.json       (about 5 minutes of compilation for B2)
    pytest bench/level_one_two.py -k "compiled or engine or ratios"  (parts)
    pytest bench/level_one_two.py -k "generate or ratios"            (about 110 s for B2)
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import measure
import pytest
import reference_models
import torch
from decode_step import BLOCK, start_rows, stop_rows
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import CompileConfig, StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast

import midstream
from midstream.compiler.lowering import cache_argument
from midstream.graphs.table import decode_key

PROMPT = 64
MAX_LEN = 4096
_NEW = 64  # tokens of a `generate`
_HOST_CALLS = 30
_ROUNDS = {"eager": (10, 5)}  # rounds and calls of each; the others take ...
_MANY = (30, 20)
_GOALS = (  # ratio of two columns, at most
    ("backend", "compile", 0.25),
    ("backend", "engine", 1.5),
    ("compiled", "engine", 1.15),
)

_device_s: dict[str, float] = {}  # medians of this run
_token_s: dict[str, float] = {}

Step = Callable[[], Any]
Generate = Callable[[int], Tensor]  # of so many new tokens; returns all ids


@contextmanager
def decoding(column: str, model: Any) -> Iterator[Step]:
    """A callable that decodes one more token of a prompt."""
    if column == "engine":
        with engine_step(model) as step:
            yield step
    elif column == "compiled":
        with midstream.compile(model, max_len=MAX_LEN) as compiled:
            yield step_of(compiled.model, compiled.model, compiled.new_cache())
    else:
        reset()
        run = model
        if column == "compile":
            run = torch.compile(model, dynamic=False)
        elif column == "backend":
            run = torch.compile(model, backend=level_one())
        static = StaticCache(config=model.config, max_cache_len=MAX_LEN)
        yield step_of(model, run, static)
        reset()


def step_of(model: Any, run: Any, held: Any) -> Step:
    """Prefill without compilation; what is returned decodes one token with `run`."""
    device, name = model.device, cache_argument(model)
    ids = torch.arange(3, 3 + PROMPT, device=device)[None]
    token = ids[:, :1].clone()
    position = torch.full((1, 1), PROMPT, device=device)
    with torch.no_grad():
        model(ids, position_ids=torch.arange(PROMPT, device=device)[None], **{name: held})

    @torch.no_grad()
    def step() -> Tensor:
        logits: Tensor = run(input_ids=token, position_ids=position, **{name: held}).logits
        position.add_(1)
        return logits

    return step


@contextmanager
def engine_step(model: Any) -> Iterator[Step]:
    with midstream.Engine(model, state_block=BLOCK, max_len=MAX_LEN, max_rows=1) as engine:
        handles = start_rows(engine, 1)
        runner = engine._parts.runner

        def step() -> None:
            if not runner.graphs.replay(decode_key(1)):
                runner.step.run(runner.step.stage.decode_view(1), 1)

        yield step
        stop_rows(engine, handles)


def level_one() -> Any:
    """The backend's name, or the backend itself where midstream is not installed but on the path."""
    if "midstream" in torch.compiler.list_backends():
        return "midstream"
    from midstream.compiler import midstream_backend

    return midstream_backend


@cache
def check_tokens(column: str) -> None:
    """The gate of levels 1 and 2: five decoded tokens of the small model are those of full forwards."""
    device = measure.device()
    exact = reference_models.build("tiny", torch.float32, device)
    ids = torch.arange(3, 3 + PROMPT, device=device)[None]
    whole = torch.cat([ids, ids[:, :1].expand(1, 5)], dim=1)  # the token that `step_of` decodes
    with torch.no_grad():
        want = exact(whole, use_cache=False).logits[0, -5:].argmax(-1)
    model = reference_models.build("tiny", torch.float32, device)
    with decoding(column, model) as step:
        found = torch.stack([step()[0, -1].argmax() for _ in range(5)])
    assert torch.equal(found, want), (column, found, want)


@pytest.mark.parametrize("column", ["eager", "compile", "backend", "compiled", "engine"])
def test_callable(benchmark: Any, model: Any, column: str, model_name: str) -> None:
    if column in ("backend", "compiled"):
        check_tokens(column)
    begin = time.perf_counter()
    with decoding(column, model) as step:
        for _ in range(3):
            step()
        wait()
        first_call_s = time.perf_counter() - begin
        host_us = 1e6 * statistics.median(host_seconds(step) for _ in range(_HOST_CALLS))
        rounds, calls = _ROUNDS.get(column, _MANY)
        benchmark._timer = measure.clock()
        benchmark.pedantic(step, iterations=calls, rounds=rounds, warmup_rounds=1)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    measure.describe(
        benchmark,
        weights,
        model=model_name,
        column=column,
        host_us=round(host_us, 1),
        first_call_s=round(first_call_s, 2),
    )
    if benchmark.stats is not None:
        _device_s[column] = benchmark.stats.stats.median


@pytest.mark.parametrize("column", ["stub", "backend", "compiled", "eager"])
def test_generate(benchmark: Any, model: Any, column: str, model_name: str) -> None:
    if column in ("backend", "compiled"):
        check_generated(column)
    rounds = 3 if column == "eager" else 10
    with generating(column, model) as generate:
        begin = time.perf_counter()
        generate(_NEW)
        wait()
        first_call_s = time.perf_counter() - begin
        # a second call has another cache
        prompt_s = statistics.median(seconds_to(generate, 1) for _ in range(rounds))
        benchmark._timer = time.perf_counter
        benchmark.pedantic(
            lambda: seconds_to(generate, _NEW), iterations=1, rounds=rounds, warmup_rounds=1
        )
        counted = dict(counters["midstream"])  # by the backend
    measure.describe(
        benchmark,
        model=model_name,
        column=column,
        tokens=_NEW,
        prompt_ms=round(1e3 * prompt_s, 2),
        first_call_s=round(first_call_s, 2),
        counted=counted,
    )
    if benchmark.stats is not None:
        _token_s[column] = (benchmark.stats.stats.median - prompt_s) / (_NEW - 1)
        benchmark.extra_info["token_us"] = round(1e6 * _token_s[column], 1)


def test_ratios(benchmark: Any) -> None:
    """What the goals are about, of the columns that this run measured."""
    benchmark.pedantic(lambda: None, rounds=1)
    ratios = {
        f"{one} / {other}": {"ratio": round(_device_s[one] / _device_s[other], 3), "goal": goal}
        for one, other, goal in _GOALS
        if one in _device_s and other in _device_s
    }
    found: dict[str, Any] = {
        "device_us": {name: round(1e6 * s, 1) for name, s in _device_s.items()},
        "token_us": {name: round(1e6 * s, 1) for name, s in _token_s.items()},
        "ratios": ratios,
    }
    measure.describe(benchmark, **found)
    print("\n" + json.dumps(found))


@cache
def check_generated(column: str) -> None:
    """The gate of the loop: the small model generates the same tokens as without a cache."""
    device = measure.device()
    exact = reference_models.build("tiny", torch.float32, device)
    ids = torch.arange(3, 3 + PROMPT, device=device)[None]
    want = exact.generate(ids, max_new_tokens=5, do_sample=False, use_cache=False)
    model = reference_models.build("tiny", torch.float32, device)
    with generating(column, model) as generate:
        for _ in range(2):
            found = generate(5)
            assert torch.equal(found, want), (column, found, want)


@contextmanager
def generating(column: str, model: Any) -> Iterator[Generate]:
    """A callable that generates tokens behind a prompt."""
    ids = torch.arange(3, 3 + PROMPT, device=model.device)[None]
    options: dict[str, Any] = {"do_sample": False}
    if column == "compiled":
        with midstream.compile(model, max_len=MAX_LEN) as compiled:
            yield lambda tokens: compiled.generate(ids, max_new_tokens=tokens, **options)
        return
    reset()
    if column == "backend":
        config = CompileConfig(backend=level_one(), mode=None)
        config._compile_all_devices = True  # else transformers does not compile on a CPU
        options |= {"cache_implementation": "static", "compile_config": config}
    with stubbed(model) if column == "stub" else nullcontext():
        yield lambda tokens: model.generate(ids, max_new_tokens=tokens, **options)
    reset()


@contextmanager
def stubbed(model: Any) -> Iterator[None]:
    """The model returns the same logits at once."""
    name = cache_argument(model)
    logits = torch.zeros((1, 1, model.config.vocab_size), dtype=model.dtype, device=model.device)

    # generate reads the parameters of the forward
    def forward(
        input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None,
        logits_to_keep: Any = 0, **kwargs: Any,
    ) -> Any:  # fmt: skip
        return CausalLMOutputWithPast(logits=logits, **{name: kwargs[name]})

    model.forward = forward
    try:
        yield
    finally:
        del model.forward


def seconds_to(generate: Generate, tokens: int) -> float:
    """Wall time of `tokens` tokens."""
    begin = time.perf_counter()
    generate(tokens)
    wait()
    return time.perf_counter() - begin


def host_seconds(step: Step) -> float:
    """The host's part of one call, with an idle device behind it."""
    wait()
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def reset() -> None:
    """Forget what was compiled and counted: every column pays for its own."""
    counters.clear()
    torch._dynamo.reset()


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
