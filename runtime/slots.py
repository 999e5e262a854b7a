"""
Per-slot records on the device: one flat int32 tensor with named views.

A slot is the record of a live request.  One flat memory means that every change that the host makes to a
record or a block table is an (index, value) pair, and one scatter kernel applies them all.
Letters: S slots, Z columns of a block table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from midstream.runtime.sampling import MAX_STOP_IDS, SamplingParams

NO_COL = -1  # state_col of a request that has no state yet


@dataclass(frozen=True, slots=True)
class SlotMemory:
    """Views of one int32 tensor; contents change, addresses never do."""

    flat: Tensor  # i32[n]       all of the below, one after the other
    last_token: Tensor  # i32[S]       token sampled last
    computed: Tensor  # i32[S]       tokens whose state and KV exist
    state_col: Tensor  # i32[S]       running column, NO_COL if fresh
    src_col: Tensor  # i32[S]       column before this step, NO_COL if fresh
    src_off: Tensor  # i32[S]       accepted - 1 of the last verification
    accepted: Tensor  # i32[S]       tokens accepted by the last step, >= 1
    resume_page: Tensor  # i32[S]       page to read instead of the table's, 0 if none
    temperature: Tensor  # i32[S]       bits of a float32; 0.0 is greedy
    top_p: Tensor  # i32[S]       bits of a float32
    min_p: Tensor  # i32[S]       bits of a float32
    top_k: Tensor  # i32[S]       0 is off
    min_position: Tensor  # i32[S]       stop ids are forbidden before this position
    seed: Tensor  # i32[S, 2]
    stop_id: Tensor  # i32[S, MAX_STOP_IDS]  -1 where unused
    state_table: Tensor  # i32[S, Z]    state page of each column
    kv_table: Tensor  # i32[S, Z']   KV page of each column

    @staticmethod
    def allocate(layout: SlotLayout, device: torch.device) -> SlotMemory:
        """All zeros: null pages everywhere."""
        flat = torch.zeros(layout.num_elements, dtype=torch.int32, device=device)
        views = {}
        for name, width in layout.widths.items():
            part = flat[layout.start[name] :][: layout.num_slots * width]
            views[name] = part.view(layout.num_slots, width) if name in _WIDE else part
        return SlotMemory(flat=flat, **views)


_WIDE = ("seed", "stop_id", "state_table", "kv_table")


class SlotLayout:
    """Where each field of each slot lies in the flat memory (host arithmetic only)."""

    def __init__(self, num_slots: int, state_cols: int, kv_cols: int) -> None:
        names = [n for n in SlotMemory.__dataclass_fields__ if n != "flat"]
        self.num_slots = num_slots
        self.widths = dict.fromkeys(names, 1) | {
            "seed": 2,
            "stop_id": MAX_STOP_IDS,
            "state_table": state_cols,
            "kv_table": kv_cols,
        }
        self.start: dict[str, int] = {}
        self.num_elements = 0
        for name, width in self.widths.items():
            self.start[name] = self.num_elements
            self.num_elements += num_slots * width

    def index(self, name: str, slot: int, col: int = 0) -> int:
        """Element of field `name` of `slot`."""
        assert 0 <= col < self.widths[name], f"{name} has no column {col}"
        return self.start[name] + slot * self.widths[name] + col

    def admission(
        self, slot: int, computed: int, resume_page: int, sampling: SlotSampling
    ) -> dict[int, int]:
        """Index and value of every change that makes `slot` the record of a newly admitted request."""
        values = {
            "computed": computed,
            "state_col": NO_COL,
            "src_col": NO_COL,
            "src_off": 0,
            "accepted": 1,
            "resume_page": resume_page,
            "temperature": _bits(sampling.params.temperature),
            "top_p": _bits(sampling.params.top_p),
            "min_p": _bits(sampling.params.min_p),
            "top_k": sampling.params.top_k,
            "min_position": sampling.min_position,
        }
        deltas = {self.index(name, slot): value for name, value in values.items()}
        for col, value in enumerate(np.array([sampling.seed], np.uint64).view(np.int32).tolist()):
            deltas[self.index("seed", slot, col)] = value
        for col in range(MAX_STOP_IDS):
            unused = col >= len(sampling.stop_ids)
            deltas[self.index("stop_id", slot, col)] = -1 if unused else sampling.stop_ids[col]
        return deltas


@dataclass(frozen=True, slots=True)
class SlotSampling:
    """Sampling state of one request as its slot holds it."""

    params: SamplingParams
    seed: int  # 64 bits
    stop_ids: tuple[int, ...]  # end-of-sequence ids included; at most MAX_STOP_IDS
    min_position: int  # first position at which a stop id may stand


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))
