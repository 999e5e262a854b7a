"""
A projection of one token: a weight matrix times a vector, with what stands before and behind it.

    h   = x                     or RMSNorm: x * rsqrt(mean(x^2) + eps) * (norm_weight + norm_shift)
    out = weight h (+ residual) or, gated: silu(weight h) * (up h)
Sums and everything between are float32; nothing is rounded before `out`.

Physics: a step of one row reads every weight once, so its floor is their bytes over the copy rate.  One
product takes some 10 us, of which starting and draining are a good part.  So a program takes a few whole
rows, all loads of which are in flight at once, and is in its place before the kernel in front has ended.

Letters: N outputs, K inputs.
Traffic: the weights once.  2 operations per weight.
Source of the norm: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467; of the gate:
Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.errors import ContractError
from midstream.ops.case_data import draw, draw_pitched
from midstream.ops.dependent_launch import after_previous, dependent_launch
from midstream.ops.registry import DTYPES, Args, OpCase, Tolerance, define_op

MAX_WIDTH = 16384  # inputs: a program keeps whole rows in registers
_ELEMENTS = 8192  # of weights per program, unless a row has more
_ELEMENTS_PER_WARP = 2048


def gemv_ref(
    out: Tensor,  # [..., N]  written; as all vectors of one row
    x: Tensor,  # [..., K]
    weight: Tensor,  # [N, K]
    up: Tensor | None,  # [N, K]
    norm_weight: Tensor | None,  # [K]
    residual: Tensor | None,  # [..., N]
    eps: float,
    norm_shift: float,
) -> None:
    """Say what the kernel means."""
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.flatten().to(wide)
    if norm_weight is not None:
        h = h * torch.rsqrt(h.square().mean() + eps) * (norm_weight.to(wide) + norm_shift)
    y = weight.to(wide) @ h
    if up is not None:
        y = torch.nn.functional.silu(y) * (up.to(wide) @ h)
    if residual is not None:
        y = y + residual.flatten().to(wide)
    out.copy_(y.view(out.shape))


@triton.jit
def _gemv_kernel(
    out_ptr,  # [N]
    x_ptr,  # [K]
    weight_ptr,  # [N, K]
    up_ptr,  # [N, K]
    norm_ptr,  # [K]
    residual_ptr,  # [N]
    N,
    weight_pitch,  # elements between rows
    up_pitch,
    eps,
    norm_shift,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two >= K
    GATED: tl.constexpr,
    NORMED: tl.constexpr,
    ADDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    after_previous(DEPENDENT)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = (row[:, None] < N) & (k[None, :] < K)
    wide_row = row.to(tl.int64)[:, None]
    weight = tl.load(weight_ptr + wide_row * weight_pitch + k[None, :], mask=inside, other=0.0)
    if GATED:
        up = tl.load(up_ptr + wide_row * up_pitch + k[None, :], mask=inside, other=0.0)
    x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(x * x, 0) / K + eps)
        x *= scale * (tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32) + norm_shift)
    y = tl.sum(weight.to(tl.float32) * x[None, :], 1)
    if GATED:
        y = y * tl.sigmoid(y) * tl.sum(up.to(tl.float32) * x[None, :], 1)
    if ADDED:
        y += tl.load(residual_ptr + row, mask=row < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty), mask=row < N)


def check_gemv(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    up: Tensor | None,
    norm_weight: Tensor | None,
    residual: Tensor | None,
) -> None:
    """Refuse what the kernel cannot read.

    Raises:
        ContractError: sizes, strides or dtypes do not fit, or rows are too wide.
    """
    if weight.dim() != 2 or x.numel() != weight.shape[1] or out.numel() != weight.shape[0]:
        raise ContractError(
            f"gemv: weight has shape {tuple(weight.shape)}, x has {x.numel()} elements and out "
            f"{out.numel()}, expected weight [N, K] with K and N of them; pass one row"
        )
    if not 0 < weight.shape[1] <= MAX_WIDTH:
        raise ContractError(
            f"gemv: weight has {weight.shape[1]} columns, expected at least 1 and at most {MAX_WIDTH}: a "
            "program keeps whole rows in registers; use torch.nn.functional.linear"
        )
    _check_size("up", up, tuple(weight.shape))
    _check_size("norm_weight", norm_weight, (weight.shape[1],))
    if residual is not None and residual.numel() != out.numel():
        raise ContractError(
            f"gemv: residual has {residual.numel()} elements, expected {out.numel()} as out has; pass "
            "one for each output"
        )
    for name, tensor in {"weight": weight, "up": up}.items():
        if tensor is not None and tensor.stride(1) != 1:
            raise ContractError(
                f"gemv: {name} has strides {tensor.stride()}, expected rows without gaps; pass it "
                "contiguous"
            )
    for name, tensor in {
        "x": x,
        "out": out,
        "norm_weight": norm_weight,
        "residual": residual,
    }.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ContractError(
                f"gemv: {name} has strides {tensor.stride()}, expected a vector without gaps; pass it "
                "contiguous"
            )
    for tensor in (out, x, weight, up, norm_weight, residual):
        if tensor is not None and tensor.dtype not in DTYPES:
            raise ContractError(
                f"gemv: a tensor of {tensor.dtype}, expected one of {DTYPES}: all sums are float32; use "
                "torch.nn.functional.linear"
            )


def _check_size(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    if tensor is not None and tuple(tensor.shape) != shape:
        raise ContractError(
            f"gemv: {name} has shape {tuple(tensor.shape)}, expected {shape} for this weight"
        )


def _launch(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    up: Tensor | None,
    norm_weight: Tensor | None,
    residual: Tensor | None,
    eps: float,
    norm_shift: float,
) -> None:
    check_gemv(out, x, weight, up, norm_weight, residual)
    outputs, width = weight.shape
    if outputs == 0:
        return
    block_k = triton.next_power_of_2(width)
    matrices = 1 if up is None else 2
    block_n = max(1, _ELEMENTS // block_k // matrices)
    _gemv_kernel[(triton.cdiv(outputs, block_n),)](
        out, x, weight, weight if up is None else up, x if norm_weight is None else norm_weight,
        x if residual is None else residual, outputs, weight.stride(0),
        (weight if up is None else up).stride(0), eps, norm_shift,
        K=width, BLOCK_N=block_n, BLOCK_K=block_k, GATED=up is not None,
        NORMED=norm_weight is not None, ADDED=residual is not None,
        num_warps=max(4, block_n * block_k * matrices // _ELEMENTS_PER_WARP), **dependent_launch(),
    )  # fmt: skip


def _case(
    outputs: int = 24, width: int = 64, *, gated: bool = False, normed: bool = False,
    added: bool = False, gap: int = 0, shift: float = 0.0,
) -> OpCase:  # fmt: skip
    """`gap` elements lie between the rows of the weights, which are slices of wider ones.

    With a shift the vector before the norm is float32, as models keep it that have such norms.
    """

    def build(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Args:
        def random(*shape: int) -> Tensor:
            return draw(generator, *shape, dtype=dtype).to(device)

        def matrix() -> Tensor:
            wide = draw_pitched(generator, outputs, width, dtype=dtype, gap=gap)
            return wide.mul_(width**-0.5).to(device)

        def vector(size: int, wanted: bool = True) -> Tensor | None:
            return random(size) if wanted else None

        return {
            "out": torch.full((1, 1, outputs), torch.nan, dtype=dtype, device=device),
            "x": random(width).float() if shift else random(width),
            "weight": matrix(),
            "up": matrix() if gated else None,
            "norm_weight": vector(width, normed),
            "residual": vector(outputs, added),
            "eps": 1e-5,
            "norm_shift": shift,
        }

    on = {"gated": gated, "normed": normed, "added": added, "shifted": shift}
    parts = "".join(f"-{name}" for name in on if on[name])
    return OpCase(f"N{outputs}-K{width}{parts}" + (f"-gap{gap}" if gap else ""), build)


def _traffic(args: Args) -> tuple[int, int]:
    weights = args["weight"].numel() * (1 if args["up"] is None else 2)
    return weights * args["weight"].element_size(), 2 * weights


gemv = define_op(
    "gemv(Tensor(a!) out, Tensor x, Tensor weight, Tensor? up, Tensor? norm_weight, Tensor? residual, "
    "float eps, float norm_shift) -> ()",
    cuda=_launch,
    cpu=gemv_ref,
    cases=(
        _case(),
        _case(normed=True),
        _case(gated=True, normed=True),
        _case(added=True),
        _case(normed=True, added=True),
        _case(normed=True, shift=0.75),
        _case(outputs=5, width=3, normed=True),  # nothing is aligned
        _case(outputs=7, width=72, gated=True, gap=5),
        _case(outputs=1, width=1),
        _case(outputs=0),
        _case(outputs=40, width=2048, gated=True, normed=True),
        _case(outputs=6, width=8192, added=True),
        _case(outputs=3, width=9000, gated=True, normed=True),  # the widest tile
    ),
    tolerance=Tolerance(
        {torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3},
        "fp32 arithmetic with sums of K terms: a few eps; bf16 results are rounded to 2**-9, and "
        "truncated to 2**-8 by Triton's interpreter; fp16 to 2**-11",
    ),
    traffic=_traffic,
    bench_cases=(
        _case(8512, 2048, normed=True),
        _case(2048, 4096, added=True),
        _case(8192, 2048, gated=True, normed=True),
        _case(2048, 8192, added=True),
    ),
)
