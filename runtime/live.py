"""
The live requests as arrays, one entry per slot, so that a decode step costs no Python per row.

Mirrors on the host what `SlotMemory` holds on the device, as far as the host knows it without waiting; what
the device has not got yet is in `deltas`.
Letters: S slots, Z columns.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from midstream.errors import CapacityError
from midstream.runtime.deltas import Deltas
from midstream.runtime.request import Request
from midstream.runtime.sampling import MAX_STOP_IDS
from midstream.runtime.slots import NO_COL, SlotLayout

I32 = npt.NDArray[np.int32]


class LiveTable:
    """Structure of arrays over slots.  The scheduler and the commit are its only writers."""

    def __init__(self, layout: SlotLayout, max_len: int) -> None:
        num = layout.num_slots
        self.request: list[Request | None] = [None] * num
        self.epoch = np.full(
            num, -1, np.int64
        )  # occupant; unique over the engine's life, -1 if empty
        self.computed: I32 = np.zeros(num, np.int32)  # tokens computed, steps in flight included
        self.last_computed: I32 = np.zeros(num, np.int32)  # nothing is scheduled from here on
        self.tokens: I32 = np.zeros((num, max_len + 1), np.int32)  # known tokens
        self.prompt_len: I32 = np.zeros(num, np.int32)
        self.num_outputs: I32 = np.zeros(num, np.int32)
        self.max_tokens: I32 = np.zeros(num, np.int32)
        self.num_logprobs: I32 = np.zeros(num, np.int32)
        self.stop_id: I32 = np.full((num, MAX_STOP_IDS), -1, np.int32)
        self.watched = np.zeros(num, np.bool_)  # each token needs the host's attention
        self.decodes = np.zeros(num, np.bool_)  # each step computes the token sampled last
        self.relocate = np.zeros(num, np.bool_)  # the running page becomes a checkpoint: move on
        self.state_col: I32 = np.full(num, NO_COL, np.int32)  # running column
        self.running_page: I32 = np.zeros(num, np.int32)  # written by the next tokens, 0 if none
        self.resume_page: I32 = np.zeros(num, np.int32)
        self.state_table: I32 = np.zeros((num, layout.widths["state_table"]), np.int32)
        self.kv_table: I32 = np.zeros((num, layout.widths["kv_table"]), np.int32)
        self.num_kv_pages: I32 = np.zeros(num, np.int32)  # columns in use
        self.deltas = Deltas(layout.num_elements)
        self._free = list(range(num - 1, -1, -1))
        self._next_epoch = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, request: Request, known: I32, computed: int, resume_page: int) -> int:
        """Put a request into a free slot.  Raises CapacityError if there is none."""
        if not self._free:
            raise CapacityError(f"LiveTable: all {len(self.request)} slots are taken")
        slot = self._free.pop()
        self.request[slot] = request
        self.epoch[slot] = request.epoch = self._next_epoch
        self._next_epoch += 1
        self.computed[slot] = computed
        self.last_computed[slot] = request.last_computed
        self.tokens[slot, : len(known)] = known
        self.prompt_len[slot] = len(request.prompt)
        self.num_outputs[slot] = len(request.outputs)
        self.max_tokens[slot] = request.max_tokens
        self.num_logprobs[slot] = request.params.logprobs or 0
        stop_ids = request.sampling.stop_ids
        self.stop_id[slot] = -1
        self.stop_id[slot, : len(stop_ids)] = stop_ids
        self.watched[slot] = request.watched
        self.relocate[slot] = False
        self.state_col[slot] = NO_COL
        self.resume_page[slot] = resume_page
        self.num_kv_pages[slot] = self.running_page[slot] = 0
        request.slot = slot
        return slot

    def release(self, request: Request) -> None:
        """Take the request out of its slot; its outputs go with it."""
        slot = request.slot
        request.outputs = self.outputs(slot)
        self.request[slot] = None
        self.epoch[slot] = -1
        self.decodes[slot] = False
        self._free.append(slot)
        request.slot = request.epoch = -1

    def outputs(self, slot: int) -> list[int]:
        """Output tokens that have arrived."""
        begin = int(self.prompt_len[slot])
        return self.tokens[slot, begin : begin + int(self.num_outputs[slot])].tolist()

    def kv_pages(self, slot: int) -> list[int]:
        """KV pages that the slot's request holds, in the order of its tokens."""
        return self.kv_table[slot, : int(self.num_kv_pages[slot])].tolist()
