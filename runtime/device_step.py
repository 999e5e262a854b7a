"""
One step on the device: apply deltas, advance, move states, run the layers, sample.

The same function runs eagerly on the CPU, eagerly on a GPU and under capture, over the same static buffers.
It waits for nothing and reads no device value.  Letters: R rows, L vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from midstream.compiler.context import StepView
from midstream.compiler.layout import StateLayout
from midstream.compiler.lowering import LoweredModel
from midstream.ops.advance import advance
from midstream.ops.page_move import page_move
from midstream.ops.sample import sample
from midstream.ops.scatter_slots import scatter_slots
from midstream.runtime.slots import SlotMemory
from midstream.runtime.stage import Stage


class DeviceStep:
    """Owner of the buffers between the stage and the sampled tokens."""

    def __init__(
        self,
        lowered: LoweredModel,
        slots: SlotMemory,
        stage: Stage,
        layout: StateLayout,
        arenas: tuple[Tensor, Tensor],
        state_block: int,
        precopy: bool,
    ) -> None:
        rows, device = stage.limits.max_rows, slots.flat.device
        self.lowered = lowered
        self.slots = slots
        self.stage = stage
        self.state_block = state_block
        self.precopy = precopy
        self.temporal, self.conv = arenas
        self.window_rows = layout.window_rows
        self.conv_offset, self.conv_width = layout.conv_table(device)
        # i32[2, R]  sampled tokens, and the bits of their log-probabilities: sent by one copy
        self.result = torch.zeros((2, rows), dtype=torch.int32, device=device)
        self.token = self.result[0].fill_(-1)  # i32[R]
        self.logprob = self.result[1].view(torch.float32)  # f32[R]
        self.move_from = torch.zeros((2, rows), dtype=torch.int32, device=device)
        self.move_to = torch.zeros(rows, dtype=torch.int32, device=device)
        self.move_shift = torch.zeros(rows, dtype=torch.int32, device=device)
        self.num_moves = torch.zeros(1, dtype=torch.int32, device=device)

    def apply_deltas(self) -> None:
        """Write the staged changes of records and block tables."""
        fields = self.stage.device
        scatter_slots(
            self.slots.flat, fields["delta_index"], fields["delta_value"], fields["delta_count"]
        )

    def run(self, view: StepView, rows: int) -> Tensor:
        """Enqueue the whole step; returns its logits [R, L]."""
        self.apply_deltas()
        self._advance(view, rows)
        if self.precopy:
            page_move(
                self.temporal, self.conv, self.move_from, self.move_to, self.move_shift, self.num_moves,
                self.conv_offset, self.conv_width, self.window_rows,
            )  # fmt: skip
        logits = self.lowered.forward(view)
        self._sample(view, rows, logits)
        # without drafts acceptance leaves no state behind a boundary: no post-copy
        return logits

    def addresses(self) -> dict[str, int]:
        """Every buffer that a captured step binds, by name; model parameters aside."""
        own = {n: t.data_ptr() for n, t in vars(self).items() if isinstance(t, Tensor)}
        own["slots"] = self.slots.flat.data_ptr()
        return own | {f"stage.{name}": address for name, address in self.stage.addresses().items()}

    def _advance(self, view: StepView, rows: int) -> None:
        slots = self.slots
        advance(
            slots.state_col, slots.src_col, slots.src_off, slots.accepted, slots.resume_page,
            view.token_id, view.read_page, view.write_page, self.move_from, self.move_to,
            self.move_shift, self.num_moves, slots.state_table, slots.last_token, slots.computed,
            view.row_slot, view.row_start, rows, self.state_block, self.precopy,
        )  # fmt: skip

    def _sample(self, view: StepView, rows: int, logits: Tensor) -> None:
        slots = self.slots
        sample(
            self.token, self.logprob, slots.last_token, slots.computed, slots.accepted, logits,
            view.row_slot, view.row_start, self.stage.device["row_sample"], slots.temperature,
            slots.top_k, slots.top_p, slots.min_p, slots.seed, slots.stop_id, slots.min_position, rows,
        )  # fmt: skip
