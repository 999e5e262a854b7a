"""A toy step around `advance`, `page_move` and `post_copy`: states that say which tokens they hold.

The temporal state after n tokens is the number n.  A row of a convolution window is the position of
the token that it holds; the window of a verified row has its new tokens at the end, so that the W - 1
rows from `accepted - 1` on are the history of the next step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.ops.advance import NO_COL, advance
from midstream.ops.page_move import page_move
from midstream.ops.post_copy import post_copy
from midstream.ops.registry import PADDING

KERNEL, REFERENCE = "kernel", "reference"
TAPS = 4  # W
_WORD = 64  # elements of a temporal page and channels of a window, all equal


@dataclass(frozen=True)
class Moves:
    """Columns of one slot: (temporal source, conv source, target, shift) of each move."""

    listed: list[tuple[int, int, int, int]]


class Rig:
    """Requests whose page in column c is 1 + slot * cols + c; four pages behind are free to use."""

    def __init__(self, path, device, *, block, drafts=0, slots=1, cols=8, rows=None, precopy=True):
        self.path, self.device, self.block, self.drafts = path, device, block, drafts
        self.precopy, self.cols, self.rows = precopy, cols, rows or slots
        self.window_rows = TAPS - 1 + drafts
        pages = 1 + slots * cols + 4
        self.temporal = torch.full((pages, _WORD), float("nan"), device=device)
        self.conv = torch.full((pages, self.window_rows * _WORD), float("nan"), device=device)
        table = 1 + torch.arange(slots * cols, device=device, dtype=torch.int32)
        self.state_table = table.view(slots, cols)
        self.state_col = self.ints([NO_COL] * slots)
        self.src_col, self.src_off = self.ints([-9] * slots), self.ints([-9] * slots)
        self.accepted, self.resume_page = self.ints([1] * slots), self.ints([0] * slots)
        self.computed, self.last_token = self.ints([0] * slots), self.ints([7] * slots)
        self.row_slot = self.ints([PADDING] * self.rows)
        self.row_start = self.ints([0] * (self.rows + 1))
        self.read_page, self.write_page = self.ints([-7] * self.rows), self.ints([-7] * self.rows)
        self.move_from = self.ints([[-7] * self.rows] * 2)
        self.move_to, self.move_shift = self.ints([-7] * self.rows), self.ints([-7] * self.rows)
        self.num_moves, self.token_id = self.ints([-7]), self.ints([5] * 4096)

    def ints(self, values, dtype=torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def run(self, spec, *args) -> None:
        (spec.launch if self.path == KERNEL else spec.reference)(*args)

    def advance(self, lengths: dict[int, int], padding=()) -> Moves:
        """Rows of the given slots and lengths, in order; `padding` names rows that stay empty."""
        self.row_slot.fill_(PADDING)
        live, start = iter(lengths.items()), 0
        for row in range(self.rows):
            if row not in padding:
                slot, length = next(live, (PADDING, 0))
                self.row_slot[row] = slot
                start += length
            self.row_start[row + 1] = start
        self.run(
            advance, self.state_col, self.src_col, self.src_off, self.accepted, self.resume_page,
            self.token_id, self.read_page, self.write_page, self.move_from, self.move_to,
            self.move_shift, self.num_moves, self.state_table, self.last_token, self.computed,
            self.row_slot, self.row_start, self.rows, self.block, self.precopy,
        )  # fmt: skip
        return self.moves()

    def post_copy(self) -> Moves:
        self.run(
            post_copy, self.accepted, self.move_from, self.move_to, self.move_shift, self.num_moves,
            self.state_table, self.state_col, self.computed, self.row_slot, self.rows, self.block,
        )  # fmt: skip
        return self.moves()

    def page_move(self) -> None:
        self.run(
            page_move, self.temporal, self.conv, self.move_from, self.move_to, self.move_shift,
            self.num_moves, self.ints([0], torch.int64), self.ints([_WORD]), self.window_rows,
        )  # fmt: skip

    def moves(self) -> Moves:
        count = int(self.num_moves)
        columns = [(p - 1) % self.cols for p in self.move_from[:, :count].flatten().tolist()]
        targets = [(p - 1) % self.cols for p in self.move_to[:count].tolist()]
        shifts = self.move_shift[:count].tolist()
        return Moves(list(zip(columns[:count], columns[count:], targets, shifts, strict=True)))

    def accept(self, slot: int, length: int, accepted: int) -> None:
        """What `sample` writes: a verified row keeps `accepted` of its tokens, a chunk all."""
        verified = length == 1 + self.drafts and accepted > 0
        self.computed[slot] += accepted if verified else length
        self.accepted[slot] = accepted if verified else 1

    def window(self, page: int) -> list[float]:
        return self.conv[page].view(self.window_rows, _WORD)[:, -1].tolist()

    def source_of_window(self, row: int, slot: int) -> tuple[int, int]:
        """Page and first row of the window that a step reads."""
        pages = self.state_table[slot].tolist()
        if self.precopy:
            return pages[int(self.state_col[slot])], int(self.accepted[slot]) - 1
        off = int(self.src_off[slot])
        return (pages[int(self.src_col[slot])] if off else int(self.read_page[row])), off

    def forward(self, row: int, slot: int, length: int) -> tuple[float, list[float]]:
        """Read the row's state, write the states of its tokens; returns what was read."""
        tokens, col = int(self.computed[slot]), int(self.state_col[slot])
        read, pages = int(self.read_page[row]), self.state_table[slot].tolist()
        temporal = self.temporal[read, -1].item() if read else 0.0
        history = [float(p) for p in range(1 - TAPS, 0)]
        if read:
            page, off = self.source_of_window(row, slot)
            history = self.window(page)[off : off + TAPS - 1]
        verified = length == 1 + self.drafts
        for place in range(length if verified else 1):
            count = tokens + (place + 1 if verified else length)
            self.temporal[pages[col + place]] = float(count)
        rows = history + [float(tokens + place) for place in range(length)]
        kept = self.window_rows if verified else TAPS - 1
        window = torch.tensor(rows[-kept:], device=self.device)[:, None].expand(kept, _WORD)
        self.conv[pages[col]].view(self.window_rows, _WORD)[:kept] = window
        return temporal, history
