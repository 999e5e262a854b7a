"""Which cases of an op are compiled, for which targets; and the rows that come of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from triton.compiler.compiler import CompiledKernel

from midstream.ops.compile_only import compile_only
from midstream.ops.device_limits import (
    LARGE_SHARED_BYTES,
    SMALL_SHARED_BYTES,
    assumed_shared_limit,
)
from midstream.ops.gate_rules import GateRow, is_streaming
from midstream.ops.kernel_facts import facts_of
from midstream.ops.registry import OpCase, OpSpec
from midstream.ops.testing import build_args

SM_90, SM_100 = 90, 100
DTYPES = (torch.bfloat16, torch.float32)
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Build:
    """One launch that is compiled."""

    case: OpCase
    dtype: torch.dtype
    arch: int
    limit_bytes: int  # of shared memory
    wide: bool  # accesses must be 128-bit ones

    def label(self) -> str:
        return f"{self.case.id}-{str(self.dtype).removeprefix('torch.')}"


def check_op(spec: OpSpec, all_cases: bool) -> tuple[list[GateRow], list[str]]:
    """Compile an op's kernels; returns one row for each that differs, and what is wrong."""
    rows: dict[tuple[int, str], GateRow] = {}
    faults: dict[str, None] = {}  # ordered, each once
    streaming = is_streaming(spec, build_args(aligned_cases(spec)[-1], DTYPES[0], _CPU))
    for build in builds(spec, all_cases):
        args = build_args(build.case, build.dtype, _CPU)
        with compile_only(build.arch) as attempts, assumed_shared_limit(build.limit_bytes):
            spec.launch(**args)
        for attempt in attempts:
            label = build.label()
            if not isinstance(attempt.result, CompiledKernel):
                what = f"{attempt.kernel} of {label} does not compile for sm_{build.arch}"
                faults[f"{spec.name}: {what}: {attempt.result}"] = None
                continue
            key = (build.arch, attempt.result.hash)
            before = rows.get(key)
            facts = before.facts if before else facts_of(attempt.kernel, attempt.result)
            row = GateRow(
                build.arch, build.limit_bytes, spec.name, label, streaming, build.wide, facts,
                attempt.seconds,
            )  # fmt: skip
            rows.setdefault(key, row)
            faults |= dict.fromkeys(row.faults())
    return list(rows.values()), list(faults)


def builds(spec: OpSpec, all_cases: bool) -> Iterator[Build]:
    """What is compiled of an op: the telling cases for sm_90, with much and with little shared memory, and
    the best aligned one for sm_100."""
    best = aligned_cases(spec)[-1]
    telling = spec.cases if all_cases else telling_cases(spec)
    dtypes = [d for d in DTYPES if not spec.tolerance.relative or d in spec.tolerance.relative]
    for limit_bytes, case, dtype in product(
        (LARGE_SHARED_BYTES, SMALL_SHARED_BYTES), telling, dtypes
    ):
        yield Build(case, dtype, SM_90, limit_bytes, case is best)
    for case, dtype in product(spec.cases if all_cases else (best,), dtypes):
        yield Build(case, dtype, SM_100, LARGE_SHARED_BYTES, case is best)


def telling_cases(spec: OpSpec) -> tuple[OpCase, ...]:
    """The base case, those with the largest inputs, most indices and widest heads, the worst and the best
    aligned."""

    def elements(case: OpCase) -> int:
        return sum(tensor.numel() for tensor in _inputs(case))

    def indices(case: OpCase) -> int:
        return sum(tensor.numel() for tensor in _inputs(case) if not tensor.is_floating_point())

    def head_widths(case: OpCase) -> int:
        return sum(tensor.shape[-1] for tensor in _inputs(case) if tensor.dim() == 3)

    ranked = aligned_cases(spec)
    large = [max(spec.cases, key=size) for size in (elements, indices, head_widths)]
    chosen = (spec.cases[0], *large, ranked[0], ranked[-1])
    return tuple({case.id: case for case in chosen}.values())


def aligned_cases(spec: OpSpec) -> list[OpCase]:
    """Cases, those first in which many tensors cannot be accessed 128 bits at a time; then by size."""

    def alignment(case: OpCase) -> tuple[int, int]:
        inputs = [t for t in _inputs(case) if t.is_floating_point()]
        odd = [t for t in inputs if any(stride % 16 for stride in t.stride()[:-1])]
        return -len(odd), sum(tensor.numel() for tensor in inputs)

    return sorted(spec.cases, key=alignment)


def _inputs(case: OpCase) -> list[Tensor]:
    args = build_args(case, torch.float32, _CPU)
    return [x for x in args.values() if isinstance(x, Tensor)]
