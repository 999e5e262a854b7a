"""
The kernels of ops/host_rows.py in vectorised NumPy: what the compiled ones are compared with.

Same names, arguments and results; no checks of indices, and `fill_chunks` knows no exports.
Letters: R rows, T tokens, S slots, Z columns of a table, Q chunks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]


def fill_row_starts(num_new: I32, row_start: I32) -> int:
    row_start[0] = 0
    np.cumsum(num_new, out=row_start[1:])
    return int(row_start[-1])


def fill_positions(num_computed: I32, num_new: I32, row_start: I32, position: I32) -> int:
    tokens = int(row_start[-1])
    position[:tokens] = np.arange(tokens) + np.repeat(num_computed - row_start[:-1], num_new)
    return tokens


def fill_kv_slots(
    slot: I32, num_computed: I32, num_new: I32, row_start: I32, kv_table: I32, kv_block: int, kv_slot: I32
) -> int:  # fmt: skip
    tokens = int(row_start[-1])
    position = np.arange(tokens) + np.repeat(num_computed - row_start[:-1], num_new)
    page = kv_table[np.repeat(slot, num_new), position // kv_block]
    kv_slot[:tokens] = page * kv_block + position % kv_block
    return tokens


def fill_pages(
    slot: I32, num_computed: I32, num_new: I32, state_col: I32, resume_page: I32, state_table: I32,
    block: int, precopy: bool, read_page: I32, write_page: I32,
) -> int:  # fmt: skip
    before, source = state_col[slot], resume_page[slot]
    from_table = (source == 0) & (before >= 0)
    source = np.where(from_table, state_table[slot, before], source)
    state_col[slot] = after = (num_computed + num_new - 1) // block
    resume_page[slot] = 0
    rows, target = len(slot), state_table[slot, after]
    write_page[:rows] = target
    read_page[:rows] = np.where(source != 0, target, 0) if precopy else source
    return int(np.count_nonzero((source != 0) & (source != target)))


def fill_chunks(
    row_start: I32, num_computed: I32, num_new: I32, write_page: I32, export_start: I32,
    export_position: I32, export_page: I32, chunk: int, chunk_start: I32, chunk_row: I32,
    chunk_page: I32, row_chunk: I32,
) -> int:  # fmt: skip
    rows, chunks_of = len(num_new), -(-num_new // chunk)
    row_chunk[0] = 0
    np.cumsum(chunks_of, out=row_chunk[1 : rows + 1])
    count = int(row_chunk[rows])
    first = np.repeat(row_start[:rows] - chunk * row_chunk[:rows], chunks_of)
    chunk_start[:count] = first + chunk * np.arange(count)
    chunk_start[count] = row_start[rows]
    chunk_row[:count] = np.repeat(np.arange(rows), chunks_of)
    chunk_page[:count] = 0
    chunk_page[row_chunk[1 : rows + 1] - 1] = write_page[:rows]
    return count


def pad_rows(
    rows: int, tokens: int, row_slot: I32, row_start: I32, read_page: I32, write_page: I32,
    token_id: I32, position: I32, kv_slot: I32,
) -> None:  # fmt: skip
    row_slot[rows:], read_page[rows:], write_page[rows:] = -1, 0, 0
    row_start[rows + 1 :] = row_start[rows]
    token_id[tokens:], position[tokens:], kv_slot[tokens:] = 0, 0, -1


def pad_chunks(
    rows: int, chunks: int, chunk_start: I32, chunk_row: I32, chunk_page: I32, row_chunk: I32
) -> None:
    chunk_start[chunks + 1 :] = chunk_start[chunks]
    chunk_row[chunks:], chunk_page[chunks:], row_chunk[rows + 1 :] = -1, 0, chunks


def fill_deltas(
    table: I32, slot: I32, col_begin: I32, col_end: I32, base: int, index: I32, value: I32, count: int
) -> int:  # fmt: skip
    columns = col_end - col_begin
    end = count + int(columns.sum())
    first = slot * table.shape[1] + col_begin
    place = np.arange(end - count) + np.repeat(first - np.cumsum(columns) + columns, columns)
    index[count:end] = base + place
    value[count:end] = table.reshape(-1)[place]
    return end


def fill_decode_rows(
    slot: I32, num_computed: I32, state_col: I32, resume_page: I32, state_table: I32, kv_table: I32,
    block: int, kv_block: int, precopy: bool, row_slot: I32, row_start: I32, position: I32,
    kv_slot: I32, token_id: I32, read_page: I32, write_page: I32,
) -> int:  # fmt: skip
    rows = len(slot)
    moves = fill_pages(
        slot, num_computed, np.int32(1), state_col, resume_page, state_table, block, precopy,  # type: ignore[arg-type]
        read_page, write_page,
    )  # fmt: skip
    row_slot[:rows], row_start[:rows], position[:rows] = slot, np.arange(rows), num_computed
    page = kv_table[slot, num_computed // kv_block]
    kv_slot[:rows] = page * kv_block + num_computed % kv_block
    token_id[:rows], row_start[rows] = -1, rows
    pad_rows(rows, rows, row_slot, row_start, read_page, write_page, token_id, position, kv_slot)
    return moves
