"""
The kernels of ops/host_rows.py in vectorised NumPy: what the compiled ones are compared with.

Same names, arguments and results; no checks of indices, and `fill_chunks` knows no exports.
Letters: R rows, T tokens, S slots, Z columns of a table, Q chunks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from midstream.ops import host_rows

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
    slot: I32, num_computed: I32, num_new: I32, samples: I32, tokens: I32, num_known: int, kv_table: I32,
    area: I32, start: I64, kv_block: int,
) -> int:  # fmt: skip
    to, rows = _Fields(area, start), len(slot)
    row_start = to.row_start[: rows + 1]
    row_start[0] = 0
    np.cumsum(num_new, out=row_start[1:])
    total, known = int(row_start[rows]), int(row_start[num_known])
    to.row_slot[:rows], to.row_sample[:rows] = slot, samples
    to.sample_token[:rows] = row_start[1:] - 1
    position = np.arange(total) + np.repeat(num_computed - row_start[:-1], num_new)
    record = np.repeat(slot, num_new)
    to.position[:total] = position
    to.kv_slot[:total] = kv_table[record, position // kv_block] * kv_block + position % kv_block
    to.token_id[:known] = tokens[record[:known], position[:known]]
    to.token_id[known:total] = -1
    return total


def fill_pages(
    slot: I32, num_computed: I32, num_new: I32, state_col: I32, resume_page: I32, state_table: I32,
    area: I32, start: I64, block: int, precopy: bool,
) -> int:  # fmt: skip
    to, rows = _Fields(area, start), len(slot)
    before, source = state_col[slot], resume_page[slot]
    from_table = (source == 0) & (before >= 0)
    source = np.where(from_table, state_table[slot, before], source)
    state_col[slot] = after = (num_computed + num_new - 1) // block
    resume_page[slot] = 0
    target = state_table[slot, after]
    to.write_page[:rows] = target
    to.read_page[:rows] = np.where(source != 0, target, 0) if precopy else source
    return int(np.count_nonzero((source != 0) & (source != target)))


def fill_chunks(
    num_computed: I32, num_new: I32, export_start: I32, export_position: I32, export_page: I32, area: I32,
    start: I64, chunk: int,
) -> int:  # fmt: skip
    to, rows, chunks_of = _Fields(area, start), len(num_new), -(-num_new // chunk)
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
    chunk_page[row_chunk[1:] - 1] = to.write_page[:rows]
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
    plan_rows: I32, num_rows: int, state_col: I32, resume_page: I32, state_table: I32, kv_table: I32,
    deltas: I32, num_deltas: I32, most_deltas: int, area: I32, start: I64, rows: int, block: int,
    kv_block: int, precopy: bool,
) -> int:  # fmt: skip
    to, live = _Fields(area, start), num_rows
    slot, num_computed = plan_rows[0, :live], plan_rows[1, :live]
    fill_deltas(deltas, num_deltas, most_deltas, area, start)
    moves = fill_pages(
        slot, num_computed, np.int32(1), state_col, resume_page, state_table, area, start, block,  # type: ignore[arg-type]
        precopy,
    )  # fmt: skip
    to.row_slot[:live], to.row_start[:live] = slot, np.arange(live)
    to.decode_position[:live], to.decode_token_id[:live], to.row_sample[:live] = num_computed, -1, 1
    page = kv_table[slot, num_computed // kv_block]
    to.decode_kv_slot[:live] = page * kv_block + num_computed % kv_block
    to.row_slot[live:rows], to.row_start[live : rows + 1] = -1, live
    to.read_page[live:rows], to.write_page[live:rows], to.row_sample[live:rows] = 0, 0, 0
    to.decode_token_id[live:rows], to.decode_position[live:rows] = 0, 0
    to.decode_kv_slot[live:rows] = -1
    return moves


pad_step = host_rows.pad_step_py  # is vectorised NumPy already
