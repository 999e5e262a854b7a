"""
Move every row's running column forward and say which pages the step reads, writes and moves.

First op of a step.  A row of n computed and m new tokens runs in column ceil((n + m) / block) - 1
of its slot's state table.  Its state comes from `resume_page` when the host staged one, else from
the column it ran in before: the temporal state `accepted - 1` columns further (one column per
draft), the convolution window from the column itself, `accepted - 1` rows further.  Without such
a column or page it starts from zeros.
* copy-free: the row reads its source page and writes the new one; nothing moves.
* pre-copy: a source that lies elsewhere becomes a move for `page_move`; the row reads the page that
  it writes (with drafts: the page of the last accepted one).
`accepted` restarts at 1 when the column changed or the row resumes: offsets count from the new
page.  Each slot is in at most one row.  The single program keeps moves in row order.

With drafts the window of a copy-free row lies where its temporal state does if `src_off` is 0, and
else in column `src_col`, from its row `src_off` on.

Moves never form a chain, so that they need no order.  A destination is a running page, in a column
of one slot's table and of no other, and never published.  A source is a page of the same slot's
table, or a published page.  So only its own row may read a destination, and a row makes one move.
`post_copy` draws sources and destinations from one slot's table as well.

Letters: R rows (`rows` of them used), T tokens, S slots, Z columns.
Traffic: about 100 bytes a row.  Integers only: exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.errors import ContractError
from midstream.ops.page_words import wide_offset
from midstream.ops.registry import EXACT, NULL_PAGE, PADDING, Args, OpCase, define_op

NO_COL = -1  # state_col of a slot that has no state yet
LAST_TOKEN = -1  # token_id that stands for the slot's last token
_TILE = 1024  # rows per turn of the single program, at most


def running_col(tokens: int, block: int) -> int:
    """Column that holds the state after `tokens` tokens; NO_COL before the first one.

    >>> [running_col(n, block=4) for n in (0, 1, 4, 5)]
    [-1, 0, 0, 1]
    """
    return -(-tokens // block) - 1


def advance_ref(
    state_col: Tensor, src_col: Tensor, src_off: Tensor, accepted: Tensor, resume_page: Tensor,
    token_id: Tensor, read_page: Tensor, write_page: Tensor, move_from: Tensor, move_to: Tensor,
    move_shift: Tensor, num_moves: Tensor, state_table: Tensor, last_token: Tensor,
    computed: Tensor, row_slot: Tensor, row_start: Tensor, rows: int, block: int, precopy: bool,
) -> None:  # fmt: skip
    """Say what the kernel means, one row at a time."""
    starts, moves = row_start[: rows + 1].tolist(), 0
    read_page[:rows], write_page[:rows] = NULL_PAGE, NULL_PAGE
    for row, slot in enumerate(row_slot[:rows].tolist()):
        if slot == PADDING:
            continue
        first, length = starts[row], starts[row + 1] - starts[row]
        if length and token_id[first] == LAST_TOKEN:
            token_id[first] = last_token[slot]

        resume, source, count = int(resume_page[slot]), int(state_col[slot]), int(accepted[slot])
        target = running_col(int(computed[slot]) + length, block)
        fresh = source == NO_COL or resume > 0  # an earlier owner's count means nothing
        off = 0 if fresh else max(count - 1, 0)
        changed = fresh or target != source
        if changed:
            accepted[slot] = count = 1
        src_col[slot], src_off[slot], state_col[slot] = source, off, target
        resume_page[slot] = NULL_PAGE

        pages = state_table[slot].tolist()
        before = resume or (pages[source + off] if source >= 0 else NULL_PAGE)
        conv_before = resume or (pages[source] if source >= 0 else NULL_PAGE)
        after = pages[target] if target >= 0 else NULL_PAGE
        write_page[row] = after
        if not precopy:
            read_page[row] = before
            continue
        if before:
            read_page[row] = pages[target + max(count - 1, 0)]
        if changed and before and after and (before != after or conv_before != after):
            move_from[0, moves], move_from[1, moves] = before, conv_before
            move_to[moves], move_shift[moves] = after, off
            moves += 1
    num_moves.fill_(moves)


@triton.jit
def table_page(table_ptr, table_stride, slot, col, live):
    """Page in a slot's column; 0 where the row is not live or has no such column."""
    place = wide_offset(slot, table_stride) + col
    return tl.load(table_ptr + place, mask=live & (col >= 0), other=0)


