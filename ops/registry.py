"""
How an operation enters torch: one declaration, from which tests, gates and benchmarks follow.

An op is declared once, with a hand-written schema that marks mutation.  `define_op` registers the
reference as the CPU implementation, the Triton launcher as the CUDA implementation and a fake for
tracing.  Others register theirs in a namespace of their own, with `define_op("acme::...")` or by any
other means and `describe_op`; `midstream.ops.testing` proves both alike.

Conventions that every op obeys:
* Results are arguments (`Tensor(b!) out`): a launcher validates, picks a grid and launches.  It never
  reads device values, so it can be captured into a CUDA graph.
* Page 0 is the null page.  Reading it means "no history" (zeros); a row that writes it is padding,
  touches no memory but its own output, and that output is zero.
* Address arithmetic is 64-bit; layer offsets arrive as one-element int64 tensors, so that one compiled
  layer serves all layers of its kind.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from midstream.errors import ContractError
from midstream.ops.interception import interceptable

NULL_PAGE = 0  # never handed out; reading it means no history, writing it means padding
PADDING = -1  # row_slot, chunk_row and kv_slot of padding
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of data that kernels take
LAUNCH_ALIGN = 128  # bytes; pages and regions start on multiples of it

_OURS = "midstream"
_LIBRARIES = {_OURS: torch.library.Library(_OURS, "DEF")}  # torch forgets the ops of a dropped one

Args = dict[str, Any]


@dataclass(frozen=True, slots=True)
class OpCase:
    """One input of an op.  `build(generator, dtype, device)` returns the arguments by name.

    `dtype` is the dtype of the floating-point data; index tensors keep theirs.  Building twice from
    equal generators gives equal arguments; another seed changes contents, never shapes or numbers.
    The id names a shape, e.g. `R4-H8-P16-S16`.
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
    overload: Callable[..., None]  # torch.ops.<namespace>.<name>.default
    arenas: tuple[str, ...]  # page-major arguments [N, E], whose pages may lie further apart than E
    results: tuple[str, ...]  # written without being read
    bench_cases: tuple[
        OpCase, ...
    ]  # real sizes, built on the device from a generator of the device

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.overload(*args, **kwargs)


OPS: dict[str, OpSpec] = {}  # ours; a third party keeps its own


def define_op(
    schema: str,
    *,
    cuda: Callable[..., None],
    cpu: Callable[..., None],
    reference: Callable[..., None] | None = None,
    fake: Callable[..., None] | None = None,
    **declared: Any,
) -> OpSpec:
    """Register an op and return its declaration.

    `schema` may start with a namespace, as in `acme::leaky_step(Tensor(a!) out, Tensor x) -> ()`; without
    one the op is ours and is listed in `OPS`.  `reference` is the definition; it is `cpu` itself unless a
    quicker CPU implementation is given.  `declared` is what `describe_op` takes: cases, tolerance, traffic
    and the optional rest.

    The schema returns nothing: all results are mutated arguments, so the default fake does nothing.  What
    is refused leaves nothing behind: the name may be defined once the declaration is right.
    Raises:
        RuntimeError: from torch, when the name is defined a second time or the schema is none.
        ContractError: when the schema returns a value or mutates nothing, or `declared` is not what
            `describe_op` takes.
    """
    head, _, tail = schema.partition("(")
    namespace, _, name = head.rpartition("::")
    _check_schema(head, tail, schema)
    implementations = {"cuda": cuda, "cpu": cpu, "reference": reference or cpu}
    _check_implementations(name, implementations | {"fake": fake or _writes_nothing_new})
    _check_names(name, declared)
    parsed = torch._C.parse_schema(f"{namespace or _OURS}::{name}({tail}")
    _check_declared(name, [argument.name for argument in parsed.arguments], declared)
    library = _library(namespace or _OURS)
    library.define(name + "(" + tail)
    library.impl(name, interceptable(head, cuda), "CUDA")
    library.impl(name, interceptable(head, cpu), "CPU")
    torch.library.register_fake(
        f"{namespace or _OURS}::{name}", fake or _writes_nothing_new, lib=library
    )
    overload = getattr(getattr(torch.ops, namespace or _OURS), name).default
    spec = describe_op(overload, launch=cuda, reference=reference or cpu, **declared)
    if not namespace:
        OPS[name] = spec
    return spec


