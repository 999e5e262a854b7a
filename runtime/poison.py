"""Debugging: NaN, or nonsense, in whatever no step may read, so that a stray read shows in the output."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from midstream.graphs.dispatch import GraphKey
from midstream.ops.tape import garbage
from midstream.runtime.device_step import DeviceStep
from midstream.runtime.pages import NULL_PAGE, PagePool

if TYPE_CHECKING:
    from midstream.runtime.assembly import Parts

_OF_DECODE = ("decode_token_id", "decode_position", "decode_kv_slot")
_OF_TOKENS = ("token_id", "position", "kv_slot")
_OF_CHUNKS = ("chunk_start", "chunk_row", "chunk_page", "row_chunk", "sample_token")
_ONE_MORE = ("row_start", "chunk_start", "row_chunk")


def poison_free_pages(parts: Parts) -> None:
    """Fill free pages and the null page of both pools; enqueued ahead of the next step."""
    temporal, conv, kv = parts.pools.temporal, parts.pools.conv, parts.pools.kv
    for arena, pool in (
        (temporal, parts.ownership.state_pool),
        (conv, parts.ownership.state_pool),
        (kv, parts.ownership.kv_pool),
    ):
        if arena.shape[1]:
            pages = _free_pages(pool, arena.device)
            parts.runner.queue.run(partial(arena.index_fill_, 0, pages, float("nan")))


def poison_buffers(step: DeviceStep, key: GraphKey, num_deltas: int, logits: Tensor | None) -> None:
    """Fill what a staged step leaves as it was, and what it must write: enqueue behind the stage's copy.

    Args:
        num_deltas: changes of records that the step applies.
        logits: of the captured step, None where it runs eagerly.
    """
    used = used_lengths(key, num_deltas)
    for name, field in step.stage.device.items():
        field[used[name] :].fill_(garbage(field.dtype))
    results = (
        step.token,
        step.logprob,
        step.move_from,
        step.move_to,
        step.move_shift,
        step.num_moves,
    )
    for tensor in (*results, *([] if logits is None else [logits])):
        tensor.fill_(garbage(tensor.dtype))


def used_lengths(key: GraphKey, num_deltas: int) -> Mapping[str, int]:
    """Entries of each field of the stage that a step of this shape may read; the rest is stale.

    >>> used = used_lengths(GraphKey(tokens=4, rows=4, chunks=0), num_deltas=2)
    >>> [used[name] for name in ("row_slot", "row_start", "decode_kv_slot", "kv_slot", "delta_index")]
    [4, 5, 4, 0, 2]
    """
    rows = dict.fromkeys(
        ("row_slot", "row_start", "read_page", "write_page", "row_sample"), key.rows
    )
    deltas = {"delta_count": 1, "delta_index": num_deltas, "delta_value": num_deltas}
    decode = dict.fromkeys(_OF_DECODE, 0 if key.chunks else key.rows)
    tokens = dict.fromkeys(_OF_TOKENS, key.tokens if key.chunks else 0)
    chunks = dict.fromkeys(_OF_CHUNKS, key.chunks)
    if key.chunks:
        chunks |= {"row_chunk": key.rows, "sample_token": key.rows}
    used = rows | deltas | decode | tokens | chunks
    return {n: length + (n in _ONE_MORE and length > 0) for n, length in used.items()}


def _free_pages(pool: PagePool, device: torch.device) -> Tensor:
    return torch.tensor([NULL_PAGE, *pool.free_pages()], device=device)
