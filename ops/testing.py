"""
Checks that follow from an op's declaration alone, for our ops and for those of third parties.

    @pytest.mark.parametrize(("spec", "case"), op_cases(causal_conv_step))
    def test_kernel_equals_float64_reference(spec, case):
        check_kernel(spec, case, torch.float32, torch.device("cpu"))   # TRITON_INTERPRET=1

Cases fill pages that the op must not read with NaN, so a stray read shows in the result, and all written
tensors are compared whole, so a stray write does too.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from midstream.ops.registry import Args, OpCase, OpSpec

_SEED = 20


def op_cases(*specs: OpSpec) -> Iterator[tuple[OpSpec, OpCase]]:
    """All (spec, case) pairs, for parametrize."""
    return ((spec, case) for spec in specs for case in spec.cases)


def written_args(spec: OpSpec) -> tuple[str, ...]:
    """Names of the arguments that the schema marks as written."""
    schema = spec.overload._schema  # type: ignore[attr-defined]
    return tuple(a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write)


def build_args(case: OpCase, dtype: torch.dtype, device: torch.device) -> Args:
    """The arguments of a case; equal for equal inputs.  Random data is drawn on the CPU."""
    cpu = case.build(torch.Generator().manual_seed(_SEED), dtype, torch.device("cpu"))
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
    """The Triton kernel writes what the reference writes, within the declared tolerance."""
    args = build_args(case, dtype, device)
    want = expected(spec, build_args(case, dtype, torch.device("cpu")))
    spec.launch(**args)
    compare_written(spec, args, want, dtype)


def check_reference(spec: OpSpec, case: OpCase, dtype: torch.dtype) -> None:
    """The registered CPU implementation in `dtype` stays within tolerance of itself in float64."""
    args = build_args(case, dtype, torch.device("cpu"))
    want = expected(spec, build_args(case, dtype, torch.device("cpu")))
    spec(**args)
    compare_written(spec, args, want, dtype)


def check_registration(spec: OpSpec, case: OpCase) -> None:
    """`torch.library.opcheck`: schema, mutation marks and fake agree with the implementation."""
    args = build_args(case, torch.float32, torch.device("cpu"))
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(spec.overload, (), args, test_utils=tests)  # type: ignore[arg-type]


def compare_written(spec: OpSpec, got: Args, want: Args, dtype: torch.dtype) -> None:
    """Assert that every written tensor equals the expected one; NaN equals NaN."""
    for name in written_args(spec):
        have, goal = got[name].cpu(), want[name]
        if not spec.tolerance.relative or not have.is_floating_point():
            assert _same_bits(have, goal), f"{spec.name}: {name} differs"
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
            msg=f"{spec.name}: {name} differs from the float64 reference by more than {bound:.2e}",
        )


def _like(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A copy with the same strides: ops must see views with odd pitches."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
    return copy.copy_(tensor)


def _same_bits(have: Tensor, goal: Tensor) -> bool:
    return have.dtype == goal.dtype and torch.equal(
        have.contiguous().view(torch.uint8), goal.contiguous().view(torch.uint8)
    )