@triton.jit
def append_moves(
    move_from_ptr, move_to_ptr, move_shift_ptr, move_stride, count, moves, source, conv_source,
    target, shift,
):  # fmt: skip
    """Append the rows where `moves` holds to a list of `count` moves; returns the new count."""
    ones = moves.to(tl.int32)
    place = count + tl.cumsum(ones, 0) - 1
    tl.store(move_from_ptr + place, source, mask=moves)
    tl.store(move_from_ptr + move_stride + place, conv_source, mask=moves)
    tl.store(move_to_ptr + place, target, mask=moves)
    tl.store(move_shift_ptr + place, shift, mask=moves)
    return count + tl.sum(ones, 0)


@triton.jit
def _advance_kernel(
    state_col_ptr,  # i32[S]
    src_col_ptr,  # i32[S]
    src_off_ptr,  # i32[S]
    accepted_ptr,  # i32[S]
    resume_page_ptr,  # i32[S]
    token_id_ptr,  # i32[T]
    read_page_ptr,  # i32[R]
    write_page_ptr,  # i32[R]
    move_from_ptr,  # i32[2, R]
    move_to_ptr,  # i32[R]
    move_shift_ptr,  # i32[R]
    num_moves_ptr,  # i32[1]
    state_table_ptr,  # i32[S, Z]
    last_token_ptr,  # i32[S]
    computed_ptr,  # i32[S]
    row_slot_ptr,  # i32[R]
    row_start_ptr,  # i32[R + 1]
    table_stride,
    move_stride,
    rows,
    BLOCK: tl.constexpr,
    PRECOPY: tl.constexpr,
    TILE: tl.constexpr,
):
    moved = 0
    for start in range(0, rows, TILE):
        row = start + tl.arange(0, TILE)
        real = row < rows
        slot = tl.load(row_slot_ptr + row, mask=real, other=-1)
        first = tl.load(row_start_ptr + row, mask=real, other=0)
        end = tl.load(row_start_ptr + row + 1, mask=real, other=0)
        live = slot >= 0

        source = tl.load(state_col_ptr + slot, mask=live, other=-1)
        resume = tl.load(resume_page_ptr + slot, mask=live, other=0)
        count = tl.load(accepted_ptr + slot, mask=live, other=1)
        computed = tl.load(computed_ptr + slot, mask=live, other=0)
        last = tl.load(last_token_ptr + slot, mask=live, other=0)
        starts = live & (end > first)
        token = tl.load(token_id_ptr + first, mask=starts, other=0)
        # Records are updated in place.  Which thread loads a row and which one stores it is the
        # compiler's choice, so all have loaded before one stores.
        tl.debug_barrier()
        tl.store(token_id_ptr + first, last, mask=starts & (token == -1))

        target = (computed + (end - first) + (BLOCK - 1)) // BLOCK - 1
        fresh = (source < 0) | (resume > 0)
        off = tl.where(fresh, 0, tl.maximum(count - 1, 0))
        changed = fresh | (target != source)
        count = tl.where(changed, 1, count)
        temporal_col = tl.where(source < 0, -1, source + off)
        before = table_page(state_table_ptr, table_stride, slot, temporal_col, live)
        conv_before = table_page(state_table_ptr, table_stride, slot, source, live)
        after = table_page(state_table_ptr, table_stride, slot, target, live)
        before = tl.where(resume > 0, resume, before)
        conv_before = tl.where(resume > 0, resume, conv_before)

        tl.store(src_col_ptr + slot, source, mask=live)
        tl.store(src_off_ptr + slot, off, mask=live)
        tl.store(state_col_ptr + slot, target, mask=live)
        tl.store(accepted_ptr + slot, count, mask=live)
        tl.store(resume_page_ptr + slot, tl.zeros_like(slot), mask=live)
        tl.store(write_page_ptr + row, after, mask=real)
        if PRECOPY:
            has_state = live & (before > 0)
            read_col = target + tl.maximum(count - 1, 0)
            read = table_page(state_table_ptr, table_stride, slot, read_col, has_state)
            moves = has_state & changed & (after > 0)
            moves &= (before != after) | (conv_before != after)
            moved = append_moves(
                move_from_ptr, move_to_ptr, move_shift_ptr, move_stride, moved, moves, before,
                conv_before, after, off,
            )  # fmt: skip
        else:
            read = before
        tl.store(read_page_ptr + row, read, mask=real)
    tl.store(num_moves_ptr, moved)


def row_tile(rows: int) -> int:
    """Rows per turn of a single-program op over the rows of a step."""
    return min(max(triton.next_power_of_2(rows), 32), _TILE)


