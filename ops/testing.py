"""
The proof of an op: checks that follow from its declaration alone, for our ops and for those of third parties.

    @pytest.mark.parametrize("check", op_suite(my_op), ids=str)
    def test_obeys_its_declaration(check):
        check.run()

Without a GPU this needs TRITON_INTERPRET=1, set before any kernel is defined.  Each check asserts one
thing, so that the one that fails names the fault; docs/ops.md has the list.  bfloat16 kernels are not
run in Triton's interpreter, which computes them wrongly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from midstream.errors import ContractError
from midstream.ops.case_data import slice_of_wider
from midstream.ops.guarded_memory import FILLINGS, GuardedArgs, same_bits
from midstream.ops.launch_recorder import record
from midstream.ops.registry import Args, OpCase, OpSpec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SEED = 20
_OTHER_SEED = 21
_NO_DRIVER = "0 active drivers"  # what Triton says where it has nothing to launch on
_GARBAGE = (float("nan"), 77.0)  # what results, and memory that the run takes, hold before it
_UNWRITTEN = (
    torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to prove on one input; as text it is the id of a test."""

    name: str  # a key of CHECKS
    spec: OpSpec
    case: OpCase
    dtype: torch.dtype
    device: torch.device

    def run(self) -> None:
        """Raises AssertionError, or what the op raised; ContractError where its kernels cannot run."""
        try:
            CHECKS[self.name](self.spec, self.case, self.dtype, self.device)
        except RuntimeError as error:
            if _NO_DRIVER not in str(error):
                raise
            raise ContractError(
                f"op_suite: the kernels of {self.spec.name} cannot run, Triton found no GPU and does not "
                "interpret them; expected one of the two; set TRITON_INTERPRET=1 before any kernel is "
                "defined, at best in conftest.py"
            ) from error

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name}-{self.spec.name}-{self.case.id}-{dtype}"


