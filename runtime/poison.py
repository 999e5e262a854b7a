"""Debugging: NaN in every page that nobody owns, so that a stray read shows in the output."""

from __future__ import annotations

import torch

from midstream.runtime.assembly import Parts
from midstream.runtime.pages import NULL_PAGE, PagePool


def poison_free_pages(parts: Parts) -> None:
    """Fill free pages and the null page of both pools; enqueued ahead of the next step."""
    temporal, conv, kv = parts.pools.temporal, parts.pools.conv, parts.pools.kv
    for arena, pool in (
        (temporal, parts.ownership.state_pool),
        (conv, parts.ownership.state_pool),
        (kv, parts.ownership.kv_pool),
    ):
        _fill(arena, pool)


def _fill(arena: torch.Tensor, pool: PagePool) -> None:
    pages = torch.tensor([NULL_PAGE, *pool.free_pages()], device=arena.device)
    if arena.shape[1]:
        arena.index_fill_(0, pages, float("nan"))
