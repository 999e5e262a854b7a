"""Models with rewritten projections compute what they did, lowered and under the backend."""

from __future__ import annotations

import pytest
import torch
from backend_rig import Watched
from compiler_rig import PagedRig
from projection_rig import IN, OUT, ROWS, SCALE, UP, Fused, X, mlp
from tiny_models import FAMILIES, build, prompt
from torch import Tensor

from midstream.compiler import lower
from midstream.graphs.kernels import kernels_of
from midstream.ops.skinny_linear import skinny_linear


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
@pytest.mark.parametrize(
    ("rows", "dtype", "kernel"),
    [
        (X, torch.float32, "_gemv_kernel"),
        (X, torch.bfloat16, "_gemv_kernel"),
        (ROWS["tokens"], torch.bfloat16, "_product_kernel"),
    ],
)
def test_the_backend_replays_the_kernels(rows: Tensor, dtype: torch.dtype, kernel: str) -> None:
    args = [tensor.to("cuda", dtype) for tensor in (rows, SCALE, IN, UP, OUT)]
    exact = mlp(*(tensor.double() for tensor in args))
    torch.compiler.reset()  # behind other sizes, the count of rows would be a symbol
    watched = Watched(mlp, options={})
    with torch.inference_mode():
        plain = mlp(*args)
    for _ in range(3):
        found = watched(*args)
        assert (found - exact).abs().max() <= 1.2 * (plain - exact).abs().max() + 1e-6
    assert watched.num_replays >= 1
    names = [launched.name for launched in kernels_of(lambda: watched(*args))]
    assert sum(name.startswith(kernel) for name in names) == 2
