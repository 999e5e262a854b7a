"""
Memory of the rows that a compiled model generates for: one state page and a run of KV pages each.

A row belongs to at most one cache.  The tensors that a decode step reads are written from the host when
another cache, or a longer one, comes to decode; in between, the step itself moves them on.

Letters: R rows of the memory, B rows of a cache, Z KV pages of a row, N pages, E elements of a page.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from midstream.compiler.context import Pools, StepView
from midstream.compiler.host_memory import host_memory
from midstream.compiler.lowering import LoweredModel
from midstream.errors import CapacityError, ContractError

_PADDING = (0, -1, 0, -1, 0)  # of each field below


class RowMemory:
    """Pools, the rows that are free, and the static tensors of decode steps."""

    def __init__(self, lowered: LoweredModel, num_rows: int, max_len: int) -> None:
        self.num_rows = num_rows
        self.max_len = max_len
        self.kv_block = lowered.kv_layout.kv_block
        self.pages_per_row = -(-max_len // self.kv_block)
        device, num_kv = lowered.device, num_rows * self.pages_per_row
        temporal, conv, kv = _allocate(lowered, num_rows, max_len, num_kv)
        table = torch.arange(1, num_kv + 1, dtype=torch.int32, device=device)
        self.pools = Pools(temporal, conv, kv, table.view(num_rows, -1), self.kv_block)
        lowered.bind(self.pools)
        self.is_open = True  # False once the model was given back
        self._free = list(range(num_rows))
        self.token_id = torch.zeros(num_rows, dtype=torch.int32, device=device)  # i32[R]
        self._fields = torch.zeros((5, num_rows), dtype=torch.int32, device=device)
        self._row_start = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._every_row = torch.arange(num_rows, dtype=torch.int64, device=device)
        self.blank()

    @property
    def num_bytes(self) -> int:
        """Bytes of the pools."""
        pools = (self.pools.temporal, self.pools.conv, self.pools.kv)
        return sum(pool.numel() * pool.element_size() for pool in pools)

    @property
    def num_free(self) -> int:
        """Rows that no cache holds."""
        return len(self._free)

    def take(self, num_rows: int) -> list[int]:
        """Rows for a cache.

        Raises:
            CapacityError: when fewer are free.
            ContractError: when the model was given back.
        """
        if not self.is_open:
            raise undone("rows were wanted")
        if num_rows > len(self._free):
            held = self.num_rows - len(self._free)
            drop = "drop the outputs that hold those caches, reset() them, or " if held else ""
            raise CapacityError(
                f"midstream.compile: {rows_told(num_rows)} wanted, {self.num_rows} compiled for and {held} "
                "held by caches that are still alive; expected room for the batch (times beams); "
                f"{drop}compile with a larger max_batch"
            )
        self._free.sort()
        taken = self._free[:num_rows]
        del self._free[:num_rows]
        return taken

    def give_back(self, rows: list[int]) -> None:
        """Empty `rows`, which its owner may go on using."""
        self._free.extend(rows)
        rows.clear()

    def copy(self, sources: Sequence[int], targets: Sequence[int], num_tokens: int) -> None:
        """Copy the states and the first `num_tokens` keys and values of rows; targets may be sources too."""
        pairs = [(s, t) for s, t in zip(sources, targets, strict=True) if s != t]
        if not pairs:
            return
        device, pools = self.token_id.device, self.pools
        source, target = torch.tensor(pairs, device=device).unbind(1)
        for arena in (pools.temporal, pools.conv):
            arena[target + 1] = arena[source + 1]  # read whole before anything is written
        used = -(-num_tokens // self.kv_block)
        by_row = pools.kv[1:].unflatten(0, (self.num_rows, self.pages_per_row))
        by_row[target, :used] = by_row[source, :used]

    def state_page(self, row: int) -> int:
        """The page of a row's state."""
        return row + 1

    def kv_slot(self, row: int, position: int) -> int:
        """Where the KV pool keeps the token at `position` of a row."""
        return (row * self.pages_per_row + 1) * self.kv_block + position

    def stage(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Write the tensors of decode steps: the next token of row i comes at position lengths[i]."""
        pad = self.num_rows - len(rows)
        fields = [
            [*lengths],
            [self.kv_slot(row, length) for row, length in zip(rows, lengths, strict=True)],
            [1] * len(rows),
            [*rows],
            [self.state_page(row) for row in rows],
        ]
        padded = [field + [of] * pad for field, of in zip(fields, _PADDING, strict=True)]
        self._fields.copy_(torch.tensor(padded, dtype=torch.int32))

    def blank(self) -> None:
        """Make every row padding, so that a step touches no row."""
        self.stage((), ())

    def move_on(self, num_rows: int) -> None:
        """Device work behind a decode step: positions and KV slots grow by one, except in padding."""
        self._fields[:2, :num_rows].add_(self._fields[2, :num_rows])

    def decode_view(self, num_rows: int) -> StepView:
        """The tensors of a decode step; always the same addresses."""
        position, kv_slot, _, row_slot, page = self._fields[:, :num_rows].unbind(0)
        return StepView(
            kind="decode",
            token_id=self.token_id[:num_rows],
            position=position,
            kv_slot=kv_slot,
            row_slot=row_slot,
            row_start=self._row_start[: num_rows + 1],
            read_page=page,
            write_page=page,
            sample_token=self._every_row[:num_rows],
        )

    def addresses(self) -> dict[str, int]:
        """Data pointers of what captured steps bind, by name; model parameters aside."""
        bound = {
            "temporal": self.pools.temporal,
            "conv": self.pools.conv,
            "kv": self.pools.kv,
            "kv_table": self.pools.kv_table,
            "token_id": self.token_id,
            "fields": self._fields,
            "row_start": self._row_start,
            "every_row": self._every_row,
        }
        return {name: tensor.data_ptr() for name, tensor in bound.items()}


def undone(found: str) -> ContractError:
    """What to raise where a cache outlived the compiled model that made it."""
    return ContractError(
        f"MidstreamCache: {found} after undo() of the compiled model that made the cache, expected a cache "
        "of the model as it is now; leave the cache out and pass the whole conversation once more, or "
        "undo() later"
    )


def rows_told(number: int) -> str:
    """
    >>> rows_told(1), rows_told(2)
    ('1 row', '2 rows')
    """
    return "1 row" if number == 1 else f"{number} rows"


def _allocate(
    lowered: LoweredModel, num_rows: int, max_len: int, num_kv: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The arenas of states, windows and keys and values, null pages included.

    Raises:
        CapacityError: when the device has no room for them.
    """
    layout, kv_layout, device = lowered.layout, lowered.kv_layout, lowered.device
    num_bytes = (num_rows + 1) * layout.page_bytes + (num_kv + 1) * kv_layout.page_bytes
    refusal = CapacityError(
        f"midstream.compile: max_batch={num_rows} rows of max_len={max_len} tokens take "
        f"{num_bytes / 2**30:,.1f} GiB, which {device} does not have; expected rows that fit beside the "
        "model; lower max_batch or max_len"
    )
    # more than there is would not fail when it is taken, but end the process when it is filled
    if device.type == "cpu" and num_bytes > host_memory():
        raise refusal
    try:
        return *layout.allocate(num_rows + 1, device), kv_layout.allocate(num_kv + 1, device)
    except CapacityError as error:
        raise refusal from error