def op_suite(spec: OpSpec, device: torch.device | None = None) -> list[Check]:
    """All checks of an op on `device`: the GPU where there is one, else the CPU with Triton's interpreter.

    Dtypes are those for which a tolerance is declared.  What does not depend on rounding is checked in one,
    and in the interpreter, where a kernel takes seconds, some of it on the first cases only that give every
    result.

    Raises:
        ContractError: when no case gives one of the results, which nothing would prove then.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    exact = not spec.tolerance.relative
    dtypes = [d for d in DTYPES if exact or d in spec.tolerance.relative]
    runnable = [d for d in dtypes if on_gpu or d != torch.bfloat16]
    narrow = torch.bfloat16 if on_gpu and torch.bfloat16 in dtypes else dtypes[0]
    first = _cases_with_every_result(spec)
    most = spec.cases if on_gpu else first
    plan: list[tuple[str, list[torch.dtype], tuple[OpCase, ...]]] = [
        ("reference", [] if on_gpu else dtypes, spec.cases),
        ("kernel", runnable, spec.cases),
        ("repeat", [narrow], most),
        ("guards", [narrow], spec.cases),
        ("results", [narrow], most),
        ("replay", [narrow], most),
        ("slices", [narrow], first),
        ("registration", [torch.float32], first),
    ]
    return [
        Check(name, spec, case, dtype, device)
        for name, some, cases in plan
        for case, dtype in product(cases, some)
    ]


def _cases_with_every_result(spec: OpSpec) -> tuple[OpCase, ...]:
    """The first case, and for each result that it leaves out the first case that has it."""
    left = set(marked_args(spec))
    cases: list[OpCase] = []
    for case in spec.cases:
        given = set(written_args(spec, build_args(case, torch.float32, torch.device("cpu"))))
        if not cases or left & given:
            cases.append(case)
            left -= given
        if not left:
            return tuple(cases)
    raise ContractError(
        f"op_suite: no case of {spec.name} gives {sorted(left)}, which its schema marks as written; expected "
        "each in at least one case; add a case that asks for it"
    )


def op_cases(*specs: OpSpec) -> Iterator[tuple[OpSpec, OpCase]]:
    """All (spec, case) pairs, for parametrize."""
    return ((spec, case) for spec in specs for case in spec.cases)


def marked_args(spec: OpSpec) -> tuple[str, ...]:
    """Names of the arguments that the schema marks as written."""
    schema = spec.overload._schema  # type: ignore[attr-defined]
    return tuple(a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write)


def written_args(spec: OpSpec, args: Args) -> tuple[str, ...]:
    """Of these, without those that `args` leaves out."""
    return tuple(name for name in marked_args(spec) if args[name] is not None)


def build_args(case: OpCase, dtype: torch.dtype, device: torch.device, seed: int = _SEED) -> Args:
    """The arguments of a case; equal for equal inputs.  Random data is drawn on the CPU."""
    cpu = case.build(torch.Generator().manual_seed(seed), dtype, torch.device("cpu"))
    return {k: _like(v, v.dtype, device) if isinstance(v, Tensor) else v for k, v in cpu.items()}


def expected(spec: OpSpec, args: Args) -> Args:
    """Run the reference on copies; in float64 unless the op only moves data.  Returns the arguments."""
    exact = not spec.tolerance.relative
    copies = dict(args)
    for name, value in args.items():
        if isinstance(value, Tensor):
            widen = value.is_floating_point() and not exact
            copies[name] = _like(
                value, torch.float64 if widen else value.dtype, torch.device("cpu")
            )
    spec.reference(**copies)
    return copies


def check_kernel(spec: OpSpec, case: OpCase, dtype: torch.dtype, device: torch.device) -> None:
    """The Triton kernel writes what the reference writes, within the declared tolerance.

    Pages that the reference leaves alone keep their bits: they belong to others.
    """
    args = build_args(case, dtype, device)
    before = build_args(case, dtype, torch.device("cpu"))
    want = expected(spec, build_args(case, dtype, torch.device("cpu")))
    spec.launch(**args)
    compare_written(spec, args, want, dtype)
    for name in set(spec.arenas) & set(written_args(spec, args)):
        old, new, goal = before[name], args[name].cpu(), want[name]
        alone = torch.isclose(goal, old.to(goal.dtype), 0, 0, equal_nan=True).flatten(1).all(1)
        assert same_bits(new[alone], old[alone]), (
            f"{spec.name}: pages of {name} that are others' differ"
        )


def check_reference(
    spec: OpSpec, case: OpCase, dtype: torch.dtype, device: torch.device | None = None
) -> None:
    """The registered CPU implementation in `dtype` stays within tolerance of the reference in float64."""
    args = build_args(case, dtype, torch.device("cpu"))
    want = expected(spec, build_args(case, dtype, torch.device("cpu")))
    spec(**args)
    compare_written(spec, args, want, dtype)


def check_repeat(spec: OpSpec, case: OpCase, dtype: torch.dtype, device: torch.device) -> None:
    """Two runs on equal arguments write equal bits."""
    runs = [build_args(case, dtype, device) for _ in range(2)]
    for args in runs:
        spec.launch(**args)
    _assert_same_written(spec, runs[1], runs[0], "a second run")


def check_guards(spec: OpSpec, case: OpCase, dtype: torch.dtype, device: torch.device) -> None:
    """Whatever stands around arguments, and between pages, changes no result and is not changed."""
    runs = []
    for filling in FILLINGS:
        guarded = GuardedArgs(build_args(case, dtype, device), spec.arenas, filling)
        spec.launch(**guarded.args)
        strays = guarded.strays(written_args(spec, guarded.args))
        assert not strays, f"{spec.name}: {'; '.join(strays)}"
        runs.append(guarded.args)
    one, other = (filling.name for filling in FILLINGS)
    what = f"{one} around every argument, instead of {other},"
    _assert_same_written(spec, runs[0], runs[1], what)


def check_results(spec: OpSpec, case: OpCase, dtype: torch.dtype, device: torch.device) -> None:
    """No element of a result that the reference defines depends on what it held before."""
    cpu = torch.device("cpu")
    written = written_args(spec, build_args(case, dtype, cpu))
    names = [n for n in spec.results if n in written]
    same = _same_from_any_garbage(spec.launch, names, lambda: build_args(case, dtype, device))
    if all(elements.all() for elements in same.values()):
        return
    wide = torch.float64 if spec.tolerance.relative else dtype
    defined = _same_from_any_garbage(spec.reference, names, lambda: build_args(case, wide, cpu))
    for name in names:
        left = int((defined[name] & ~same[name]).sum())
        assert not left, (
            f"{spec.name}: {left} elements of {name} hold what they held before the run"
        )


def check_replay(spec: OpSpec, case: OpCase, dtype: torch.dtype, device: torch.device) -> None:
    """A captured launch equals an eager one bit for bit, also after all arguments got other contents."""
    bound = build_args(case, dtype, device)
    spec.launch(**bound)  # compiles
    replay = record(lambda: spec.launch(**bound), device)
    for seed in (_SEED, _OTHER_SEED):
        eager = build_args(case, dtype, device, seed)
        _write_contents(bound, eager)
        spec.launch(**eager)
        replay()
        _assert_same_written(spec, bound, eager, "a replay")


def check_slices(spec: OpSpec, case: OpCase, dtype: torch.dtype, device: torch.device) -> None:
    """Arguments that are slices of wider tensors give the results of whole ones, or are refused by name."""
    whole = build_args(case, dtype, device)
    spec.launch(**whole)
    args, _ = launch_sliced(spec, case, dtype, device)
    want = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in whole.items()}
    compare_written(spec, args, want, dtype, "that of arguments which are no slices")


def launch_sliced(
    spec: OpSpec, case: OpCase, dtype: torch.dtype, device: torch.device
) -> tuple[Args, set[str]]:
    """Launch with slices wherever the op takes them; returns the arguments, and the names that it refused.

    Sliced is what has rows of floating-point numbers and is no arena.  Rows then lie further apart, each
    argument's by another number of elements, and begin at odd addresses.
    """
    whole = build_args(case, dtype, device)
    sliced = {name for name, value in whole.items() if _has_rows(value)} - set(spec.arenas)
    refused: set[str] = set()
    while True:
        args = build_args(case, dtype, device)
        for behind, name in enumerate(sorted(sliced - refused)):
            args[name] = slice_of_wider(args[name], 3, behind)
        try:
            spec.launch(**args)
            return args, refused
        except ContractError as error:
            named = {n for n in sliced - refused if re.search(rf"\b{n}\b", str(error))}
            assert named, f"{spec.name}: refused, and names none of {sorted(sliced)}: {error}"
            refused |= named


def check_registration(
    spec: OpSpec,
    case: OpCase,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> None:
    """`torch.library.opcheck`: schema, mutation marks and fake agree with the implementation.

    The fake is the same for all devices, so that on the GPU only the marks are compared.
    """
    device = device or torch.device("cpu")
    args = build_args(case, dtype, device)
    fake = ("test_faketensor", "test_aot_dispatch_dynamic") if device.type == "cpu" else ()
    tests = ("test_schema", *fake)
    torch.library.opcheck(spec.overload, (), args, test_utils=tests)  # type: ignore[arg-type]


CHECKS: dict[str, Callable[[OpSpec, OpCase, torch.dtype, torch.device], None]] = {
    "reference": check_reference,
    "kernel": check_kernel,
    "repeat": check_repeat,
    "guards": check_guards,
    "results": check_results,
    "replay": check_replay,
    "slices": check_slices,
    "registration": check_registration,
}


def compare_written(
    spec: OpSpec, got: Args, want: Args, dtype: torch.dtype, other: str = "the float64 reference"
) -> None:
    """Assert that every written tensor equals the expected one; NaN equals NaN."""
    for name in written_args(spec, want):
        have, goal = got[name].cpu(), want[name]
        if not spec.tolerance.relative or not have.is_floating_point():
            assert same_bits(have, goal), f"{spec.name}: {name} differs from {other}"
            continue
        finite = goal[goal.isfinite()]
        scale = finite.abs().max().item() if finite.numel() else 1.0
        bound = spec.tolerance.relative[dtype] * max(scale, 1e-30)
        torch.testing.assert_close(
            have.double(),
            goal.double(),
            rtol=0.0,
            atol=bound,
            equal_nan=True,
            msg=f"{spec.name}: {name} differs from {other} by more than {bound:.2e}",
        )


def _assert_same_written(spec: OpSpec, got: Args, want: Args, what: str) -> None:
    for name in written_args(spec, want):
        assert same_bits(got[name], want[name]), f"{spec.name}: {what} gives another {name}"


def _same_from_any_garbage(
    run: Callable[..., None], results: list[str], build: Callable[[], Args]
) -> dict[str, Tensor]:
    """Elements of results that do not depend on what results, or memory that `run` takes, held before."""
    after = []
    for garbage in _GARBAGE:
        args = build()
        for name in results:
            value = args[name]
            is_number = value.is_floating_point() or garbage == garbage
            value.fill_(garbage if is_number else -77)
        with _FilledWorkspace(garbage):
            run(**args)
        after.append({name: args[name].cpu() for name in results})
    one, other = after
    return {
        name: (one[name] == other[name]) | (one[name].isnan() & other[name].isnan())
        for name in results
    }


class _FilledWorkspace(TorchDispatchMode):
    """Memory that is taken inside holds what it is given: left as it comes, it may hold an earlier run's."""

    def __init__(self, garbage: float) -> None:
        super().__init__()
        self._garbage = garbage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _UNWRITTEN:
            result.fill_(_garbage_of(result.dtype, self._garbage))
        return result


def _garbage_of(dtype: torch.dtype, garbage: float) -> float:
    """Another number for each entry of `_GARBAGE`, whatever the dtype."""
    if dtype.is_floating_point or dtype.is_complex:
        return garbage
    first = garbage != garbage
    if dtype == torch.bool:
        return first
    return torch.iinfo(dtype).max if first else 77


def _write_contents(bound: Args, fresh: Args) -> None:
    """Copy tensors into bound ones.  Numbers and shapes are part of a capture, so they must be equal."""
    for name, value in fresh.items():
        if isinstance(value, Tensor):
            assert bound[name].shape == value.shape, f"{name}: another seed gives another shape"
            bound[name].copy_(value)
        else:
            assert bound[name] == value, f"{name}: another seed gives another number"


def _has_rows(value: object) -> bool:
    """Several rows of several floating-point numbers."""
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.dim() >= 2
        and value.shape[0] > 1
    )


def _like(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A copy with the same strides: ops must see views with odd pitches."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
    return copy.copy_(tensor)
