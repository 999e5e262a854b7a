"""Projections of one token, and of a few, become one kernel each, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from backend_rig import Watched
from compiler_rig import PagedRig
from rewrite_rig import Rewritten, random
from tiny_models import FAMILIES, build, prompt
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx
from torch.nn.functional import linear, rms_norm, silu
from torch.testing._internal.two_tensor import TwoTensor

from midstream.compiler import backend_inner, lower, projections
from midstream.compiler.pieces import distinct_sizes
from midstream.compiler.projections import decoding, fuse_projections
from midstream.graphs.kernels import kernels_of
from midstream.ops.finish_rows import MAX_NORMED
from midstream.ops.gemv import MAX_WIDTH, gemv
from midstream.ops.registry import OpSpec
from midstream.ops.rms_norm import rms_norm as rms_norm_op
from midstream.ops.skinny_linear import MAX_ROWS, skinny_linear

WIDTH, HIDDEN = 16, 24
EPS = 1e-5


class Fused(Rewritten):
    def __init__(self, function: Callable[..., Any], **compile_args: Any) -> None:
        super().__init__(function, fuse_projections, **compile_args)

    @property
    def kernels(self) -> list[torch.fx.Node]:
        return self.calls(gemv.overload)

    def left(self, target: Any) -> int:
        return len(self.calls(target))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """As transformers writes it."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def check(function: Callable[..., Any], *args: Any, kernels: int, linears: int = 0) -> Fused:
    """Equal results, and so many kernels and products left."""
    fused = Fused(function)
    with torch.no_grad():
        want, found = function(*args), fused.call(*args)
    torch.testing.assert_close(found, want, rtol=2e-5, atol=2e-5)
    assert (len(fused.kernels), fused.left(linear)) == (kernels, linears)
    return fused


X, SCALE = random(1, 1, WIDTH), random(WIDTH)
IN, UP, OUT = random(HIDDEN, WIDTH), random(HIDDEN, WIDTH) / 2, random(WIDTH, HIDDEN)


def mlp(x: Tensor, scale: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    h = norm(x, scale)
    return x + linear(silu(linear(h, gate)) * linear(h, up), down)


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


@pytest.mark.parametrize("x", [random(1, 2, WIDTH), random(2, WIDTH)], ids=["tokens", "rows"])
def test_two_rows_of_float32_are_left_alone(x: Tensor) -> None:
    check(mlp, x, SCALE, IN, UP, OUT, kernels=0, linears=3)


def test_rows_wider_than_a_program_holds_are_left_alone() -> None:
    check(linear, random(1, MAX_WIDTH + 1), random(2, MAX_WIDTH + 1), kernels=0, linears=1)


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


def normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def gemma_norm(x: Tensor, weight: Tensor) -> Tensor:
    return (normed(x.float()) * (1.0 + weight.float())).type_as(x)


NORMS = {
    "shifted": gemma_norm,
    "shifted by an int": lambda x, w: (w + 1) * normed(x),
    "scaled in float32": lambda x, w: (w.float() * normed(x.float())).to(x.dtype),
    "exchanged": lambda x, w: x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + EPS) * w,
    "viewed": lambda x, w: norm(x.reshape(1, WIDTH), w).view(-1, WIDTH),
    "of torch": lambda x, w: rms_norm(x, (WIDTH,), w, EPS),
    "of torch, viewed": lambda x, w: rms_norm(x, (WIDTH,), w, EPS).view(1, 1, WIDTH),
}


@pytest.mark.parametrize("way", NORMS)
def test_a_norm_goes_into_the_kernel_however_it_is_written(way: str) -> None:
    fused = check(lambda x, s, w: linear(NORMS[way](x, s), w), X, SCALE, IN, kernels=1)
    assert fused.left(torch.rsqrt) == fused.left(torch.rms_norm) == 0


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
    ],
)
def test_what_is_no_such_norm_is_left_apart(mistaken: Callable[[Tensor, Tensor], Tensor]) -> None:
    fused = check(lambda x, s, w: linear(mistaken(x, s), w), X, SCALE, IN, kernels=1)
    assert (
        sum(fused.left(target) for target in (torch.rsqrt, torch.rms_norm, rms_norm_op.overload))
        == 1
    )


