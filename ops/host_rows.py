"""
Index arithmetic of a step on the host: arrays of row data in, flat index arrays out, by Numba.

Results go into one flat int32 `area` that belongs to the caller (the staging area): field f of FIELDS
is area[start[f] : start[f + 1]], so that a call takes two arrays for all of its results: taking an
array costs a call about as much as ten rows.  Nothing is allocated and the interpreter lock is
released.  A result of REFUSED means that an index lies outside of the array that it indexes, a field
is too short or the input breaks the stated precondition; what was written up to there is then void.
`fill_x_py` is the same function as plain Python.

Letters: R rows, T tokens, S slots, Z columns of a table, Q chunks, X exports.
"""

from __future__ import annotations

from midstream.ops.host_compile import compiled, inlined
from midstream.ops.host_decode import COMPUTED, INDEX, KV_SLOT, NEW, PAGE, SAMPLES, SLOT, VALUE
from midstream.ops.registry import NULL_PAGE, PADDING

FIELDS = (
    # of every step
    "delta_count",  # [1]
    "row_slot",  # [R]
    "row_start",  # [R + 1]
    "write_page",  # [R]
    "row_sample",  # [R]
    "decode_token_id",  # [R]
    "decode_position",  # [R]
    "decode_kv_slot",  # [R]
    # of steps with deltas
    "delta_index",  # [deltas]
    "delta_value",  # [deltas]
    # of steps with chunks
    "sample_token",  # [R]
    "token_id",  # [T]
    "position",  # [T]
    "kv_slot",  # [T]
    "chunk_start",  # [Q + 1]
    "chunk_row",  # [Q]
    "chunk_page",  # [Q]
    "row_chunk",  # [R + 1]
    # written by the device alone
    "read_page",  # [R]
)
_DELTA_COUNT = FIELDS.index("delta_count")
_DELTA_INDEX, _DELTA_VALUE = FIELDS.index("delta_index"), FIELDS.index("delta_value")
_ROW_SLOT, _ROW_START = FIELDS.index("row_slot"), FIELDS.index("row_start")
_WRITE_PAGE = FIELDS.index("write_page")
_ROW_SAMPLE, _SAMPLE_TOKEN = FIELDS.index("row_sample"), FIELDS.index("sample_token")
_DECODE_TOKEN_ID = FIELDS.index("decode_token_id")
_DECODE_POSITION = FIELDS.index("decode_position")
_DECODE_KV_SLOT = FIELDS.index("decode_kv_slot")
_TOKEN_ID, _POSITION = FIELDS.index("token_id"), FIELDS.index("position")
_KV_SLOT, _CHUNK_START = FIELDS.index("kv_slot"), FIELDS.index("chunk_start")
_CHUNK_ROW, _CHUNK_PAGE = FIELDS.index("chunk_row"), FIELDS.index("chunk_page")
_ROW_CHUNK = FIELDS.index("row_chunk")

REFUSED = -1  # result: the input is not valid or does not fit
_LAST_TOKEN = -1  # token_id that stands for the slot's last token (ops/advance.py)


@inlined
def _fill_deltas(deltas, num_deltas, most, area, start):
    """Move the latest deltas into their fields, at most `most`; returns how many are left."""
    index = area[start[_DELTA_INDEX] : start[_DELTA_INDEX + 1]]
    value = area[start[_DELTA_VALUE] : start[_DELTA_VALUE + 1]]
    count = min(num_deltas[0], most)
    left = num_deltas[0] - count
    for i in range(count):
        index[i] = deltas[INDEX, left + i]
        value[i] = deltas[VALUE, left + i]
    area[start[_DELTA_COUNT]] = count
    num_deltas[0] = left
    return left


def fill_deltas_py(deltas, num_deltas, most, area, start):
    """Move deltas (ops/host_decode.py) into the area, at most `most`; returns how many are left."""
    return _fill_deltas(deltas, num_deltas, most, area, start)


