"""One chunk op over rows cut from one random sequence, for tests that state claims about scans."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from midstream.ops.case_data import element_offset
from midstream.ops.chunk_table import cut_chunks

START = 64  # elements before the region
GUARD = 64  # elements after it


@dataclass(frozen=True, slots=True)
class ScanResult:
    out: list[Tensor]  # per row [length, ...]
    states: dict[tuple[int, int], Tensor]  # (row, tokens) -> region, flat

    def end(self, row: int = 0) -> Tensor:
        return self.states[row, self.out[row].shape[0]]


@dataclass(frozen=True, slots=True)
class PagedScan:
    """`call` is a launcher or a reference; `tokens` are inputs per token, `params` all others."""

    call: Callable[..., None]
    tokens: Mapping[str, Tensor]
    params: Mapping[str, Any]
    size: int  # elements of the region

    def run(
        self,
        rows: Sequence[slice],
        exports: Sequence[tuple[int, int]] = (),
        states: Sequence[Tensor | None] = (),
        in_place: bool = False,
    ) -> ScanResult:
        """Rows start from `states` (None or missing: zero) and export at (row, tokens)."""
        device = self.tokens["x"].device
        lengths = [row.stop - row.start for row in rows]
        count = len(rows)
        old = [1 + row for row in range(count)]
        new = old if in_place else [1 + count + row for row in range(count)]
        extra = {key: 1 + 2 * count + i for i, key in enumerate(exports)}
        elements = START + -(-(self.size + GUARD) // 64) * 64
        arena = torch.full((1 + 2 * count + len(exports), elements), float("nan"), device=device)
        region = arena[:, START : START + self.size]
        known = [row < len(states) and states[row] is not None for row in range(count)]
        for row in range(count):
            if known[row]:
                region[old[row]] = states[row]
        before = arena.clone()
        table = cut_chunks(lengths, new, extra, padding_chunks=1)
        packed = {
            name: torch.cat([value[row] for row in rows] + [value[:3] * float("nan")])
            for name, value in self.tokens.items()
        }
        out = torch.full_like(packed["x"], 7.0)
        read_page = [page if there else 0 for page, there in zip(old, known, strict=True)]
        self.call(
            arena=arena,
            out=out,
            **packed,
            **self.params,
            offset=element_offset(START).to(device),
            read_page=torch.tensor(read_page, dtype=torch.int32, device=device),
            chunk_start=table.chunk_start.to(device),
            chunk_row=table.chunk_row.to(device),
            chunk_page=table.chunk_page.to(device),
            row_chunk=table.row_chunk.to(device),
        )
        written = {**{(row, lengths[row]): new[row] for row in range(count)}, **extra}
        self._check_untouched(arena, before, set(written.values()))
        assert (out[sum(lengths) :] == 7.0).all(), "wrote the output of a token of no chunk"
        return ScanResult(
            list(out[: sum(lengths)].split(lengths)),
            {key: region[page].clone() for key, page in written.items()},
        )

    def _check_untouched(self, arena: Tensor, before: Tensor, written: set[int]) -> None:
        """Pages that are not written, and all guards, keep their bytes (NaN included)."""
        for page in range(arena.shape[0]):
            guards = [slice(0, START), slice(START + self.size, None)]
            for part in guards if page in written else [slice(None)]:
                assert torch.equal(
                    arena[page, part].view(torch.int32), before[page, part].view(torch.int32)
                ), f"page {page} changed outside what the step writes"


def run_programs_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Triton's interpreter start programs from the last to the first, to show races between them."""
    if torch.cuda.is_available():
        pytest.skip("only the interpreter has an order of programs")
    from triton.runtime.interpreter import interpreter_builder as builder

    forwards = builder.set_grid_idx
    monkeypatch.setattr(
        builder, "set_grid_idx", lambda x, y, z: forwards(builder.grid_dim[0] - 1 - x, y, z)
    )
