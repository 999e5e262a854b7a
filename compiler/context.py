"""
What lowered layers read while they run: the memory pools and the tensors of the current step.

Letters: R rows, T tokens, S slots, N pages, E elements of a page, Z table columns, Q chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NoReturn, SupportsIndex

from torch import Tensor

from midstream.errors import ContractError

StepKind = Literal["decode", "chunk"]


@dataclass(frozen=True, slots=True)
class Pools:
    """Device memory of the paged state; contents change every step, addresses never."""

    temporal: Tensor  # f32|bf16[N, E]  recurrent states
    conv: Tensor  # model dtype[N, E]  convolution windows
    kv: Tensor  # model dtype[N, E]  keys and values
    kv_table: Tensor  # i32[S, Z]  KV pages of each slot
    kv_block: int  # tokens of a KV page


@dataclass(frozen=True, slots=True)
class StepView:
    """Tensors of one step.

    A decode step has one token in each row, so T = R.  A chunk step packs the rows' tokens one after the
    other.  Row tensors may be longer than R: static buffers are passed whole.  Compiled layers treat every
    length from two on alike; a table of one entry is compiled apart.
    """

    kind: StepKind
    token_id: Tensor  # i32[T]  a valid id everywhere, also in padding
    position: Tensor  # i32[T]  0 in padding
    kv_slot: Tensor  # i32[>=T]  page * kv_block + place, -1 in padding
    row_slot: Tensor  # i32[>=R]  -1 in padding
    row_start: Tensor  # i32[>=R + 1]  first token of each row
    read_page: Tensor  # i32[>=R]  state page before the step, 0 for a fresh sequence
    write_page: Tensor  # i32[>=R]  state page after the step, 0 in padding
    sample_token: Tensor  # i32[R]  last token of each row, the token whose logits are kept
    chunk_start: Tensor | None = (
        None  # i32[Q + 1]  first token of each chunk; None in a decode step
    )
    chunk_row: Tensor | None = None  # i32[Q]  -1 in padding
    chunk_page: Tensor | None = None  # i32[Q]  state page written after the chunk, 0 for none
    row_chunk: Tensor | None = None  # i32[>=R + 1]  first chunk of each row


class PagedContext:
    """The pools and the current step of one lowered model.  Owned by `LoweredModel`, read by its layers."""

    def __init__(self) -> None:
        self._pools: Pools | None = None
        self._step: StepView | None = None

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled along with a lowered model."""
        raise ContractError(
            "midstream: a lowered model was copied or pickled (copy.deepcopy, torch.save), expected one as "
            "transformers built it: its layers share paged memory with the Engine, or with what compile or "
            "lower returned; copy it before, or after close() or undo() (midstream.restore(model))"
        )

    @property
    def pools(self) -> Pools:
        if self._pools is None:
            raise ContractError(
                "PagedContext: the lowered model has no pools, expected bind() before forward(); "
                "call LoweredModel.bind(Pools(...))"
            )
        return self._pools

    @property
    def step(self) -> StepView:
        if self._step is None:
            raise ContractError(
                "PagedContext: the model was called while it is lowered, expected calls of the Engine only; "
                "close() the Engine (or undo() the LoweredModel) to use the model by itself"
            )
        return self._step

    def bind(self, pools: Pools) -> None:
        """Use `pools` from now on."""
        self._pools = pools

    @contextmanager
    def running(self, step: StepView) -> Iterator[None]:
        """Make `step` the current one inside the block."""
        self._step = step
        try:
            yield
        finally:
            self._step = None
