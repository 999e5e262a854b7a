"""The cache object of a compiled model: the names of its rows, and how many tokens each has."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

from torch import Tensor
from transformers.cache_utils import Cache

from midstream.compiler.row_memory import RowMemory
from midstream.errors import UnsupportedError


class MidstreamCache(Cache):  # type: ignore[misc]
    """Stands for rows of a `RowMemory`; holds no tensor.  Its rows are free again when it is dropped.

    Several caches may be alive and take turns, as long as their rows fit.  `copy.deepcopy` makes a second
    cache with the same contents.
    """

    def __init__(self, memory: RowMemory) -> None:
        super().__init__(layers=[])
        self.memory = memory
        self.rows: list[int] = []  # of the memory; the same list for the cache's whole life
        self.lengths: list[int] = []  # tokens of each row, padding not counted
        self.num_columns = 0  # of the padded batch, which is what transformers counts
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

    def rearrange(self, order: list[int]) -> None:
        """Row i continues what row order[i] has; there may be more or fewer rows than before."""
        if not self.rows:
            return
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

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """For beam search.  Reads `beam_idx` on the host."""
        self.rearrange(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.rearrange([row for row in range(len(self.rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        self.rearrange(indices.tolist())

    def __deepcopy__(self, memo: dict[int, Any]) -> MidstreamCache:
        twin = MidstreamCache(self.memory)
        if self.rows:
            twin.start(len(self.rows))
            self.memory.copy(self.rows, twin.rows, max(self.lengths))
        twin.lengths, twin.num_columns = list(self.lengths), self.num_columns
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
        self._refuse("update()", "the model that midstream.compile made it for")

    def crop(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse(
            "crop()", "no rollback (assisted decoding): a recurrent state cannot step back"
        )

    def activate_past_recording(self) -> NoReturn:
        self._refuse("activate_past_recording()", "no rollback: a recurrent state cannot step back")

    def _refuse(self, found: str, expected: str) -> NoReturn:
        raise UnsupportedError(
            f"MidstreamCache: {found} was called, expected {expected}; copy.deepcopy(cache) keeps a state to "
            "return to, or undo() the compiled model"
        )