def describe_op(
    overload: Callable[..., None],
    *,
    launch: Callable[..., None],
    reference: Callable[..., None],
    cases: tuple[OpCase, ...],
    tolerance: Tolerance,
    traffic: Callable[[Args], tuple[int, int]],
    export_alignment: int | None = None,
    arenas: tuple[str, ...] | None = None,
    results: tuple[str, ...] | None = None,
    bench_cases: tuple[OpCase, ...] = (),
) -> OpSpec:
    """Declare an op that is registered already, e.g. `torch.ops.acme.leaky_step.default`.

    The other arguments are the fields of `OpSpec`; `arenas` and `results` are by default the arguments
    named `arena` and `out`, if there are such.
    Raises:
        ContractError: when the schema returns a value or mutates nothing, lacks a name that is given, or
            when there are no cases.
    """
    schema = str(overload._schema)  # type: ignore[attr-defined]
    head, _, tail = schema.partition("(")
    name = head.rpartition("::")[2]
    _check_schema(name, tail, schema)
    known = [argument.name for argument in overload._schema.arguments]  # type: ignore[attr-defined]
    _check_declared(name, known, {"cases": cases, "arenas": arenas, "results": results})
    return OpSpec(
        name=name,
        schema=schema,
        launch=launch,
        reference=reference,
        cases=cases,
        tolerance=tolerance,
        traffic=traffic,
        export_alignment=export_alignment,
        overload=overload,
        arenas=tuple(n for n in ("arena",) if n in known) if arenas is None else arenas,
        results=tuple(n for n in ("out",) if n in known) if results is None else results,
        bench_cases=bench_cases,
    )


def _check_schema(name: str, tail: str, schema: str) -> None:
    if not tail.rstrip().endswith("-> ()") or "!)" not in tail:
        raise ContractError(
            f"define_op: {name} must return nothing and mark what it writes, got '{schema}'; "
            "pass results as arguments, e.g. 'Tensor(b!) out'"
        )


def _check_implementations(name: str, given: Mapping[str, object]) -> None:
    for role, function in given.items():
        if not callable(function):
            raise ContractError(
                f"define_op: {name} has {role}={function!r}, expected a function; pass the one that runs it"
            )


def _check_names(name: str, declared: Mapping[str, object]) -> None:
    """The keywords that go on to `describe_op`."""
    known = list(inspect.signature(describe_op).parameters)[
        3:
    ]  # the op itself is given by the schema
    unknown = [keyword for keyword in declared if keyword not in known]
    missing = [keyword for keyword in ("cases", "tolerance", "traffic") if keyword not in declared]
    if unknown or missing:
        raise ContractError(
            f"define_op: {name} declares {unknown or 'nothing'} that is unknown and lacks "
            f"{missing or 'nothing'}; expected cases, tolerance, traffic and of {known[3:]} what applies"
        )


def _check_declared(name: str, known: list[str], declared: Mapping[str, Any]) -> None:
    """What a declaration says of its arguments, against those of the schema."""
    named = (*(declared.get("arenas") or ()), *(declared.get("results") or ()))
    unknown = [argument for argument in named if argument not in known]
    if unknown or not declared["cases"]:
        raise ContractError(
            f"describe_op: {name} has the arguments {known}, but arenas and results name {unknown}, and "
            f"{len(declared['cases'])} cases; expected names of arguments and at least one case, or nothing "
            "is proven"
        )


def _library(namespace: str) -> torch.library.Library:
    """Others may define ops of their namespace by other means too: theirs is a fragment."""
    if namespace not in _LIBRARIES:
        _LIBRARIES[namespace] = torch.library.Library(namespace, "FRAGMENT")
    return _LIBRARIES[namespace]


def _writes_nothing_new(*args: Any, **kwargs: Any) -> None:
    """Fake of an op whose results are arguments: shapes do not change."""
