"""Products with one row or one column, and convolutions with few results, become sums; others stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rewrite_rig import Rewritten, check_rewritten, random
from torch import Tensor

from midstream.compiler.backend_inner import fuse_few_tokens
from midstream.compiler.short_products import spell_out_short_products


def check(function: Callable[..., Any], *args: Any, rewritten: int, **more: Any) -> Rewritten:
    return check_rewritten(function, spell_out_short_products, *args, rewritten=rewritten, **more)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


@pytest.mark.parametrize(
    ("function", "a", "b"),
    [
        (torch.bmm, (5, 7, 3), (5, 3, 1)),
        (torch.bmm, (5, 1, 3), (5, 3, 7)),
        (torch.bmm, (5, 1, 3), (5, 3, 1)),
        (torch.matmul, (2, 5, 7, 3), (2, 5, 3, 1)),
        (matmul, (2, 4, 1), (2, 1, 1)),
        (matmul, (2, 1, 0), (2, 0, 3)),  # an empty sum
    ],
)
def test_products_with_one_row_or_column_become_sums(function: Any, a: Any, b: Any) -> None:
    found = check(function, random(*a), random(*b), rewritten=1)
    assert not found.calls(function)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((5, 7, 3), (5, 3, 2)),  # a matrix of each
        ((1, 1, 3), (3, 7)),  # may be weights
        ((2, 7, 3), (1, 3, 1)),  # of another batch
        ((3,), (3,)),
    ],
)
def test_other_products_stay(a: Any, b: Any) -> None:
    check(matmul, random(*a), random(*b), rewritten=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_products_of_other_dtypes_stay(dtype: torch.dtype) -> None:
    check(matmul, random(2, 4, 3).to(dtype), random(2, 3, 1).to(dtype), rewritten=0)


def test_sums_of_short_numbers_are_taken_in_float32() -> None:
    a, b = (x.to(torch.bfloat16) for x in (random(2, 3, 999), random(2, 999, 1)))
    found = Rewritten(torch.bmm, spell_out_short_products)
    exact = (a.double() @ b.double()).float()
    torch.testing.assert_close(found.call(a, b), exact.to(torch.bfloat16), rtol=0, atol=0)
    assert found.num_rewritten == 1


def test_products_under_autocast_stay() -> None:
    def cast(a: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.bmm(a, b)

    check(cast, random(5, 7, 3), random(5, 3, 1), rewritten=0)


@pytest.mark.parametrize("length", [4, 5, 7])
@pytest.mark.parametrize("bias", [None, random(6)], ids=["plain", "bias"])
def test_a_convolution_of_each_channel_becomes_a_sum_over_taps(length: int, bias: Any) -> None:
    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.nn.functional.conv1d(x, weight, bias, padding=0, groups=6)

    check(convolve, random(2, 6, length), random(6, 1, 4), bias, rewritten=1)


@pytest.mark.parametrize(
    ("x", "weight", "options"),
    [
        ((2, 6, 8), (6, 1, 4), {"groups": 6}),  # many results
        ((2, 6, 4), (6, 6, 4), {}),  # channels mix
        ((2, 6, 4), (12, 1, 4), {"groups": 6}),  # two results of each channel
        ((2, 6, 4), (6, 1, 4), {"groups": 6, "padding": 1}),
        ((2, 6, 5), (6, 1, 4), {"groups": 6, "stride": (2,)}),
        ((2, 6, 8), (6, 1, 4), {"groups": 6, "dilation": 2}),
        ((2, 6, 4), (6, 1, 4), {"groups": 6, "padding": "same"}),
        ((6, 4), (6, 1, 4), {"groups": 6}),  # no batch
    ],
)
def test_other_convolutions_stay(x: Any, weight: Any, options: Any) -> None:
    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.conv1d(x, weight, **options)

    check(convolve, random(*x), random(*weight), rewritten=0)


def test_a_state_that_is_written_before_it_is_read_gives_what_was_written() -> None:
    def step(state: Tensor, x: Tensor, c: Tensor) -> Tensor:
        state.mul_(0.5).add_(x)
        result = torch.bmm(state, c)
        state.zero_()
        return result

    first, x, c = random(4, 3, 5), random(4, 3, 5), random(4, 5, 1)
    found = Rewritten(step, spell_out_short_products)
    torch.testing.assert_close(found.call(first.clone(), x, c), step(first.clone(), x, c))
    assert found.num_rewritten == 1


def test_sizes_that_are_symbols_stay() -> None:
    found = Rewritten(matmul, spell_out_short_products, dynamic=True)
    for rows in (5, 6):
        a, b = random(rows, 7, 3), random(rows, 3, 1)
        torch.testing.assert_close(found.call(a, b), a @ b)
    assert found.num_rewritten == 0
    assert len(found.graphs) == 1


def test_convolutions_under_autocast_stay() -> None:
    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.conv1d(x, weight, groups=6)

    def cast(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return convolve(x, weight)

    check(cast, random(2, 6, 4), random(6, 1, 4), rewritten=0)
    with torch.autocast("cpu", torch.bfloat16):
        check(convolve, random(2, 6, 4), random(6, 1, 4), rewritten=0)


def test_results_lie_as_those_of_the_library() -> None:
    def convolve(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        result = torch.nn.functional.conv1d(x.transpose(1, 2), weight, groups=6)
        return result, result.view(2, -1)

    found = check(convolve, random(2, 6, 6), random(6, 1, 4), rewritten=1)
    result, _ = found.call(random(2, 6, 6), random(6, 1, 4))
    assert result.is_contiguous()


def test_long_kernels_are_not_spelled_out() -> None:
    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.conv1d(x, weight, groups=6)

    check(convolve, random(2, 6, 9), random(6, 1, 9), rewritten=0)


def test_graphs_that_change_shapes_in_place_stay() -> None:
    """What a trace says of a tensor is what it is at the end."""

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        b = b.clone()
        result = torch.bmm(a, b)
        b.transpose_(1, 2)
        return result

    check_rewritten(multiply, fuse_few_tokens, random(3, 4, 1), random(3, 1, 7), rewritten=0)
