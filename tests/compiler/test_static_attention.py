"""Attention of one query over a static cache becomes one kernel; other attention stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from backend_rig import Watched
from rewrite_rig import Rewritten, check_rewritten, random
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from midstream.compiler.static_attention import fuse_static_attention
from midstream.graphs.kernels import kernels_of
from midstream.ops.static_attention_decode import static_attention_decode

LENGTH = 20


def check(function: Callable[..., Any], *args: Any, rewritten: int) -> Rewritten:
    found = check_rewritten(function, fuse_static_attention, *args, rewritten=rewritten)
    assert len(found.calls(static_attention_decode.overload)) == rewritten
    return found


def repeat(x: Tensor, times: int) -> Tensor:
    """As transformers writes it."""
    rows, heads, length, width = x.shape
    return x[:, :, None, :, :].expand(rows, heads, times, length, width).reshape(
        rows, heads * times, length, width
    )  # fmt: skip


def queries(rows: int = 2, heads: int = 6, tokens: int = 1, width: int = 8) -> Tensor:
    return random(rows, tokens, heads, width).transpose(1, 2)


def cache(rows: int = 2, heads: int = 3, width: int = 8) -> tuple[Tensor, Tensor]:
    return random(rows, heads, LENGTH, width), random(rows, heads, LENGTH, width) * 2


def mask(*seen: int) -> Tensor:
    return (torch.arange(LENGTH) < torch.tensor(seen)[:, None])[:, None, None]


def repeated(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    k, v = repeat(k, 2), repeat(v, 2)
    out = sdpa(q, k, v, attn_mask=mask, dropout_p=0.0, scale=0.25, is_causal=False)
    return out.transpose(1, 2).reshape(out.shape[0], 1, -1)


@pytest.mark.parametrize("seen", [None, mask(5, 20), mask(7)], ids=["all", "rows", "shared"])
def test_the_kernel_reads_the_cache_before_its_heads_are_repeated(seen: Tensor | None) -> None:
    found = check(repeated, queries(), *cache(), seen, rewritten=1)
    (kernel,) = found.calls(static_attention_decode.overload)
    assert kernel.args[2].op == kernel.args[3].op == "placeholder"


def test_heads_need_not_be_repeated() -> None:
    check(sdpa, queries(heads=3), *cache(), mask(5, 20), rewritten=1)
    check(lambda *args: sdpa(*args, enable_gqa=True), queries(), *cache(), mask(5, 20), rewritten=1)


def test_a_cache_that_is_written_in_the_same_graph_is_read_as_it_is_then() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, at: Tensor, new: Tensor) -> Tensor:
        k.index_copy_(2, at, new)
        v.index_copy_(2, at, new)
        result = repeated(q, k, v, mask(5, 20))
        k.zero_()
        return result

    found = Rewritten(step, fuse_static_attention)
    args = queries(), *cache(), torch.tensor([3]), random(2, 3, 1, 8)
    want = step(*(x.clone() for x in args))
    torch.testing.assert_close(found.call(*(x.clone() for x in args)), want)
    assert found.num_rewritten == 1


def test_a_cache_that_is_written_after_its_heads_were_repeated_is_read_from_the_copy() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = repeat(k, 2), repeat(v, 2)
        k.zero_()
        return sdpa(q, keys, values)

    found = Rewritten(step, fuse_static_attention)
    args = queries(), *cache()
    want = step(*(x.clone() for x in args))
    torch.testing.assert_close(found.call(*(x.clone() for x in args)), want)


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},  # of torch: the query stands at the first position
        {"dropout_p": 0.5},
        {"attn_mask": torch.zeros(2, 1, 1, LENGTH)},  # a number to add
        {"attn_mask": mask(5, 20).expand(2, 3, 1, LENGTH)},  # one for each head
        {"attn_mask": mask(7)[0, 0]},  # of other axes
    ],
    ids=["causal", "dropout", "additive", "by head", "axes"],
)
def test_attention_with_other_options_stays(options: dict[str, Any]) -> None:
    function = Rewritten(lambda *args: sdpa(*args, **options), fuse_static_attention)
    function.call(queries(heads=3), *cache())
    assert function.num_rewritten == 0


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        (queries(heads=3, tokens=2), *cache()),
        (queries(heads=3).double(), *(x.double() for x in cache())),
        (queries(heads=3, width=264), *cache(width=264)),
        (queries(heads=3), cache()[0], random(2, 3, LENGTH, 5)),  # values of another width
        (queries(heads=3), *(x.transpose(2, 3).contiguous().transpose(2, 3) for x in cache())),
        (queries(heads=3)[0], *(x[0] for x in cache())),
        *([(queries(heads=0), *cache(heads=0))] if torch.__version__ >= "2.13" else []),
    ],
    ids=lambda x: f"{tuple(x.shape)}-{x.dtype}",
)
def test_attention_that_the_kernel_cannot_read_stays(q: Tensor, k: Tensor, v: Tensor) -> None:
    check(sdpa, q, k, v, rewritten=0)


def test_sizes_that_are_symbols_stay() -> None:
    found = Rewritten(sdpa, fuse_static_attention, dynamic=True)
    for length in (LENGTH, LENGTH - 5):
        q, (k, v) = queries(heads=3), cache()
        args = q, k[:, :, :length], v[:, :, :length]
        torch.testing.assert_close(found.call(*args), sdpa(*args))
    assert found.num_rewritten == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_backend_replays_one_kernel_for_keys_that_the_graph_writes(dtype: torch.dtype) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, at: Tensor, new: Tensor, seen: Tensor) -> Tensor:
        k.index_copy_(2, at, new)
        v.index_copy_(2, at, new)
        return repeated(q, k, v, seen)

    args = [x.to("cuda", dtype) for x in (queries(), *cache())]
    args += [torch.tensor([3], device="cuda"), random(2, 3, 1, 8).to("cuda", dtype)]
    args += [mask(5, 20).cuda()]
    exact = step(*(x.double() if x.is_floating_point() else x.clone() for x in args))
    plain = step(*(x.clone() for x in args))
    watched = Watched(step, options={})
    for _ in range(3):
        found = watched(*args)
        assert (found - exact).abs().max() <= 1.5 * (plain - exact).abs().max() + 1e-5
    assert watched.num_replays >= 1
    names = [kernel.name for kernel in kernels_of(lambda: watched(*args))]
    assert sum(name.startswith("_attend_kernel") for name in names) == 1
