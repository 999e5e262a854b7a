"""One decode op on a poisoned arena, for tests that state claims about rows and pages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from midstream.ops.case_data import element_offset, index

START = 64  # elements before the region
PAGES = 8


@dataclass(frozen=True, slots=True)
class PagedStep:
    """`rows` are inputs per row, `params` all others; all pages are NaN where `fill` wrote nothing."""

    call: Callable[..., None]
    rows: Mapping[str, Tensor]
    params: Mapping[str, Any]
    size: int  # elements of the region

    def arena(self, live: Sequence[int], seed: int = 5) -> Tensor:
        """NaN but for the regions of live pages."""
        elements = START + -(-(self.size + 1) // 64) * 64
        arena = torch.full((PAGES, elements), float("nan"))
        for page in live:
            generator = torch.Generator().manual_seed(seed)
            self.region(arena, page)[:] = torch.randn(self.size, generator=generator)
        return arena.to(self.rows["x"].device)

    def region(self, arena: Tensor, page: int) -> Tensor:
        return arena[page, START : START + self.size]

    def run(self, arena: Tensor, read_page: Sequence[int], write_page: Sequence[int]) -> Tensor:
        """The first rows, one per write page; returns their output."""
        count, device = len(write_page), arena.device
        inputs = {name: value[:count] for name, value in self.rows.items()}
        out = torch.full_like(inputs["x"], float("nan"))
        self.call(
            arena=arena,
            out=out,
            **inputs,
            **self.params,
            offset=element_offset(START).to(device),
            read_page=index(*read_page).to(device),
            write_page=index(*write_page).to(device),
        )
        return out


def changed_pages(before: Tensor, after: Tensor) -> list[int]:
    """Pages of which any byte differs (NaN included)."""
    same = before.view(torch.int32) == after.view(torch.int32)
    return (~same.all(1)).nonzero().squeeze(1).tolist()
