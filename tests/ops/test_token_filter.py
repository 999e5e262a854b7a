"""token_filter: the allowed set is the one that sorting gives."""

import math

import pytest
import torch

from midstream.ops.token_filter import allowed_tokens


def allowed_by_sorting(
    logit: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> set[int]:
    """Temperature, top_k, top_p, min_p one after the other, on a sorted list of distinct logits."""
    ranked = sorted(((x / temperature, i) for i, x in enumerate(logit.tolist())), reverse=True)
    if top_k:
        ranked = ranked[:top_k]
    peak = ranked[0][0]
    mass = [math.exp(x - peak) for x, _ in ranked]
    kept, sum_before = set(), 0.0
    for (_, token), weight in zip(ranked, mass, strict=True):
        if sum_before < top_p * sum(mass) and weight >= min_p:
            kept.add(token)
        sum_before += weight
    return kept


def allowed_in_row(
    logit: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    allowed, _ = allowed_tokens(
        logit[None], *(torch.tensor([value]) for value in (temperature, top_k, top_p, min_p))
    )
    return allowed[0]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.0, 0, 0.7, 0.0),
        (1.0, 0, 1.0, 0.2),
        (0.5, 9, 0.9, 0.01),
        (2.0, 40, 0.5, 0.1),
    ],
)
def test_allowed_set_equals_the_one_found_by_sorting(seed, temperature, top_k, top_p, min_p):
    logit = 3 * torch.randn(60, generator=torch.Generator().manual_seed(seed))
    allowed = allowed_in_row(logit, temperature, top_k, top_p, min_p)
    want = allowed_by_sorting(logit, temperature, top_k, top_p, min_p)
    assert set(allowed.nonzero().flatten().tolist()) == want


def test_equal_logits_are_allowed_together():
    logit = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    for top_k, top_p in ((1, 1.0), (2, 1.0), (0, 0.1)):
        allowed = allowed_in_row(logit, 1.0, top_k, top_p, 0.0)
        assert allowed.tolist() == [False, True, True, True, False]


def test_likeliest_token_is_always_allowed():
    logit = torch.tensor([0.0, 3.0, -torch.inf])
    allowed = allowed_in_row(logit, 1.0, 1, 0.0, 1.0)
    assert allowed.tolist() == [False, True, False]
