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
from midstream.graphs.table import GraphKey
from midstream.ops import host_rows
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
    """Sizes that no step exceeds: each row may add two cuts to those of the chunk and block grids."""
    grids = max_step_tokens // CHUNK + max_step_tokens // state_block
    return StageLimits(
        max_rows=max(max_rows, 2),
        max_step_tokens=max(8, -(-max_step_tokens // 8) * 8),
        max_chunks=grids + 4 * max_rows + 8,
        max_deltas=max(1024, 4 * max_rows),
    )


def _fields(limits: StageLimits) -> dict[str, int]:
    rows, tokens, chunks = limits.max_rows, limits.max_step_tokens, limits.max_chunks
    return {
        # every step
        "delta_count": 1,
        "row_slot": rows,
        "row_start": rows + 1,
        "read_page": rows,
        "write_page": rows,
        "row_sample": rows,
        "decode_token_id": rows,
        "decode_position": rows,
        "decode_kv_slot": rows,
        "delta_index": limits.max_deltas,
        "delta_value": limits.max_deltas,
        # chunk steps
        "sample_token": rows,
        "token_id": tokens,
        "position": tokens,
        "kv_slot": tokens,
        "chunk_start": chunks + 1,
        "chunk_row": chunks,
        "chunk_page": chunks,
        "row_chunk": rows + 1,
    }


class _Cut:
    """Start of each field in the flat area."""

    def __init__(self, limits: StageLimits) -> None:
        self.length = _fields(limits)
        self.start: dict[str, int] = {}
        self.size = 0
        for name, length in self.length.items():
            self.start[name] = self.size
            self.size += -(-length // _FIELD_ALIGN) * _FIELD_ALIGN
        self.decode_size = self.start["sample_token"]

    def of(self, flat: Tensor) -> dict[str, Tensor]:
        return {n: flat[self.start[n] :][:length] for n, length in self.length.items()}


class _Area:
    """One pinned area with its numpy views and the event of the copy that reads it."""

    def __init__(self, cut: _Cut, pinned: bool) -> None:
        self.flat = torch.zeros(cut.size, dtype=torch.int32, pin_memory=pinned)
        self.host: dict[str, I32] = {n: t.numpy() for n, t in cut.of(self.flat).items()}
        self.sent = torch.cuda.Event() if pinned else None


class Stage:
    """Turns plans into device buffers.  `device` holds the tensors that kernels read, at fixed addresses."""

    def __init__(self, limits: StageLimits, device: torch.device) -> None:
        self.limits = limits
        self._cut = _Cut(limits)
        self._flat = torch.zeros(self._cut.size, dtype=torch.int32, device=device)
        self.device = self._cut.of(self._flat)
        self._areas = [_Area(self._cut, device.type == "cuda") for _ in range(_NUM_AREAS)]
        self._turn = 0
        self._every_row = torch.arange(limits.max_rows, dtype=torch.int32, device=device)

    def write_decode(self, plan: StepPlan, live: LiveTable, block: int, kv_block: int, precopy: bool,
                     rows: int) -> None:  # fmt: skip
        """Send a decode step padded to `rows` rows."""
        host = self._next_area().host
        moves = host_rows.fill_decode_rows(
            plan.slot, plan.num_computed, live.state_col, live.resume_page, live.state_table,
            live.kv_table, block, kv_block, precopy, host["row_slot"][:rows],
            host["row_start"][: rows + 1], host["decode_position"][:rows], host["decode_kv_slot"][:rows],
            host["decode_token_id"][:rows], host["read_page"][:rows], host["write_page"][:rows],
        )  # fmt: skip
        assert moves != host_rows.REFUSED, "a row outside of the slots' tables"
        host["row_sample"][: plan.num_rows] = 1
        host["row_sample"][plan.num_rows : rows] = 0
        self._send(plan.deltas, self._cut.decode_size)

    def write_chunks(
        self,
        plan: StepPlan,
        live: LiveTable,
        block: int,
        kv_block: int,
        precopy: bool,
        pad: Callable[[GraphKey], GraphKey],
    ) -> GraphKey:
        """Send a step with prompt chunks, padded to the shape that `pad` gives for its own; returns that."""
        host = self._next_area().host
        num_rows, row_start = plan.num_rows, host["row_start"]
        num_tokens = int(host_rows.fill_row_starts(plan.num_new, row_start))
        host["token_id"][:num_tokens] = -1  # decoding rows: the device knows
        for row, chunk in enumerate(plan.chunks):
            known = live.tokens[chunk.request.slot, chunk.begin : chunk.end]
            host["token_id"][row_start[row] : row_start[row + 1]] = known
        host_rows.fill_positions(plan.num_computed, plan.num_new, row_start, host["position"])
        places = host_rows.fill_kv_slots(
            plan.slot, plan.num_computed, plan.num_new, row_start, live.kv_table, kv_block, host["kv_slot"]
        )  # fmt: skip
        moves = host_rows.fill_pages(
            plan.slot, plan.num_computed, plan.num_new, live.state_col, live.resume_page,
            live.state_table, block, precopy, host["read_page"], host["write_page"],
        )  # fmt: skip
        assert host_rows.REFUSED not in (places, moves), "a row outside of the slots' tables"
        num_chunks = _fill_chunk_tables(plan, host)
        shape = pad(GraphKey(num_tokens, num_rows, num_chunks))
        _fill_rows(plan, host, shape)
        host_rows.pad_chunks(
            num_rows, num_chunks, host["chunk_start"][: shape.chunks + 1], host["chunk_row"][: shape.chunks],
            host["chunk_page"][: shape.chunks], host["row_chunk"][: shape.rows + 1],
        )  # fmt: skip
        self._send(plan.deltas, self._cut.size)
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

    def _next_area(self) -> _Area:
        self._turn = (self._turn + 1) % _NUM_AREAS
        area = self._areas[self._turn]
        if area.sent is not None:
            area.sent.synchronize()  # the copy of three steps ago
        return area

    def send_deltas(self, deltas: dict[int, int]) -> None:
        """Send deltas alone, ahead of a step that has more of them than fit into one copy."""
        self._next_area()
        self._send(deltas, self._cut.decode_size)

    def _send(self, deltas: dict[int, int], size: int) -> None:
        area, count = self._areas[self._turn], len(deltas)
        assert count <= self.limits.max_deltas
        area.host["delta_count"][0] = count
        area.host["delta_index"][:count] = list(deltas)
        area.host["delta_value"][:count] = list(deltas.values())
        self._flat[:size].copy_(area.flat[:size], non_blocking=True)
        if area.sent is not None:
            area.sent.record()


def _fill_chunk_tables(plan: StepPlan, host: dict[str, I32]) -> int:
    """Cut the rows into chunks; returns their number."""
    export_start = np.zeros(plan.num_rows + 1, np.int32)
    counts = [len(chunk.export_position) for chunk in plan.chunks]
    export_start[1 : len(counts) + 1] = np.cumsum(counts)
    export_start[len(counts) + 1 :] = sum(counts)
    position = np.array([p for c in plan.chunks for p in c.export_position], np.int32)
    page = np.array([p for c in plan.chunks for p in c.export_page], np.int32)
    chunks = host_rows.fill_chunks(
        host["row_start"], plan.num_computed, plan.num_new, host["write_page"], export_start,
        position, page, CHUNK, host["chunk_start"], host["chunk_row"], host["chunk_page"],
        host["row_chunk"],
    )  # fmt: skip
    assert chunks != host_rows.REFUSED, (
        "exports outside of their chunk, or more chunks than planned"
    )
    return int(chunks)


def _fill_rows(plan: StepPlan, host: dict[str, I32], shape: GraphKey) -> None:
    """Slots and sampling of the rows, and padding up to `shape`."""
    num_rows, rows, tokens = plan.num_rows, shape.rows, shape.tokens
    host["row_slot"][:num_rows] = plan.slot
    host["row_sample"][:num_rows] = plan.samples
    host["row_sample"][num_rows:rows] = 0
    host["sample_token"][:num_rows] = host["row_start"][1 : num_rows + 1] - 1
    host["sample_token"][num_rows:rows] = 0
    host_rows.pad_rows(
        num_rows, int(host["row_start"][num_rows]), host["row_slot"][:rows],
        host["row_start"][: rows + 1], host["read_page"][:rows], host["write_page"][:rows],
        host["token_id"][:tokens], host["position"][:tokens], host["kv_slot"][:tokens],
    )  # fmt: skip
