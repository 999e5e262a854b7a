"""
A projection of a few tokens: a weight matrix times a few rows, with what stands behind it.

    y      = x weight^T (+ residual)     or, gated: silu(x weight^T) * (x up^T)
    out    = y
    normed = y * rsqrt(mean(y^2) + eps) * (norm_weight + norm_shift)     where the next thing is a norm
Sums and everything between are float32.

Physics: up to some 64 rows the weights are all that costs time, so the floor is their bytes over the copy
rate.  To come near it every processor must have loads in flight from the first to the last microsecond.  So
a program takes TILE_N rows of the weights, which are the long side of the matrix unit, and all rows of x;
and where that makes fewer programs than processors, the inputs are cut into parts, whose sums a second
kernel adds (ops/finish_rows.py).  No atomics: two runs are bit-equal, and a row's result does not depend on
how many others there are, up to MAX_ROWS.

More than MAX_ROWS rows are bound by arithmetic, which the library's kernels do; then only the second kernel
is ours.

Letters: R rows, N outputs, K inputs, S parts of the inputs, M matrices: 1, or 2 where there is a gate.
Traffic: the weights once.  2 operations per weight and row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.errors import ContractError
from midstream.ops.case_data import draw, draw_pitched
from midstream.ops.dependent_launch import after_previous, dependent_launch
from midstream.ops.device_limits import fitting_stages
from midstream.ops.finish_rows import MAX_NORMED, finish_rows
from midstream.ops.registry import DTYPES, Args, OpCase, Tolerance, define_op

MAX_ROWS = 64  # that one program takes
_FEWEST_ROWS = 16  # what a matrix unit takes
_TILE_N = 64
_TILE_BYTES = 256  # of a row of weights in a turn of the loop, where the inputs are cut; else half
_PROGRAMS = 132  # wanted: the processors of an H200
_FEWEST_TURNS = 2  # of the loop in a part


def skinny_linear_ref(
    out: Tensor,  # [..., R, N]  written
    normed: Tensor | None,  # [..., R, N]  written
    x: Tensor,  # [..., R, K]
    weight: Tensor,  # [N, K]
    up: Tensor | None,  # [N, K]
    residual: Tensor | None,  # [..., R, N]
    norm_weight: Tensor | None,  # [N], with `normed`
    eps: float,
    norm_shift: float,
) -> None:
    """Say what the kernels mean."""
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.reshape(-1, x.shape[-1]).to(wide)
    y = h @ weight.to(wide).T
    if up is not None:
        y = torch.nn.functional.silu(y) * (h @ up.to(wide).T)
    if residual is not None:
        y = y + residual.reshape(y.shape).to(wide)
    out.copy_(y.view(out.shape))
    if normed is not None and norm_weight is not None:
        scale = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
        normed.copy_((y * scale * (norm_weight.to(wide) + norm_shift)).view(normed.shape))


@triton.jit(do_not_specialize=("R",))
def _product_kernel(
    out_ptr,  # [R, N], or the parts [M, S, R, N]
    x_ptr,  # [R, K]
    weight_ptr,  # [N, K]
    up_ptr,  # [N, K]
    residual_ptr,  # [R, N]
    R,
    N,
    x_pitch,  # elements between rows
    weight_pitch,
    up_pitch,
    K: tl.constexpr,
    S: tl.constexpr,
    TURNS: tl.constexpr,  # of the loop, in each part
    TILE_R: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    WHOLE: tl.constexpr,  # this kernel writes the result
    DEPENDENT: tl.constexpr,
):
    after_previous(DEPENDENT)
    part = tl.program_id(1)
    row = tl.arange(0, TILE_R)
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    k = part * (TURNS * TILE_K) + tl.arange(0, TILE_K)
    wide_n = n.to(tl.int64)[:, None]
    x_at = x_ptr + row.to(tl.int64)[:, None] * x_pitch + k[None, :]
    weight_at = weight_ptr + wide_n * weight_pitch + k[None, :]
    up_at = up_ptr + wide_n * up_pitch + k[None, :]
    y = tl.zeros((TILE_N, TILE_R), tl.float32)
    gate = tl.zeros((TILE_N, TILE_R), tl.float32)
    for turn in range(TURNS):
        ahead = turn * TILE_K
        x_in, weight_in = row[:, None] < R, n[:, None] < N
        if S * TURNS * TILE_K > K:
            x_in &= k[None, :] + ahead < K
            weight_in &= k[None, :] + ahead < K
        weight = tl.load(
            weight_at + ahead, mask=weight_in, other=0.0, eviction_policy="evict_first"
        )
        if GATED:
            up = tl.load(up_at + ahead, mask=weight_in, other=0.0, eviction_policy="evict_first")
        x = tl.trans(tl.load(x_at + ahead, mask=x_in, other=0.0))
        if GATED:
            gate = tl.dot(weight, x, gate, input_precision="ieee")
            y = tl.dot(up, x, y, input_precision="ieee")
        else:
            y = tl.dot(weight, x, y, input_precision="ieee")
    inside = (row[None, :] < R) & (n[:, None] < N)
    place = row.to(tl.int64)[None, :] * N + n[:, None]
    if WHOLE:
        if GATED:
            y = gate * tl.sigmoid(gate) * y
        if ADDED:
            y += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        part_size = R.to(tl.int64) * N
        if GATED:
            tl.store(out_ptr + part * part_size + place, gate, mask=inside)
            tl.store(out_ptr + (S + part) * part_size + place, y, mask=inside)
        else:
            tl.store(out_ptr + part * part_size + place, y, mask=inside)


def num_parts(outputs: int, inputs: int, tile_k: int) -> int:
    """Parts that the inputs are cut into, so that no processor is without a program.

    >>> [num_parts(outputs, 4096, tile_k=128) for outputs in (32000, 8512, 2048, 64)]
    [1, 1, 4, 16]
    """
    programs, turns = triton.cdiv(outputs, _TILE_N), triton.cdiv(inputs, tile_k)
    parts = max(1, min(_PROGRAMS // programs, turns // _FEWEST_TURNS))
    return 1 << parts.bit_length() - 1


def check_skinny_linear(
    out: Tensor,
    normed: Tensor | None,
    x: Tensor,
    weight: Tensor,
    up: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
) -> None:
    """Refuse what the kernels cannot read.

    Raises:
        ContractError: sizes, strides or dtypes do not fit.
    """
    if weight.dim() != 2 or x.dim() < 2 or x.shape[-1] != weight.shape[1] or not weight.shape[1]:
        raise ContractError(
            f"skinny_linear: x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}, expected "
            "[..., R, K] and [N, K] with K of at least 1; pass rows as wide as those of the weights"
        )
    outputs = weight.shape[0]
    if (normed is None) != (norm_weight is None) or (normed is not None and outputs > MAX_NORMED):
        raise ContractError(
            f"skinny_linear: normed is {_said(normed)} and norm_weight {_said(norm_weight)} for {outputs} "
            f"outputs, expected both or neither, and at most {MAX_NORMED} outputs with them; leave both out "
            "and use rms_norm"
        )
    result = (*x.shape[:-1], outputs)
    _check("out", out, result)
    _check("normed", normed, result)
    _check("residual", residual, result)
    _check("norm_weight", norm_weight, (outputs,))
    _check("x", x, tuple(x.shape), apart=x.dim() == 2)
    _check("weight", weight, tuple(weight.shape), apart=True)
    _check("up", up, tuple(weight.shape), apart=True)
    if not x.dtype == weight.dtype == (weight if up is None else up).dtype:
        raise ContractError(
            f"skinny_linear: x is {x.dtype} and weight {weight.dtype}, expected one dtype for x, weight and "
            "up; cast the activations to that of the weights"
        )


def _check(name: str, tensor: Tensor | None, shape: tuple[int, ...], apart: bool = False) -> None:
    """`apart`: rows may lie further apart than they are wide."""
    if tensor is None:
        return
    if tuple(tensor.shape) != shape or tensor.dtype not in DTYPES:
        raise ContractError(
            f"skinny_linear: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, expected one of "
            f"{DTYPES} and {shape} for this x and weight; all sums are float32"
        )
    if not (tensor.stride(-1) == 1 if apart else tensor.is_contiguous()):
        raise ContractError(
            f"skinny_linear: {name} has strides {tensor.stride()}, expected rows without gaps; pass it "
            "contiguous"
        )


def _said(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else "given"


def _launch(
    out: Tensor,
    normed: Tensor | None,
    x: Tensor,
    weight: Tensor,
    up: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    norm_shift: float,
) -> None:
    check_skinny_linear(out, normed, x, weight, up, residual, norm_weight)
    outputs, inputs = weight.shape
    rows = x if x.dim() == 2 else x.view(-1, inputs)
    num_rows = rows.shape[0]
    if num_rows == 0 or outputs == 0:
        return
    flat, weights = out.view(num_rows, outputs), [weight] if up is None else [weight, up]
    if num_rows <= MAX_ROWS:
        parts = _products(flat, rows, weights, residual, is_last=normed is None)
    else:
        is_all = up is None and residual is None and normed is None
        parts = _library_products(flat, rows, weights, is_all)
    if parts is not None:
        finish_rows(flat, normed, parts, residual, norm_weight, eps, norm_shift)


def _products(
    out: Tensor, x: Tensor, weights: list[Tensor], residual: Tensor | None, is_last: bool
) -> Tensor | None:
    """Parts [M, S, R, N] of the products; None where `out` has the result already.

    `is_last`: nothing follows what stands behind the products.
    """
    weight, up = weights[0], weights[-1]
    (rows, inputs), outputs = x.shape, weight.shape[0]
    tile_k = max(16, min(triton.next_power_of_2(inputs), _TILE_BYTES // x.element_size()))
    split = num_parts(outputs, inputs, tile_k)
    if split == 1:
        tile_k = max(16, tile_k // 2)
    whole = split == 1 and is_last
    shape = (len(weights), split, rows, outputs)
    result = out if whole else torch.empty(shape, dtype=torch.float32, device=out.device)
    tile_r = max(_FEWEST_ROWS, triton.next_power_of_2(rows))
    stage_bytes = tile_k * x.element_size() * (_TILE_N * len(weights) + tile_r)
    _product_kernel[(triton.cdiv(outputs, _TILE_N), split)](
        result, x, weight, up, x if residual is None else residual,
        rows, outputs, x.stride(0), weight.stride(0), up.stride(0),
        K=inputs, S=split, TURNS=triton.cdiv(inputs, tile_k * split), TILE_R=tile_r, TILE_N=_TILE_N,
        TILE_K=tile_k, GATED=len(weights) == 2, ADDED=residual is not None, WHOLE=whole,
        num_warps=4 if x.element_size() == 2 else 8,  # fp32 is summed in registers
        num_stages=fitting_stages(x.device, stage_bytes, 4 if split > 1 else 6), **dependent_launch(),
    )  # fmt: skip
    return None if whole else result


@torch.no_grad()  # results are arguments
def _library_products(out: Tensor, x: Tensor, weights: list[Tensor], is_all: bool) -> Tensor | None:
    """As `_products`, by the library's kernels, which round them; `is_all`: nothing stands behind them."""
    if is_all and out.dtype == x.dtype:
        torch.mm(x, weights[0].T, out=out)
        return None
    products = x.new_empty((len(weights), 1, *out.shape))
    for matrix, product in zip(weights, products, strict=True):
        torch.mm(x, matrix.T, out=product[0])
    return products


