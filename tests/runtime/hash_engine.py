"""An engine over the hash model: all of the runtime, the ops that move slots and sample, no layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hash_model import VOCAB, HashMemory, HashRow
from torch import Tensor

import midstream
from midstream.compiler.context import Pools, StepView
from midstream.runtime import assembly, device_step


class HashLanguageModel(torch.nn.Module):
    """As much of a model of transformers as the runtime looks at."""

    def __init__(self, vocab_size: int = VOCAB) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, 1)
        self.config = SimpleNamespace(max_position_embeddings=4096, eos_token_id=None)
        self.lowered = False

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embedding


class _StateLayout:
    page_bytes = 16
    window_rows = 0

    def allocate(self, num_pages: int, device: torch.device) -> tuple[Tensor, Tensor]:
        return torch.zeros(num_pages, 2, dtype=torch.float64), torch.zeros(num_pages, 0)

    def conv_table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)


class _KvLayout:
    def __init__(self, kv_block: int) -> None:
        self.kv_block = kv_block
        self.page_bytes = 16 * kv_block

    def allocate(self, num_pages: int, device: torch.device) -> Tensor:
        return torch.zeros(num_pages, 2 * self.kv_block, dtype=torch.float64)


class HashLowered:
    """Stands in for `LoweredModel`: reads a step from the buffers that layers would get."""

    def __init__(self, model: HashLanguageModel, *, kv_block: int, **unused: Any) -> None:
        self.model = model
        self.device = torch.device("cpu")
        self.layout = _StateLayout()
        self.kv_layout = _KvLayout(kv_block)
        self.export_alignment: int | None = 1
        model.lowered = True

    def bind(self, pools: Pools) -> None:
        self.pools = pools
        self.memory = HashMemory(pools.temporal.numpy(), pools.kv.numpy(), pools.kv_block)

    def undo(self) -> None:
        self.model.lowered = False

    def forward(self, view: StepView) -> Tensor:
        """Logits [R, VOCAB]: one-hot at the next token."""
        slots, starts = view.row_slot.tolist(), view.row_start.tolist()
        live = [row for row, slot in enumerate(slots) if slot >= 0]
        rows = [self._row(view, row) for row in live]
        assert live == list(range(len(live))), "padding between rows"
        assert set(starts[len(live) :]) == {starts[len(live)]}
        assert (view.kv_slot[starts[-1] : len(view.token_id)] == -1).all()
        for table in (view.read_page, view.write_page):
            assert not table[len(live) : len(slots)].any()
        logits = torch.zeros(len(view.sample_token), self.model.embedding.num_embeddings)
        for row, token in zip(live, self.memory.run(rows), strict=True):
            assert view.sample_token[row] == starts[row + 1] - 1
            logits[row, token] = 1.0
        return logits

    def _row(self, view: StepView, row: int) -> HashRow:
        first, end = view.row_start[row : row + 2].tolist()
        begin = int(view.position[first])
        assert view.position[first:end].tolist() == list(range(begin, begin + end - first))
        block = self.pools.kv_block
        last = (begin + end - first - 1) // block
        pages = self.pools.kv_table[view.row_slot[row], : last + 1].tolist()
        places = [pages[p // block] * block + p % block for p in range(begin, begin + end - first)]
        assert view.kv_slot[first:end].tolist() == places
        cuts = [(begin + stop - first, page) for stop, page in _cuts(view, row)]
        assert cuts[-1][1] == view.write_page[row]
        return HashRow(
            begin, view.token_id[first:end].tolist(), int(view.read_page[row]), pages, cuts
        )


def _cuts(view: StepView, row: int) -> list[tuple[int, int]]:
    """First token behind each chunk of a row, and the page that it writes."""
    if view.chunk_start is None or view.chunk_page is None or view.row_chunk is None:
        return [(int(view.row_start[row + 1]), int(view.write_page[row]))]
    assert view.chunk_row is not None
    first, end = view.row_chunk[row : row + 2].tolist()
    bounds = view.chunk_start[first : end + 1].tolist()
    assert view.chunk_row[first:end].tolist() == [row] * (end - first)
    assert bounds[0] == view.row_start[row] and bounds[-1] == view.row_start[row + 1]
    assert all(0 < b - a <= 64 for a, b in pairwise(bounds))
    return list(zip(bounds[1:], view.chunk_page[first:end].tolist(), strict=True))


class CheckedStep(device_step.DeviceStep):
    """Pages are decided twice, by the host for the stage and by the device: both must agree."""

    def _advance(self, view: StepView, rows: int) -> None:
        table = view.write_page
        staged = table[:rows].clone()
        super()._advance(view, rows)
        assert torch.equal(table[:rows], staged), f"the host says {staged}, the device {table}"


@contextmanager
def hash_engine(
    model: HashLanguageModel | None = None, tokenizer: Any = None, **options: Any
) -> Iterator[midstream.Engine]:
    """An engine over poisoned pools; at the end its books balance and nothing is owned."""
    options = {
        "kv_block": 4,
        "state_block": 8,
        "max_rows": 4,
        "max_step_tokens": 16,
        "max_len": 64,
    } | options
    options = {"num_state_pages": 30, "num_kv_pages": 80} | options
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIDSTREAM_POISON", "1")
        patch.setattr(assembly, "check_model", lambda model: None)
        patch.setattr(assembly, "lower", HashLowered)
        patch.setattr(assembly, "DeviceStep", CheckedStep)
        engine = midstream.Engine(model or HashLanguageModel(), tokenizer, **options)
    ownership = engine._parts.ownership
    lowered: Any = engine._parts.lowered
    lowered.memory.books = (ownership.state_pool, ownership.kv_pool)
    lowered.memory.protected = ownership.index.protected
    try:
        yield engine
        settle(engine)
    finally:
        engine.close()


def settle(engine: midstream.Engine) -> list[midstream.Output]:
    """Step until nothing is left to do; then nobody owns a page."""
    outputs: list[midstream.Output] = []
    for turn in count():
        outputs += [u.output for u in engine.step() if u.output]
        if not engine.num_unfinished and not engine._turns.flights:
            break
        assert turn < 5000, f"stuck: {engine.stats()}"
    engine.check_books()
    pages = engine.stats()["pages"]
    assert all(pool["owned"] == 0 for pool in pages.values()), pages
    return outputs
