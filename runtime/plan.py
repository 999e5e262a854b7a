"""The decision of the scheduler for one step: plain host data, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from midstream.ops.host_decode import COMPUTED, NEW, OCCUPANT, ROW_FIELDS, SAMPLES, SLOT

if TYPE_CHECKING:
    from midstream.runtime.keys import Keys
    from midstream.runtime.request import Request
    from midstream.runtime.tree import Branch

I32 = npt.NDArray[np.int32]


@dataclass(slots=True)
class Chunk:
    """Known tokens of one request that this step computes (prompt, or a replay after preemption)."""

    request: Request
    epoch: int
    begin: int  # tokens before the step
    end: int  # tokens after it
    samples: bool  # the chunk reaches the last known token, so that the step samples the next
    wanted: dict[int, bool] = field(default_factory=dict)  # positions to keep; True: a guess
    export_position: list[int] = field(default_factory=list)  # ascending, inside (begin, end)
    export_page: list[int] = field(default_factory=list)
    branch: Branch | None = None  # most of its blocks, made ready for the prefix tree


@dataclass(slots=True)
class Publication:
    """A running page that becomes a checkpoint when its step is committed, if the request still lives."""

    request: Request
    epoch: int
    position: int
    page: int
    is_passing: bool = False  # the request's next boundary replaces it


@dataclass(slots=True)
class Ending:
    """What a request that left its slot computed last: published when the step that wrote it is committed."""

    epoch: int
    keys: Keys
    root: bytes
    num_tokens: int
    tail: tuple[int, ...]  # tokens behind the last whole block
    first_block: int  # of `kv_pages`
    kv_pages: list[int] = field(default_factory=list)  # held by the ending
    state_page: int = 0  # held by the ending


def new_rows(num_slots: int) -> I32:
    """i32[8, S + 16]  as in ops/host_decode.py; one cache line more than needed, as in runtime/stage.py"""
    return np.zeros((ROW_FIELDS, num_slots + 16), np.int32)


@dataclass(slots=True)
class StepPlan:
    """Rows of a step: the chunks first, then the decoding rows.

    The rows of a plan that is over may be those of a later one.
    """

    rows: I32  # i32[8, R]  as in ops/host_decode.py, with room for every slot
    num_rows: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    publications: list[Publication] = field(default_factory=list)
    released: list[int] = field(default_factory=list)  # state pages of no use once it is committed
    num_logprobs: int = 0  # best alternatives asked for by any row
    kv_copies: list[tuple[int, int]] = field(
        default_factory=list
    )  # pages (from, to), ahead of the step
    released_kv: list[int] = field(default_factory=list)  # KV pages likewise
    fresh: set[int] = field(default_factory=set)  # state pages that this step is the first to write
    endings: list[Ending] = field(default_factory=list)
    is_over: bool = False  # committed or given up

    @staticmethod
    def empty() -> StepPlan:
        """No rows, and no room for any."""
        return StepPlan(new_rows(0))

    @property
    def slot(self) -> I32:
        """i32[R]  slot of each row"""
        return self.rows[SLOT, : self.num_rows]

    @property
    def num_computed(self) -> I32:
        """i32[R]  tokens before the step"""
        return self.rows[COMPUTED, : self.num_rows]

    @property
    def num_new(self) -> I32:
        """i32[R]  tokens of the step, >= 1"""
        return self.rows[NEW, : self.num_rows]

    @property
    def samples(self) -> I32:
        """i32[R]  1 where the row samples a token"""
        return self.rows[SAMPLES, : self.num_rows]

    @property
    def epoch(self) -> I32:
        """i32[R]  occupant of the slot; a later occupant has another"""
        return self.rows[OCCUPANT, : self.num_rows]

    @property
    def kind(self) -> str:
        """`decode` by request state, never by shape: a one-token prompt chunk is a chunk."""
        return "chunk" if self.chunks else "decode"
