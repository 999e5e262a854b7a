"""
Random inputs for the cases of ops that work on paged state.

Everything that an op must not read is NaN: other pages, the null page, the rest of an owned page, and the
gaps between the rows of a view.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.ops.chunk_table import ChunkTable, cut_chunks
from midstream.ops.registry import NULL_PAGE

_ALIGN = 64  # elements: LAUNCH_ALIGN bytes for every element of two bytes or more


def draw(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers, rounded to `dtype`, where the generator is."""
    return torch.randn(shape, generator=generator, device=generator.device).to(dtype)


def draw_pitched(generator: torch.Generator, *shape: int, dtype: torch.dtype, gap: int) -> Tensor:
    """The same, as a view whose rows lie `gap` elements further apart than their length."""
    width = torch.Size(shape[1:]).numel()
    wide = torch.full((shape[0], width + gap), float("nan"), dtype=dtype, device=generator.device)
    wide[:, :width] = draw(generator, shape[0], width, dtype=dtype)
    return wide[:, :width].unflatten(1, shape[1:])


def slice_of_wider(tensor: Tensor, before: int, behind: int) -> Tensor:
    """The same numbers between columns of NaN, as a fused projection leaves its parts."""
    shape = (len(tensor), before + tensor[0].numel() + behind)
    wide = torch.full(shape, float("nan"), dtype=tensor.dtype, device=tensor.device)
    return wide[:, before : shape[1] - behind].unflatten(1, tensor.shape[1:]).copy_(tensor)


def poisoned_arena(
    generator: torch.Generator,
    pages: int,
    start: int,
    size: int,
    live: Iterable[int],
    dtype: torch.dtype,
) -> Tensor:
    """Arena [pages, E] of NaN in which only elements [start, start + size) of live pages are numbers."""
    elements = -(-(start + size + 1) // _ALIGN) * _ALIGN
    arena = torch.full((pages, elements), float("nan"), dtype=dtype)
    for page in sorted(set(live) - {NULL_PAGE}):
        arena[page, start : start + size] = draw(generator, size, dtype=dtype)
    return arena


def index(*values: int) -> Tensor:
    """An i32 index tensor."""
    return torch.tensor(values, dtype=torch.int32)


def element_offset(start: int) -> Tensor:
    """The one-element i64 tensor by which a layer finds its region."""
    return torch.tensor([start], dtype=torch.int64)


def page_names(pages: int, generator: torch.Generator | None) -> list[int]:
    """What the pages of a plan are called: the null page keeps its name, all others are shuffled."""
    if generator is None:
        return list(range(pages))
    return [NULL_PAGE, *(1 + torch.randperm(pages - 1, generator=generator)).tolist()]


def decode_pages(rows: int, generator: torch.Generator | None = None) -> tuple[int, Tensor, Tensor]:
    """Number of pages, read pages, write pages: in place, to another page, fresh, padding, in turn.

    The index tensors are longer than the rows, as static buffers are; their tails and the padding name
    an owned page that no row may touch.  With a generator the pages lie in random order.
    """
    untouched = 2 * rows + 1
    name = page_names(untouched + 1, generator)
    read, write = [], []
    for row in range(rows):
        page, other = 2 * row + 1, 2 * row + 2
        pairs = ((page, page), (page, other), (NULL_PAGE, page), (untouched, NULL_PAGE))
        read.append(pairs[row % 4][0])
        write.append(pairs[row % 4][1])
    tail = (untouched, untouched)
    read_page, write_page = (
        index(*(name[page] for page in (*ids, *tail))) for ids in (read, write)
    )
    return untouched + 1, read_page, write_page


@dataclass(frozen=True, slots=True)
class ChunkPages:
    """Pages and chunks of a packed step."""

    pages: int
    read_page: Tensor  # i32[R + 2], longer than the rows
    table: ChunkTable


def chunk_pages(
    lengths: Sequence[int],
    exports: Sequence[Sequence[int]],
    generator: torch.Generator | None = None,
) -> ChunkPages:
    """Rows of `lengths` tokens that also export their state after `exports[row]` tokens.

    Rows in turn: end in place, move to another page, start fresh, put their first export in place.  With a
    generator the pages lie in random order.
    """
    untouched = 1
    read, write, pages = [], [], untouched + 1
    export_page: dict[tuple[int, int], int] = {}
    for row in range(len(lengths)):
        old, new = pages, pages + 1
        pages += 2
        read.append(NULL_PAGE if row % 4 == 2 else old)
        write.append(old if row % 4 == 0 else new)
        for at in exports[row] if row < len(exports) else ():
            if row % 4 == 3 and old not in export_page.values():
                export_page[row, at] = old
            else:
                export_page[row, at], pages = pages, pages + 1
    name = page_names(pages, generator)
    export_name = {at: name[page] for at, page in export_page.items()}
    table = cut_chunks(lengths, [name[page] for page in write], export_name, padding_chunks=2)
    return ChunkPages(pages, index(*(name[page] for page in (*read, untouched, untouched))), table)


def bench_arena(
    generator: torch.Generator, rows: int, elements: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """An arena with one page per row, and the page of each row; where the generator is."""
    device = generator.device
    arena = torch.randn((1 + rows, elements), generator=generator, device=device).to(dtype)
    return arena, 1 + torch.randperm(rows, generator=generator, device=device).int()
