"""
Gated delta net mixers on paged state: Qwen3-Next.

Letters: T tokens, H value heads, G key heads, K key width, V value width, D convolution channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from midstream.compiler.families.convolution import paged_conv, require_silu
from midstream.compiler.families.mixer import MixerBinding, MixerKind, binding_of
from midstream.compiler.layout import LayerState
from midstream.ops.causal_conv_chunk import causal_conv_chunk
from midstream.ops.gated_delta_chunk import gated_delta_chunk
from midstream.ops.gated_delta_step import gated_delta_step


def _state(mixer: Any, layer: int) -> LayerState:
    """Sizes of the state: temporal [H, V, K] and a window of the query, key and value channels."""
    require_silu(mixer, layer)
    shape = (mixer.num_v_heads, mixer.head_v_dim, mixer.head_k_dim)
    return LayerState(layer, "gated_delta", shape, mixer.conv_kernel_size - 1, mixer.conv_dim)


def _forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Mix packed tokens [1, T, hidden] through the rows' paged states."""
    binding: MixerBinding = binding_of(self)
    query, key, value, gate, b, a = self.fix_query_key_value_ordering(
        self.in_proj_qkvz(hidden_states), self.in_proj_ba(hidden_states)
    )
    channels = torch.cat([part[0].flatten(1) for part in (query, key, value)], dim=-1)
    mixed = paged_conv(binding, self.conv1d, channels)
    decay = -self.A_log.float().exp() * F.softplus(a[0].float() + self.dt_bias)
    y = _scan(self, binding, mixed, decay, b[0].sigmoid())
    y = self.norm(y.flatten(0, 1), gate[0].flatten(0, 1))
    return self.out_proj(y.view(hidden_states.shape[0], -1, self.value_dim))


def _scan(mixer: Any, binding: MixerBinding, mixed: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Advance the states of the step's rows.  mixed [T, D], decay and beta [T, H].  Returns [T, H, V]."""
    step, pools = binding.context.step, binding.context.pools
    q, k, v = mixed.split((mixer.key_dim, mixer.key_dim, mixer.value_dim), dim=-1)
    q = q.unflatten(1, (mixer.num_k_heads, mixer.head_k_dim))
    k = k.unflatten(1, (mixer.num_k_heads, mixer.head_k_dim))
    v = v.unflatten(1, (mixer.num_v_heads, mixer.head_v_dim))
    if step.kind == "decode":
        out = v.new_empty(v.shape)
        gated_delta_step(
            pools.temporal, out, q, k, v, decay, beta, binding.temporal_offset,
            step.read_page, step.write_page,
        )  # fmt: skip
        return out
    out = v.new_zeros(v.shape)  # chunk ops leave padding tokens alone
    gated_delta_chunk(
        pools.temporal, out, q, k, v, decay, beta, binding.temporal_offset,
        step.read_page, step.chunk_start, step.chunk_row, step.chunk_page, step.row_chunk,
    )  # fmt: skip
    return out


GATED_DELTA = MixerKind("gated_delta", _state, _forward, (gated_delta_chunk, causal_conv_chunk))
