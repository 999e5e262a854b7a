"""
How an operation enters torch: one declaration, from which tests, gates and benchmarks follow.

An op is declared once, with a hand-written schema that marks mutation.  `define_op` registers the
reference as the CPU implementation, the Triton launcher as the CUDA implementation and a fake for
tracing, and keeps the declaration in `OPS` for `midstream.ops.testing`.

Conventions that every op obeys:
* Results are arguments (`Tensor(b!) out`): a launcher validates, picks a grid and launches.  It never
  reads device values, so it can be captured into a CUDA graph.
* Page 0 is the null page.  Reading it means "no history" (zeros); a row that writes it is padding,
  touches no memory but its own output, and that output is zero.
* Address arithmetic is 64-bit; layer offsets arrive as one-element int64 tensors, so that one compiled
  layer serves all layers of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from midstream.errors import ContractError

NULL_PAGE = 0  # never handed out; reading it means no history, writing it means padding
PADDING = -1  # row_slot, chunk_row and kv_slot of padding
LAUNCH_ALIGN = 128  # bytes; pages and regions start on multiples of it

_LIB = torch.library.Library("midstream", "DEF")

Args = dict[str, Any]


@dataclass(frozen=True, slots=True)
class OpCase:
    """One input of an op.  `build(generator, dtype, device)` returns the arguments by name.

    `dtype` is the dtype of the floating-point data; index tensors keep theirs.  Building twice from
    equal generators gives equal arguments.  The id names a shape, e.g. `R4-H8-P16-S16`.
    """

    id: str
    build: Callable[[torch.Generator, torch.dtype, torch.device], Args]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bound on |kernel - float64 reference| relative to the largest entry, by dtype, and why."""

    relative: Mapping[torch.dtype, float]
    reason: str


EXACT = Tolerance({}, "moves data without arithmetic: bit-equal")


@dataclass(frozen=True, slots=True)
class OpSpec:
    """The whole declaration of one op."""

    name: str
    schema: str
    launch: Callable[..., None]  # Triton launcher; also runs in Triton's interpreter on CPU tensors
    reference: Callable[..., None]  # plain torch, one token or row at a time: the definition
    cases: tuple[OpCase, ...]
    tolerance: Tolerance
    traffic: Callable[[Args], tuple[int, int]]  # -> (bytes moved, arithmetic operations)
    export_alignment: int | None  # tokens between positions where a chunk op can export its state
    overload: Callable[..., None]  # torch.ops.midstream.<name>.default

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.overload(*args, **kwargs)


OPS: dict[str, OpSpec] = {}


def define_op(
    schema: str,
    *,
    cuda: Callable[..., None],
    cpu: Callable[..., None],
    reference: Callable[..., None] | None = None,
    fake: Callable[..., None] | None = None,
    cases: tuple[OpCase, ...],
    tolerance: Tolerance,
    traffic: Callable[[Args], tuple[int, int]],
    export_alignment: int | None = None,
) -> OpSpec:
    """Register an op of the `midstream` namespace and return its declaration.

    `reference` is the definition; it is `cpu` itself unless a quicker CPU implementation is given.

    The schema returns nothing: all results are mutated arguments, so the default fake does nothing.
    Raises:
        RuntimeError: from torch, when the name is defined a second time.
        ContractError: when the schema returns a value or mutates nothing.
    """
    name, _, tail = schema.partition("(")
    if not tail.rstrip().endswith("-> ()") or "!)" not in tail:
        raise ContractError(
            f"define_op: {name} must return nothing and mark what it writes, got '{schema}'; "
            "pass results as arguments, e.g. 'Tensor(b!) out'"
        )
    _LIB.define(schema)
    _LIB.impl(name, cuda, "CUDA")
    _LIB.impl(name, cpu, "CPU")
    torch.library.register_fake(f"midstream::{name}", fake or _writes_nothing_new, lib=_LIB)
    overload = getattr(torch.ops.midstream, name).default
    spec = OpSpec(
        name, schema, cuda, reference or cpu, cases, tolerance, traffic, export_alignment, overload
    )
    OPS[name] = spec
    return spec


def _writes_nothing_new(*args: Any, **kwargs: Any) -> None:
    """Fake of an op whose results are arguments: shapes do not change."""
