"""
Attention over paged keys and values, entered through transformers' own seams.

transformers looks its attention function up by name and hands new keys and values to a cache object.
`PagedCache` hands them back untouched; `paged_attention` writes them into the pool and attends.  So
rotary embeddings, norms and output gates stay in the model's code.  No mask is ever built: which
positions a token sees follows from its own position and the layer's sliding window.

Letters: T tokens, H query heads, G KV heads, D head width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface

from midstream.compiler.families.mixer import AttentionBinding, binding_of
from midstream.errors import UnsupportedError
from midstream.ops.kv_write import kv_write
from midstream.ops.paged_attention_chunk import paged_attention_chunk
from midstream.ops.paged_attention_decode import paged_attention_decode

IMPLEMENTATION = "midstream"  # name in transformers' attention and mask registries
_NOT_IMPLEMENTED = ("s_aux", "position_bias", "head_mask")  # arguments that change the result


class PagedCache(Cache):  # type: ignore[misc]
    """Stands in for a cache.  Its answers are constants, so that compiled layers never see a new one."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


def paged_attention(
    module: Any,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, G, T, D]
    value: Tensor,  # [1, G, T, D]
    attention_mask: None,
    *,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Store the step's keys and values, then attend causally.  Returns [1, T, H, D] and no weights.

    Raises:
        UnsupportedError: for an argument that changes the result and that the ops do not know.
    """
    _check_options(module, attention_mask, kwargs)
    window, softcap = _window(module, kwargs), _softcap(module, kwargs)
    binding: AttentionBinding = binding_of(module)
    step, pools = binding.context.step, binding.context.pools
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    kv_write(pools.kv, k, v, binding.offset, step.kv_slot, pools.kv_block)
    q = q.contiguous()
    if step.kind == "decode":
        out = q.new_empty(q.shape)
        paged_attention_decode(
            out, pools.kv, q, binding.offset, pools.kv_table, step.row_slot, step.position,
            k.shape[1], pools.kv_block, scaling, window, softcap,
        )  # fmt: skip
        return out[None], None
    out = q.new_zeros(q.shape)  # chunk ops leave padding tokens alone
    paged_attention_chunk(
        out, pools.kv, q, binding.offset, pools.kv_table, step.row_slot, step.position,
        step.chunk_start, step.chunk_row, k.shape[1], pools.kv_block, scaling, window, softcap,
    )  # fmt: skip
    return out[None], None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The attention ops mask by position."""


def _window(module: Any, options: dict[str, Any]) -> int:
    """Positions that a token sees, 0 for all; layers that pass none may have it for the mask only."""
    window = options.get("sliding_window", getattr(module, "sliding_window", None))
    return int(window or 0)


def _softcap(module: Any, options: dict[str, Any]) -> float:
    """Bound of the scores, 0 for none."""
    softcap = options.get("softcap", getattr(module, "attn_logit_softcapping", None))
    return float(softcap or 0.0)


def _check_options(module: Any, attention_mask: object, options: dict[str, Any]) -> None:
    found = {name: options[name] for name in _NOT_IMPLEMENTED if options.get(name) is not None}
    if attention_mask is not None:
        found["attention_mask"] = attention_mask
    if options.get("dropout"):
        found["dropout"] = options["dropout"]
    is_causal = options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal:
        found["is_causal"] = False
    if found:
        raise UnsupportedError(
            f"midstream attention: {type(module).__name__} passes {', '.join(sorted(found))}, expected "
            "causal attention with at most a sliding window and a soft cap; run this model without "
            "lowering"
        )


def register() -> None:
    """Make the attention function known to transformers.  Repeating it changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
