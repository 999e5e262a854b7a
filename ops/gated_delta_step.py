"""
Advance the gated delta rule by one token per row, from the page it reads into the page it writes.

Per row and head, with the key and the query scaled to unit length and the query by K**-0.5:
    state <- exp(g) * state
    state <- state + key (outer) beta * (v - state^T key)
    out    = state^T query
A row whose write page is 0 is padding: its `out` is zero and no page is touched.  Read page 0 means
no history.  A row may write the page it reads, or another one and leave that page as it was.
`offset`, `read_page` and `write_page` are read early: ops/dependent_launch.py says who may write them.

Letters: R rows, N pages, E elements of a page, H value heads, G key heads (head h uses key head
h // (H // G)), K key width, V value width.
Traffic: the state of every live row is read and written once, 2 * H * K * V elements.
Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv:2412.06464, equation 10.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from midstream.ops.linear_heads import (
    LinearShape,
    bench_step_cases,
    check_heads,
    draw_gates,
    step_case,
    step_traffic,
)
from midstream.ops.linear_step import NORM_EPS, launch_linear_step, step_rows
from midstream.ops.registry import Tolerance, define_op


def delta_rule(
    state_RHKV: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each row: the state after it, and its output [R, H, V]; in the state's dtype.

    The decay g is [R, H], or [R, H, K] for one of each key channel.
    """
    groups = state_RHKV.shape[1] // k.shape[1]
    q, k, v, g, beta = (x.to(state_RHKV.dtype) for x in (q, k, v, g, beta))
    key_RHK = unit_length(k).repeat_interleave(groups, dim=1)
    query_RHK = unit_length(q).repeat_interleave(groups, dim=1) * k.shape[-1] ** -0.5
    decay = g.exp() if g.ndim == 3 else g.exp()[..., None]
    state_RHKV = state_RHKV * decay[..., None]
    error_RHV = v - torch.einsum("rhkv,rhk->rhv", state_RHKV, key_RHK)
    state_RHKV = state_RHKV + key_RHK[..., None] * (beta[..., None] * error_RHV)[..., None, :]
    return state_RHKV, torch.einsum("rhkv,rhk->rhv", state_RHKV, query_RHK)


def unit_length(x: Tensor) -> Tensor:
    """Vectors along the last dimension, scaled to length one."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def gated_delta_step_ref(
    arena: Tensor,  # f32, bf16 or f16 [N, E]  written: the region [H, V, K] of the write pages
    out: Tensor,  # [R, H, V]  written
    q: Tensor,  # [R, G, K]  before normalisation
    k: Tensor,  # [R, G, K]  before normalisation
    v: Tensor,  # [R, H, V]
    g: Tensor,  # f32[R, H]  log of the decay; in `kda_step` f32[R, H, K]
    beta: Tensor,  # [R, H]    strength of the update
    offset: Tensor,  # i64[1]    element of a page where the region starts
    read_page: Tensor,  # i32[>= R]  0 = no history
    write_page: Tensor,  # i32[>= R]  0 = padding
) -> None:
    """Say what the kernel means, all rows at once."""

    def rule(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return delta_rule(state, q[row], k[row], v[row], g[row], beta[row])

    step_rows(rule, arena, out, k.shape[2], offset, read_page, write_page)


def _launch(
    arena: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    offset: Tensor, read_page: Tensor, write_page: Tensor,
) -> None:  # fmt: skip
    check_heads("gated_delta_step", q, k, v)
    launch_linear_step(arena, out, q, k, v, g, beta, offset, read_page, write_page)


_case = partial(step_case, draw_gates)

_CASES = (
    _case(),
    _case(rows=1),
    _case(rows=0),
    _case(key_width=16, value_width=24),  # a width that is no power of two
    _case(key_width=24, value_width=16),  # and that of the keys, wider than values
    _case(key_width=5, value_width=3, gap=3),  # nothing is aligned
    _case(heads=3, key_heads=3, gap=64),
    _case(rows=9, heads=3, key_heads=3, key_width=5, value_width=3),
    _case(state_dtype=None),  # bf16 pages with bf16 activations
    _case(rows=3, key_width=128, value_width=128),  # widths of qwen3_next
    _case(rows=9, heads=2, key_heads=1, key_width=128, value_width=128),
    _case(rows=9, key_width=128, value_width=128, state_dtype=None),
)

gated_delta_step = define_op(
    "gated_delta_step(Tensor(a!) arena, Tensor(b!) out, Tensor q, Tensor k, Tensor v, Tensor g, "
    "Tensor beta, Tensor offset, Tensor read_page, Tensor write_page) -> ()",
    cuda=_launch,
    cpu=gated_delta_step_ref,
    cases=_CASES,
    tolerance=Tolerance(
        {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3},
        "fp32 arithmetic with sums of K products of unit vectors: a few eps; bf16 results are "
        "rounded to 2**-9, and truncated to 2**-8 by Triton's interpreter; fp16 to 2**-11",
    ),
    traffic=step_traffic,
    bench_cases=bench_step_cases(draw_gates, LinearShape(32, 16, 128, 128)),
)
