"""
Tiny random models of the supported families, built from a config alone.

Sizes are chosen unequal (2 groups over 8 heads, keys of 16 and values of 24, 2 KV heads under 4), and
parameters that transformers starts at constants are drawn anew: otherwise all heads decay alike, and a
wrong head, group or channel would pass unseen.

Import this module before any modelling file of transformers: without a GPU it hides the packages of
faster kernels, whose mere presence would change, or break, the models that tests compare with.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor

if not torch.cuda.is_available():
    for _package in ("fla", "mamba_ssm", "causal_conv1d"):
        sys.modules[_package] = None  # type: ignore[assignment]  # importing it now fails

import transformers

VOCAB = 128
FAMILIES = ("bamba", "qwen3_next")  # those that are lowered

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_COMMON_OF_STATE_SPACE = {
    key: value
    for key, value in _COMMON.items()
    if "attention" not in key and "key_value" not in key
}
_BAMBA = {
    "attn_layer_indices": [2],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_QWEN3_NEXT = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MAMBA2 = {
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 16,
    "n_groups": 2,
    "expand": 2,
    "conv_kernel": 4,
    "chunk_size": 8,
}
_FALCON_H1 = {
    **{key: value for key, value in _BAMBA.items() if key != "attn_layer_indices"},
    "head_dim": 16,
    "mamba_d_ssm": 128,
    "mamba_rms_norm": False,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.75,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 1.1,
    "key_multiplier": 0.6,
    "mlp_multipliers": [0.9, 1.2],
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
}
_LFM2 = {
    "block_multiple_of": 16,
    "conv_L_cache": 3,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
}
_KIMI_LINEAR = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "n_shared_experts": 1,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "linear_conv_kernel_dim": 4,
}
_NAMES_AND_SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": ("Bamba", _BAMBA),
    "falcon_h1": ("FalconH1", _FALCON_H1),
    "kimi_linear": ("KimiLinear", _KIMI_LINEAR),
    "lfm2": ("Lfm2", _LFM2),
    "mamba2": ("Mamba2", _MAMBA2),
    "qwen3_next": ("Qwen3Next", _QWEN3_NEXT),
}


def build(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """A model in eval mode on the CPU whose weights depend on `seed` only; `config` overrides sizes."""
    name, sizes = _NAMES_AND_SIZES[family]
    common = _COMMON_OF_STATE_SPACE if family == "mamba2" else _COMMON
    settings = getattr(transformers, f"{name}Config")(**{**common, **sizes, **config})
    model_class = getattr(transformers, f"{name}ForCausalLM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(settings)
    stir(model, torch.Generator().manual_seed(seed + 1))
    return model.to(dtype).eval().requires_grad_(False)


@torch.no_grad()
def stir(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Draw every parameter anew, so that heads, groups and channels differ."""
    for path, parameter in model.named_parameters():
        parameter.copy_(_drawn(path, parameter, generator))


def prompt(length: int, seed: int = 0) -> Tensor:
    """Token ids i64[length]."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(3, VOCAB, (length,), generator=generator)


def _drawn(path: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(parameter.shape, generator=generator)
    match path.rsplit(".", 1)[-1]:
        case "A_log":
            return torch.log(torch.rand(parameter.shape, generator=generator) * 3.0 + 0.2)
        case "dt_bias":
            return noise * 0.5 - 1.0
        case "D":
            return 1.0 + 0.3 * noise
    if parameter.dim() == 1:  # scales of norms, biases
        return parameter.mean() + 0.15 * noise
    if "embed" in path:
        return noise * 0.6
    fan_in = parameter[0].numel() if parameter.dim() == 2 or "conv" in path else parameter.shape[-1]
    return noise / math.sqrt(fan_in)
