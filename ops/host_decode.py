"""
The host's passes over the rows of a step, compiled by Numba: plan the decoding rows, count, take in tokens.

A pass does what needs no decision and leaves the rest to its caller: a request that finds no free page, a
row that ends or is watched, a block that is full.  Most rows of a step need nothing of that kind, and a slot
says until when: a pass looks into a row only from LOOK_AT or HEED_AT on.  Both may be lower than needed, so
that 0 is always right.  Nothing is allocated and the interpreter lock is released.  `x_py` is the same
function as plain Python.

    slots   i32[*, S]  the numbers of each slot, as `LiveTable` names them
    books   i32[*, N]  HELD: how often a page is held; FREE: free pages as a stack, behind their number;
                       what other rows say is in runtime/page_passes.py
    deltas  i32[3, E]  changes of E elements as a set: index and value of each, and the place of an index,
                       any number >= 0 where it has none
    rows    i32[8, R]  of each row of a plan: SLOT and its OCCUPANT, COMPUTED before the step, NEW tokens,
                       SAMPLES, the state PAGE that it writes, and if it decodes KV_SLOT, where its token's
                       keys and values go, and DUE, 1 if its state comes to stand on a boundary
    tally   i32[n]     numbers of what a pass found

Letters: R rows, S slots, Z columns of a table, N pages, E elements of slot memory.
"""

from __future__ import annotations

from midstream.ops.host_compile import compiled, inlined

# of slots
COUNTED, LAST_COMPUTED, LOOK_AT, KV_SHIFT, DECODES, RELOCATE, NUM_KV_PAGES, RUNNING_PAGE = range(8)
NUM_LOGPROBS, HEED_AT, PROMPT_LEN, NUM_OUTPUTS, MAX_TOKENS, WATCHED, EPOCH = range(8, 15)
SLOT_FIELDS = 15
HELD, FREE = 0, 1  # of books
INDEX, VALUE, PLACE = 0, 1, 2  # of deltas
SLOT, COMPUTED, NEW, SAMPLES, OCCUPANT, PAGE, KV_SLOT, DUE, ROW_FIELDS = range(9)  # of rows
ROWS, MOVES, NUM_DUE, LOGPROBS = 0, 1, 2, 3  # of the tally of a plan
HEEDED, FILLED, BROKEN, LOST, TOKENS = 0, 1, 2, 3, 4  # of the tally of a commit
ROW, REASON = 0, 1  # of what a commit found
GOES_ON, STOPPED, TOO_LONG = 0, 1, 2  # reasons
_NO_ROW, _NO_PAGE = -1, -2  # results of a look
_NOT_NEGATIVE = 0x7FFFFFFF  # `and` with it: spares an index the compiled look at its sign


@inlined
def col_of(tokens, per_block):
    """Column that the token after `tokens` tokens falls into; `per_block` is 1 / tokens of a block.

    Equals tokens // block: the half keeps the product off whole numbers.  A division takes longer.
    """
    return int((tokens + 0.5) * per_block)


@inlined
def _put_delta(deltas, num_deltas, index, value):
    """Change an element; what was to become of it before is forgotten."""
    place = deltas[PLACE, index]
    # a place is no proof by itself, it may be an old one: does the index stand there?
    if place >= num_deltas[0] or deltas[INDEX, place] != index:
        place = num_deltas[0]
        num_deltas[0] = place + 1
        deltas[PLACE, index] = place
        deltas[INDEX, place] = index
    deltas[VALUE, place] = value


@inlined
def _take_page(books):
    """The free page on top of the stack; there is one."""
    height = books[FREE, 0]
    page = books[FREE, height]
    books[FREE, 0] = height - 1
    books[HELD, page] = 1
    return page


def put_deltas_py(deltas, num_deltas, index, value):
    """Change the elements `index` to `value`, both i32[n]."""
    for i in range(index.shape[0]):
        _put_delta(deltas, num_deltas, index[i], value[i])


@inlined
def _behind(tokens, grid):
    """The first multiple of `grid` behind `tokens`."""
    return (col_of(tokens, 1.0 / grid) + 1) * grid


@inlined
def _begin_kv_page(slot, slots, kv_table, kv_books, deltas, num_deltas, kv_start):
    column, page = slots[NUM_KV_PAGES, slot], _take_page(kv_books)
    slots[NUM_KV_PAGES, slot] = column + 1
    kv_table[slot, column] = page
    _put_delta(deltas, num_deltas, kv_start + slot * kv_table.shape[1] + column, page)


@inlined
def _move_state(
    slot, column, slots, state_books, deltas, num_deltas, state_start, state_cols, resume_start,
    moves, tally,
):  # fmt: skip
    page, left = _take_page(state_books), slots[RUNNING_PAGE, slot]
    if slots[RELOCATE, slot]:
        # the column may stay the same: name the old page outside of the table
        _put_delta(deltas, num_deltas, resume_start + slot, left)
        slots[RELOCATE, slot] = 0
    slots[RUNNING_PAGE, slot] = page
    _put_delta(deltas, num_deltas, state_start + slot * state_cols + column, page)
    moves[0, tally[MOVES]] = slot
    moves[1, tally[MOVES]] = left
    tally[MOVES] += 1


