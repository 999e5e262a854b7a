"""
How a packed step is cut into chunks: pieces of at most `CHUNK` tokens that belong to one row.

Chunk ops read four index tensors, the same for all layers of a step.  The engine fills them with compiled
host code; this file says what they mean and builds them for tests and cases.

Letters: R rows, Q chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.ops.registry import NULL_PAGE, PADDING

CHUNK = 64  # tokens at most; tile size of the chunk kernels


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """Chunks of a row are consecutive; a chunk ends wherever the state of its row must be exported."""

    chunk_start: (
        Tensor  # i32[Q + 1]  first token in the packed step; the last entry counts the tokens
    )
    chunk_row: Tensor  # i32[Q]      row of the chunk, PADDING in padding (which has no tokens)
    chunk_page: Tensor  # i32[Q]      page that receives the state after the chunk, NULL_PAGE: none
    row_chunk: Tensor  # i32[R + 1]  first chunk of each row


def cut_chunks(
    lengths: Sequence[int],
    write_page: Sequence[int],
    exports: Mapping[tuple[int, int], int] | None = None,
    padding_chunks: int = 0,
) -> ChunkTable:
    """Cut rows of `lengths` tokens; `exports[row, tokens]` is the page for the state after so many tokens.

    >>> cut_chunks([70, 3], [5, 6], {(0, 10): 4}).chunk_start.tolist()
    [0, 10, 70, 73]
    """
    start, row_of, page_of, row_chunk = [0], [], [], [0]
    for row, length in enumerate(lengths):
        pages = {at: page for (r, at), page in (exports or {}).items() if r == row}
        pages[length] = write_page[row]
        done = 0
        while done < length:
            end = min(at for at in (*pages, done + CHUNK) if at > done)
            start.append(start[-1] + end - done)
            row_of.append(row)
            page_of.append(pages.get(end, NULL_PAGE))
            done = end
        row_chunk.append(len(row_of))
    start += [start[-1]] * padding_chunks
    row_of += [PADDING] * padding_chunks
    page_of += [NULL_PAGE] * padding_chunks
    return ChunkTable(
        *(torch.tensor(v, dtype=torch.int32) for v in (start, row_of, page_of, row_chunk))
    )