def test_a_norm_that_is_also_written_to_a_buffer_is_left_apart() -> None:
    def project(x: Tensor, scale: Tensor, w: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
        inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS, out=buffer)
        return linear(scale * (x * inverse), w), buffer

    check(project, X, SCALE, IN, torch.ones(1, 1, 1), kernels=1)


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


def test_a_gate_that_is_computed_in_place_is_seen_by_the_product_behind_it() -> None:
    def project(x: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        h = norm(x, scale)
        silu(x, inplace=True)
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


def test_autocast_decides_the_dtype_of_a_product() -> None:
    fused = Fused(lambda x, w: linear(x, w))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert fused.call(X, IN).dtype == torch.bfloat16
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
        backend_inner, "fuse_one_token", lambda gm: fused.append(fuse_projections(gm, "cpu")) or fused[-1]
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


def check_rows(
    function: Callable[..., Any], *args: Tensor, kernels: int, norms: int = 0, linears: int = 0
) -> Fused:
    """As near to float64 as the unfused function, and so many calls left; in bfloat16."""
    narrow = [arg.bfloat16() for arg in args]
    fused = Fused(function)
    with torch.no_grad():
        exact, plain = function(*(arg.double() for arg in narrow)), function(*narrow)
        found = fused.call(*narrow)
    assert found.dtype == torch.bfloat16
    assert (found - exact).abs().mean() <= 1.1 * (plain - exact).abs().mean()
    ops = (skinny_linear.overload, rms_norm_op.overload, linear)
    counts = [len(fused.calls(target)) for target in ops]
    assert counts == [kernels, norms, linears]
    return fused


ROWS = {
    "tokens": random(1, 5, WIDTH),
    "rows": random(5, WIDTH),
    "one token of each row": random(5, 1, WIDTH),
    "as many as a kernel takes": random(1, MAX_ROWS, WIDTH),
}


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


def mamba_norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    wide = x.float() * silu(gate.float())
    return weight * normed(wide).to(x.dtype)


def gated_delta_norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return (norm(x, weight) * silu(gate.float())).to(x.dtype)


GATED_NORMS = {
    "first": mamba_norm,
    "last": gated_delta_norm,
    "last, exchanged": lambda x, gate, w: silu(gate) * norm(x, w),
}


@pytest.mark.parametrize("way", GATED_NORMS)
def test_a_gated_norm_of_rows_is_one_kernel(way: str) -> None:
    def project(both: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        x, gate = both.chunk(2, -1)  # rows lie apart
        return linear(GATED_NORMS[way](x.contiguous(), gate, scale), w)

    fused = check_rows(project, random(1, 5, 2 * WIDTH), SCALE, IN, kernels=1, norms=1)
    assert fused.left(torch.rsqrt) == fused.left(silu) == 0


@pytest.mark.parametrize("way", GATED_NORMS)
def test_a_gated_norm_of_one_row_is_a_kernel_in_front_of_the_projection(way: str) -> None:
    def project(x: Tensor, gate: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        return linear(GATED_NORMS[way](x, gate, scale), w)

    fused = check(project, X, X.flip(-1), SCALE, IN, kernels=1)
    assert fused.left(torch.rsqrt) == fused.left(silu) == 0
    assert len(fused.calls(rms_norm_op.overload)) == 1


@pytest.mark.parametrize("gate", [random(1, 1, WIDTH), random(WIDTH)], ids=["row", "vector"])
def test_a_gate_that_broadcasts_is_left_apart(gate: Tensor) -> None:
    def project(x: Tensor, gate: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        return linear(gated_delta_norm(x, gate, scale), w)

    fused = check_rows(project, ROWS["tokens"], gate, SCALE, IN, kernels=1)
    assert fused.left(torch.rsqrt) == 1


def test_a_gated_norm_of_a_projection_is_no_second_result_of_it() -> None:
    def project(y: Tensor, gate: Tensor, out: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        return linear(gated_delta_norm(linear(y, out), gate, scale), w)

    y = random(1, 5, HIDDEN)
    check_rows(project, y, ROWS["tokens"], OUT, SCALE, IN, kernels=2, norms=1)


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


@pytest.mark.parametrize(
    ("x", "kernel"),
    [
        (random(1, 1, WIDTH), gemv),
        (random(WIDTH).bfloat16(), gemv),
        (random(1, 5, WIDTH).bfloat16(), skinny_linear),
        (random(2, 3, WIDTH).bfloat16(), skinny_linear),
        (random(1, 5, WIDTH), None),
        (random(MAX_ROWS + 1, WIDTH).bfloat16(), None),
        (random(5, 2 * WIDTH).bfloat16()[:, ::2], None),
        (random(0, WIDTH).bfloat16(), None),
        (random(1, WIDTH).double(), None),
    ],
)
def test_the_head_takes_the_kernel_for_its_rows(
    x: Tensor, kernel: OpSpec | None, monkeypatch: Any
) -> None:
    taken: list[OpSpec] = []
    for op in (gemv, skinny_linear):
        spied = lambda *args, op=op: (taken.append(op), op.overload(*args))[1]  # noqa: E731
        monkeypatch.setattr(projections, op.name, spied)
    weight = nn.Parameter(IN.to(x.dtype))
    with torch.no_grad():
        found = projections.project_few(x, weight)
    torch.testing.assert_close(found, linear(x, weight), rtol=1e-2, atol=1e-2)
    assert taken == ([] if kernel is None else [kernel])


def _head_kernels(monkeypatch: Any) -> list[str]:
    taken: list[str] = []
    for op in (gemv, skinny_linear):
        monkeypatch.setattr(projections, op.name, lambda *_, name=op.name: taken.append(name))
    return taken


def test_the_head_leaves_what_asks_for_more_to_torch(monkeypatch: Any) -> None:
    taken = _head_kernels(monkeypatch)
    weight = nn.Parameter(IN.clone())
    projections.project_few(X, weight).sum().backward()
    assert weight.grad is not None
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert projections.project_few(X, weight).dtype == torch.bfloat16
        found = projections.project_few(X, TwoTensor(IN.clone(), UP.clone()))
        assert type(found) is TwoTensor
        transposed = random(WIDTH, HIDDEN).T
        torch.testing.assert_close(projections.project_few(X, transposed), linear(X, transposed))
        wide = random(1, MAX_WIDTH + 1), random(2, MAX_WIDTH + 1)
        torch.testing.assert_close(projections.project_few(*wide), linear(*wide))
    assert not taken


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
    "a sum with gaps": lambda x, r: r.repeat_interleave(2, -1)[..., ::2] + linear(x, IN),
}


def _gated_and_added(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up + up


@pytest.mark.parametrize("way", BESIDE)
def test_what_does_not_fit_into_the_kernel_stays_behind_it(way: str) -> None:
    fused = Fused(BESIDE[way])
    args = (X, random(1, 1, HIDDEN))
    with torch.no_grad():
        want, found = BESIDE[way](*args), fused.call(*args)
    torch.testing.assert_close(found, want, rtol=2e-5, atol=2e-5)
    assert all(call.args[3] is None for call in fused.kernels)
    assert "bias" in way or all(call.args[5] is None for call in fused.kernels)


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


def test_a_norm_of_rows_too_wide_for_a_program_is_left_alone() -> None:
    wide = MAX_NORMED + 16
    args = (random(2, wide), random(wide), random(3, wide))
    check_rows(lambda x, s, w: linear(norm(x, s), w), *args, kernels=1)


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


GATES = {
    "gaps": lambda both: both[..., ::2],
    "one for all": lambda both: both[..., :1].expand(1, 1, WIDTH),
    "float64": lambda both: both[..., :WIDTH].double(),
    "numbers": lambda both: both[..., :WIDTH].int(),
}


@pytest.mark.parametrize("way", GATES)
def test_a_gate_that_the_kernel_cannot_read_is_left_apart(way: str) -> None:
    def project(x: Tensor, both: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        return linear((norm(x, scale) * silu(GATES[way](both).float())).to(x.dtype), w)

    fused = check(project, X, random(1, 1, 2 * WIDTH), SCALE, IN, kernels=1)
    assert not fused.calls(rms_norm_op.overload)


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


def test_sparse_weights_are_left_to_torch() -> None:
    weight = IN.to_sparse_csr()
    fused = Fused(linear)
    with torch.no_grad():
        torch.testing.assert_close(fused.call(X[0], weight), linear(X[0], IN))
    assert not fused.kernels


@pytest.mark.parametrize("family", FAMILIES)
def test_lowered_models_in_16_bits_decode_rows_together_as_eager_ones_do(family: str) -> None:
    ids = prompt(12)
    kernels = Fused(lambda: None)
    logits = []
    for mode in ("eager", "inductor"):
        model = build(family).bfloat16()
        lowered = lower(model, compile_mode=mode, backend=kernels.backend)  # type: ignore[arg-type]
        rig = PagedRig(lowered)
        live, other = rig.start(), rig.start()
        steps = [rig.chunk([(live, ids[:9]), (other, ids[:4])])]
        for token in ids[9:]:
            steps.append(rig.decode([(live, int(token)), (other, int(token) + 1)]))
        logits.append(torch.cat(steps).float())
    assert (logits[1] - logits[0]).abs().max() <= 0.03 * logits[0].abs().max()
    assert len(kernels.calls(skinny_linear.overload)) >= 6  # a mixer, an attention layer


@pytest.mark.parametrize("family", FAMILIES)
def test_lowered_models_decode_the_same_tokens(family: str) -> None:
    ids = prompt(12)
    kernels = Fused(lambda: None)
    logits = []
    for mode in ("eager", "inductor"):
        lowered = lower(build(family), compile_mode=mode, backend=kernels.backend)  # type: ignore[arg-type]
        rig = PagedRig(lowered)
        live = rig.start()
        steps = [rig.chunk([(live, ids[:9])])]
        steps += [rig.decode([(live, int(token))]) for token in ids[9:]]
        logits.append(torch.cat(steps))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    assert len(kernels.kernels) >= 6  # a mixer, an attention layer


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_backend_replays_the_kernels(dtype: torch.dtype) -> None:
    args = [tensor.to("cuda", dtype) for tensor in (X, SCALE, IN, UP, OUT)]
    exact = mlp(*(tensor.double() for tensor in args))
    watched = Watched(mlp, options={})
    with torch.inference_mode():
        plain = mlp(*args)
    for _ in range(3):
        found = watched(*args)
        assert (found - exact).abs().max() <= 1.2 * (plain - exact).abs().max() + 1e-6
    assert watched.num_replays >= 1
    names = [kernel.name for kernel in kernels_of(lambda: watched(*args))]
    assert sum(name.startswith("_gemv_kernel") for name in names) == 2


@pytest.mark.gpu
def test_the_backend_replays_the_kernels_of_a_few_rows() -> None:
    args = [tensor.to("cuda", torch.bfloat16) for tensor in (ROWS["tokens"], SCALE, IN, UP, OUT)]
    exact = mlp(*(tensor.double() for tensor in args))
    torch.compiler.reset()  # of other sizes, the count of rows would be a symbol
    watched = Watched(mlp, options={})
    with torch.inference_mode():
        plain = mlp(*args)
    for _ in range(3):
        found = watched(*args)
        assert (found - exact).abs().max() <= 1.2 * (plain - exact).abs().max() + 1e-6
    assert watched.num_replays >= 1
    names = [kernel.name for kernel in kernels_of(lambda: watched(*args))]
    assert sum(name.startswith("_product_kernel") for name in names) == 2
