"""
Index arithmetic of a step on the host: arrays of row data in, flat index arrays out, by Numba.

All arrays are C-contiguous int32 and belong to the caller (views of the staging area); nothing is
allocated and the interpreter lock is released.  A result of REFUSED means that an index lies
outside the array that it indexes, an output is too short or the input breaks the stated
precondition; what was written up to there is then void.  Kernels compile at their first call;
`fill_x_py` is the same function as plain Python.

Letters: R rows, T tokens, S slots, Z columns of a table, Q chunks, X exports.
"""

from __future__ import annotations

from numba import njit
from numba.extending import register_jitable

from midstream.ops.registry import NULL_PAGE, PADDING

_compiled = njit(cache=True, nogil=True, error_model="numpy")

REFUSED = -1  # result: the input is not valid or does not fit
_LAST_TOKEN = -1  # token_id that stands for the slot's last token (ops/advance.py)


@register_jitable
def _col_of(tokens, per_block):
    """Column that the token after `tokens` tokens falls into; `per_block` is 1 / tokens of a block.

    Equals tokens // block: the half keeps the product off whole numbers.  A division takes longer.
    """
    return int((tokens + 0.5) * per_block)


@register_jitable
def _turn_page(slot, tokens, state_col, resume_page, state_table, per_block):
    """Move a slot to the running column of `tokens` >= 1 tokens; returns source and target page.

    The rule of ops/advance.py for rows without drafts.  Source 0: no history; target REFUSED: no
    such slot or column.
    """
    after = _col_of(tokens - 1, per_block)
    if slot >= state_table.shape[0] or after >= state_table.shape[1]:
        return NULL_PAGE, REFUSED
    before = state_col[slot]
    source = resume_page[slot]
    if source == NULL_PAGE and before >= 0:
        source = state_table[slot, before]
    state_col[slot] = after
    resume_page[slot] = NULL_PAGE
    return source, state_table[slot, after]


@_compiled
def fill_row_starts(num_new, row_start):
    """Prefix sums of `num_new` [R] into `row_start` [R + 1]; returns the number of tokens."""
    total = 0
    for row in range(num_new.shape[0]):
        row_start[row] = total
        total += num_new[row]
    row_start[num_new.shape[0]] = total
    return total


@_compiled
def fill_positions(num_computed, num_new, row_start, position):
    """Position of every token of the step in its sequence; returns the number of tokens."""
    tokens = row_start[num_new.shape[0]]
    if tokens > position.shape[0]:
        return REFUSED
    for row in range(num_new.shape[0]):
        first = row_start[row]
        for place in range(num_new[row]):
            position[first + place] = num_computed[row] + place
    return tokens


