"""
Advance Kimi delta attention by one token per row, from the page it reads into the page it writes.

The gated delta rule with a decay of its own for every key channel.  Per row and head, with the key and
the query scaled to unit length and the query by K**-0.5:
    state <- exp(g)[:, None] * state
    state <- state + key (outer) beta * (v - state^T key)
    out    = state^T query
A row whose write page is 0 is padding: its `out` is zero and no page is touched.  Read page 0 means
no history.  A row may write the page it reads, or another one and leave that page as it was.
`offset`, `read_page` and `write_page` are read early: ops/dependent_launch.py says who may write them.

Letters: R rows, N pages, E elements of a page, H value heads, G key heads (head h uses key head
h // (H // G)), K key width, V value width.
Traffic: the state of every live row is read and written once, 2 * H * K * V elements.
Source: Kimi Team, "Kimi Linear", arXiv:2510.26692, section 3; lengths as in `gated_delta_step`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from midstream.errors import ContractError
from midstream.ops.gated_delta_step import gated_delta_step_ref
from midstream.ops.linear_heads import (
    LinearShape,
    bench_step_cases,
    check_linear,
    draw_log_decays,
    draw_strengths,
    step_case,
    step_traffic,
)
from midstream.ops.linear_step import launch_linear_step
from midstream.ops.registry import Args, Tolerance, define_op


def check_kda(
    name: str, arena: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> None:
    """Refuse what the kernels of Kimi delta attention cannot read or write.

    Raises:
        ContractError: heads, widths, strides or dtypes do not fit.
    """
    check_linear(name, arena, out, q, k, v)
    if g.shape != (*v.shape[:2], k.shape[2]) or beta.shape != v.shape[:2] or g.stride(-1) != 1:
        raise ContractError(
            f"{name}: g {tuple(g.shape)} of strides {g.stride()} and beta {tuple(beta.shape)} do not fit "
            f"k {tuple(k.shape)} and v {tuple(v.shape)}; g must be [n, H, K], contiguous in K, and "
            "beta [n, H]"
        )
    if beta.stride(-1) != 1:
        raise ContractError(
            f"{name}: beta has strides {beta.stride()}, expected heads next to each other; make its "
            "last dimension contiguous"
        )


def _launch(
    arena: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    offset: Tensor, read_page: Tensor, write_page: Tensor,
) -> None:  # fmt: skip
    check_kda("kda_step", arena, out, q, k, v, g, beta)
    launch_linear_step(arena, out, q, k, v, g, beta, offset, read_page, write_page)


def draw_kda_gates(
    rng: torch.Generator, tokens: int, dtype: torch.dtype, shape: LinearShape
) -> Args:
    """Log decays, from almost none to strong, and update strengths in (0, 1)."""
    g = draw_log_decays(rng, tokens, shape.heads, shape.key_width)
    return {"g": g, "beta": draw_strengths(rng, tokens, dtype, shape)}


_case = partial(step_case, draw_kda_gates)

CASES = (
    _case(),
    _case(rows=1),
    _case(rows=0),
    _case(key_width=16, value_width=24),  # a width that is no power of two
    _case(key_width=24, value_width=16),  # and that of the keys, wider than values
    _case(key_width=5, value_width=3, gap=3),  # nothing is aligned
    _case(heads=3, key_heads=3, gap=64),
    _case(state_dtype=None),  # pages of the activations' dtype
    _case(rows=3, key_heads=4, key_width=128, value_width=128),  # widths of Kimi Linear
    _case(key_width=128, value_width=128, state_dtype=None),  # sums of 16-bit products
)

kda_step = define_op(
    "kda_step(Tensor(a!) arena, Tensor(b!) out, Tensor q, Tensor k, Tensor v, Tensor g, "
    "Tensor beta, Tensor offset, Tensor read_page, Tensor write_page) -> ()",
    cuda=_launch,
    cpu=gated_delta_step_ref,
    cases=CASES,
    tolerance=Tolerance(
        {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3},
        "fp32 arithmetic with sums of K products of unit vectors: a few eps; bf16 results are "
        "rounded to 2**-9, and truncated to 2**-8 by Triton's interpreter; fp16 to 2**-11",
    ),
    traffic=step_traffic,
    bench_cases=bench_step_cases(draw_kda_gates, LinearShape(32, 32, 128, 128)),
)
