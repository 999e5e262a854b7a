"""
After sampling, list the states that acceptance left behind a block boundary.

A verified row ends at n = `computed` tokens, of which `accepted` are new; column `state_col` + j
holds the state after draft j.  If the last whole block ends inside the accepted part, the state
there lies `bias` drafts behind the running column and moves to the boundary's own column, where
it can be published.  When that is the running column itself, offsets count anew: `accepted`
becomes 1.  Without drafts the boundary state is written where it belongs and nothing ever moves.
The moves are carried out by `page_move`; the single program keeps them in row order.

Letters: R rows (`rows` of them used), S slots, Z columns.
Traffic: about 40 bytes a row.  Integers only: exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.errors import ContractError
from midstream.ops.advance import append_moves, row_tile, table_page
from midstream.ops.registry import EXACT, PADDING, Args, OpCase, define_op


def post_copy_ref(
    accepted: Tensor, move_from: Tensor, move_to: Tensor, move_shift: Tensor, num_moves: Tensor,
    state_table: Tensor, state_col: Tensor, computed: Tensor, row_slot: Tensor, rows: int,
    block: int,
) -> None:  # fmt: skip
    """Say what the kernel means, one row at a time."""
    moves = 0
    for slot in row_slot[:rows].tolist():
        if slot == PADDING:
            continue
        tokens, source = int(computed[slot]), int(state_col[slot])
        running = tokens - int(accepted[slot]) + 1  # tokens in the state of the running column
        boundary = tokens // block * block
        if boundary == 0 or boundary < running:
            continue
        bias, target = boundary - running, boundary // block - 1
        if source == target:
            accepted[slot] = 1
        if source == target and bias == 0:
            continue
        pages = state_table[slot].tolist()
        if pages[source + bias] and pages[target]:
            move_from[0, moves], move_from[1, moves] = pages[source + bias], pages[source]
            move_to[moves], move_shift[moves] = pages[target], bias
            moves += 1
    num_moves.fill_(moves)


@triton.jit
def _post_copy_kernel(
    accepted_ptr,  # i32[S]
    move_from_ptr,  # i32[2, R]
    move_to_ptr,  # i32[R]
    move_shift_ptr,  # i32[R]
    num_moves_ptr,  # i32[1]
    state_table_ptr,  # i32[S, Z]
    state_col_ptr,  # i32[S]
    computed_ptr,  # i32[S]
    row_slot_ptr,  # i32[R]
    table_stride,
    move_stride,
    rows,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    moved = 0
    for start in range(0, rows, TILE):
        row = start + tl.arange(0, TILE)
        slot = tl.load(row_slot_ptr + row, mask=row < rows, other=-1)
        live = slot >= 0
        source = tl.load(state_col_ptr + slot, mask=live, other=0)
        count = tl.load(accepted_ptr + slot, mask=live, other=1)
        tokens = tl.load(computed_ptr + slot, mask=live, other=0)

        running = tokens - count + 1
        boundary = tokens // BLOCK * BLOCK
        bias = boundary - running
        target = boundary // BLOCK - 1
        behind = live & (boundary > 0) & (bias >= 0)
        tl.debug_barrier()  # in place, as in `advance`: all threads have loaded the counts
        tl.store(
            accepted_ptr + slot, tl.full([TILE], 1, tl.int32), mask=behind & (source == target)
        )

        moves = behind & ((source != target) | (bias > 0))
        before = table_page(state_table_ptr, table_stride, slot, source + bias, moves)
        conv_before = table_page(state_table_ptr, table_stride, slot, source, moves)
        after = table_page(state_table_ptr, table_stride, slot, target, moves)
        moves &= (before > 0) & (after > 0)
        moved = append_moves(
            move_from_ptr, move_to_ptr, move_shift_ptr, move_stride, moved, moves, before,
            conv_before, after, bias,
        )  # fmt: skip
    tl.store(num_moves_ptr, moved)


def _launch(
    accepted: Tensor, move_from: Tensor, move_to: Tensor, move_shift: Tensor, num_moves: Tensor,
    state_table: Tensor, state_col: Tensor, computed: Tensor, row_slot: Tensor, rows: int,
    block: int,
) -> None:  # fmt: skip
    if row_slot.shape[0] < rows or move_to.shape[0] < rows:
        raise ContractError(
            f"post_copy: {rows} rows need as many entries of row_slot and move_to, got "
            f"{row_slot.shape[0]} and {move_to.shape[0]}; size the step buffers for the padded rows"
        )
    tile = row_tile(rows)
    _post_copy_kernel[(1,)](
        accepted, move_from, move_to, move_shift, num_moves, state_table, state_col, computed,
        row_slot, state_table.stride(0), move_from.stride(0), rows,
        BLOCK=block, TILE=tile, num_warps=min(tile // 32, 8),
    )  # fmt: skip


@dataclass(frozen=True)
class _Case:
    """Verified rows around a boundary: `accepted` of up to 1 + drafts tokens, in random slots."""

    rows: int = 23
    block: int = 4
    drafts: int = 3
    cols: int = 6  # without the columns of drafts

    def __call__(self, gen: torch.Generator, dtype: torch.dtype, device: torch.device) -> Args:
        def draw(low: int, high: int, count: int) -> Tensor:
            return torch.randint(low, high, (count,), generator=gen, dtype=torch.int32)

        slots, cols = self.rows + 5, self.cols + self.drafts
        accepted = draw(1, self.drafts + 2, slots)
        before = draw(0, (self.cols - 2) * self.block, slots)  # tokens before the step
        scheduled = before + 1 + self.drafts
        row_slot = torch.randperm(slots, generator=gen, dtype=torch.int32)[: self.rows]
        row_slot[3::6] = PADDING
        junk = torch.full((2, self.rows + 3), -77, dtype=torch.int32)
        pages = 1 + torch.randperm(slots * cols, generator=gen, dtype=torch.int32)
        args: Args = {
            "accepted": accepted,
            "move_from": junk.clone(),
            "move_to": junk[0].clone(),
            "move_shift": junk[0].clone(),
            "num_moves": junk[0, :1].clone(),
            "state_table": pages.view(slots, cols),
            "state_col": (scheduled + self.block - 1) // self.block - 1,
            "computed": before + accepted,
            "row_slot": row_slot,
        }
        return {k: v.to(device) for k, v in args.items()} | {"rows": self.rows, "block": self.block}


_CASES = tuple(
    OpCase(f"R{c.rows}-block{c.block}-k{c.drafts}", c)
    for c in (
        _Case(),
        _Case(drafts=0),  # never moves
        _Case(drafts=7, block=16),
        _Case(rows=1),
        _Case(rows=0),
        _Case(rows=1030),  # two turns of the program, the second one partial
    )
)


def _traffic(args: Args) -> tuple[int, int]:
    return 40 * args["rows"], 0


post_copy = define_op(
    "post_copy(Tensor(a!) accepted, Tensor(b!) move_from, Tensor(c!) move_to, "
    "Tensor(d!) move_shift, Tensor(e!) num_moves, Tensor state_table, Tensor state_col, "
    "Tensor computed, Tensor row_slot, SymInt rows, SymInt block) -> ()",
    cuda=_launch,
    cpu=post_copy_ref,
    cases=_CASES,
    tolerance=EXACT,
    traffic=_traffic,
)