@_compiled
def fill_kv_slots(slot, num_computed, num_new, row_start, kv_table, kv_block, kv_slot):
    """Where the key and value of every token go: page * kv_block + place in the page.

    `kv_table` [S, Z].  Returns the number of tokens.
    """
    if row_start[slot.shape[0]] > kv_slot.shape[0]:
        return REFUSED
    for row in range(slot.shape[0]):
        token = row_start[row]
        tokens = num_computed[row]
        end = tokens + num_new[row]
        if slot[row] >= kv_table.shape[0] or end > kv_table.shape[1] * kv_block:
            return REFUSED
        while tokens < end:
            base = kv_table[slot[row], tokens // kv_block] * kv_block
            for place in range(tokens % kv_block, min(kv_block, tokens % kv_block + end - tokens)):
                kv_slot[token] = base + place
                token += 1
            tokens += kv_block - tokens % kv_block
    return row_start[slot.shape[0]]


@_compiled
def fill_pages(
    slot, num_computed, num_new, state_col, resume_page, state_table, block, precopy, read_page,
    write_page,
):  # fmt: skip
    """State pages that rows read and write; returns the number of rows whose state changes page.

    `state_col` [S], the host's mirror of the running column (-1 fresh), moves on; `resume_page` [S]
    is used up.  With `precopy` a row that has a state reads the page that it writes.
    """
    moves, per_block = 0, 1.0 / block
    for row in range(slot.shape[0]):
        tokens = num_computed[row] + num_new[row]
        source, target = _turn_page(
            slot[row], tokens, state_col, resume_page, state_table, per_block
        )
        if target == REFUSED:
            return REFUSED
        write_page[row] = target
        read_page[row] = target if precopy and source != NULL_PAGE else source
        moves += source != NULL_PAGE and source != target
    return moves


@_compiled
def fill_chunks(
    row_start, num_computed, num_new, write_page, export_start, export_position, export_page, chunk,
    chunk_start, chunk_row, chunk_page, row_chunk,
):  # fmt: skip
    """Cut each row into chunks of at most `chunk` tokens, and at its exports; returns the number Q.

    Exports of row r are entries export_start[r] up to export_start[r + 1]: after `export_position`
    tokens of the sequence (ascending, inside the row) the state goes to `export_page`.  The row's
    last chunk carries its `write_page`; an export at the row's end must name that page.
    """
    count = 0
    for row in range(num_new.shape[0]):
        row_chunk[row] = count
        tokens = num_computed[row]
        end = tokens + num_new[row]
        shift = row_start[row] - tokens  # from position to token of the step
        export, exports = export_start[row], export_start[row + 1]
        while tokens < end:
            if count == chunk_row.shape[0]:
                return REFUSED
            cut = min(tokens + chunk, end)
            page = NULL_PAGE
            if export < exports and export_position[export] <= cut:
                cut = export_position[export]
                page = export_page[export]
                export += 1
            misplaced = cut == end and page != NULL_PAGE and page != write_page[row]
            if cut <= tokens or misplaced:
                return REFUSED
            chunk_start[count] = tokens + shift
            chunk_row[count] = row
            chunk_page[count] = write_page[row] if cut == end else page
            count += 1
            tokens = cut
        if export < exports:
            return REFUSED
    row_chunk[num_new.shape[0]] = count
    chunk_start[count] = row_start[num_new.shape[0]]
    return count


@register_jitable
def pad_rows_py(
    rows, tokens, row_slot, row_start, read_page, write_page, token_id, position, kv_slot
):
    """Fill everything behind the first `rows` rows and `tokens` tokens with padding."""
    for row in range(rows, row_slot.shape[0]):
        row_slot[row] = PADDING
        row_start[row + 1] = row_start[rows]
        read_page[row] = NULL_PAGE
        write_page[row] = NULL_PAGE
    for token in range(tokens, kv_slot.shape[0]):
        token_id[token] = 0
        position[token] = 0
        kv_slot[token] = PADDING


pad_rows = _compiled(pad_rows_py)


@_compiled
def pad_chunks(rows, chunks, chunk_start, chunk_row, chunk_page, row_chunk):
    """Fill everything behind the first `chunks` chunks of `rows` rows with padding."""
    for chunk in range(chunks, chunk_row.shape[0]):
        chunk_start[chunk + 1] = chunk_start[chunks]
        chunk_row[chunk] = PADDING
        chunk_page[chunk] = NULL_PAGE
    for row in range(rows + 1, row_chunk.shape[0]):
        row_chunk[row] = chunks


@_compiled
def fill_deltas(table, slot, col_begin, col_end, base, index, value, count):
    """Append columns [col_begin, col_end) of the slots' table rows as (index, value) pairs.

    `table` [S, Z] lies at word `base` of the per-slot memory (ops/scatter_slots.py).  Pairs before
    `count` stay; returns the new count.
    """
    for entry in range(slot.shape[0]):
        first = base + slot[entry] * table.shape[1]
        if count + max(col_end[entry] - col_begin[entry], 0) > index.shape[0]:
            return REFUSED
        for col in range(col_begin[entry], col_end[entry]):
            index[count] = first + col
            value[count] = table[slot[entry], col]
            count += 1
    return count


@_compiled
def fill_decode_rows(
    slot, num_computed, state_col, resume_page, state_table, kv_table, block, kv_block, precopy,
    row_slot, row_start, position, kv_slot, token_id, read_page, write_page,
):  # fmt: skip
    """All row buffers of a step in which each row decodes one token, padding included.

    `slot` and `num_computed` have the real rows, the outputs the padded ones (`row_start` one
    more).  Token ids come from the device.  Returns the number of rows whose state changes page.
    """
    rows = slot.shape[0]
    moves, per_block, per_kv_block = 0, 1.0 / block, 1.0 / kv_block
    for row in range(rows):
        record, tokens = slot[row], num_computed[row]
        source, target = _turn_page(
            record, tokens + 1, state_col, resume_page, state_table, per_block
        )
        kv_col = _col_of(tokens, per_kv_block)
        if target == REFUSED or record >= kv_table.shape[0] or kv_col >= kv_table.shape[1]:
            return REFUSED
        row_slot[row] = record
        row_start[row] = row
        position[row] = tokens
        kv_slot[row] = kv_table[record, kv_col] * kv_block + tokens - kv_col * kv_block
        token_id[row] = _LAST_TOKEN
        write_page[row] = target
        read_page[row] = target if precopy and source != NULL_PAGE else source
        moves += source != NULL_PAGE and source != target
    row_start[rows] = rows
    pad_rows_py(rows, rows, row_slot, row_start, read_page, write_page, token_id, position, kv_slot)
    return moves


fill_row_starts_py = fill_row_starts.py_func
fill_positions_py = fill_positions.py_func
fill_kv_slots_py = fill_kv_slots.py_func
fill_pages_py = fill_pages.py_func
fill_chunks_py = fill_chunks.py_func
pad_chunks_py = pad_chunks.py_func
fill_deltas_py = fill_deltas.py_func
fill_decode_rows_py = fill_decode_rows.py_func
