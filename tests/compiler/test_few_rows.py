"""Projections of a few tokens in 16 bits become one kernel each, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from projection_rig import (
    EPS,
    HIDDEN,
    IN,
    NORMS,
    OUT,
    ROWS,
    SCALE,
    UP,
    WIDTH,
    Fused,
    X,
    check,
    check_rows,
    mlp,
    norm,
    normed,
)
from rewrite_rig import random
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx
from torch.nn.functional import linear, silu

from midstream.compiler.pieces import distinct_sizes
from midstream.compiler.projections import decoding, fuse_projections
from midstream.ops.finish_rows import MAX_NORMED
from midstream.ops.rms_norm import rms_norm as rms_norm_op
from midstream.ops.skinny_linear import MAX_ROWS, skinny_linear


@pytest.mark.parametrize("x", [random(1, 2, WIDTH), random(2, WIDTH)], ids=["tokens", "rows"])
def test_two_rows_of_float32_are_left_alone(x: Tensor) -> None:
    check(mlp, x, SCALE, IN, UP, OUT, kernels=0, linears=3)


@pytest.mark.parametrize("rows", ROWS)
def test_a_few_rows_of_16_bits_have_a_kernel_for_each_projection(rows: str) -> None:
    fused = check_rows(mlp, ROWS[rows], SCALE, IN, UP, OUT, kernels=2, norms=1)
    assert fused.left(silu) == fused.left(torch.rsqrt) == 0


@pytest.mark.parametrize("way", [way for way in NORMS if "viewed" not in way])  # as one row
def test_a_norm_of_rows_is_found_however_it_is_written(way: str) -> None:
    fused = check_rows(
        lambda x, s, w: linear(NORMS[way](x, s), w), ROWS["tokens"], SCALE, IN, kernels=1, norms=1
    )  # fmt: skip
    assert fused.left(torch.rsqrt) == fused.left(torch.rms_norm) == 0


def test_a_norm_of_rows_that_get_another_axis_is_a_kernel_by_itself() -> None:
    def project(x: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        return x[None] + linear(norm(x, scale), w)[:, :1]

    check_rows(project, ROWS["rows"], SCALE, IN, kernels=1, norms=1)


def test_a_norm_beside_a_projection_of_the_same_rows_is_none_of_its_results() -> None:
    def project(x: Tensor, scale: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return linear(x, a) * linear(norm(x, scale), b)

    square = random(WIDTH, WIDTH)  # as wide as the rows
    check_rows(project, ROWS["tokens"], SCALE, square, square.T.contiguous(), kernels=2, norms=1)


def test_a_norm_of_rows_that_are_viewed_otherwise_is_left_apart() -> None:
    check_rows(
        lambda x, s, w: linear(norm(x.view(1, 5, WIDTH), s), w),
        random(5, WIDTH),
        SCALE,
        IN,
        kernels=1,
    )


def test_a_mean_of_rows_that_scales_columns_is_no_norm() -> None:
    def project(x: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        return linear(scale * (x * torch.rsqrt(x.pow(2).mean(-1) + EPS)), w)

    check_rows(project, random(WIDTH, WIDTH), SCALE, IN, kernels=1)


def test_the_norm_of_a_sum_goes_behind_the_projection_that_makes_it() -> None:
    def project(y: Tensor, x: Tensor, out: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        h = x + linear(y, out)
        return h + linear(norm(h, scale), gate)[..., :WIDTH]

    y = random(1, 5, HIDDEN)
    fused = check_rows(project, y, ROWS["tokens"], OUT, SCALE, IN, kernels=2)
    assert fused.left(torch.rsqrt) == 0
    assert [call.args[1] is None for call in fused.calls(skinny_linear.overload)] == [False, True]


def test_all_that_read_a_norm_of_rows_read_the_kernels() -> None:
    def project(x: Tensor, scale: Tensor, a: Tensor, b: Tensor) -> Tensor:
        h = norm(x, scale)
        return linear(h.view(-1, WIDTH), a)[None] + linear(h, b) * h.mean(-1, keepdim=True)

    fused = check_rows(project, ROWS["tokens"], SCALE, IN, UP, kernels=2, norms=1)
    assert fused.left(torch.rsqrt) == 0


def test_a_norm_whose_weight_is_computed_later_stays_behind_its_projection() -> None:
    def project(y: Tensor, x: Tensor, out: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        h = x + linear(y, out)
        return linear(norm(h, scale * scale), gate)

    y = random(1, 5, HIDDEN)
    check_rows(project, y, ROWS["tokens"], OUT, SCALE, IN, kernels=2, norms=1)


@pytest.mark.parametrize("written", ["between", "behind"])
def test_a_norm_of_rows_reads_what_stood_there_when_the_model_read_it(written: str) -> None:
    def project(y: Tensor, x: Tensor, out: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        h = x + linear(y, out)
        if written == "between":
            h.mul_(2)
        normed = norm(h, scale)
        if written == "behind":
            h.mul_(2)
        return linear(normed, gate)

    y = random(1, 5, HIDDEN)
    norms = int(written == "between")
    check_rows(project, y, ROWS["tokens"], OUT, SCALE, IN, kernels=2, norms=norms)


@pytest.mark.parametrize(
    "residual", [random(WIDTH), random(1, 1, WIDTH), random(5, WIDTH)], ids=str
)
def test_a_sum_of_rows_that_broadcasts_is_left_apart(residual: Tensor) -> None:
    check_rows(
        lambda x, w, r: r + linear(x, w),
        ROWS["tokens"][:, :, :WIDTH],
        OUT.T[:WIDTH, :].contiguous(),
        residual,
        kernels=1,
    )


@pytest.mark.parametrize(
    "taken",
    [
        lambda x: x[:WIDTH].expand(5, -1),
        lambda x: x[:WIDTH].repeat(MAX_ROWS + 1, 1),
        lambda x: x.view(3, 2, WIDTH),
        lambda x: x.view(2, 3, WIDTH).transpose(0, 1),
        lambda x: x.view(1, 3, 2 * WIDTH)[..., ::2],
        lambda x: x.view(WIDTH, 6).T,
        lambda x: x.view(3, 2 * WIDTH)[:, WIDTH:],
    ],
    ids=["one for all", "many", "two axes", "exchanged", "gaps", "transposed", "slices"],
)
def test_rows_that_the_kernel_does_not_take_are_left_alone(
    taken: Callable[[Tensor], Tensor],
) -> None:
    check_rows(lambda x, w: linear(taken(x), w), random(6 * WIDTH), IN, kernels=0, linears=1)


def test_rows_with_a_bias_are_left_alone() -> None:
    check_rows(linear, ROWS["tokens"], IN, random(HIDDEN), kernels=0, linears=1)


@pytest.mark.parametrize("decodes", [True, False])
def test_an_unknown_number_of_rows_is_few_in_a_decode_step_alone(decodes: bool) -> None:
    weights = [nn.Parameter(tensor.bfloat16()) for tensor in (SCALE, IN, UP, OUT)]
    fused = Fused(lambda x: mlp(x, *weights), dynamic=True)
    for rows in (5, 2, 64, 65, 300):
        x = random(1, rows, WIDTH).bfloat16()
        torch._dynamo.mark_static(x, 2)
        with torch.no_grad(), distinct_sizes(), decoding(decodes):
            found, plain = fused.call(x), mlp(x, *weights)
        assert (found - plain).abs().max() <= 0.02 * plain.abs().max()
    assert len(fused.graphs) == 1
    assert len(fused.calls(skinny_linear.overload)) == (2 if decodes else 0)
    assert len(fused.calls(rms_norm_op.overload)) == (1 if decodes else 0)


def test_a_gate_and_a_sum_go_into_one_kernel() -> None:
    def project(x: Tensor, r: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return r + silu(linear(x, gate)) * linear(x, up)

    check(project, X, random(1, 1, HIDDEN), IN, UP, kernels=1)
    check_rows(project, ROWS["tokens"], random(1, 5, HIDDEN), IN, UP, kernels=1)


def test_a_sum_whose_rows_lie_apart_stays_behind_the_kernel() -> None:
    fused = check_rows(
        lambda x, r, w: r[..., :HIDDEN] + linear(x, w),
        ROWS["tokens"],
        random(1, 5, 2 * HIDDEN),
        IN,
        kernels=1,
    )
    assert fused.calls(skinny_linear.overload)[0].args[5] is None


@pytest.mark.parametrize("more", [0, 16])
def test_a_norm_of_rows_too_wide_for_a_program_is_left_alone(more: int) -> None:
    wide = MAX_NORMED + more
    args = (random(8, wide), random(wide), random(16, wide))
    check_rows(lambda x, s, w: linear(norm(x, s), w), *args, kernels=1, norms=int(not more))


def test_the_second_norm_of_a_sum_is_a_kernel_by_itself() -> None:
    def project(y: Tensor, x: Tensor, out: Tensor, a: Tensor, b: Tensor, w: Tensor) -> Tensor:
        h = x + linear(y, out)
        return linear(norm(h, a), w) + linear(norm(h, b), w)

    args = (random(1, 5, HIDDEN), ROWS["tokens"], OUT, SCALE, SCALE.flip(0), IN)
    check_rows(project, *args, kernels=3, norms=1)


OTHER_NAMES = {
    "to": lambda h: h.to(h.dtype),
    "type_as": lambda h: h.type_as(h),
    "to and view": lambda h: h.to(h.dtype).view(-1, WIDTH),
}


@pytest.mark.parametrize("few", [True, False], ids=["rows", "row"])
@pytest.mark.parametrize("way", OTHER_NAMES)
def test_a_norm_that_is_written_is_seen_under_its_other_names(way: str, few: bool) -> None:
    def project(x: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        h = norm(x, scale)
        other = OTHER_NAMES[way](h)
        h.mul_(2)
        return linear(other, w)

    if few:
        check_rows(project, ROWS["tokens"], SCALE, IN, kernels=1, norms=1)
    else:
        check(project, X, SCALE, IN, kernels=1)


@pytest.mark.parametrize("early", ["gate", "rows", "weight"])
def test_what_is_written_behind_a_cast_is_read_as_it_was(early: str) -> None:
    def project(x: Tensor, gate: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        wide = {"gate": gate.float(), "rows": x.float(), "weight": scale.float()}
        {"gate": gate, "rows": x, "weight": scale}[early].mul_(3)
        h = wide["rows"] * silu(wide["gate"]) if early == "gate" else wide["rows"]
        return linear((wide["weight"] * normed(h)).to(w.dtype), w)

    tokens = ROWS["tokens"]
    args = [tensor.bfloat16() for tensor in (tokens, tokens.flip(-1), SCALE, IN)]
    fused = Fused(project)
    with torch.no_grad():
        want = project(*(arg.clone() for arg in args))
        found = fused.call(*(arg.clone() for arg in args))
    torch.testing.assert_close(found, want, rtol=3e-2, atol=3e-2)


def test_the_rewritten_graph_is_what_runs() -> None:
    fused = check_rows(linear, ROWS["tokens"], IN, kernels=1)
    assert "skinny_linear" in fused.graphs[0].code


def test_graphs_with_our_kernels_are_kept_in_the_cache_of_torch() -> None:
    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        assert fuse_projections(gm, "cpu") == 2
        compiled: Any = compile_fx(gm, list(inputs))
        return compiled

    weights = [nn.Parameter(tensor.bfloat16()) for tensor in (SCALE, IN, UP, OUT)]
    x = ROWS["tokens"].bfloat16()
    torch.compiler.reset()
    counters["aot_autograd"].clear()
    with torch.no_grad():
        torch.compile(lambda x: mlp(x, *weights), backend=backend)(x)
    asked = counters["aot_autograd"]
    assert asked["autograd_cache_hit"] + asked["autograd_cache_miss"] == 1
    assert not asked["autograd_cache_bypass"]
