"""
The host's passes over the rows of a step, compiled by Numba: plan the decoding rows, count, take in tokens.

A pass does what needs no decision and leaves the rest to its caller: a request that finds no free page, a
row that ends or is watched, a block that is full.  Nothing is allocated and the interpreter lock is
released.  `x_py` is the same function as plain Python.

    books   i32[2, N]  HELD: how often a page is held; FREE: free pages as a stack, behind their number
    deltas  i32[3, E]  changes of E elements as a set: index and value of each, and the place of an index,
                       any number >= 0 where it has none
    rows    i32[4, S]  SLOT, COMPUTED before the step, NEW tokens, SAMPLES: of each row of a plan
    tally   i32[n]     numbers of what a pass found

Letters: R rows, S slots, Z columns of a table, N pages, E elements of slot memory.
"""

from __future__ import annotations

from midstream.ops.host_compile import compiled, inlined

HELD, FREE = 0, 1  # of books
INDEX, VALUE, PLACE = 0, 1, 2  # of deltas
SLOT, COMPUTED, NEW, SAMPLES = 0, 1, 2, 3  # of rows
ROWS, MOVES, DUE, LOGPROBS = 0, 1, 2, 3  # of the tally of a plan
HEEDED, FILLED, BROKEN, LOST, TOKENS = 0, 1, 2, 3, 4  # of the tally of a commit
ROW, REASON = 0, 1  # of what a commit found
GOES_ON, STOPPED, TOO_LONG = 0, 1, 2  # reasons


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


def plan_decode_py(
    order, decodes, computed, last_computed, relocate, num_kv_pages, running_page, resume_page, epoch,
    kv_table, state_table, deltas, num_deltas, kv_start, state_start, resume_start, kv_books, state_books,
    kv_block, state_block, moves, tally, begin, end, served, rows, row_epoch, num_rows, most_rows,
):  # fmt: skip
    """Add a row for each request of order[begin:end] that decodes, with the pages of its next token.

    `order`: slots.  A request takes a KV page where its token begins one, and a state page where the
    running page changes; `moves` [2, S] then names its slot and the page that it leaves.  Returns the
    place of the first request that finds no free page: the caller serves it, and goes on from there
    with `served` set to the place.  Returns `end` when all have been seen, or rows are `most_rows`.
    The tally counts all ROWS, and the MOVES of this call.
    """
    row, moved, place, per_block = num_rows, 0, begin, 1.0 / state_block
    while place < end and row < most_rows:
        slot = order[place]
        tokens = computed[slot]
        if not decodes[slot] or tokens >= last_computed[slot]:
            place += 1
            continue
        kv_col = num_kv_pages[slot]
        begins_page = tokens >= kv_col * kv_block
        col = col_of(tokens, per_block)
        changes = relocate[slot] or tokens == col * state_block
        if place != served and (begins_page or changes):
            if begins_page and (kv_books[FREE, 0] == 0 or kv_col >= kv_table.shape[1]):
                break
            if changes and (state_books[FREE, 0] == 0 or col >= state_table.shape[1]):
                break
            if begins_page:
                page = _take_page(kv_books)
                num_kv_pages[slot] = kv_col + 1
                kv_table[slot, kv_col] = page
                at = kv_start + slot * kv_table.shape[1] + kv_col
                _put_delta(deltas, num_deltas, at, page)
            if changes:
                page, left = _take_page(state_books), running_page[slot]
                if relocate[
                    slot
                ]:  # the column may stay the same: name the old page outside of the table
                    resume_page[slot] = left
                    _put_delta(deltas, num_deltas, resume_start + slot, left)
                    relocate[slot] = False
                running_page[slot] = page
                state_table[slot, col] = page
                at = state_start + slot * state_table.shape[1] + col
                _put_delta(deltas, num_deltas, at, page)
                moves[0, moved] = slot
                moves[1, moved] = left
                moved += 1
        rows[SLOT, row] = slot
        rows[COMPUTED, row] = tokens
        rows[NEW, row] = 1
        rows[SAMPLES, row] = 1
        row_epoch[row] = epoch[slot]
        row += 1
        place += 1
    tally[ROWS] = row
    tally[MOVES] = moved
    return end if row == most_rows else place


def advance_rows_py(
    computed,
    epoch,
    num_logprobs,
    block,
    interval,
    due,
    tally,
    rows,
    row_epoch,
    num_rows,
    num_chunks,
):
    """Count the tokens of a whole plan, whose first `num_chunks` rows do not decode.

    `due` [S] names the decoding rows whose state comes to stand on a boundary: on a multiple of
    `block` or of `interval`, where these are not 0.
    """
    most, found = 0, 0
    per_block, per_interval = 1.0 / max(block, 1), 1.0 / max(interval, 1)
    for row in range(num_rows):
        slot = rows[SLOT, row]
        after = rows[COMPUTED, row] + rows[NEW, row]
        computed[slot] = after
        row_epoch[row] = epoch[slot]
        most = max(most, num_logprobs[slot])
        if row >= num_chunks and (
            (block > 0 and after == col_of(after, per_block) * block)
            or (interval > 0 and after == col_of(after, per_interval) * interval)
        ):
            due[found] = row
            found += 1
    tally[DUE] = found
    tally[LOGPROBS] = most


def commit_rows_py(
    epoch, tokens, prompt_len, num_outputs, max_tokens, watched, stop_id, kv_block, heeded, filled,
    tally, rows, row_epoch, num_rows, token, logprob,
):  # fmt: skip
    """Store the sampled tokens of rows whose request is still in its slot.

    `heeded` [2, S] gets the rows that need the host, each with its reason: those that are the first
    token of an answer, watched, broken (not finite) or the last.  `filled` [S] gets the rows that
    completed a KV page.  LOST counts sampled rows whose request has left its slot.
    """
    num_heeded, num_filled, broken, lost, stored, per_block = 0, 0, 0, 0, 0, 1.0 / kv_block
    for row in range(num_rows):
        slot = rows[SLOT, row]
        before = rows[COMPUTED, row]
        after = before + rows[NEW, row]
        is_broken = logprob[row] != logprob[row]
        broken += is_broken
        if epoch[slot] != row_epoch[row]:
            lost += rows[SAMPLES, row] != 0
            continue
        if col_of(before, per_block) != col_of(after, per_block):
            filled[num_filled] = row
            num_filled += 1
        if rows[SAMPLES, row] == 0:
            continue
        sampled = token[row]
        tokens[slot, after] = sampled
        outputs = after + 1 - prompt_len[slot]
        num_outputs[slot] = outputs
        stored += 1
        reason = TOO_LONG if outputs >= max_tokens[slot] else GOES_ON
        for place in range(stop_id.shape[1]):
            if stop_id[slot, place] == sampled:
                reason = STOPPED
        if reason != GOES_ON or outputs == 1 or watched[slot] or is_broken:
            heeded[ROW, num_heeded] = row
            heeded[REASON, num_heeded] = reason
            num_heeded += 1
    tally[HEEDED] = num_heeded
    tally[FILLED] = num_filled
    tally[BROKEN] = broken
    tally[LOST] = lost
    tally[TOKENS] = stored


put_deltas = compiled(put_deltas_py)
plan_decode = compiled(plan_decode_py)
advance_rows = compiled(advance_rows_py)
commit_rows = compiled(commit_rows_py)