def _launch(
    state_col: Tensor, src_col: Tensor, src_off: Tensor, accepted: Tensor, resume_page: Tensor,
    token_id: Tensor, read_page: Tensor, write_page: Tensor, move_from: Tensor, move_to: Tensor,
    move_shift: Tensor, num_moves: Tensor, state_table: Tensor, last_token: Tensor,
    computed: Tensor, row_slot: Tensor, row_start: Tensor, rows: int, block: int, precopy: bool,
) -> None:  # fmt: skip
    if row_slot.shape[0] < rows or row_start.shape[0] < rows + 1 or move_to.shape[0] < rows:
        raise ContractError(
            f"advance: {rows} rows need as many entries of row_slot and move_to and one more of "
            f"row_start, got {row_slot.shape[0]}, {move_to.shape[0]} and {row_start.shape[0]}; "
            "size the step buffers for the padded rows"
        )
    tile = row_tile(rows)
    _advance_kernel[(1,)](
        state_col, src_col, src_off, accepted, resume_page, token_id, read_page, write_page,
        move_from, move_to, move_shift, num_moves, state_table, last_token, computed, row_slot,
        row_start, state_table.stride(0), move_from.stride(0), rows,
        BLOCK=block, PRECOPY=precopy, TILE=tile, num_warps=min(tile // 32, 8),
    )  # fmt: skip


@dataclass(frozen=True)
class _Case:
    """Random but possible states: live, fresh and resumed slots in any order, padding between."""

    rows: int = 23
    block: int = 4
    drafts: int = 3
    precopy: bool = True
    cols: int = 9  # without the columns of drafts

    def id(self) -> str:
        mode = "precopy" if self.precopy else "copyfree"
        return f"R{self.rows}-block{self.block}-k{self.drafts}-{mode}"

    def __call__(self, gen: torch.Generator, dtype: torch.dtype, device: torch.device) -> Args:
        def draw(low: int, high: int, count: int) -> Tensor:
            return torch.randint(low, high, (count,), generator=gen, dtype=torch.int32)

        slots, cols, rows = self.rows + 5, self.cols + self.drafts, self.rows
        lengths = draw(1, self.block + 2, rows)
        computed = draw(0, (self.cols - 2) * self.block, slots)
        computed[::5] = 0
        pages = 1 + torch.randperm(slots * cols, generator=gen, dtype=torch.int32)
        resume = torch.where(draw(0, 4, slots) == 0, draw(5000, 6000, slots), 0)
        row_slot = torch.randperm(slots, generator=gen, dtype=torch.int32)[:rows]
        row_slot[2::7] = PADDING
        row_start = torch.zeros(rows + 1, dtype=torch.int32)
        row_start[1:] = torch.where(row_slot == PADDING, 0, lengths).cumsum(0)
        tokens = draw(
            0, 100, rows * (self.block + 1) + 1
        )  # longer than the step, as a static buffer
        tokens[row_start[:-1:2].long()] = LAST_TOKEN
        junk = torch.full((2, rows + 3), -77, dtype=torch.int32)
        args: Args = {
            "state_col": (computed + self.block - 1) // self.block - 1,
            "src_col": draw(-9, 0, slots),
            "src_off": draw(-9, 0, slots),
            "accepted": draw(1, self.drafts + 2, slots),
            "resume_page": torch.where(computed > 0, resume, 0),
            "token_id": tokens,
            "read_page": junk[0].clone(),
            "write_page": junk[0].clone(),
            "move_from": junk.clone(),
            "move_to": junk[0].clone(),
            "move_shift": junk[0].clone(),
            "num_moves": junk[0, :1].clone(),
            "state_table": pages.view(slots, cols),
            "last_token": draw(100, 200, slots),
            "computed": computed,
            "row_slot": row_slot,
            "row_start": row_start,
        }
        scalars = {"rows": rows, "block": self.block, "precopy": self.precopy}
        return {k: v.to(device) for k, v in args.items()} | scalars


_CASES = tuple(
    OpCase(c.id(), c)
    for c in (
        _Case(),
        _Case(precopy=False),
        _Case(drafts=0),
        _Case(drafts=0, precopy=False),
        _Case(rows=1),
        _Case(rows=0),
        _Case(block=64),
        _Case(rows=1030),  # two turns of the program, the second one partial
    )
)


def _traffic(args: Args) -> tuple[int, int]:
    return 100 * args["rows"], 0


advance = define_op(
    "advance(Tensor(a!) state_col, Tensor(b!) src_col, Tensor(c!) src_off, Tensor(d!) accepted, "
    "Tensor(e!) resume_page, Tensor(f!) token_id, Tensor(g!) read_page, Tensor(h!) write_page, "
    "Tensor(i!) move_from, Tensor(j!) move_to, Tensor(k!) move_shift, Tensor(l!) num_moves, "
    "Tensor state_table, Tensor last_token, Tensor computed, Tensor row_slot, Tensor row_start, "
    "SymInt rows, SymInt block, bool precopy) -> ()",
    cuda=_launch,
    cpu=advance_ref,
    cases=_CASES,
    tolerance=EXACT,
    traffic=_traffic,
)
