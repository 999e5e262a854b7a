"""
A training forward of `BambaForCausalLM` that is made of large matrix products.

It reads the weights of a transformers model and gives the logits of the model's own forward,
which runs the recurrence too slowly to train with.  The recurrence is taken in chunks: inside a
chunk as masked products, between chunks as one product with the matrix of decays.
Formula: Dao and Gu, "Transformers are SSMs" (2024), section 6.

Letters: R rows, T tokens, Q chunks of a row, C tokens of a chunk, H heads, P head width,
M state size, D conv channels, W conv taps, E hidden width, L vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens; decay matrices grow with it, states shrink with it


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Depthwise causal convolution of x [R, T, D], weight [D, 1, W]: a sum of shifted copies."""
    num_tokens, taps = x.shape[1], weight.shape[-1]
    padded = F.pad(x, (0, 0, taps - 1, 0))
    return bias + sum(padded[:, k : k + num_tokens] * weight[:, 0, k] for k in range(taps))


def decay_matrix(log_decay: Tensor) -> Tensor:
    """Decay from after position s to after position t of the last axis [..., t, s]; 0 where s > t.

    >>> decay_matrix(torch.tensor([0.5, 0.5]).log())
    tensor([[1.0000, 0.0000],
            [0.5000, 1.0000]])
    """
    total = log_decay.cumsum(-1)
    length = log_decay.shape[-1]
    future = torch.ones(length, length, dtype=torch.bool, device=log_decay.device).triu(1)
    return (total[..., :, None] - total[..., None, :]).masked_fill(future, float("-inf")).exp()


