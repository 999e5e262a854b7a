"""
What a call of a compiled model asks for, and the refusal of what it cannot have.

Letters: B rows, W new columns of the padded batch, K columns whose logits are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from midstream.compiler.row_cache import MidstreamCache
from midstream.compiler.row_memory import RowMemory
from midstream.compiler.row_steps import Mask
from midstream.errors import ConfigError, ContractError, UnsupportedError

CACHE_NAMES = ("cache", "past_key_values")  # in releases of transformers
_KNOWN = {
    "input_ids",
    "attention_mask",
    "position_ids",
    "use_cache",
    "logits_to_keep",
    "return_dict",
}


@dataclass(frozen=True, slots=True)
class ModelCall:
    """The arguments of a forward that matter."""

    ids: Tensor  # i64[B, W]
    cache: MidstreamCache | None
    attention_mask: Tensor | None  # [B, columns of the cache + W]
    position_ids: Tensor | None  # [B or 1, W]
    logits_to_keep: int | Tensor
    use_cache: bool | None
    return_dict: bool

    @staticmethod
    def of(arguments: Mapping[str, Any], memory: RowMemory) -> ModelCall:
        """
        Raises:
            UnsupportedError: for an argument that changes the result and that paged steps do not know.
        """
        _refuse_others(arguments)
        ids = arguments.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel():
            found = tuple(ids.shape) if isinstance(ids, Tensor) else ids
            raise ConfigError(
                f"midstream.compile: input_ids is {found}, expected token ids [batch, columns] with at "
                "least one of each; pass input_ids=..., to generate with a kept cache the whole sequence"
            )
        if ids.dtype not in (torch.int64, torch.int32):
            raise ConfigError(
                f"midstream.compile: input_ids are {ids.dtype}, expected token ids of torch.int64; pass "
                "what the tokenizer returns"
            )
        return_dict = arguments.get("return_dict")
        return ModelCall(
            ids=ids,
            cache=own_cache(_cache_argument(arguments), memory),
            attention_mask=_two_dimensional("attention_mask", arguments.get("attention_mask")),
            position_ids=_two_dimensional("position_ids", arguments.get("position_ids")),
            logits_to_keep=arguments.get("logits_to_keep", 0),
            use_cache=arguments.get("use_cache"),
            return_dict=return_dict is None or bool(return_dict),
        )

    def is_decode(self) -> bool:
        """One more token for each row of a cache that has some."""
        return self.ids.shape[1] == 1 and self.cache is not None and self.cache.num_columns > 0

    def mask(self, num_columns: int, lengths: Sequence[int]) -> Mask | None:
        """The mask of the new columns, on the host; None where no column is padding.

        Args:
            num_columns: that the cache has.
            lengths: tokens of its rows, empty for a new cache.
        Raises:
            ContractError: when the mask does not belong to the cache, or a row gets no token.
        """
        if self.attention_mask is None:
            return None
        whole = self.attention_mask.cpu().numpy() != 0
        expected = (self.ids.shape[0], num_columns + self.ids.shape[1])
        if whole.shape != expected:
            raise ContractError(
                f"midstream.compile: attention_mask is {whole.shape}, expected {expected}: every column, "
                "those of the cache included; pass the mask of the whole sequence, or none"
            )
        old, new = whole[:, :num_columns], whole[:, num_columns:]
        if num_columns and old.sum(1).tolist() != list(lengths):
            raise ContractError(
                f"midstream.compile: attention_mask shows {old.sum(1).tolist()} tokens in the columns of the "
                f"cache, expected {list(lengths)} as they were computed; leave these columns as they were"
            )
        if not new.any(1).all():
            rows = np.flatnonzero(~new.any(1)).tolist()
            raise ContractError(
                f"midstream.compile: rows {rows} are padding in all new columns, expected a token in each "
                "row; leave these rows out of the batch"
            )
        return None if new.all() else new

    def check_positions(self, mask: Mask | None, lengths: Sequence[int]) -> None:
        """Refuse positions other than those counted from each row's first token.

        Raises:
            UnsupportedError: with the first row that differs.
        """
        if self.position_ids is None:
            return
        given = np.broadcast_to(self.position_ids.cpu().numpy(), tuple(self.ids.shape))
        for row, positions in enumerate(given):
            found = positions if mask is None else positions[mask[row]]
            start = lengths[row] if lengths else 0
            if not np.array_equal(found, np.arange(start, start + len(found))):
                raise UnsupportedError(
                    f"midstream.compile: position_ids of row {row} are {found[:8].tolist()}..., expected "
                    f"{start}, {start + 1}, ... over its tokens; leave position_ids out, and give "
                    "generate the whole sequence, the tokens of a kept cache included, with its mask or none"
                )

    def kept_columns(self, mask: Mask | None) -> list[int]:
        """Which of the new columns have their logits returned.

        Raises:
            ConfigError: when single columns are asked for and one of them is padding.
        """
        width, keep = self.ids.shape[1], self.logits_to_keep
        if isinstance(keep, Tensor):
            columns = torch.arange(width)[keep.cpu()].reshape(-1).tolist()
        else:
            columns = list(range(width))[-keep:]
        if mask is not None and len(columns) < width and not mask[:, columns].all():
            rows = np.flatnonzero((~mask[:, columns]).any(1)).tolist()
            raise ConfigError(
                f"midstream.compile: rows {rows} have padding where their logits are wanted, expected "
                "padding on the left; set tokenizer.padding_side = 'left'"
            )
        return columns


def own_cache(cache: Any, memory: RowMemory) -> MidstreamCache | None:
    """Check that a cache names rows of this memory.

    Raises:
        UnsupportedError: for a cache of another class, or of another compiled model.
    """
    if cache is None or (isinstance(cache, MidstreamCache) and cache.memory is memory):
        return cache
    found = type(cache).__name__
    if isinstance(cache, MidstreamCache):
        found += " of another compiled model"
    raise UnsupportedError(
        f"midstream.compile: the cache is a {found}, expected the one that this model returned, or none; "
        "leave it out (the model makes its own), or pass handle.new_cache()"
    )


def _cache_argument(arguments: Mapping[str, Any]) -> Any:
    return next((arguments[n] for n in CACHE_NAMES if arguments.get(n) is not None), None)


def _refuse_others(arguments: Mapping[str, Any]) -> None:
    others = [
        name
        for name, value in arguments.items()
        if name not in _KNOWN
        and name not in CACHE_NAMES
        and value is not None
        and value is not False
    ]
    if others:
        raise UnsupportedError(
            f"midstream.compile: the forward got {', '.join(sorted(others))}, expected only "
            f"{', '.join(sorted(_KNOWN))} and a cache; leave it out, or undo() the compiled model"
        )


def _two_dimensional(name: str, value: Any) -> Tensor | None:
    if value is None or (isinstance(value, Tensor) and value.dim() == 2):
        return value
    found = (
        f"a tensor of {value.dim()} dimensions"
        if isinstance(value, Tensor)
        else type(value).__name__
    )
    raise UnsupportedError(
        f"midstream.compile: {name} is {found}, expected [batch, columns]; pass the tokenizer's, or none"
    )
