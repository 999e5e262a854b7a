"""
Steps of the rows of one cache: a prompt packed without its padding, or one token for each row.

A decode step is one graph for each batch size, captured when that size first comes.  Per call the host
copies the token ids, replays and hands out a copy of the logits; positions move on inside the graph.

Letters: B rows of the cache, T tokens without padding, W columns of the padded batch, K columns kept,
L vocabulary.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.compiler.context import StepView
from midstream.compiler.lowering import LoweredModel
from midstream.compiler.row_cache import MidstreamCache
from midstream.compiler.row_memory import RowMemory
from midstream.errors import CapacityError
from midstream.graphs.addresses import ParameterWatch
from midstream.graphs.captured import Captured, Capturer
from midstream.ops.chunk_table import cut_chunks

Mask = NDArray[np.bool_]  # [B, W]  False in padding

_TOKENS_UNIT = 8  # tokens of a packed step are a multiple: matrix kernels want it

_log = logging.getLogger("midstream")


class RowSteps:
    """Runs a lowered model for the caches of one `RowMemory`."""

    def __init__(self, lowered: LoweredModel, memory: RowMemory, capturer: Capturer | None) -> None:
        """`capturer`: None runs decode steps eagerly."""
        self.lowered = lowered
        self.memory = memory
        self.counts: Counter[str] = Counter()  # steps by how they ran
        self.graphs: dict[int, Captured] = {}  # by batch size
        self._capturer = capturer
        self._logits: dict[int, Tensor] = {}  # [B, L] of captured steps
        self._staged: tuple[list[int], list[int]] | None = None  # rows, lengths as the tensors say
        self._parameters = ParameterWatch(lowered.model)

    def decode(self, cache: MidstreamCache, token_id: Tensor) -> Tensor:
        """One token for each row, token_id [B]; returns logits [B, L] that later steps leave alone.

        Raises:
            CapacityError: when a row is full.
        """
        self._check_room(cache, [1] * len(cache.rows))
        rows = len(cache.rows)
        if self._capturer is not None and rows not in self.graphs:
            self._capture(rows, self._capturer)
        if self._staged != (cache.rows, cache.lengths):
            self.memory.stage(cache.rows, cache.lengths)
        self._staged = None  # until the step has been enqueued
        self.memory.token_id[:rows].copy_(token_id)
        graph = self.graphs.get(rows)
        if graph is None:
            self.counts["eager"] += 1
            logits = self._decode(rows)
        else:
            self.counts["replayed"] += 1
            graph.replay()
            logits = self._logits[rows].clone()
        cache.lengths = [length + 1 for length in cache.lengths]
        cache.num_columns += 1
        self._staged = list(cache.rows), cache.lengths  # a cache never writes into its lengths
        return logits

    def prefill(
        self, cache: MidstreamCache, ids: Tensor, mask: Mask | None, keep: Sequence[int]
    ) -> Tensor:
        """New columns ids [B, W] behind those that the cache has; returns logits [B, K, L] of columns `keep`.

        Logits of padding columns are zeros.  Graphs that hold addresses of weights moved since are dropped.
        Raises:
            CapacityError: when a row has no room.
        """
        real: Mask = np.ones(tuple(ids.shape), bool) if mask is None else mask
        lengths = real.sum(1).tolist()
        if not cache.rows:
            cache.start(len(lengths))
        self._check_room(cache, lengths)
        self._follow_weights()
        self._staged = None
        self.counts["prefill"] += 1
        index = (real.cumsum().reshape(real.shape) - 1)[:, keep]  # of a column in the packed tokens
        kept = real[:, keep]
        sample = torch.from_numpy(np.where(kept, index, 0).reshape(-1)).to(ids.device)
        logits = self.lowered.forward(self._chunk_view(cache, ids, real, lengths, sample))
        logits = logits.view(len(lengths), len(keep), -1)
        if not kept.all():
            logits[torch.from_numpy(~kept).to(ids.device)] = 0
        cache.lengths = [old + new for old, new in zip(cache.lengths, lengths, strict=True)]
        cache.num_columns += real.shape[1]
        return logits

    def forget_graphs(self) -> None:
        """Release all graphs; the next decode steps capture again."""
        for graph in self.graphs.values():
            graph.release()
        self.graphs.clear()
        self._logits.clear()
        if self._capturer is not None:
            self._capturer.release()

    def _follow_weights(self) -> None:
        moved = self._parameters.moved()
        if moved:
            _log.info("%d weights moved (%s ...): graphs are captured again", len(moved), moved[0])
            self.forget_graphs()
            self._parameters.bind()

    def _decode(self, rows: int) -> Tensor:
        logits = self.lowered.forward(self.memory.decode_view(rows))
        self.memory.move_on(rows)
        return logits

    def _capture(self, rows: int, capturer: Capturer) -> None:
        """Record a step of padding only: warm-up runs touch no row."""
        self.memory.blank()
        self._staged = None

        def step() -> None:
            self._logits[rows] = self._decode(rows)

        name = f"decode of {rows} rows"
        self.graphs[rows] = capturer.capture(step, self.memory.addresses, name)

    def _check_room(self, cache: MidstreamCache, new: Sequence[int]) -> None:
        longest = max(old + more for old, more in zip(cache.lengths, new, strict=True))
        if longest > self.memory.max_len:
            raise CapacityError(
                f"midstream.compile: a row would hold {longest} tokens, compiled for max_len="
                f"{self.memory.max_len}; expected prompt and answer together within it; generate fewer "
                "tokens, or compile with a larger max_len"
            )

    def _chunk_view(
        self, cache: MidstreamCache, ids: Tensor, real: Mask, lengths: list[int], sample: Tensor
    ) -> StepView:
        """The packed step.  Padded to at least two rows and two chunks, which compiled code treats alike."""
        memory, device = self.memory, ids.device
        num_tokens = sum(lengths)
        pad = -num_tokens % _TOKENS_UNIT
        pad_rows = max(0, 2 - len(lengths))
        pages = [memory.state_page(row) for row in cache.rows] + [0] * pad_rows
        fresh = [page if old else 0 for page, old in zip(pages, cache.lengths, strict=False)]
        new = lengths + [0] * pad_rows
        chunks = cut_chunks(new, pages)
        if len(chunks.chunk_row) < 2:
            chunks = cut_chunks(new, pages, padding_chunks=1)
        position, kv_slot = self._places(cache, lengths)

        def i32(values: Sequence[int] | NDArray[np.int64], padding: int = 0, by: int = 0) -> Tensor:
            whole = np.append(np.asarray(values, np.int32), np.full(padding, by, np.int32))
            return torch.from_numpy(whole).to(device)

        flat = ids.reshape(-1)
        if num_tokens < flat.numel():
            flat = flat[torch.from_numpy(real.reshape(-1).nonzero()[0]).to(device)]
        return StepView(
            kind="chunk",
            token_id=torch.nn.functional.pad(flat.to(torch.int32), (0, pad)),
            position=i32(position, pad),
            kv_slot=i32(kv_slot, pad, -1),
            row_slot=i32(cache.rows, pad_rows, -1),
            row_start=i32([0, *np.cumsum(new).tolist()]),
            read_page=i32(fresh, pad_rows),
            write_page=i32(pages),
            sample_token=sample,
            chunk_start=chunks.chunk_start.to(device),
            chunk_row=chunks.chunk_row.to(device),
            chunk_page=chunks.chunk_page.to(device),
            row_chunk=chunks.row_chunk.to(device),
        )

    def _places(
        self, cache: MidstreamCache, lengths: list[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions of the packed tokens, and where the KV pool keeps them."""
        spans = [np.arange(old, old + new) for old, new in zip(cache.lengths, lengths, strict=True)]
        first = [self.memory.kv_slot(row, 0) for row in cache.rows]
        slots = [span + base for span, base in zip(spans, first, strict=True)]
        return np.concatenate(spans), np.concatenate(slots)
