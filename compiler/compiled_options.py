"""The options of `midstream.compile`: which there are, and the refusal of those that can never work."""

from __future__ import annotations

from typing import Any

import torch

from midstream.errors import ConfigError, UnsupportedError

_LONGEST = 4096  # default of max_len: all memory is taken at the start
_MOST = 2**30
OPTIONS = ("max_batch", "max_len", "graphs", "compile", "kv_block", "state_dtype")
STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def longest(model: Any, max_len: int | None) -> int:
    """Tokens of a row.  Raises ConfigError where the model has fewer positions."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if max_len is None:
        return min(_LONGEST, positions or _LONGEST)
    if positions and max_len > positions:
        raise ConfigError(
            f"midstream.compile: max_len={max_len} exceeds the {positions} positions of the model; lower it"
        )
    return max_len


def check_options(
    max_batch: Any, max_len: Any, kv_block: Any, graphs: Any, compile: Any, state_dtype: Any
) -> None:
    """Raises ConfigError, naming the option."""
    length = 1 if max_len is None else max_len
    for name, value in (("max_batch", max_batch), ("max_len", length), ("kv_block", kv_block)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"midstream.compile: {name}={value!r}; expected a whole number >= 1")
        if value > _MOST:
            raise ConfigError(
                f"midstream.compile: {name}={value}; expected at most {_MOST}: the device counts in 32 bits; "
                "lower it"
            )
    if kv_block & (kv_block - 1):
        raise ConfigError(
            f"midstream.compile: kv_block={kv_block}; expected a power of two; use 16 or 32"
        )
    if type(graphs) is not bool:
        raise ConfigError(f"midstream.compile: graphs={graphs!r}; expected True or False")
    if compile not in ("auto", "eager", "inductor"):
        raise ConfigError(
            f"midstream.compile: compile={compile!r}; expected 'auto', 'eager' or 'inductor'"
        )
    if not isinstance(state_dtype, str) or state_dtype not in STATE_DTYPES:
        raise ConfigError(
            f"midstream.compile: state_dtype={state_dtype!r}; expected one of {', '.join(STATE_DTYPES)}"
        )


def check_outputs(model: Any) -> None:
    """Refuse a model that is configured to return what paged steps do not compute."""
    names = ("output_hidden_states", "output_attentions", "output_router_logits")
    asked = [name for name in names if getattr(model.config, name, False)]
    if asked:
        raise UnsupportedError(
            f"midstream.compile: the model's config sets {', '.join(asked)}, expected logits only; set them "
            "to False"
        )
