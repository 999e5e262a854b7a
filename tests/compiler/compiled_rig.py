"""A small compiled model, the tokens that it must give, and padded batches."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import build
from torch import Tensor

import midstream

NEW = 12
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


def make(family: str = "bamba", **options: Any) -> midstream.CompiledModel:
    return midstream.compile(build(family), **{"max_batch": 3, "max_len": 64, **options})


def greedy(model: Any, ids: Tensor, num_tokens: int) -> Tensor:
    """`num_tokens` best tokens behind ids [T], each from an un-cached forward over all before it."""
    for _ in range(num_tokens):
        with torch.no_grad():
            best = model(ids[None], use_cache=False).logits[0, -1].argmax()
        ids = torch.cat([ids, best[None]])
    return ids


def left_padded(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, W] of prompts of several lengths; padding holds a token that is not silent."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), 7)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return ids, mask
