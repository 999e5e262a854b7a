"""
The cache object of a compiled model: the names of its rows, how many tokens each has, and which.

Letters: B rows of the cache, C columns of the padded batch, W new columns.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache

from midstream.compiler.row_memory import RowMemory, rows_told, undone
from midstream.errors import ContractError, UnsupportedError


class _NoLayers(list[Any]):
    """Where other caches keep their layers: empty, and refused to models that look for theirs."""

    def __init__(self, memory: RowMemory) -> None:
        super().__init__()
        self._memory = memory  # not the cache, which must go with its last user

    def __getitem__(self, layer: Any) -> NoReturn:
        _refuse(
            self._memory,
            "a model looked for its layers in it",
            "the model that midstream.compile made it for",
        )


class MidstreamCache(Cache):  # type: ignore[misc]
    """Stands for rows of a `RowMemory`, and knows their token ids.  Its rows are free when it is dropped.

    Several caches may be alive and take turns, as long as their rows fit.  `copy.deepcopy` makes a second
    cache with the same contents.
    """

    def __init__(self, memory: RowMemory) -> None:
        super().__init__(layers=_NoLayers(memory))
        self.memory = memory
        self.rows: list[int] = []  # of the memory; the same list for the cache's whole life
        self.lengths: list[int] = []  # tokens of each row, padding not counted
        self.num_columns = 0  # of the padded batch, which is what transformers counts
        self._ids: Tensor | None = None  # i64[B, >= C]  on the device: nobody waits for them
        self._is_token: NDArray[np.bool_] | None = None  # [B, <= C]  False in padding; none behind
        weakref.finalize(self, memory.give_back, self.rows)

    def start(self, num_rows: int) -> None:
        """Take rows without any token."""
        self.rows.extend(self.memory.take(num_rows))
        self.lengths = [0] * num_rows

    def reset(self) -> None:
        """Forget all tokens and free the rows."""
        self.memory.give_back(self.rows)
        self.lengths = []
        self.num_columns = 0
        self._ids = self._is_token = None

    def remember(self, ids: Tensor, mask: NDArray[np.bool_] | None) -> None:
        """The newest columns were computed from ids [B, W].  `mask`: False in padding; None without any."""
        end, width = self.num_columns, ids.shape[1]
        if self._ids is None or self._ids.shape[1] < end:
            with torch.inference_mode(False):  # what is made inside cannot be written outside
                longer = ids.new_zeros((ids.shape[0], 2 * end), dtype=torch.int64)
            if self._ids is not None:
                longer[:, : end - width] = self._ids[:, : end - width]
            self._ids = longer
        self._ids[:, end - width : end] = ids
        if mask is not None:
            old = self._tokens_up_to(end - width, ids.shape[0])
            self._is_token = np.concatenate([old, mask], axis=1)

    def check_batch(self, num_rows: int) -> None:
        """That a step of `num_rows` rows goes on from this cache; any does from an empty one."""
        held = len(self.rows)
        if held and num_rows != held:
            raise ContractError(
                f"midstream.compile: the cache that was passed holds {rows_told(held)} of "
                f"{self.num_columns} tokens, and this turn has {rows_told(num_rows)}; expected as many as "
                "the cache began with, beams and returned sequences included; repeat or leave out rows of "
                "the turn, or start with a new cache: handle.new_cache()"
            )

    def check_beginning(self, ids: Tensor) -> None:
        """That the whole sequences ids [B, W] go on from what this cache holds.  Waits for the device.

        Raises:
            ContractError: naming the first token that differs, or when there is none behind the cache.
        """
        held = self.num_columns
        if not held or self._ids is None:
            return
        if not len(ids) or len(self.rows) % len(ids):  # else beams may make up for it
            self.check_batch(len(ids))
        if ids.shape[1] <= held:
            raise ContractError(
                f"midstream.compile: this turn has {ids.shape[1]} tokens, and its cache holds {held} of the "
                "turns before; expected all turns so far and at least one token more; append the new turn "
                "to the sequence that generate returned, or start with a new cache"
            )
        given = ids[:, :held].repeat_interleave(len(self.rows) // len(ids), 0).cpu().numpy()
        known = self._ids[:, :held].cpu().numpy()
        is_other = (given != known) & self._tokens_up_to(held, len(self.rows))
        if is_other.any():
            row, column = np.argwhere(is_other)[0].tolist()
            raise ContractError(
                f"midstream.compile: in row {row} the turns before differ from those in the cache: token "
                f"{column} is {given[row, column]}, expected {known[row, column]}, as it was computed; "
                "append to the sequence that generate returned rather than encode its text again, or start "
                "with a new cache"
            )

    def rearrange(self, order: list[int]) -> None:
        """Row i continues what row order[i] has; there may be more or fewer rows than before."""
        if not self.rows:
            return
        if not order or not all(0 <= row < len(self.rows) for row in order):
            raise ContractError(
                f"MidstreamCache: rows {order} of it were asked for, expected some of 0 to "
                f"{len(self.rows) - 1}; reset() frees all of them"
            )
        sources = [self.rows[row] for row in order]
        lengths = [self.lengths[row] for row in order]
        missing = len(order) - len(self.rows)
        if missing > 0:
            self.rows.extend(self.memory.take(missing))
        self.memory.copy(sources, self.rows[: len(order)], max(lengths))
        surplus = self.rows[len(order) :]
        del self.rows[len(order) :]
        self.memory.give_back(surplus)
        self.lengths = lengths
        if self._ids is not None:
            with torch.inference_mode(False):
                self._ids = self._ids[order]
        if self._is_token is not None:
            self._is_token = self._is_token[order]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """For beam search.  Reads `beam_idx` on the host."""
        self.rearrange(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.rearrange([row for row in range(len(self.rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        self.rearrange(indices.tolist())

    def __repr__(self) -> str:
        if not self.memory.is_open:
            return "<MidstreamCache: of a model that was given back>"
        return f"<MidstreamCache: {rows_told(len(self.rows))} of {self.num_columns} tokens>"

    def __deepcopy__(self, memo: dict[int, Any]) -> MidstreamCache:
        twin = MidstreamCache(self.memory)
        if self.rows:
            twin.start(len(self.rows))
            self.memory.copy(self.rows, twin.rows, max(self.lengths))
        twin.lengths, twin.num_columns = list(self.lengths), self.num_columns
        with torch.inference_mode(False):
            twin._ids = None if self._ids is None else self._ids.clone()
        twin._is_token = self._is_token  # never written into
        memo[id(self)] = twin
        return twin

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_columns

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.num_columns

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.num_columns + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.memory.max_len

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.memory.max_len

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        return self.num_columns > 0

    @property
    def batch_size(self) -> int:
        return len(self.rows) or -1

    @property
    def is_compileable(self) -> bool:
        """False: transformers would compile the forward that replays graphs already."""
        return False

    @property
    def is_initialized(self) -> bool:
        return bool(self.rows)

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def is_linear(self) -> list[bool]:
        """transformers slices prompts behind a cache only if not every layer is linear."""
        return [False]

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(self.memory, "update() was called", "the model that midstream.compile made it for")

    def crop(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(
            self.memory,
            "crop() was called",
            "no rollback (assisted decoding): a recurrent state cannot step back",
        )

    def activate_past_recording(self) -> NoReturn:
        _refuse(
            self.memory,
            "activate_past_recording() was called",
            "no rollback: a recurrent state cannot step back",
        )

    def _tokens_up_to(self, num_columns: int, num_rows: int) -> NDArray[np.bool_]:
        """[B, C]  Which entries of the first columns are tokens; the others are padding."""
        known = np.ones((num_rows, 0), bool) if self._is_token is None else self._is_token
        return np.pad(known, ((0, 0), (0, num_columns - known.shape[1])), constant_values=True)


def _refuse(memory: RowMemory, found: str, expected: str) -> NoReturn:
    if not memory.is_open:
        raise undone(found)
    raise UnsupportedError(
        f"MidstreamCache: {found}, expected {expected}; copy.deepcopy(cache) keeps a state to return to, "
        "and other models make caches of their own: leave this one out"
    )
