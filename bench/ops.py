"""
How close each op comes to the copy rate, on sizes of real layers.

Physics: the bytes that an op declares to move, over the copy rate of the same run.  One captured graph
launches the op on as many inputs as exceed the L2 cache, in turns, and is timed on the device's clock; a
launch's share includes its gap to the next, and little of the replay's own start.  Short launches cannot
reach the copy rate, so each has the time of one plain copy of as many bytes as well.  Activations are
bfloat16; a name ends in the dtype of the states.  Ops that declare no real sizes are left out.

    pytest bench/ops.py --benchmark-json=ops.json      (-k ssd_step)
"""

from __future__ import annotations

import math
from typing import Any

import measure
import pytest
import torch
from percentiles import percentiles_us, seconds_of

from midstream.ops.gates import import_all_ops
from midstream.ops.registry import OPS, Args, OpCase, OpSpec
from midstream.ops.testing import check_kernel, written_args

GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if GPU else torch.float32
COLD_BYTES = 2**28  # several times what an L2 cache holds
LAUNCHES = 24 if GPU else 2  # at least: a replay takes some 10 us to start
ROUNDS = 200 if GPU else 3

import_all_ops()
POINTS = [
    pytest.param(spec, case, id=f"{spec.name}-{case.id}")
    for spec in OPS.values()
    for case in (spec.bench_cases if GPU else spec.cases[:1] if spec.bench_cases else ())
]


@pytest.fixture(scope="module", autouse=True)
def gate() -> None:
    """No figures unless the kernels equal their references (on the CPU they are these)."""
    for spec in OPS.values() if GPU else ():
        if spec.bench_cases:
            check_kernel(spec, spec.cases[0], DTYPE, measure.device())


@pytest.mark.parametrize(("spec", "case"), POINTS)
def test_op(benchmark: Any, spec: OpSpec, case: OpCase) -> None:
    """The share of one launch."""
    inputs = cold_inputs(spec, case)
    moved_bytes, operations = spec.traffic(inputs[0])
    turns = math.ceil(LAUNCHES / len(inputs))
    launches = turns * len(inputs)

    def work() -> None:
        for args in turns * inputs:
            spec(**args)

    replay = measure.captured(work, case.id)
    replay()
    assert_finite(spec, inputs)
    benchmark._timer = measure.clock()
    benchmark.pedantic(replay, rounds=ROUNDS, warmup_rounds=3)
    times = percentiles_us(seconds_of(benchmark), launches)
    copy_us = measure.copy_us(moved_bytes)
    measure.describe(
        benchmark,
        launches * moved_bytes,
        op=spec.name,
        case=case.id,
        launches=launches,
        bytes_per_launch=moved_bytes,
        operations_per_launch=operations,
        plain_copy_us=round(copy_us, 3),
        of_plain_copy=round(copy_us / times["p50_us"], 4),
        **times,
    )


def cold_inputs(spec: OpSpec, case: OpCase) -> list[Args]:
    """Inputs, each with memory of its own, that together do not fit into the cache."""
    generator = torch.Generator(measure.device()).manual_seed(0)
    inputs = [case.build(generator, DTYPE, measure.device())]
    moved_bytes = max(1, spec.traffic(inputs[0])[0])
    for _ in range(math.ceil(COLD_BYTES / moved_bytes) - 1 if GPU else 1):
        inputs.append(case.build(generator, DTYPE, measure.device()))
    return inputs


def assert_finite(spec: OpSpec, inputs: list[Args]) -> None:
    """Every result was written, of every input."""
    for args in inputs if GPU else ():
        for name in set(spec.results) & set(written_args(spec, args)):
            assert args[name].isfinite().all(), f"{spec.name}: {name} is not finite"