def ssd(x: Tensor, dt: Tensor, log_decay: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """State space recurrence from a zero state.

    x [R, T, H, P], B and C [R, T, M] in the dtype of the products; dt and log_decay f32[R, T, H].
    """
    rows, num_tokens, heads, width = x.shape
    dtype, chunks = x.dtype, (rows, num_tokens // CHUNK, CHUNK)
    x, B, C = x.view(*chunks, heads, width), B.view(*chunks, -1), C.view(*chunks, -1)
    dt = dt.view(*chunks, heads).transpose(2, 3)  # [R, Q, H, C]
    log_decay = log_decay.view(*chunks, heads).transpose(2, 3)
    total = log_decay.cumsum(-1)

    scores = (C @ B.transpose(2, 3))[:, :, None] * decay_matrix(log_decay) * dt[..., None, :]
    inside = (scores.to(dtype) @ x.transpose(2, 3)).transpose(2, 3)  # [R, Q, C, H, P]

    to_end = ((total[..., -1:] - total).exp() * dt).transpose(2, 3)[..., None]
    chunk_state = (x * to_end).to(dtype).flatten(3).transpose(2, 3) @ B  # [R, Q, H * P, M]
    between = decay_matrix(total[..., -1].transpose(1, 2)).to(dtype)  # [R, H, Q, Q]
    per_head = chunk_state.view(*chunks[:2], heads, -1)  # [R, Q, H, P * M]
    after = (between @ per_head.transpose(1, 2)).transpose(1, 2)
    before = F.pad(after[:, :-1], (0, 0, 0, 0, 1, 0)).reshape(chunk_state.shape)
    carried = (C @ before.transpose(2, 3)).view_as(inside) * total.exp().transpose(2, 3)[..., None]

    return (inside + carried).reshape(rows, num_tokens, heads, width)


def _norm(x: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), norm.weight, norm.variance_epsilon)


def _linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return F.linear(x.to(dtype), weight.to(dtype))


def _mixer(x: Tensor, mixer: Any, dtype: torch.dtype) -> Tensor:
    inner, states, heads = mixer.intermediate_size, mixer.ssm_state_size, mixer.num_heads
    gate, conv_in, dt = _linear(x, mixer.in_proj.weight, dtype).split_with_sizes(
        [inner, inner + 2 * states, heads], dim=-1
    )
    mixed = F.silu(causal_conv(conv_in, mixer.conv1d.weight, mixer.conv1d.bias)).to(dtype)
    value, B, C = mixed.split_with_sizes([inner, states, states], dim=-1)
    value = value.view(*x.shape[:2], heads, inner // heads)
    step = F.softplus(dt.float() + mixer.dt_bias)
    out = ssd(value, step, -step * mixer.A_log.exp(), B, C) + mixer.D[:, None] * value
    return _linear(
        _norm(out.flatten(2) * F.silu(gate.float()), mixer.norm), mixer.out_proj.weight, dtype
    )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, kept = x.split_with_sizes([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned, kept], dim=-1)


def _attention(x: Tensor, attention: Any, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    width, group = attention.head_dim, attention.num_key_value_groups
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    query, key, value = (
        _linear(x, p.weight, dtype).view(*x.shape[:2], -1, width).transpose(1, 2)
        for p in projections
    )
    query, key = _rotate(query, cos, sin).to(dtype), _rotate(key, cos, sin).to(dtype)
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return _linear(out.transpose(1, 2).flatten(2), attention.o_proj.weight, dtype)


def _feed_forward(x: Tensor, layer: Any, dtype: torch.dtype, dropout: float) -> Tensor:
    mlp = layer.feed_forward
    hidden = _norm(x, layer.pre_ff_layernorm)
    hidden = F.silu(_linear(hidden, mlp.gate_proj.weight, dtype)) * _linear(
        hidden, mlp.up_proj.weight, dtype
    )
    return x + F.dropout(_linear(hidden, mlp.down_proj.weight, dtype), dropout)


def _recurrent_layer(x: Tensor, layer: Any, dtype: torch.dtype, dropout: float) -> Tensor:
    mixed = _mixer(_norm(x, layer.input_layernorm), layer.mamba, dtype)
    return _feed_forward(x + F.dropout(mixed, dropout), layer, dtype, dropout)


def _attention_layer(
    x: Tensor, layer: Any, cos: Tensor, sin: Tensor, dtype: torch.dtype, dropout: float
) -> Tensor:
    mixed = _attention(_norm(x, layer.input_layernorm), layer.self_attn, cos, sin, dtype)
    return _feed_forward(x + F.dropout(mixed, dropout), layer, dtype, dropout)


def _head(x: Tensor, norm: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return _linear(_norm(x, norm), weight, dtype).float()


def _head_loss(x: Tensor, norm: Any, weight: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    return F.cross_entropy(_head(x, norm, weight, dtype).flatten(0, 1), target.flatten())


class FastForward:
    """Runs the layers of a model (one group, no linear biases, tied head); weights stay its own."""

    def __init__(self, model: Any, dtype: torch.dtype, *, compiled: bool) -> None:
        wrap: Callable[..., Any] = torch.compile(dynamic=False) if compiled else lambda fn: fn
        self._model, self._dtype = model, dtype
        self._recurrent, self._attention = wrap(_recurrent_layer), wrap(_attention_layer)
        self._head, self._head_loss = _head, wrap(_head_loss)

    def _hidden(self, token: Tensor, dropout: float) -> Tensor:
        body = self._model.model
        x = F.embedding(token, body.embed_tokens.weight)
        cos, sin = body.rotary_emb(x, torch.arange(token.shape[1], device=token.device)[None])
        for layer in body.layers:
            if layer.block_type == "full_attention":
                x = self._attention(x, layer, cos[:, None], sin[:, None], self._dtype, dropout)
            else:
                x = self._recurrent(x, layer, self._dtype, dropout)
        return x

    def logits(self, token: Tensor) -> Tensor:
        """Logits f32[R, T, L] of token i64[R, T]; T is a multiple of CHUNK."""
        body = self._model.model
        hidden = self._hidden(token, 0.0)
        return self._head(hidden, body.final_layernorm, body.embed_tokens.weight, self._dtype)

    def loss(self, token: Tensor, target: Tensor, dropout: float = 0.0) -> Tensor:
        """Mean cross entropy f32[] in nats of target i64[R, T] given token i64[R, T]."""
        body = self._model.model
        hidden = self._hidden(token, dropout)
        weight = body.embed_tokens.weight
        out: Tensor = self._head_loss(hidden, body.final_layernorm, weight, target, self._dtype)
        return out
