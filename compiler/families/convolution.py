"""The causal convolution that recurrent mixers share, on paged windows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from midstream.compiler.families.mixer import MixerBinding
from midstream.errors import UnsupportedError
from midstream.ops.causal_conv_chunk import causal_conv_chunk
from midstream.ops.causal_conv_step import causal_conv_step

_SILU = ("silu", "swish")


def require_silu(mixer: Any, layer: int) -> None:
    """Refuse another activation after the convolution.

    Raises:
        UnsupportedError: when the mixer's activation is not SiLU.
    """
    if mixer.activation not in _SILU:
        raise UnsupportedError(
            f"lower: layer {layer} ({type(mixer).__name__}) applies {mixer.activation!r} after its "
            "convolution, expected 'silu'; run this model without lowering"
        )


def paged_conv(binding: MixerBinding, conv1d: Any, x: Tensor) -> Tensor:
    """Convolve x [T, D] behind the rows' windows, apply SiLU, store the new windows.  Returns [T, D]."""
    step, pools = binding.context.step, binding.context.pools
    weight, bias = conv1d.weight.squeeze(1), conv1d.bias
    if step.kind == "decode":
        out = x.new_empty(x.shape)
        causal_conv_step(
            pools.conv, out, x, weight, bias, binding.conv_offset,
            step.read_page, step.write_page, True,
        )  # fmt: skip
        return out
    out = x.new_zeros(x.shape)  # chunk ops leave padding tokens alone
    causal_conv_chunk(
        pools.conv, out, x, weight, bias, binding.conv_offset,
        step.read_page, step.chunk_start, step.chunk_row, step.chunk_page, step.row_chunk, True,
    )  # fmt: skip
    return out