def _case(
    rows: int = 5, outputs: int = 72, width: int = 64, *, gated: bool = False, added: bool = False,
    normed: bool = False, gap: int = 0, shift: float = 0.0,
) -> OpCase:  # fmt: skip
    """`gap` elements lie between the rows of x and of the weights, which are slices of wider ones."""

    def build(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Args:
        def random(*shape: int) -> Tensor:
            return draw(generator, *shape, dtype=dtype).to(device)

        def matrix(height: int, scale: float) -> Tensor:
            wide = draw_pitched(generator, height, width, dtype=dtype, gap=gap)
            return wide.mul_(scale).to(device)

        def result() -> Tensor:
            return torch.full((rows, outputs), torch.nan, dtype=dtype, device=device)

        return {
            "out": result(),
            "normed": result() if normed else None,
            "x": matrix(rows, 1),
            "weight": matrix(outputs, width**-0.5),
            "up": matrix(outputs, width**-0.5) if gated else None,
            "residual": random(rows, outputs) if added else None,
            "norm_weight": random(outputs) if normed else None,
            "eps": 1e-5,
            "norm_shift": shift,
        }

    on = {"gated": gated, "added": added, "normed": normed, "shifted": shift}
    parts = "".join(f"-{name}" for name in on if on[name])
    return OpCase(f"R{rows}-N{outputs}-K{width}{parts}" + (f"-gap{gap}" if gap else ""), build)


def _traffic(args: Args) -> tuple[int, int]:
    weights = args["weight"].numel() * (1 if args["up"] is None else 2)
    rows = args["x"].numel() // args["x"].shape[-1]
    return weights * args["weight"].element_size(), 2 * weights * rows


skinny_linear = define_op(
    "skinny_linear(Tensor(a!) out, Tensor(b!)? normed, Tensor x, Tensor weight, Tensor? up, "
    "Tensor? residual, Tensor? norm_weight, float eps, float norm_shift) -> ()",
    cuda=_launch,
    cpu=skinny_linear_ref,
    results=("out", "normed"),
    cases=(
        _case(),
        _case(gated=True),
        _case(added=True),
        _case(rows=2, width=520, added=True, normed=True),  # several parts, the last one shorter
        _case(rows=17, width=520, gated=True),
        _case(rows=3, normed=True, shift=0.75),
        _case(rows=5, outputs=7, width=37, gated=True, gap=5),  # nothing is aligned
        _case(rows=1, outputs=1, width=1),
        _case(rows=0),
        _case(outputs=0),
        _case(rows=33, outputs=130, width=264, added=True),
        _case(rows=64, outputs=64, width=1024, gated=True, normed=True),
        _case(rows=65, outputs=72, width=40),  # the library's products
        _case(rows=70, outputs=72, width=40, gated=True),
        _case(rows=66, outputs=72, width=40, added=True, normed=True),
    ),
    tolerance=Tolerance(
        {torch.float32: 4e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3},
        "fp32 sums of K terms: a few eps; bf16 results are rounded to 2**-9, and truncated to 2**-8 by "
        "Triton's interpreter; fp16 to 2**-11; the library's products are rounded once more",
    ),
    traffic=_traffic,
    bench_cases=tuple(
        _case(rows, outputs, width, **behind)
        for rows in (8, 32, 64)
        for outputs, width, behind in (
            (8512, 2048, {}),
            (2048, 4096, {"added": True, "normed": True}),
            (8192, 2048, {"gated": True}),
            (2048, 8192, {"added": True}),
        )
    ),
)
