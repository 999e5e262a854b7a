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
from midstream.ops import host_decode
from midstream.runtime.deltas import Deltas
from midstream.runtime.request import Request
from midstream.runtime.sampling import MAX_STOP_IDS
from midstream.runtime.slots import SlotLayout

I32 = npt.NDArray[np.int32]


class LiveTable:
    """Structure of arrays over slots.  The scheduler and the commit are its only writers."""

    def __init__(self, layout: SlotLayout, max_len: int) -> None:
        num = layout.num_slots
        self.request: list[Request | None] = [None] * num
        # i32[fields, S + 16]  numbers of each slot; one line more than needed, as in runtime/stage.py
        self.slots: I32 = np.zeros((host_decode.SLOT_FIELDS, num + 16), np.int32)
        of = self.slots[:, :num]
        self.computed: I32 = of[host_decode.COUNTED]  # tokens, steps in flight included
        self.last_computed: I32 = of[host_decode.LAST_COMPUTED]  # from here on nothing is scheduled
        self.look_at: I32 = of[host_decode.LOOK_AT]  # as in ops/host_decode.py, as heed_at
        self.heed_at: I32 = of[host_decode.HEED_AT]
        self.decodes: I32 = of[host_decode.DECODES]  # 1: each step computes the token sampled last
        self.relocate: I32 = of[host_decode.RELOCATE]  # 1: the running page is kept, move on
        self.num_kv_pages: I32 = of[host_decode.NUM_KV_PAGES]  # columns in use
        self.running_page: I32 = of[host_decode.RUNNING_PAGE]  # of the next tokens, 0 if none
        self.num_logprobs: I32 = of[host_decode.NUM_LOGPROBS]
        self.prompt_len: I32 = of[host_decode.PROMPT_LEN]
        self.num_outputs: I32 = of[host_decode.NUM_OUTPUTS]
        self.max_tokens: I32 = of[host_decode.MAX_TOKENS]
        self.watched: I32 = of[host_decode.WATCHED]  # 1: each token needs the host's attention
        self.epoch: I32 = of[host_decode.EPOCH]  # occupant, -1 if empty; not used again for long
        self.epoch[:] = -1
        self.tokens: I32 = np.zeros((num, max_len + 1), np.int32)  # known tokens
        self.stop_id: I32 = np.full((num, MAX_STOP_IDS), -1, np.int32)
        self.kv_table: I32 = np.zeros((num, layout.widths["kv_table"]), np.int32)
        self.deltas = Deltas(layout.num_elements)
        self._free = list(range(num - 1, -1, -1))
        self._next_epoch = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, request: Request, known: I32, computed: int) -> int:
        """Put a request into a free slot.  Raises CapacityError if there is none."""
        if not self._free:
            raise CapacityError(f"LiveTable: all {len(self.request)} slots are taken")
        slot = self._free[-1]  # free until all is written
        self.computed[slot] = computed
        self.last_computed[slot] = request.last_computed
        self.tokens[slot, : len(known)] = known
        self.prompt_len[slot] = len(request.prompt)
        self.num_outputs[slot] = len(request.outputs)
        self.max_tokens[slot] = request.max_tokens
        self.num_logprobs[slot] = request.params.logprobs or 0
        stop_ids = request.sampling.stop_ids
        self.stop_id[slot] = -1
        self.stop_id[slot, : len(stop_ids)] = sorted(stop_ids, reverse=True)  # any -1 last
        self.watched[slot] = request.watched
        self.relocate[slot] = self.look_at[slot] = self.heed_at[slot] = 0
        self.num_kv_pages[slot] = self.running_page[slot] = 0
        self.request[slot] = request
        self.epoch[slot] = request.epoch = self._next_epoch
        self._next_epoch = (self._next_epoch + 1) % 2**31
        request.slot = self._free.pop()
        return slot

    def release(self, request: Request) -> None:
        """Take the request out of its slot; its outputs go with it."""
        slot = request.slot
        request.outputs = self.outputs(slot)
        self.request[slot] = None
        self.epoch[slot] = -1
        self.decodes[slot] = 0
        self._free.append(slot)
        request.slot = request.epoch = -1

    def outputs(self, slot: int) -> list[int]:
        """Output tokens that have arrived."""
        begin = int(self.prompt_len[slot])
        return self.tokens[slot, begin : begin + int(self.num_outputs[slot])].tolist()

    def kv_pages(self, slot: int) -> list[int]:
        """KV pages that the slot's request holds, in the order of its tokens."""
        return self.kv_table[slot, : int(self.num_kv_pages[slot])].tolist()
