"""
The kernels of ops/host_rows.py in vectorised NumPy: what the compiled ones are compared with.

Same names, arguments and results; no checks of indices, and `fill_chunks` knows no exports.
Letters: R rows, T tokens, S slots, Z columns of a table, Q chunks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from midstream.ops import host_rows
from midstream.ops.host_decode import COMPUTED, KV_SLOT, NEW, PAGE, SLOT

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


class _Fields:
    """The fields of an area by name."""

    def __init__(self, area: I32, start: I64) -> None:
        self.area, self.start = area, start

    def __getattr__(self, name: str) -> I32:
        field = _PLACE[name]
        view: I32 = self.area[self.start[field] : self.start[field + 1]]
        return view


_PLACE = {name: place for place, name in enumerate(host_rows.FIELDS)}


def fill_token_rows(
    plan_rows: I32, num_rows: int, tokens: I32, num_known: int, kv_table: I32, area: I32, start: I64,
    kv_block: int,
) -> int:  # fmt: skip
    to, rows = _Fields(area, start), num_rows
    slot, num_computed, num_new, samples, _, page, planned, _ = plan_rows[:, :rows]
    row_start = to.row_start[: rows + 1]
    row_start[0] = 0
    np.cumsum(num_new, out=row_start[1:])
    total, known = int(row_start[rows]), int(row_start[num_known])
    to.row_slot[:rows], to.row_sample[:rows], to.write_page[:rows] = slot, samples, page
    to.sample_token[:rows] = row_start[1:] - 1
    position = np.arange(total) + np.repeat(num_computed - row_start[:-1], num_new)
    to.position[:total] = position
    record, place = np.repeat(slot[:num_known], num_new[:num_known]), position[:known]
    to.kv_slot[:known] = kv_table[record, place // kv_block] * kv_block + place % kv_block
    to.kv_slot[known:total] = planned[num_known:]
    to.token_id[:known] = tokens[record, place]
    to.token_id[known:total] = -1
    return total


def fill_chunks(
    plan_rows: I32, num_rows: int, export_start: I32, export_position: I32, export_page: I32,
    area: I32, start: I64, chunk: int,
) -> int:  # fmt: skip
    to, rows = _Fields(area, start), num_rows
    chunks_of = -(-plan_rows[NEW, :rows] // chunk)
    row_chunk, row_start = to.row_chunk[: rows + 1], to.row_start
    row_chunk[0] = 0
    np.cumsum(chunks_of, out=row_chunk[1:])
    count = int(row_chunk[rows])
    first = np.repeat(row_start[:rows] - chunk * row_chunk[:rows], chunks_of)
    to.chunk_start[:count] = first + chunk * np.arange(count)
    to.chunk_start[count] = row_start[rows]
    to.chunk_row[:count] = np.repeat(np.arange(rows), chunks_of)
    chunk_page = to.chunk_page
    chunk_page[:count] = 0
    chunk_page[row_chunk[1:] - 1] = plan_rows[PAGE, :rows]
    return count


def fill_deltas(deltas: I32, num_deltas: I32, most: int, area: I32, start: I64) -> int:
    to, total = _Fields(area, start), int(num_deltas[0])
    count = min(total, most)
    to.delta_count[0] = count
    to.delta_index[:count] = deltas[0, total - count : total]
    to.delta_value[:count] = deltas[1, total - count : total]
    num_deltas[0] = total - count
    return total - count


def fill_decode_step(
    plan_rows: I32, num_rows: int, deltas: I32, num_deltas: I32, most_deltas: int, area: I32,
    start: I64, rows: int,
) -> int:  # fmt: skip
    to, live = _Fields(area, start), num_rows
    fill_deltas(deltas, num_deltas, most_deltas, area, start)
    to.row_slot[:live], to.row_start[:live] = plan_rows[SLOT, :live], np.arange(live)
    to.write_page[:live], to.decode_position[:live] = (
        plan_rows[PAGE, :live],
        plan_rows[COMPUTED, :live],
    )
    to.decode_kv_slot[:live] = plan_rows[KV_SLOT, :live]
    to.decode_token_id[:live], to.row_sample[:live] = -1, 1
    to.row_slot[live:rows], to.row_start[live : rows + 1] = -1, live
    to.write_page[live:rows], to.row_sample[live:rows] = 0, 0
    to.decode_token_id[live:rows], to.decode_position[live:rows] = 0, 0
    to.decode_kv_slot[live:rows] = -1
    return int(to.delta_count[0])


pad_step = host_rows.pad_step_py  # is vectorised NumPy already
