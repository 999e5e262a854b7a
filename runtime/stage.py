"""
The one way of host data to the device: write a pinned area, send it with one asynchronous copy.

The area is a flat int32 vector; the same cut gives named numpy views on the host and named tensor views on
the device.  Fields that a decode step needs lie first, so that it sends only those.  Areas rotate: one is
written again only after the copy that read it has finished.
Letters: R rows, T tokens, Q chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from midstream.compiler.context import StepView
from midstream.graphs.ladder import chunks_of
from midstream.graphs.queue import DeviceQueue, queue_of
from midstream.graphs.table import GraphKey
from midstream.ops import host_rows
from midstream.runtime.deltas import Deltas
from midstream.runtime.live import I32, LiveTable
from midstream.runtime.plan import StepPlan

CHUNK = 64  # tokens of a chunk at most: the tile of the scans and of attention queries
_FIELD_ALIGN = 32  # int32 elements: 128 bytes
_NUM_AREAS = 3  # one being written, one in flight, one to spare


@dataclass(frozen=True, slots=True)
class StageLimits:
    """Sizes of the static buffers."""

    max_rows: int
    max_step_tokens: int
    max_chunks: int
    max_deltas: int  # per copy; more deltas take more copies


def stage_limits(max_rows: int, max_step_tokens: int, state_block: int) -> StageLimits:
    """Sizes that no step exceeds, padded ones included; each row may add two cuts to those of both grids."""
    grids = max_step_tokens // CHUNK + max_step_tokens // state_block
    tokens = max(8, -(-max_step_tokens // 8) * 8)
    return StageLimits(
        max_rows=max(max_rows, 2),
        max_step_tokens=tokens,
        max_chunks=max(grids + 4 * max_rows + 8, chunks_of(tokens, max_rows)),
        max_deltas=max(1024, 4 * max_rows),
    )


def _lengths(limits: StageLimits) -> dict[str, int]:
    rows, tokens, chunks = limits.max_rows, limits.max_step_tokens, limits.max_chunks
    of_one_row_more = {"row_start": rows + 1, "row_chunk": rows + 1}
    of_tokens = dict.fromkeys(("token_id", "position", "kv_slot"), tokens)
    of_chunks = {"chunk_start": chunks + 1, "chunk_row": chunks, "chunk_page": chunks}
    of_deltas = dict.fromkeys(("delta_index", "delta_value"), limits.max_deltas)
    other = {"delta_count": 1, **of_one_row_more, **of_tokens, **of_chunks, **of_deltas}
    return {name: other.get(name, rows) for name in host_rows.FIELDS}


class Cut:
    """Start of each field in the flat area."""

    def __init__(self, limits: StageLimits) -> None:
        self.length = _lengths(limits)
        # one line more than needed: fields of 1024 rows, 4 KiB apart, would share cache sets
        sizes = [(-(-length // _FIELD_ALIGN) + 1) * _FIELD_ALIGN for length in self.length.values()]
        self.starts = np.cumsum([0, *sizes], dtype=np.int64)  # i64[fields + 1]
        self.start = dict(zip(self.length, self.starts.tolist(), strict=False))
        self.size = int(self.starts[-1])
        self.quiet_size = self.start["delta_index"]
        self.decode_size = self.start["sample_token"]

    def of(self, flat: Tensor) -> dict[str, Tensor]:
        return {n: flat[self.start[n] :][:length] for n, length in self.length.items()}


class _Area:
    """One pinned area and the event of the copy that reads it."""

    def __init__(self, cut: Cut, queue: DeviceQueue) -> None:
        self.flat = queue.host_zeros((cut.size,), torch.int32)
        self.words: I32 = self.flat.numpy()  # all fields, for the index kernels
        self.decode_part = self.flat[: cut.decode_size]
        self.quiet_part = self.flat[: cut.quiet_size]
        self.sent = queue.new_event()


class Stage:
    """Turns plans into device buffers.  `device` holds the tensors that kernels read, at fixed addresses."""

    def __init__(
        self, limits: StageLimits, device: torch.device, queue: DeviceQueue | None = None
    ) -> None:
        """`queue`: the device's work, by default what a device of its type has."""
        self.limits = limits
        self._queue = queue or queue_of(device)
        self._cut = Cut(limits)
        self._flat = torch.zeros(self._cut.size, dtype=torch.int32, device=device)
        self._decode_part = self._flat[: self._cut.decode_size]
        self._quiet_part = self._flat[: self._cut.quiet_size]  # of a decode step without deltas
        self.device = self._cut.of(self._flat)
        self._areas = [_Area(self._cut, self._queue) for _ in range(_NUM_AREAS)]
        self._turn = 0
        self._every_row = torch.arange(limits.max_rows, dtype=torch.int32, device=device)

    def write_decode(self, plan: StepPlan, deltas: Deltas, rows: int) -> None:
        """Send a decode step padded to `rows` rows, and all deltas."""
        area = self._next_area()
        num_deltas = host_rows.fill_decode_step(
            plan.rows, plan.num_rows, deltas.table, deltas.count, self.limits.max_deltas,
            area.words, self._cut.starts, rows,
        )  # fmt: skip
        assert num_deltas != host_rows.REFUSED, "more rows than the step has, or excess deltas"
        if num_deltas:
            self._send(area, self._decode_part, area.decode_part)
        else:
            self._send(area, self._quiet_part, area.quiet_part)

    def write_chunks(
        self, plan: StepPlan, live: LiveTable, kv_block: int, pad: Callable[[GraphKey], GraphKey]
    ) -> GraphKey:
        """Send a step with prompt chunks and all deltas, padded to the shape that `pad` gives for its own.

        Returns that shape.
        """
        area = self._next_area()
        rows, num_rows, words, starts = plan.rows, plan.num_rows, area.words, self._cut.starts
        num_tokens = host_rows.fill_token_rows(
            rows, num_rows, live.tokens, len(plan.chunks), live.kv_table, words, starts, kv_block
        )
        assert num_tokens != host_rows.REFUSED, "a row outside of the slots' tables"
        num_chunks = host_rows.fill_chunks(rows, num_rows, *_exports(plan), words, starts, CHUNK)
        assert num_chunks != host_rows.REFUSED, (
            "exports outside of their chunk, or more chunks than planned"
        )
        shape = pad(GraphKey(num_tokens, num_rows, num_chunks))
        host_rows.pad_step(
            words, starts, num_rows, num_tokens, num_chunks, shape.rows, shape.tokens, shape.chunks
        )
        excess = self._fill_deltas(area, live.deltas)
        assert not excess, "send_excess comes first"
        self._send(area, self._flat, area.flat)
        return shape

    def decode_view(self, rows: int) -> StepView:
        """The tensors of a decode step of `rows` rows; always the same addresses."""
        fields = self.device
        return StepView(
            kind="decode",
            token_id=fields["decode_token_id"][:rows],
            position=fields["decode_position"][:rows],
            kv_slot=fields["decode_kv_slot"][:rows],
            sample_token=self._every_row[:rows],
            **self._row_fields(rows),
        )

    def chunk_view(self, shape: GraphKey) -> StepView:
        """The tensors of a step with prompt chunks."""
        fields = self.device
        return StepView(
            kind="chunk",
            token_id=fields["token_id"][: shape.tokens],
            position=fields["position"][: shape.tokens],
            kv_slot=fields["kv_slot"][: shape.tokens],
            sample_token=fields["sample_token"][: shape.rows],
            chunk_start=fields["chunk_start"][: shape.chunks + 1],
            chunk_row=fields["chunk_row"][: shape.chunks],
            chunk_page=fields["chunk_page"][: shape.chunks],
            row_chunk=fields["row_chunk"][: shape.rows + 1],
            **self._row_fields(shape.rows),
        )

    @property
    def num_deltas(self) -> int:
        """Changes of records in the step that was staged last."""
        return int(self._areas[self._turn].words[self._cut.start["delta_count"]])

    def addresses(self) -> dict[str, int]:
        """Data pointers by field; a captured graph is valid only while they stay equal."""
        return {name: tensor.data_ptr() for name, tensor in self.device.items()}

    def _row_fields(self, rows: int) -> dict[str, Tensor]:
        fields = self.device
        return {
            "row_slot": fields["row_slot"][:rows],
            "row_start": fields["row_start"][: rows + 1],
            "read_page": fields["read_page"][:rows],
            "write_page": fields["write_page"][:rows],
        }

    def send_excess(self, deltas: Deltas) -> bool:
        """Send as many deltas as a copy holds if there are more than that; False otherwise.

        The caller applies them on the device, and asks again.
        """
        if len(deltas) <= self.limits.max_deltas:
            return False
        area = self._next_area()
        self._fill_deltas(area, deltas)
        self._send(area, self._decode_part, area.decode_part)
        return True

    def _next_area(self) -> _Area:
        self._turn = (self._turn + 1) % _NUM_AREAS
        area = self._areas[self._turn]
        area.sent.synchronize()  # the copy of three steps ago
        return area

    def _fill_deltas(self, area: _Area, deltas: Deltas) -> int:
        left: int = host_rows.fill_deltas(
            deltas.table, deltas.count, self.limits.max_deltas, area.words, self._cut.starts
        )
        return left

    def _send(self, area: _Area, target: Tensor, source: Tensor) -> None:
        self._queue.copy(target, source)
        area.sent.record()


def _exports(plan: StepPlan) -> tuple[I32, I32, I32]:
    """First export of each row, and of all of them the position and the page."""
    counts = np.zeros(plan.num_rows + 1, np.int32)
    counts[1 : len(plan.chunks) + 1] = [len(chunk.export_position) for chunk in plan.chunks]
    position = np.array([p for c in plan.chunks for p in c.export_position], np.int32)
    page = np.array([p for c in plan.chunks for p in c.export_page], np.int32)
    return np.cumsum(counts, dtype=np.int32), position, page
