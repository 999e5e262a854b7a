"""
Advance lightning attention by one token per row, from the page it reads into the page it writes.

Linear attention whose state decays by a constant of its head.  Per row and head:
    state <- exp(g) * state + k (outer) v
    out    = state^T q
A row whose write page is 0 is padding: its `out` is zero and no page is touched.  Read page 0 means
no history.  A row may write the page it reads, or another one and leave that page as it was.
`offset`, `read_page` and `write_page` are read early: ops/dependent_launch.py says who may write them.
Queries and keys enter as they are: an activation, a norm or a scale belongs to the caller.

Letters: R rows, N pages, E elements of a page, H value heads, G key heads (head h uses key head
h // (H // G)), K key width, V value width.
Traffic: the state of every live row is read and written once, 2 * H * K * V elements.
Source: Qin et al., "Lightning Attention-2", arXiv:2401.04658, equations 3 and 4.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from midstream.errors import ContractError
from midstream.ops.linear_heads import (
    LinearShape,
    bench_step_cases,
    check_linear,
    draw_log_decays,
    step_case,
    step_traffic,
)
from midstream.ops.linear_step import launch_linear_step, step_rows
from midstream.ops.registry import Args, Tolerance, define_op


def lightning_rule(
    state_RHKV: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each row: the state after it, and its output [R, H, V]; in the state's dtype."""
    groups = state_RHKV.shape[1] // k.shape[1]
    q, k, v, g = (x.to(state_RHKV.dtype) for x in (q, k, v, g))
    key_RHK, query_RHK = (x.repeat_interleave(groups, dim=1) for x in (k, q))
    state_RHKV = state_RHKV * g.exp()[:, None, None] + key_RHK[..., None] * v[..., None, :]
    return state_RHKV, torch.einsum("rhkv,rhk->rhv", state_RHKV, query_RHK)


def lightning_step_ref(
    arena: Tensor,  # f32, bf16 or f16 [N, E]  written: the region [H, V, K] of the write pages
    out: Tensor,  # [R, H, V]  written
    q: Tensor,  # [R, G, K]
    k: Tensor,  # [R, G, K]
    v: Tensor,  # [R, H, V]
    g: Tensor,  # f32[H]     log of the decay
    offset: Tensor,  # i64[1]     element of a page where the region starts
    read_page: Tensor,  # i32[>= R]  0 = no history
    write_page: Tensor,  # i32[>= R]  0 = padding
) -> None:
    """Say what the kernel means, all rows at once."""

    def rule(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return lightning_rule(state, q[row], k[row], v[row], g)

    step_rows(rule, arena, out, k.shape[2], offset, read_page, write_page)


def check_lightning(
    name: str, arena: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor
) -> None:
    """Refuse what the kernels of lightning attention cannot read or write.

    Raises:
        ContractError: heads, widths, strides or dtypes do not fit.
    """
    check_linear(name, arena, out, q, k, v)
    if g.shape != v.shape[1:2] or not g.is_contiguous():
        raise ContractError(
            f"{name}: g has shape {tuple(g.shape)} and strides {g.stride()}, expected one log decay for "
            f"each of {v.shape[1]} heads; pass a contiguous [H]"
        )


def _launch(
    arena: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor,
    offset: Tensor, read_page: Tensor, write_page: Tensor,
) -> None:  # fmt: skip
    check_lightning("lightning_step", arena, out, q, k, v, g)
    launch_linear_step(arena, out, q, k, v, g, None, offset, read_page, write_page)


def draw_decays(rng: torch.Generator, rows: int, dtype: torch.dtype, shape: LinearShape) -> Args:
    return {"g": draw_log_decays(rng, shape.heads)}


_case = partial(step_case, draw_decays)

CASES = (
    _case(),
    _case(rows=1),
    _case(rows=0),
    _case(key_width=16, value_width=24),  # a width that is no power of two
    _case(key_width=24, value_width=16),  # and that of the keys, wider than values
    _case(key_width=5, value_width=3, gap=3),  # nothing is aligned
    _case(heads=3, key_heads=3, gap=64),
    _case(state_dtype=None),  # pages of the activations' dtype
    _case(rows=3, key_heads=4, key_width=128, value_width=128),  # widths of MiniMax-01
    _case(key_width=128, value_width=128, state_dtype=None),  # sums of 16-bit products
)

lightning_step = define_op(
    "lightning_step(Tensor(a!) arena, Tensor(b!) out, Tensor q, Tensor k, Tensor v, Tensor g, "
    "Tensor offset, Tensor read_page, Tensor write_page) -> ()",
    cuda=_launch,
    cpu=lightning_step_ref,
    cases=CASES,
    tolerance=Tolerance(
        {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3},
        "fp32 arithmetic with a sum of K terms: a few eps; bf16 results are rounded to 2**-9, and "
        "truncated to 2**-8 by Triton's interpreter; fp16 to 2**-11",
    ),
    traffic=step_traffic,
    bench_cases=bench_step_cases(draw_decays, LinearShape(32, 32, 128, 128)),
)
