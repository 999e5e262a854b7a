"""
RMSNorm of rows, with a gate or without, as a link in a chain of kernels that begin early
(ops/dependent_launch.py).

    normed = norm(x)                       norm(h) = h * rsqrt(mean(h^2) + eps) * (weight + shift)
    normed = norm(x * silu(gate))          `gate_first`, as in Mamba-2
    normed = norm(x) * silu(gate)          as in gated delta nets

Physics: a few rows are some 100 KB, which no clock notices; what such a kernel costs is the gap between the
one in front and the one behind it.
Sources: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467; for the gates Dao and
Gu, "Transformers are SSMs", arXiv:2405.21060, and Yang et al., "Gated Delta Networks", arXiv:2412.06464.
Letters: R rows, N elements of a row.
Traffic: rows once in and once out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.errors import ContractError
from midstream.ops.case_data import draw, draw_pitched
from midstream.ops.dependent_launch import after_previous, dependent_launch
from midstream.ops.finish_rows import MAX_NORMED, rms_scale, warps_of_row
from midstream.ops.registry import DTYPES, Args, OpCase, Tolerance, define_op


def rms_norm_ref(
    normed: Tensor,  # [..., R, N]  written
    x: Tensor,  # [..., R, N]  rows may lie apart
    gate: Tensor | None,  # [..., R, N]  rows may lie apart
    weight: Tensor,  # [N]
    eps: float,
    shift: float,
    gate_first: bool,
) -> None:
    """Say what the kernel means."""
    wide = torch.promote_types(x.dtype, torch.float32)
    factor = 1.0 if gate is None else torch.nn.functional.silu(gate.to(wide))
    h = x.to(wide) * factor if gate_first else x.to(wide)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * (weight.to(wide) + shift)
    normed.copy_(h if gate_first else h * factor)


@triton.jit
def _rms_norm_kernel(
    normed_ptr,  # [R, N]
    x_ptr,  # [R, N]
    gate_ptr,  # [R, N]
    weight_ptr,  # [N]
    x_pitch,  # elements between rows
    gate_pitch,
    N,
    eps,
    shift,
    TILE: tl.constexpr,  # power of two >= N
    GATED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    after_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, TILE)
    inside = n < N
    h = tl.load(x_ptr + row * x_pitch + n, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        gate = tl.load(gate_ptr + row * gate_pitch + n, mask=inside, other=0.0).to(tl.float32)
        gate *= tl.sigmoid(gate)
        if GATE_FIRST:
            h *= gate
    weight = tl.load(weight_ptr + n, mask=inside, other=0.0).to(tl.float32) + shift
    h = h * rms_scale(h, N, eps) * weight
    if GATED and not GATE_FIRST:
        h *= gate
    tl.store(normed_ptr + row * N + n, h.to(normed_ptr.dtype.element_ty), mask=inside)


def _as_rows(name: str, tensor: Tensor, shape: torch.Size) -> Tensor:
    """[..., R, N] as [R, N].

    Raises:
        ContractError: another shape or dtype, or elements of a row or rows that do not follow each other.
    """
    if tensor.shape != shape or tensor.dtype not in DTYPES:
        raise ContractError(
            f"rms_norm: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, expected one of {DTYPES} "
            f"and {tuple(shape)} as x has; all sums are float32"
        )
    try:
        rows = tensor.view(-1, shape[-1])
    except RuntimeError:
        rows = None
    if rows is None or rows.stride(1) != 1:
        raise ContractError(
            f"rms_norm: {name} has strides {tensor.stride()}, expected rows without gaps that lie equally "
            "far apart; pass it contiguous"
        )
    return rows


def _launch(
    normed: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    eps: float,
    shift: float,
    gate_first: bool,
) -> None:
    width = x.shape[-1] if x.dim() else 0
    if not 0 < width <= MAX_NORMED:
        raise ContractError(
            f"rms_norm: x has shape {tuple(x.shape)}, expected [..., N] with N of at least 1 and at most "
            f"{MAX_NORMED}: a program keeps a whole row in registers; use torch.nn.functional.rms_norm"
        )
    rows = _as_rows("x", x, x.shape)
    gates = rows if gate is None else _as_rows("gate", gate, x.shape)
    results = _as_rows("normed", normed, x.shape)
    scale = _as_rows("weight", weight, x.shape[-1:])
    if not normed.is_contiguous():
        raise ContractError(
            f"rms_norm: normed has strides {normed.stride()}, expected rows that follow each other; pass it "
            "contiguous"
        )
    if not x.numel():
        return
    _rms_norm_kernel[(rows.shape[0],)](
        results, rows, gates, scale, rows.stride(0), gates.stride(0), width, eps, shift,
        TILE=triton.next_power_of_2(width), GATED=gate is not None, GATE_FIRST=gate_first,
        num_warps=warps_of_row(width), **dependent_launch(),
    )  # fmt: skip


def _case(
    rows: int = 5, width: int = 64, *, gap: int = 0, shift: float = 0.0, gate: str = ""
) -> OpCase:
    """`gap` elements lie between the rows of x and of the gate, which are slices of wider ones."""

    def build(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Args:
        def slices() -> Tensor:
            return draw_pitched(generator, rows, width, dtype=dtype, gap=gap)[None].to(device)

        return {
            "normed": torch.full((1, rows, width), torch.nan, dtype=dtype, device=device),
            "x": slices(),
            "gate": slices() if gate else None,
            "weight": draw(generator, width, dtype=dtype).to(device),
            "eps": 1e-5,
            "shift": shift,
            "gate_first": gate == "first",
        }

    parts = [f"gap{gap}" if gap else "", "shifted" if shift else "", f"gate-{gate}" if gate else ""]
    return OpCase("-".join([f"R{rows}-N{width}", *filter(None, parts)]), build)


def _traffic(args: Args) -> tuple[int, int]:
    numbers = args["x"].numel()
    moved = 2 if args["gate"] is None else 3
    return moved * numbers * args["x"].element_size(), 5 * numbers


rms_norm = define_op(
    "rms_norm(Tensor(a!) normed, Tensor x, Tensor? gate, Tensor weight, float eps, float shift, "
    "bool gate_first) -> ()",
    cuda=_launch,
    cpu=rms_norm_ref,
    results=("normed",),
    cases=(
        _case(),
        _case(gate="first"),
        _case(gate="last"),
        _case(rows=1, width=1),
        _case(rows=0),
        _case(rows=3, width=37, gap=5, gate="first"),  # nothing is aligned
        _case(rows=2, width=2048, shift=1.0),
        _case(rows=2, width=4096, gap=64, gate="first"),
        _case(rows=2, width=9000, gate="last"),  # the widest tile
    ),
    tolerance=Tolerance(
        {torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3},
        "fp32 arithmetic with sums of N terms: a few eps; bf16 results are rounded to 2**-9, and "
        "truncated to 2**-8 by Triton's interpreter; fp16 to 2**-11",
    ),
    traffic=_traffic,
    bench_cases=(_case(32, 2048), _case(32, 4096, gap=4416, gate="first"), _case(256, 2048)),
)
