"""
Mamba-2 (SSD) mixers on paged state: Bamba and modules with the same attributes.

The time step is clamped to `time_step_limit` in every step.  transformers clamps it in its chunked form
only, so its one-token steps differ from its own full forward where the limits bite; clamping always
equals the full forward.  The gated norm is the module's own, because releases group it differently.

Letters: T tokens, H heads, P head width, G groups, M state size, D convolution channels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from midstream.compiler.families.convolution import paged_conv, require_silu
from midstream.compiler.families.mixer import MixerBinding, MixerKind, binding_of
from midstream.compiler.layout import LayerState
from midstream.ops.causal_conv_chunk import causal_conv_chunk
from midstream.ops.ssd_chunk import ssd_chunk
from midstream.ops.ssd_step import ssd_step


def _state(mixer: Any, layer: int) -> LayerState:
    """Sizes of the state: temporal [H, P, M] and a window of the x, B and C channels."""
    require_silu(mixer, layer)
    shape = (mixer.num_heads, mixer.head_dim, mixer.ssm_state_size)
    return LayerState(layer, "ssd", shape, mixer.conv_kernel_size - 1, mixer.conv_dim)


def _forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Mix packed tokens [1, T, hidden] through the rows' paged states."""
    binding: MixerBinding = binding_of(self)
    widths = (self.intermediate_size, self.conv_dim, self.num_heads)
    gate, channels, dt = self.in_proj(hidden_states).split(widths, dim=-1)
    mixed = paged_conv(binding, self.conv1d, channels[0])
    y = _scan(self, binding, mixed, dt[0])
    return self.out_proj(self.norm(y.flatten(1)[None], gate).to(hidden_states.dtype))


def _scan(mixer: Any, binding: MixerBinding, mixed: Tensor, dt: Tensor) -> Tensor:
    """Advance the states of the step's rows.  mixed [T, D], dt [T, H].  Returns [T, H, P]."""
    step, pools = binding.context.step, binding.context.pools
    group = mixer.n_groups * mixer.ssm_state_size
    x, b, c = mixed.split((mixer.intermediate_size, group, group), dim=-1)
    x = x.unflatten(1, (mixer.num_heads, mixer.head_dim))
    b = b.unflatten(1, (mixer.n_groups, mixer.ssm_state_size))
    c = c.unflatten(1, (mixer.n_groups, mixer.ssm_state_size))
    dt_min, dt_max = (float(limit) for limit in mixer.time_step_limit)
    parameters = (mixer.A_log, b, c, mixer.D, mixer.dt_bias, dt_min, dt_max)
    if step.kind == "decode":
        out = x.new_empty(x.shape)
        ssd_step(
            pools.temporal, out, x, dt, *parameters, binding.temporal_offset,
            step.read_page, step.write_page,
        )  # fmt: skip
        return out
    out = x.new_zeros(x.shape)  # chunk ops leave padding tokens alone
    ssd_chunk(
        pools.temporal, out, x, dt, *parameters, binding.temporal_offset,
        step.read_page, step.chunk_start, step.chunk_row, step.chunk_page, step.row_chunk,
    )  # fmt: skip
    return out


SSD = MixerKind("ssd", _state, _forward, (ssd_chunk, causal_conv_chunk))
