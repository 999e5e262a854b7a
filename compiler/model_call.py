"""
What a call of a compiled model asks for, and the refusal of what it cannot have.

Letters: B rows, W new columns of the padded batch, K columns whose logits are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from midstream.compiler.row_cache import MidstreamCache
from midstream.compiler.row_memory import RowMemory, undone
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
_NO_CACHE_ASKED = (None, "dynamic")  # the second is the name of transformers' default
_STEPS_BACK = "rejected tokens cannot be taken back from a recurrent state"
_HIDDEN = "it compares hidden states, and a compiled model returns logits only"
_NO_MODES = {  # of generate: why not, and what asks for it
    "assisted_generation": (
        _STEPS_BACK,
        "assistant_model, prompt_lookup_num_tokens, assistant_early_exit and use_mtp",
    ),
    "contrastive_search": (_HIDDEN, "penalty_alpha"),
    "dola_generation": (_HIDDEN, "dola_layers"),
}


@dataclass(frozen=True, slots=True)
class ModelCall:
    """The arguments of a forward that matter."""

    ids: Tensor  # i64[B, W]
    cache: MidstreamCache | None
    attention_mask: Tensor | None  # [B, columns of the cache + W]
    position_ids: Tensor | None  # [B or 1, W]
    logits_to_keep: int | Tensor | None  # number of last columns, 0 or None: all; or columns
    use_cache: bool | None
    return_dict: bool

    @staticmethod
    def of(arguments: Mapping[str, Any], memory: RowMemory) -> ModelCall:
        """
        Raises:
            UnsupportedError: for an argument that changes the result and that paged steps do not know.
            ConfigError: for token ids or columns that are none.
        """
        _refuse_others(arguments)
        ids = arguments.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel():
            found = tuple(ids.shape) if isinstance(ids, Tensor) else _told(ids)
            raise ConfigError(
                f"midstream.compile: input_ids is {found}, expected token ids [batch, columns] with at "
                "least one of each; pass input_ids=..., to generate with a kept cache the whole sequence"
            )
        if ids.dtype not in (torch.int64, torch.int32):
            raise ConfigError(
                f"midstream.compile: input_ids are {ids.dtype}, expected token ids of torch.int64; pass "
                "what the tokenizer returns"
            )
        if ids.device != memory.token_id.device:
            raise ConfigError(
                f"midstream.compile: input_ids are on {ids.device}, expected {memory.token_id.device}, where "
                "the model was compiled; call input_ids.to(model.device)"
            )
        return_dict = arguments.get("return_dict")
        return ModelCall(
            ids=ids,
            cache=own_cache(_cache_argument(arguments), memory),
            attention_mask=_two_dimensional("attention_mask", arguments.get("attention_mask")),
            position_ids=_two_dimensional("position_ids", arguments.get("position_ids")),
            logits_to_keep=arguments.get("logits_to_keep"),
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
            ContractError: when they are not those of the new columns.
        """
        if self.position_ids is None:
            return
        shape = tuple(self.position_ids.shape)
        if shape[0] not in (1, self.ids.shape[0]) or shape[1] != self.ids.shape[1]:
            raise ContractError(
                f"midstream.compile: position_ids are {shape}, expected {tuple(self.ids.shape)}: one for "
                "each new column; leave position_ids out"
            )
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
            ConfigError: when there are none, or single columns are asked for and one of them is padding.
        """
        width = self.ids.shape[1]
        columns = _columns(self.logits_to_keep, width)
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
        ContractError: for a cache of a model that was compiled once.
    """
    if cache is None or (isinstance(cache, MidstreamCache) and cache.memory is memory):
        return cache
    found = type(cache).__name__
    if isinstance(cache, MidstreamCache):
        if not cache.memory.is_open:
            raise undone("the cache was passed")
        found += " of another compiled model"
    raise UnsupportedError(
        f"midstream.compile: the cache is a {found}, expected the one that this model returned, or none; "
        "leave it out (the model makes its own), or pass handle.new_cache()"
    )


def check_turn(ids: Any, arguments: Mapping[str, Any], memory: RowMemory) -> None:
    """Before `generate` cuts off what a kept cache holds without looking at it.

    Args:
        ids: the prompts; None where there are none.
        arguments: the others of `generate`.
    Raises:
        ConfigError: when the prompts are no token ids.
        UnsupportedError: when the cache is of another kind or model.
        ContractError: when the prompts are not what goes on from the cache.
    """
    cache = own_cache(_cache_argument(arguments), memory)
    mask = _two_dimensional("attention_mask", arguments.get("attention_mask"))
    if ids is None:
        return
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        found = f"a tensor of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else _told(ids)
        raise ConfigError(
            f"midstream.compile: generate got {found}, expected token ids [batch, columns] as a tensor; "
            "pass **tokenizer(texts, return_tensors='pt'), or torch.tensor([[...]])"
        )
    if mask is not None and not _covers(mask, ids, is_longer=cache is not None):
        raise ContractError(
            f"midstream.compile: attention_mask is {tuple(mask.shape)} and the prompts are "
            f"{tuple(ids.shape)}, expected as many rows and columns (more columns with a kept cache only); "
            "pass the mask that the tokenizer returned with these prompts, or none"
        )
    # behind a mask that is longer come the new tokens alone
    if cache is not None and (mask is None or mask.shape[-1] == ids.shape[-1]):
        cache.check_beginning(ids)


def check_mode(mode: Any) -> None:
    """Refuse a way to generate that paged steps cannot serve."""
    name = getattr(mode, "value", mode)
    if name in _NO_MODES:
        why, options = _NO_MODES[name]
        raise UnsupportedError(
            f"midstream.compile: generate was asked for {name.replace('_', ' ')}, expected greedy search, "
            f"sampling or beams: {why}; leave out {options} (look into model.generation_config too), or "
            "undo() the compiled model"
        )


def check_cache_kind(generation_config: Any) -> None:
    """Refuse a cache of another kind that `generate` was asked to make."""
    implementation = generation_config.cache_implementation
    if implementation not in _NO_CACHE_ASKED:
        raise UnsupportedError(
            f"midstream.compile: cache_implementation={implementation!r}, expected none: keys and states "
            "lie in pools of the compiled model, at fixed addresses; leave it out (look into "
            "model.generation_config too), or undo() the compiled model"
        )


def refuse_batches(*args: Any, **kwargs: Any) -> NoReturn:
    """Stands for what transformers begins its continuous batching with."""
    raise UnsupportedError(
        "midstream.compile: continuous batching of transformers (generate_batch, "
        "cache_implementation='paged') was asked for, expected generate: the compiled model has pages of its "
        "own; undo() it and serve the model with midstream.Engine, or call generate"
    )


def _covers(mask: Tensor, ids: Tensor, is_longer: bool) -> bool:
    """Whether a mask has an entry for each token; `is_longer`: and may have more."""
    rest = mask.shape[1] - ids.shape[1]
    return mask.shape[0] == ids.shape[0] and (rest == 0 or (rest > 0 and is_longer))


def _columns(keep: Any, width: int) -> list[int]:
    """Which of `width` columns `logits_to_keep` names."""
    every = torch.arange(width)
    try:
        kept = every[keep.cpu()] if isinstance(keep, Tensor) else every[-(keep or 0) :]
        columns: list[int] = kept.reshape(-1).tolist()
    except (IndexError, TypeError):
        columns = []
    if columns:
        return columns
    raise ConfigError(
        f"midstream.compile: logits_to_keep is {_told(keep)}, expected a number of last columns, or a tensor "
        f"of some of the {width} new columns; 0 keeps all"
    )


def _told(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:40]}"


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
