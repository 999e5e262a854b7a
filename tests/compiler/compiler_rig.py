"""
Drives a lowered model by hand-made steps, with every page that a step must not read filled with NaN.

The rig plays the part of the runtime in the simplest way: each sequence has a scattered slot, permuted KV
pages, and a fresh state page for every step (or one page in place).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from midstream.compiler import LoweredModel, Pools, StepView
from midstream.ops.chunk_table import cut_chunks

_SLOTS = 9
_COLUMNS = 16
_NAN = float("nan")


@dataclass
class Live:
    """One sequence under way."""

    slot: int
    state_page: int = 0  # 0: nothing computed yet
    length: int = 0  # tokens computed
    exported: dict[int, int] = field(default_factory=dict)  # tokens -> state page


class PagedRig:
    """Pools, free lists and step tensors around one `LoweredModel`."""

    def __init__(
        self,
        lowered: LoweredModel,
        *,
        in_place: bool = False,
        state_pages: int = 40,
        spare: int = 3,
    ) -> None:
        kv_pages = _SLOTS * _COLUMNS + 1
        self.lowered = lowered
        self.in_place = in_place
        self.spare = spare  # entries of row buffers behind the step's rows, holding stale values
        generator = torch.Generator().manual_seed(7)
        temporal, conv = lowered.layout.allocate(state_pages, "cpu")
        kv = lowered.kv_layout.allocate(kv_pages, "cpu")
        for arena in (temporal, conv, kv):
            arena.fill_(_NAN)
        shuffled = torch.randperm(kv_pages - 1, generator=generator) + 1
        table = shuffled.view(_SLOTS, _COLUMNS).to(torch.int32)
        self.pools = Pools(temporal, conv, kv, table, lowered.kv_layout.kv_block)
        self._free_pages = (torch.randperm(state_pages - 1, generator=generator) + 1).tolist()
        self._shared_pages: set[int] = set()  # exported: read by several sequences, never written
        self._free_slots = torch.randperm(_SLOTS, generator=generator).tolist()
        lowered.bind(self.pools)

    def start(self) -> Live:
        """A new sequence."""
        return Live(self._free_slots.pop())

    def resume(self, source: Live, tokens: int) -> Live:
        """A new sequence that continues an exported state; it shares nothing but that state page."""
        live = self.start()
        live.state_page, live.length = source.exported[tokens], tokens
        whole = -(-tokens // self.pools.kv_block)
        used, own = self.pools.kv_table[source.slot, :whole], self.pools.kv_table[live.slot, :whole]
        self.pools.kv[own.long()] = self.pools.kv[used.long()]
        return live

    def unused_state_pages(self) -> Tensor:
        """Page ids that no sequence holds, the null page included."""
        return torch.tensor([0, *self._free_pages])

    def decode(self, work: Sequence[tuple[Live, int]], padding: int = 0) -> Tensor:
        """One token in each row.  Returns logits [rows, L], padding rows cut off."""
        lives = [live for live, _ in work]
        slot, position, kv_slot, read, write = self._rows(lives, [1] * len(lives))
        pad = [0] * padding
        step = StepView(
            kind="decode",
            token_id=_i32([token for _, token in work] + pad),
            position=_i32(position + pad),
            kv_slot=self._static(kv_slot + [-1] * padding),
            row_slot=self._static(slot + [-1] * padding),
            row_start=_i32(list(range(len(lives) + padding + 1))),
            read_page=self._static(read + pad),
            write_page=self._static(write + pad),
            sample_token=torch.arange(len(lives) + padding),
        )
        logits = self._run(step)
        self._advance(lives, [1] * len(lives), write)
        return logits[: len(lives)]

    def chunk(
        self,
        work: Sequence[tuple[Live, Tensor]],
        *,
        padding: int = 0,
        padding_tokens: int = 0,
        export_after: dict[int, int] | None = None,
    ) -> Tensor:
        """Several tokens in each row; `export_after` gives for a row how many tokens to export after."""
        lives, lengths = [live for live, _ in work], [len(ids) for _, ids in work]
        slot, position, kv_slot, read, write = self._rows(lives, lengths)
        exports = {}
        for row, tokens in (export_after or {}).items():
            page = exports[row, tokens] = self._free_pages.pop()
            self._shared_pages.add(page)
            lives[row].exported[lives[row].length + tokens] = page
        table = cut_chunks(lengths + [0] * padding, write + [0] * padding, exports, padding)
        start = torch.tensor([0, *lengths]).cumsum(0)
        tokens = torch.cat([ids for _, ids in work]).tolist()
        last = (
            start[-1:] + padding_tokens - 1
        )  # padding rows sample a padding token where there is one
        step = StepView(
            kind="chunk",
            token_id=_i32(tokens + [0] * padding_tokens),
            position=_i32(position + [0] * padding_tokens),
            kv_slot=self._static(kv_slot + [-1] * padding_tokens),
            row_slot=self._static(slot + [-1] * padding),
            row_start=_i32(start.tolist() + [sum(lengths)] * padding),
            read_page=self._static(read + [0] * padding),
            write_page=self._static(write + [0] * padding),
            sample_token=torch.cat([start[1:] - 1, last.expand(padding)]),
            chunk_start=table.chunk_start,
            chunk_row=table.chunk_row,
            chunk_page=table.chunk_page,
            row_chunk=table.row_chunk,
        )
        logits = self._run(step)
        self._advance(lives, lengths, write)
        return logits[: len(lives)]

    def _run(self, step: StepView) -> Tensor:
        """Logits of all rows; those of padding must be finite too."""
        logits = self.lowered.forward(step)
        assert logits.isfinite().all()
        return logits

    def _rows(self, lives: list[Live], lengths: list[int]) -> tuple[list[int], ...]:
        slot = [live.slot for live in lives]
        read = [live.state_page for live in lives]
        write = [self._page_to_write(live) for live in lives]
        position, kv_slot = [], []
        block = self.pools.kv_block
        for live, length in zip(lives, lengths, strict=True):
            for place in range(live.length, live.length + length):
                page = int(self.pools.kv_table[live.slot, place // block])
                position.append(place)
                kv_slot.append(page * block + place % block)
        return slot, position, kv_slot, read, write

    def _page_to_write(self, live: Live) -> int:
        if self.in_place and live.state_page not in (0, *self._shared_pages):
            return live.state_page
        return self._free_pages.pop()

    def _advance(self, lives: list[Live], lengths: list[int], write: list[int]) -> None:
        """Move the sequences on and poison the state pages they leave."""
        for live, length, page in zip(lives, lengths, write, strict=True):
            left, live.state_page = live.state_page, page
            live.length += length
            if left not in (0, page, *self._shared_pages):
                self.pools.temporal[left] = self.pools.conv[left] = _NAN
                self._free_pages.insert(0, left)

    def _static(self, values: list[int]) -> Tensor:
        """A row buffer that is longer than the step; what lies behind belongs to an earlier step."""
        return _i32(values + [1] * self.spare)


def _i32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