@inlined
def _look(
    slot, slots, kv_table, deltas, num_deltas, kv_start, state_start, state_cols, resume_start,
    kv_books, state_books, kv_block, state_block, boundary, interval, moves, tally, is_served,
):  # fmt: skip
    """Give a row what its token needs, and say when to look again; returns DUE, or why there is no row."""
    tokens = slots[COUNTED, slot]
    if not slots[DECODES, slot] or tokens >= slots[LAST_COMPUTED, slot]:
        return _NO_ROW
    kv_pages, column = slots[NUM_KV_PAGES, slot], col_of(tokens, 1.0 / state_block)
    begins_page = tokens >= kv_pages * kv_block
    changes = slots[RELOCATE, slot] != 0 or tokens == column * state_block
    if not is_served:
        if begins_page and (kv_books[FREE, 0] == 0 or kv_pages >= kv_table.shape[1]):
            return _NO_PAGE
        if changes and (state_books[FREE, 0] == 0 or column >= state_cols):
            return _NO_PAGE
        if begins_page:
            _begin_kv_page(slot, slots, kv_table, kv_books, deltas, num_deltas, kv_start)
        if changes:
            _move_state(
                slot, column, slots, state_books, deltas, num_deltas, state_start, state_cols,
                resume_start, moves, tally,
            )  # fmt: skip
    kv_col, after = col_of(tokens, 1.0 / kv_block), tokens + 1
    slots[KV_SHIFT, slot] = (kv_table[slot, kv_col] - kv_col) * kv_block
    look_at = min(slots[LAST_COMPUTED, slot], (kv_col + 1) * kv_block, (column + 1) * state_block)
    due = 0
    for grid in (boundary, interval):
        if grid > 0:
            look_at = min(look_at, _behind(after, grid) - 1)
            due |= after == _behind(tokens, grid)
    slots[LOOK_AT, slot] = after if due else look_at  # what is kept may have to be left
    return due


@inlined
def _add_quiet_rows(order, slots, rows, first, most_rows):
    """Add rows up to the first one that must be looked into; returns their number."""
    counted, look_at, kv_shift = slots[COUNTED], slots[LOOK_AT], slots[KV_SHIFT]
    running_page, epoch = slots[RUNNING_PAGE], slots[EPOCH]
    row_slot, row_computed = rows[SLOT, first:most_rows], rows[COMPUTED, first:most_rows]
    row_page, row_kv = rows[PAGE, first:most_rows], rows[KV_SLOT, first:most_rows]
    row_epoch = rows[OCCUPANT, first:most_rows]
    most = min(order.shape[0], row_slot.shape[0])
    for row in range(most):
        slot = order[row] & _NOT_NEGATIVE
        tokens = counted[slot]
        if tokens >= look_at[slot]:
            return row
        row_slot[row] = slot
        row_computed[row] = tokens
        row_kv[row] = tokens + kv_shift[slot]
        row_page[row] = running_page[slot]
        row_epoch[row] = epoch[slot]
    return most


def plan_decode_py(
    order, slots, kv_table, deltas, num_deltas, kv_start, state_start, state_cols, resume_start,
    kv_books, state_books, kv_block, state_block, boundary, interval, moves, tally, begin, end,
    served, rows, num_rows, most_rows,
):  # fmt: skip
    """Add a row for each request of order[begin:end] that decodes, with the pages of its next token.

    `order`: slots.  A request takes a KV page where its token begins one, and a state page where the
    running page changes; `moves` [2, S] then names its slot and the page that it leaves.  States on
    multiples of `boundary` or of `interval` are DUE, where these are not 0.  Returns the place of the first
    request that finds no free page: the caller serves it, and goes on from there with `served` set to
    the place.  Returns `end` when all have been seen, or rows are `most_rows`.  The tally counts all
    ROWS, and the MOVES of this call.
    """
    row, place, tally[MOVES] = num_rows, begin, 0
    rows[DUE, num_rows : num_rows + end - begin] = 0
    while True:
        num_quiet = _add_quiet_rows(order[place:end], slots, rows, row, most_rows)
        place += num_quiet
        row += num_quiet
        if place == end or row == most_rows:
            break
        found = _look(
            order[place] & _NOT_NEGATIVE, slots, kv_table, deltas, num_deltas, kv_start, state_start,
            state_cols, resume_start, kv_books, state_books, kv_block, state_block, boundary, interval,
            moves, tally, place == served,
        )  # fmt: skip
        if found == _NO_PAGE:
            break
        if found == _NO_ROW:
            place += 1
        else:
            rows[DUE, row] = found
    rows[NEW, num_rows:row] = 1
    rows[SAMPLES, num_rows:row] = 1
    tally[ROWS] = row
    return end if row == most_rows else place