def fill_decode_step_py(plan_rows, num_rows, deltas, num_deltas, most_deltas, area, start, rows):
    """All fields of a step in which each row decodes one token, padded to `rows` rows, and its deltas.

    `plan_rows` and `deltas` as in ops/host_decode.py.  Token ids come from the device.  Returns the
    number of deltas.
    """
    live = num_rows
    row_slot = area[start[_ROW_SLOT] : start[_ROW_SLOT + 1]]
    row_start = area[start[_ROW_START] : start[_ROW_START + 1]]
    write_page = area[start[_WRITE_PAGE] : start[_WRITE_PAGE + 1]]
    row_sample = area[start[_ROW_SAMPLE] : start[_ROW_SAMPLE + 1]]
    token_id = area[start[_DECODE_TOKEN_ID] : start[_DECODE_TOKEN_ID + 1]]
    position = area[start[_DECODE_POSITION] : start[_DECODE_POSITION + 1]]
    kv_slot = area[start[_DECODE_KV_SLOT] : start[_DECODE_KV_SLOT + 1]]
    if live > rows or rows > row_slot.shape[0]:
        return REFUSED
    slot, num_computed = plan_rows[SLOT], plan_rows[COMPUTED]
    page, place = plan_rows[PAGE], plan_rows[KV_SLOT]
    for row in range(live):  # one field a loop: many rows at once
        row_slot[row] = slot[row]
    for row in range(live):
        write_page[row] = page[row]
    for row in range(live):
        position[row] = num_computed[row]
    for row in range(live):
        kv_slot[row] = place[row]
    for row in range(live):
        row_start[row] = row
    row_sample[0:live] = 1
    token_id[0:live] = _LAST_TOKEN
    row_start[live : rows + 1] = live
    row_slot[live:rows] = PADDING
    kv_slot[live:rows] = PADDING
    write_page[live:rows] = NULL_PAGE
    row_sample[live:rows] = 0
    token_id[live:rows] = 0
    position[live:rows] = 0
    if _fill_deltas(deltas, num_deltas, most_deltas, area, start):
        return REFUSED
    return area[start[_DELTA_COUNT]]


@inlined
def _reaches_too_far(slot, num_computed, num_new, num_known, known_ids, num_slots, num_places):
    """Whether a row of the step indexes something behind its table, or decodes more than one token."""
    last_slot, known_end, most_decoded, least_decoded = 0, 0, 1, 1
    for row in range(slot.shape[0]):
        last_slot = max(last_slot, slot[row])
    for row in range(num_known):
        known_end = max(known_end, num_computed[row] + num_new[row])
    count = num_new[num_known:]
    for row in range(count.shape[0]):
        most_decoded = max(most_decoded, count[row])
        least_decoded = min(least_decoded, count[row])
    reaches_too_far = last_slot >= num_slots or known_end > min(num_places, known_ids)
    return reaches_too_far or most_decoded != 1 or least_decoded != 1


@inlined
def _fill_places(pages, place, count, kv_block, position, kv_slot):
    """Positions of `count` tokens from `place` on, and where their keys and values go."""
    for ahead in range(count):
        position[ahead] = place + ahead
    column, done = place // kv_block, 0
    while done < count:
        many = min((column + 1) * kv_block - place, count) - done  # the rest of a page
        target = kv_slot[done : done + many]
        first = (pages[column] - column) * kv_block + place + done
        for ahead in range(many):
            target[ahead] = first + ahead
        done += many
        column += 1


def fill_token_rows_py(plan_rows, num_rows, tokens, num_known, kv_table, area, start, kv_block):
    """Row and token fields of a step with chunks; returns the number of tokens.

    `plan_rows` as in ops/host_decode.py.  The ids of the first `num_known` rows are in `tokens`
    [S, length], and `kv_table` [S, Z] says where their keys and values go: page * kv_block + place in
    the page; the others decode one token each, whose id comes from the device.
    """
    rows, num_known = num_rows, min(num_known, num_rows)
    slot, num_computed = plan_rows[SLOT, :rows], plan_rows[COMPUTED, :rows]
    num_new, page, samples = plan_rows[NEW, :rows], plan_rows[PAGE], plan_rows[SAMPLES]
    row_slot = area[start[_ROW_SLOT] : start[_ROW_SLOT + 1]]
    row_start = area[start[_ROW_START] : start[_ROW_START + 1]]
    write_page = area[start[_WRITE_PAGE] : start[_WRITE_PAGE + 1]]
    row_sample = area[start[_ROW_SAMPLE] : start[_ROW_SAMPLE + 1]]
    sample_token = area[start[_SAMPLE_TOKEN] : start[_SAMPLE_TOKEN + 1]]
    token_id = area[start[_TOKEN_ID] : start[_TOKEN_ID + 1]]
    position = area[start[_POSITION] : start[_POSITION + 1]]
    kv_slot = area[start[_KV_SLOT] : start[_KV_SLOT + 1]]
    if rows > row_slot.shape[0] or _reaches_too_far(
        slot, num_computed, num_new, num_known, tokens.shape[1], kv_table.shape[0],
        kv_table.shape[1] * kv_block,
    ):  # fmt: skip
        return REFUSED
    token = 0
    for row in range(num_known):
        record, place, count = slot[row], num_computed[row], num_new[row]
        if token + count > kv_slot.shape[0]:
            return REFUSED
        row_start[row] = token
        ids, known = token_id[token : token + count], tokens[record, place : place + count]
        for ahead in range(count):
            ids[ahead] = known[ahead]
        _fill_places(kv_table[record], place, count, kv_block, position[token:], kv_slot[token:])
        token += count
        sample_token[row] = token - 1
    for row in range(rows):  # one field a loop: many rows at once
        row_slot[row] = slot[row]
    for row in range(rows):
        write_page[row] = page[row]
    for row in range(rows):
        row_sample[row] = samples[row]
    end = token + rows - num_known
    if end > kv_slot.shape[0]:
        return REFUSED
    _fill_decoding_rows(
        num_computed[num_known:], plan_rows[KV_SLOT, num_known:rows], token, token_id[token:end],
        position[token:end], kv_slot[token:end], row_start[num_known:rows], sample_token[num_known:rows],
    )  # fmt: skip
    row_start[rows] = end
    return end


