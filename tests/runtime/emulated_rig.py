"""
Engines whose steps are captured and replayed by the emulator, over tiny models or the model of exact hashes.

The hash model's forward becomes one op, so that a recording holds it as it holds a kernel: by the addresses
of what it reads and writes.  A weight of the model takes part in every hash.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import hash_engine as hashes
import pytest
import torch
from hash_model import HashMemory, HashRow, absorb, next_token
from torch import Tensor

from midstream.compiler.context import Pools, StepView
from midstream.graphs import ladder
from midstream.runtime import device_step

_VIEW = [field.name for field in fields(StepView) if field.name != "kind"]
_OPTIONAL = ("chunk_start", "chunk_row", "chunk_page", "row_chunk")
_SCALE = 1000.0  # a weight as it is drawn counts as none
_LOWERED: dict[int, RecordableHashes] = {}

_library = torch.library.Library("midstream_tests", "DEF")
_library.define(
    "hash_step(Tensor(a!) logits, Tensor(b!) state, Tensor(c!) kv, Tensor weight, Tensor kv_table, "
    + ", ".join(f"Tensor{'?' if name in _OPTIONAL else ''} {name}" for name in _VIEW)
    + ", int model) -> ()"
)


def _hash_step(
    logits: Tensor, state: Tensor, kv: Tensor, weight: Tensor, kv_table: Tensor, *rest: Any
) -> None:
    *tensors, model = rest
    kind = "decode" if tensors[_VIEW.index("chunk_start")] is None else "chunk"
    view = StepView(kind=kind, **dict(zip(_VIEW, tensors, strict=True)))  # type: ignore[arg-type]
    _LOWERED[model].run(logits, state, kv, weight, kv_table, view)


_library.impl("hash_step", _hash_step, "CPU")


class RecordableHashes(hashes.HashLowered):
    """The hash model as a captured graph sees it."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        model.embedding.requires_grad_(False)
        self._number = len(_LOWERED)
        self._shift = 0
        _LOWERED[self._number] = self

    def bind(self, pools: Pools) -> None:
        super().bind(pools)
        self.bound = pools

    def undo(self) -> None:
        super().undo()
        _LOWERED.pop(self._number, None)

    def forward(self, view: StepView) -> Tensor:
        logits = torch.empty(len(view.sample_token), self.model.embedding.num_embeddings)
        pools, tensors = self.bound, [getattr(view, name) for name in _VIEW]
        torch.ops.midstream_tests.hash_step(
            logits, pools.temporal, pools.kv, self.model.embedding.weight, pools.kv_table, *tensors,
            self._number,
        )  # fmt: skip
        return logits

    def run(
        self, logits: Tensor, state: Tensor, kv: Tensor, weight: Tensor, kv_table: Tensor, view: StepView
    ) -> None:  # fmt: skip
        """The op: all that is read comes from its arguments."""
        self.pools = replace(self.bound, temporal=state, kv=kv, kv_table=kv_table)
        books, protected = self.memory.books, self.memory.protected
        self.memory = HashMemory(state.numpy(), kv.numpy(), self.bound.kv_block)
        self.memory.books, self.memory.protected = books, protected
        if view.chunk_row is not None and view.row_chunk is not None:
            num_chunks = view.row_chunk[-1]
            assert (view.chunk_row[num_chunks:] == -1).all(), "chunks behind the last one"
        self._shift = int(weight[0, 0] / _SCALE)
        logits.copy_(super().forward(view))

    def _row(self, view: StepView, row: int) -> HashRow:
        found = super()._row(view, row)
        return replace(found, tokens=[token + self._shift for token in found.tokens])


def answer(prompt: Sequence[int], count: int, weight: int = 0) -> list[int]:
    """What a request must bring while the model's weight is `weight`."""
    state, tokens = absorb(1, [token + weight for token in prompt]), []
    while len(tokens) < count:
        tokens.append(next_token(state))
        state = absorb(state, [tokens[-1] + weight])
    return tokens


@contextmanager
def recordable_hashes() -> Iterator[None]:
    """`hash_engine` makes engines whose steps can be captured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashes, "HashLowered", RecordableHashes)
        patch.setattr(hashes, "CheckedStep", device_step.DeviceStep)
        yield


@contextmanager
def emulation(
    pace: str = "late", tokens: tuple[int, ...] = (16, 64), late: tuple[int, ...] = ()
) -> Iterator[None]:
    """All engines made inside capture their steps and replay them; longer chunk steps run eagerly.

    `tokens`: of the chunk steps that are captured at the start; `late`: when one first comes.
    """

    def chunk_sizes(limit: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        short, long = ([n for n in sizes if n <= limit] for sizes in (tokens, late))
        return tuple(short), tuple(long)

    with pytest.MonkeyPatch.context() as patch, recordable_hashes():
        patch.setenv("MIDSTREAM_EMULATE", pace)
        patch.setattr(ladder, "SHORT", tokens)
        patch.setattr(ladder, "chunk_sizes", chunk_sizes)
        yield


def new_hash_model(weight: int = 0) -> hashes.HashLanguageModel:
    """The hash model with a weight that `answer` knows."""
    model = hashes.HashLanguageModel()
    torch.nn.init.constant_(model.embedding.weight, weight * _SCALE)
    return model
