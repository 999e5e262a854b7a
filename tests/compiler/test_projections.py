"""Projections of one token become one kernel each, and nothing else does."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from backend_rig import Watched
from projection_rig import (
    EPS,
    HIDDEN,
    IN,
    NORMS,
    OUT,
    SCALE,
    UP,
    WIDTH,
    Fused,
    X,
    check,
    mlp,
    norm,
    normed,
)
from rewrite_rig import Rewritten, random
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu
from torch.testing._internal.two_tensor import TwoTensor

from midstream.compiler import backend_inner
from midstream.compiler.projections import fuse_projections
from midstream.ops.gemv import MAX_WIDTH, gemv
from midstream.ops.rms_norm import rms_norm as rms_norm_op


def test_norm_gate_and_residual_go_into_two_kernels() -> None:
    fused = check(mlp, X, SCALE, IN, UP, OUT, kernels=2)
    assert fused.left(silu) == fused.left(torch.rsqrt) == 0


def test_one_norm_goes_into_all_projections_behind_it() -> None:
    def project(x: Tensor, scale: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        h = norm(x, scale)
        return linear(h, a).view(1, 1, 4, -1).transpose(1, 2), linear(h, b)

    fused = check(project, X, SCALE, IN, UP, kernels=2)
    assert fused.left(torch.rsqrt) == 0


def test_a_norm_that_others_read_too_stays_for_them() -> None:
    def project(x: Tensor, scale: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        h = norm(x, scale)
        return linear(h, a), h.sin()

    assert check(project, X, SCALE, IN, kernels=1).left(torch.rsqrt) == 1


@pytest.mark.parametrize("more", [0, 1])
def test_rows_wider_than_a_program_holds_are_left_alone(more: int) -> None:
    width = MAX_WIDTH + more
    check(linear, random(1, width), random(2, width), kernels=1 - more, linears=more)


def test_a_bias_is_added_and_a_residual_behind_it() -> None:
    def project(x: Tensor, w: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return residual + linear(x, w, bias)

    check(project, X, IN, random(HIDDEN), random(1, 1, HIDDEN), kernels=1)


def test_a_gate_over_another_input_is_left_apart() -> None:
    def project(x: Tensor, other: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return silu(linear(x, a)) * linear(other, b)

    assert check(project, X, X + 1, IN, UP, kernels=2).left(silu) == 1


def test_a_gate_by_itself_is_no_product_of_two() -> None:
    def project(x: Tensor, a: Tensor) -> Tensor:
        gate = silu(linear(x, a))
        return gate * gate

    check(project, X, IN, kernels=1)


@pytest.mark.parametrize("residual", [random(1), random(1, 1, 1), random(3, 1, HIDDEN)])
def test_a_sum_that_broadcasts_is_left_apart(residual: Tensor) -> None:
    check(lambda x, w, r: r + linear(x, w), X, IN, residual, kernels=1)


def test_a_product_that_others_read_too_is_not_hidden_in_a_sum() -> None:
    def project(x: Tensor, w: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        y = linear(x, w)
        return residual + y, y * 2

    check(project, X, IN, random(1, 1, HIDDEN), kernels=1)


def test_what_is_written_behind_the_norm_is_not_read_by_the_kernel() -> None:
    def project(x: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        h = norm(x, scale)
        x.add_(1)
        return linear(h, w)

    fused = Fused(project)
    with torch.no_grad():
        want, found = project(X.clone(), SCALE, IN), fused.call(X.clone(), SCALE, IN)
    torch.testing.assert_close(found, want, rtol=2e-5, atol=2e-5)
    assert len(fused.calls(rms_norm_op.overload)) == 1  # by itself, where the model computes it
    assert len(fused.kernels) == 1


def test_what_is_written_behind_the_product_goes_into_the_sum() -> None:
    def project(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
        y = linear(x, w)
        residual.mul_(2)
        return residual + y

    fused = Fused(project)
    residual = random(1, 1, HIDDEN)
    with torch.no_grad():
        want = project(X, IN, residual.clone())
        found = fused.call(X, IN, residual.clone())
    torch.testing.assert_close(found, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dim", [(-1, -2), 1])
def test_a_mean_over_other_dimensions_is_no_norm(dim: Any) -> None:
    def project(x: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(dim, keepdim=True) + EPS)
        return linear(scale * wide.to(x.dtype), w)

    assert check(project, X, SCALE, IN, kernels=1).left(torch.rsqrt) == 1


def test_a_norm_with_a_weight_that_broadcasts_is_left_apart() -> None:
    fused = check(lambda x, s, w: linear(norm(x, s), w), X, random(1), IN, kernels=1)
    assert fused.left(torch.rsqrt) == 1


@pytest.mark.parametrize("way", NORMS)
def test_a_norm_goes_into_the_kernel_however_it_is_written(way: str) -> None:
    fused = check(lambda x, s, w: linear(NORMS[way](x, s), w), X, SCALE, IN, kernels=1)
    assert fused.left(torch.rsqrt) == fused.left(torch.rms_norm) == fused.left(operator.add) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", ["shifted", "exchanged", "of torch"])
def test_norms_in_16_bits_are_as_near_to_float64_as_unfused_ones(
    way: str, dtype: torch.dtype
) -> None:
    def project(x: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        return linear(NORMS[way](x, scale), w)

    args = [t.to(dtype) for t in (X, SCALE, IN)]
    h = norm(args[0].double(), args[1].double() + (way == "shifted"))
    exact = linear(h, args[2].double())
    fused = Fused(project)
    with torch.no_grad():
        found, plain = fused.call(*args), project(*args)
    assert fused.kernels[0].args[4] is not None
    assert (found - exact).abs().max() <= 1.2 * (plain - exact).abs().max()


def test_a_norm_reads_float32_where_the_model_keeps_it() -> None:
    def project(x: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        return linear(scale * normed(x * 1.5).to(w.dtype), w)

    args = [X, SCALE.bfloat16(), IN.bfloat16()]
    fused = Fused(project)
    with torch.no_grad():
        found = fused.call(*args)
    (kernel,) = fused.kernels
    assert kernel.args[4] is not None
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, project(*args), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "mistaken",
    [
        lambda x, w: w * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + EPS)),
        lambda x, w: w * (x * torch.rsqrt(x.pow(exponent=2).mean(-1, keepdim=True) + EPS)),
        lambda x, w: w * (x * torch.rsqrt(input=x.pow(2).mean(-1, keepdim=True) + EPS)),
        lambda x, w: w * ((x + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)),
        lambda x, w: w * normed(x.view(2, -1)).view(1, 1, -1),
        lambda x, w: rms_norm(x.view(2, -1), (WIDTH // 2,), w[: WIDTH // 2], EPS).view(1, 1, -1),
        lambda x, w: rms_norm(x, (1, WIDTH), w[None], EPS),
        lambda x, w: rms_norm(x, (WIDTH,), w),
        lambda x, w: torch.rms_norm(x, (WIDTH,), w),
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + w[:1] * w[:1])),
    ],
)
def test_what_is_no_such_norm_is_left_apart(mistaken: Callable[[Tensor, Tensor], Tensor]) -> None:
    fused = check(lambda x, s, w: linear(mistaken(x, s), w), X, SCALE, IN, kernels=1)
    assert (
        sum(fused.left(target) for target in (torch.rsqrt, torch.rms_norm, rms_norm_op.overload))
        == 1
    )


def test_another_function_with_the_arguments_of_a_norm_is_none() -> None:
    @torch._dynamo.allow_in_graph
    def scaled(x: Tensor, sizes: tuple[int], weight: Tensor, eps: float) -> Tensor:
        return x * weight + eps

    check(lambda x, s, w: linear(scaled(x, (WIDTH,), s, EPS), w), X, SCALE, IN, kernels=1)


def test_a_norm_that_is_also_written_to_a_buffer_is_left_apart() -> None:
    def project(x: Tensor, scale: Tensor, w: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
        inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS, out=buffer)
        return linear(scale * (x * inverse), w), buffer

    fused, buffers = Fused(project), torch.ones(2, 1, 1, 1)
    with torch.no_grad():
        want = project(X, SCALE, IN, buffers[0])
        found = fused.call(X, SCALE, IN, buffers[1])
    torch.testing.assert_close(found, want, rtol=2e-5, atol=2e-5)
    assert len(fused.kernels) == 1


def test_a_norm_behind_a_move_to_another_device_reads_what_was_moved() -> None:
    def project(x: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        return linear(norm(x.to("meta"), scale), w)

    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        fuse_projections(gm, "meta")
        graphs.append(gm)
        return gm.forward

    with torch.no_grad():
        torch.compile(project, backend=backend)(X, SCALE.to("meta"), IN.to("meta"))
    (kernel,) = (node for node in graphs[0].graph.nodes if node.target is gemv.overload)
    assert kernel.args[1].target == "to"


def test_a_number_may_be_viewed_as_a_row() -> None:
    check(lambda x, w: linear(x.float().view(1, 1), w), random().double(), random(3, 1), kernels=1)


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_products_inside_transforms_of_torch_are_left_to_them(transform: str) -> None:
    def inner(x: Tensor) -> Tensor:
        return linear(x, IN).sin().sum()

    functions = {
        "vmap": lambda x: torch.vmap(inner)(x),
        "grad": lambda x: torch.func.grad(inner)(x),
        "jvp": lambda x: torch.func.jvp(inner, (x,), (torch.ones_like(x),)),
    }
    check(functions[transform], X, kernels=0, linears=1)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_rows_of_no_width_are_left_alone(rows: int) -> None:
    check(linear, torch.empty(rows, 0), torch.empty(HIDDEN, 0), kernels=0, linears=1)


def test_sizes_that_depend_on_data_are_left_apart() -> None:
    def project(x: Tensor, w: Tensor, rows: Tensor) -> Tensor:
        return rows[rows[:, 0] > 0] + linear(x, w)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(project, X[0], IN, random(7, HIDDEN), kernels=1)


@pytest.mark.parametrize("shape", [(1,), (), (1, HIDDEN)], ids=str)
def test_a_bias_that_broadcasts_leaves_the_product_alone(shape: tuple[int, ...]) -> None:
    check(linear, X[0], IN, random(*shape), kernels=0, linears=1)


def test_a_gate_may_come_second() -> None:
    def project(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        up = linear(x, b)
        return up * silu(linear(x, a))

    assert check(project, X, IN, UP, kernels=1).left(silu) == 0


def test_a_norm_that_rounds_to_fewer_bits_is_left_apart() -> None:
    def project(x: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        wide = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        return linear(scale * wide.to(torch.float8_e4m3fn).to(x.dtype), w)

    assert check(project, X, SCALE, IN, kernels=1).left(torch.rsqrt) == 1


@pytest.mark.parametrize("by_name", [True, False])
def test_a_gate_that_is_computed_in_place_is_seen_by_the_product_behind_it(by_name: bool) -> None:
    def project(x: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        h = norm(x, scale)
        silu(x, inplace=True) if by_name else silu(x, True)
        return linear(h, w) + linear(x, w)

    fused = Fused(project)
    with torch.no_grad():
        want, found = project(X.clone(), SCALE, IN), fused.call(X.clone(), SCALE, IN)
    torch.testing.assert_close(found, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("bias", [random(2 * HIDDEN)[::2], None], ids=["gaps", "none"])
def test_a_bias_with_gaps_leaves_the_product_alone(bias: Tensor | None) -> None:
    check(
        lambda x, w: linear(x, w, bias),
        X,
        IN,
        kernels=int(bias is None),
        linears=int(bias is not None),
    )


@pytest.mark.parametrize(
    ("x", "w"), [(X, IN), (X.bfloat16(), IN), (X, IN.bfloat16())], ids=["both", "weights", "row"]
)
def test_autocast_decides_the_dtype_of_a_product(x: Tensor, w: Tensor) -> None:
    fused = Fused(lambda x, w: linear(x, w))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert fused.call(x, w).dtype == torch.bfloat16
    assert not fused.kernels


def test_weights_that_only_look_like_tensors_are_left_alone() -> None:
    fused = Fused(lambda x, w: linear(x, w))
    with torch.no_grad():
        fused.call(X, TwoTensor(IN.clone(), UP.clone()))
        assert not fused.kernels
        fused.call(X, nn.Parameter(IN.clone()))
    assert len(fused.kernels) == 1


def test_bf16_results_are_as_near_to_float64_as_unfused_ones() -> None:
    args = [t.bfloat16() for t in (X, SCALE, IN, UP, OUT)]
    exact = mlp(*(t.double() for t in args))
    fused = Fused(mlp)
    with torch.no_grad():
        found, plain = fused.call(*args), mlp(*args)
    assert len(fused.kernels) == 2
    assert (found - exact).abs().max() <= 1.2 * (plain - exact).abs().max()


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
def test_the_backend_fuses_what_needs_no_gradients(grad: bool, monkeypatch: Any) -> None:
    fused: list[int] = []
    monkeypatch.setattr(
        backend_inner, "fuse_few_tokens", lambda gm: fused.append(fuse_projections(gm, "cpu")) or fused[-1]
    )  # fmt: skip
    watched = Watched(lambda x, w: linear(x, w), options={})
    weight = nn.Parameter(IN.clone())
    if grad:
        watched._compiled(X, weight).sum().backward()
        assert weight.grad is not None
        assert not fused
    else:
        torch.testing.assert_close(watched(X, weight), linear(X, weight))
        assert fused == [1]


LEFT = {
    "a vector of weights": lambda x: linear(x, UP[0].contiguous()),
    "transposed weights": lambda x: linear(x, random(WIDTH, HIDDEN).T),
    "a row with gaps": lambda x: linear(x.repeat_interleave(2, -1)[..., ::2], IN),
    "float64": lambda x: linear(x.double(), IN.double()),
    "names": lambda x: linear(input=x, weight=IN),
}


@pytest.mark.parametrize("way", LEFT)
def test_a_product_that_the_kernel_cannot_read_is_left_alone(way: str) -> None:
    check(LEFT[way], X, kernels=0, linears=1)


BESIDE = {
    "a bias in front of silu": lambda x, r: silu(linear(x, IN, r[0, 0])) * linear(x, UP),
    "a bias of the other": lambda x, r: silu(linear(x, IN)) * linear(x, UP, r[0, 0]),
    "one gate for all": lambda x, r: silu(linear(x, IN)) * linear(x, UP[:1]),
    "a product that is read twice": lambda x, r: _gated_and_added(linear(x, IN), linear(x, UP)),
    "another dtype": lambda x, r: r.double() + linear(x, IN),
    "no projection": lambda x, r: silu(linear(x, IN[:WIDTH])) * (x * UP[:WIDTH]),
    "other weights with gaps": lambda x, r: (
        silu(linear(x, IN)) * linear(x, UP.repeat(1, 2)[:, ::2])
    ),
    "a sum with itself": lambda x, r: _doubled(linear(x, IN)),
    "a sum with gaps": lambda x, r: r.repeat_interleave(2, -1)[..., ::2] + linear(x, IN),
}


def _gated_and_added(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up + up


def _doubled(y: Tensor) -> Tensor:
    return y + y


@pytest.mark.parametrize("way", BESIDE)
def test_what_does_not_fit_into_the_kernel_stays_behind_it(way: str) -> None:
    fused = Fused(BESIDE[way])
    args = (X, random(1, 1, HIDDEN))
    with torch.no_grad():
        want, found = BESIDE[way](*args), fused.call(*args)
    torch.testing.assert_close(found, want, rtol=2e-5, atol=2e-5)
    assert all(call.args[3] is None for call in fused.kernels)
    assert "bias" in way or all(call.args[5] is None for call in fused.kernels)


def test_projections_on_another_device_are_left_alone() -> None:
    fused = Rewritten(linear, lambda gm, _: fuse_projections(gm))
    with torch.no_grad():
        fused.call(X, IN)
    assert fused.num_rewritten == 0


def test_a_kernel_that_the_model_calls_itself_may_write_what_is_read() -> None:
    def project(x: Tensor, w: Tensor, r: Tensor, u: Tensor, v: Tensor) -> Tensor:
        y = linear(x, w)
        gemv(x, u, v, None, None, None, 0.0, 0.0)
        return r + y

    fused = Fused(project)
    args = (IN, random(1, 1, HIDDEN), random(8), random(WIDTH, 8))
    with torch.no_grad():
        want, found = project(X.clone(), *args), fused.call(X.clone(), *args)
    torch.testing.assert_close(found, want, rtol=2e-5, atol=2e-5)


def test_a_kernel_that_the_model_calls_by_names_is_left_as_it_is() -> None:
    def project(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
        out, h = x.new_empty(1, HIDDEN), norm(x, scale)
        parts = {"up": None, "norm_weight": None, "residual": None}
        gemv(out=out, x=h, weight=weight, **parts, eps=0.0, norm_shift=0.0)
        return out + linear(x, weight)[0]

    assert check(project, X, SCALE, IN, kernels=2).left(torch.rsqrt) == 1


def test_sparse_weights_are_left_to_torch() -> None:
    weight = IN.to_sparse_csr()
    fused = Fused(linear)
    with torch.no_grad():
        torch.testing.assert_close(fused.call(X[0], weight), linear(X[0], IN))
    assert not fused.kernels
