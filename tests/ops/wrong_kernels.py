"""
Kernels that the gates must refuse, one fault each.  Prints their faults by op as JSON.

Run without TRITON_INTERPRET: the kernels are compiled, never launched.
"""

import importlib
import json
import sys
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.ops.gate_rows import check_op
from midstream.ops.registry import EXACT, Args, OpCase, OpSpec, define_op

_WIDTH = 4096
_SIDE = 128  # of a matrix tile


@triton.jit
def _copy_kernel(out_ptr, x_ptr, STRIDE: tl.constexpr, TILE: tl.constexpr):
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out_ptr + place * STRIDE, tl.load(x_ptr + place * STRIDE))


@triton.jit
def _count_kernel(out_ptr, x_ptr, BARRIER: tl.constexpr):
    count = tl.load(out_ptr)
    if BARRIER:
        tl.debug_barrier()
    tl.store(out_ptr, count + 1)


@triton.jit
def _double_kernel(out_ptr, TILE: tl.constexpr):
    place = tl.arange(0, TILE)
    tl.store(out_ptr + place, 2 * tl.load(out_ptr + place))


@triton.jit
def _dots_kernel(out_ptr, x_ptr, turns, STAGES: tl.constexpr, SIDE: tl.constexpr):
    place = tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    total = tl.zeros([SIDE, SIDE], tl.float32)
    for turn in tl.range(turns, num_stages=STAGES):
        x = tl.load(x_ptr + turn * SIDE * SIDE + place)
        total = tl.dot(x, tl.trans(x), total)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty))


def _copy(out: Tensor, x: Tensor, stride: int = 1, **options: int) -> None:
    _copy_kernel[(1,)](out, x, STRIDE=stride, TILE=_WIDTH // stride, **options)


def _count(out: Tensor, x: Tensor, barrier: bool = False) -> None:
    _count_kernel[(1,)](out, x, BARRIER=barrier, num_warps=4)


def _double(out: Tensor, x: Tensor, tile: int) -> None:
    _double_kernel[(1,)](out, TILE=tile, num_warps=4)


def _dots(out: Tensor, x: Tensor, stages: int) -> None:
    _dots_kernel[(1,)](out, x, x.shape[0] // _SIDE, STAGES=stages, SIDE=_SIDE, num_warps=8)


def _build(
    generator: torch.Generator, dtype: torch.dtype, device: torch.device, shape: tuple[int, int]
) -> Args:
    del generator
    return {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name in ("out", "x")}


def _op(name: str, launch: Callable[..., None], per_byte: int) -> OpSpec:
    shape = (4 * _SIDE, _SIDE) if per_byte else (1, _WIDTH)
    return define_op(
        f"wrong::{name}(Tensor(a!) out, Tensor x) -> ()",
        cuda=launch,
        cpu=launch,
        cases=(OpCase("only", partial(_build, shape=shape)),),
        tolerance=EXACT,
        traffic=lambda args: (1, per_byte),
    )


OPS = (
    _op("sound_copy", _copy, 0),
    _op("spilling_copy", partial(_copy, maxnreg=16, num_warps=1), 0),
    _op("scalar_copy", partial(_copy, stride=2), 0),
    _op("count_without_barrier", _count, 1000),
    _op("count_with_barrier", partial(_count, barrier=True), 1000),
    _op("double_less_than_a_block", partial(_double, tile=64), 1000),
    _op("double_a_block", partial(_double, tile=128), 1000),
    _op("sound_dots", partial(_dots, stages=3), 1000),
    _op("single_stage_dots", partial(_dots, stages=1), 1000),
    _op("dots_for_large_devices", partial(_dots, stages=5), 1000),
    _op("dots_for_no_device", partial(_dots, stages=9), 1000),
)

if __name__ == "__main__":
    importlib.import_module("midstream.ops")
    json.dump({spec.name: check_op(spec, all_cases=False)[1] for spec in OPS}, sys.stdout)