def advance_rows_py(slots, due_slots, tally, rows, num_rows, num_chunks):
    """Count the tokens of a whole plan, whose first `num_chunks` rows do not decode.

    `due_slots` [S] gets the slots of the rows that are DUE.
    """
    counted, num_logprobs = slots[COUNTED], slots[NUM_LOGPROBS]
    most, found = 0, 0
    for row in range(num_chunks):
        slot = rows[SLOT, row]
        counted[slot] = rows[COMPUTED, row] + rows[NEW, row]
        most = max(most, num_logprobs[slot])
    row_slot, row_computed = rows[SLOT, num_chunks:num_rows], rows[COMPUTED, num_chunks:num_rows]
    due = rows[DUE, num_chunks:num_rows]
    for row in range(row_slot.shape[0]):
        slot = row_slot[row] & _NOT_NEGATIVE
        counted[slot] = row_computed[row] + 1
        most = max(most, num_logprobs[slot])
    for row in range(due.shape[0]):  # many rows at once
        found += due[row]
    tally[NUM_DUE] = found
    if found:
        found = 0
        for row in range(due.shape[0]):
            if due[row]:
                due_slots[found] = row_slot[row]
                found += 1
    tally[LOGPROBS] = most


@inlined
def _is_stop(stop_id, slot, token):
    """Whether a token is one of the slot's, of which those that are not used (-1) come last."""
    for place in range(stop_id.shape[1]):
        if stop_id[slot, place] < 0:
            return False
        if stop_id[slot, place] == token:
            return True
    return False


@inlined
def _store_quiet_rows(slots, tokens, stop_id, rows, first, num_rows, token, logprob):
    """Store tokens from row `first` on up to one that must be looked into; returns their number."""
    heed_at, prompt_len, num_outputs = slots[HEED_AT], slots[PROMPT_LEN], slots[NUM_OUTPUTS]
    epoch, row_epoch = slots[EPOCH], rows[OCCUPANT, first:num_rows]
    row_slot, row_computed = rows[SLOT, first:num_rows], rows[COMPUTED, first:num_rows]
    token, logprob = token[first:num_rows], logprob[first:num_rows]
    for row in range(row_slot.shape[0]):
        slot, sampled = row_slot[row] & _NOT_NEGATIVE, token[row]
        after = row_computed[row] + 1
        if after >= heed_at[slot] or epoch[slot] != row_epoch[row]:
            return row
        if logprob[row] != logprob[row] or _is_stop(stop_id, slot, sampled):
            return row
        tokens[slot, after & _NOT_NEGATIVE] = sampled
        num_outputs[slot] = after + 1 - prompt_len[slot]
    return row_slot.shape[0]


@inlined
def _store(slot, after, sampled, slots, tokens, stop_id, kv_block):
    """Store a token, and say when to look again; returns the number of outputs and a reason."""
    tokens[slot, after] = sampled
    outputs = after + 1 - slots[PROMPT_LEN, slot]
    slots[NUM_OUTPUTS, slot] = outputs
    if not slots[WATCHED, slot]:
        last = slots[PROMPT_LEN, slot] + slots[MAX_TOKENS, slot] - 1
        slots[HEED_AT, slot] = min(last, _behind(after, kv_block))
    if _is_stop(stop_id, slot, sampled):
        return outputs, STOPPED
    return outputs, TOO_LONG if outputs >= slots[MAX_TOKENS, slot] else GOES_ON


def commit_rows_py(
    slots, tokens, stop_id, kv_block, heeded, filled, tally, rows, num_rows, token, logprob
):
    """Store the sampled tokens of rows whose request is still in its slot.

    `heeded` [2, S] gets the rows that need the host, each with its reason: those that are the first
    token of an answer, watched, broken (not finite) or the last.  `filled` [S] gets the rows that
    completed a KV page.  LOST counts sampled rows whose request has left its slot.
    """
    num_heeded, num_filled, broken, lost, unsampled, row = 0, 0, 0, 0, 0, 0
    while True:
        row += _store_quiet_rows(slots, tokens, stop_id, rows, row, num_rows, token, logprob)
        if row == num_rows:
            break
        slot, before = rows[SLOT, row], rows[COMPUTED, row]
        after, samples = before + rows[NEW, row], rows[SAMPLES, row] != 0
        is_broken, is_lost = logprob[row] != logprob[row], slots[EPOCH, slot] != rows[OCCUPANT, row]
        broken += is_broken
        lost += is_lost and samples
        unsampled += not samples
        if not is_lost and after >= _behind(before, kv_block):
            filled[num_filled] = row
            num_filled += 1
        if samples and not is_lost:
            outputs, reason = _store(slot, after, token[row], slots, tokens, stop_id, kv_block)
            if reason != GOES_ON or outputs == 1 or slots[WATCHED, slot] or is_broken:
                heeded[ROW, num_heeded] = row
                heeded[REASON, num_heeded] = reason
                num_heeded += 1
        row += 1
    tally[HEEDED] = num_heeded
    tally[FILLED] = num_filled
    tally[BROKEN] = broken
    tally[LOST] = lost
    tally[TOKENS] = num_rows - lost - unsampled


put_deltas = compiled(put_deltas_py)
plan_decode = compiled(plan_decode_py)
advance_rows = compiled(advance_rows_py)
commit_rows = compiled(commit_rows_py)