@inlined
def _fill_decoding_rows(
    num_computed, place, token, token_id, position, kv_slot, row_start, sample_token
):
    """Fields of rows of one token each, the first of which is `token` of the step."""
    rows = num_computed.shape[0]
    token_id[:] = _LAST_TOKEN
    for row in range(rows):
        position[row] = num_computed[row]
    for row in range(rows):
        kv_slot[row] = place[row]
    for row in range(rows):
        row_start[row] = token + row
    for row in range(rows):
        sample_token[row] = token + row


def fill_chunks_py(
    plan_rows, num_rows, export_start, export_position, export_page, area, start, chunk
):
    """Cut each row into chunks of at most `chunk` tokens, and at its exports; returns the number Q.

    Reads the field row_start.  Exports of row r are entries export_start[r] up to export_start[r + 1]:
    after `export_position` tokens of the sequence (ascending, inside the row) the state goes to
    `export_page`.  The row's last chunk carries the row's page; an export at the row's end must name
    that page.
    """
    row_start = area[start[_ROW_START] : start[_ROW_START + 1]]
    chunk_start = area[start[_CHUNK_START] : start[_CHUNK_START + 1]]
    chunk_row = area[start[_CHUNK_ROW] : start[_CHUNK_ROW + 1]]
    chunk_page = area[start[_CHUNK_PAGE] : start[_CHUNK_PAGE + 1]]
    row_chunk = area[start[_ROW_CHUNK] : start[_ROW_CHUNK + 1]]
    count = 0
    for row in range(num_rows):
        row_chunk[row] = count
        tokens = plan_rows[COMPUTED, row]
        end = tokens + plan_rows[NEW, row]
        shift = row_start[row] - tokens  # from position to token of the step
        last_page = plan_rows[PAGE, row]
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
            misplaced = cut == end and page != NULL_PAGE and page != last_page
            if cut <= tokens or misplaced:
                return REFUSED
            chunk_start[count] = tokens + shift
            chunk_row[count] = row
            chunk_page[count] = last_page if cut == end else page
            count += 1
            tokens = cut
        if export < exports:
            return REFUSED
    row_chunk[num_rows] = count
    chunk_start[count] = row_start[num_rows]
    return count


def pad_step_py(area, start, num_rows, num_tokens, num_chunks, rows, tokens, chunks):
    """Pad a step with chunks from its own numbers of rows, tokens and chunks to the given ones."""
    area[start[_ROW_SLOT] : start[_ROW_SLOT + 1]][num_rows:rows] = PADDING
    area[start[_ROW_START] : start[_ROW_START + 1]][num_rows + 1 : rows + 1] = num_tokens
    area[start[_WRITE_PAGE] : start[_WRITE_PAGE + 1]][num_rows:rows] = NULL_PAGE
    area[start[_ROW_SAMPLE] : start[_ROW_SAMPLE + 1]][num_rows:rows] = 0
    area[start[_SAMPLE_TOKEN] : start[_SAMPLE_TOKEN + 1]][num_rows:rows] = 0
    area[start[_TOKEN_ID] : start[_TOKEN_ID + 1]][num_tokens:tokens] = 0
    area[start[_POSITION] : start[_POSITION + 1]][num_tokens:tokens] = 0
    area[start[_KV_SLOT] : start[_KV_SLOT + 1]][num_tokens:tokens] = PADDING
    area[start[_CHUNK_START] : start[_CHUNK_START + 1]][num_chunks + 1 : chunks + 1] = num_tokens
    area[start[_CHUNK_ROW] : start[_CHUNK_ROW + 1]][num_chunks:chunks] = PADDING
    area[start[_CHUNK_PAGE] : start[_CHUNK_PAGE + 1]][num_chunks:chunks] = NULL_PAGE
    area[start[_ROW_CHUNK] : start[_ROW_CHUNK + 1]][num_rows + 1 : rows + 1] = num_chunks


fill_deltas = compiled(fill_deltas_py)
fill_decode_step = compiled(fill_decode_step_py)
fill_token_rows = compiled(fill_token_rows_py)
fill_chunks = compiled(fill_chunks_py)
pad_step = compiled(pad_step_py)
