"""
The models that speed is stated for: random weights, so that anybody can build them.

B2 is a Bamba of 1.913 B parameters (21 Mamba-2 and 3 attention layers), Q3 a Qwen3-Next of 1.9 B parameters
(18 gated delta net and 6 attention layers, 16 experts of which 4 are used).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers

_B2: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
    "num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_indices": [5, 13, 21],
    "mamba_n_heads": 64, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4,
    "mamba_chunk_size": 256,
}  # fmt: skip
_Q3: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "num_experts": 16, "num_experts_per_tok": 4,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "B2": (transformers.BambaConfig, transformers.BambaForCausalLM, _B2),
    "Q3": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM, _Q3),
    # small enough for the CPU: shows that a suite runs, its figures mean nothing
    "tiny": (
        transformers.BambaConfig,
        transformers.BambaForCausalLM,
        _B2 | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
               "num_attention_heads": 4, "num_key_value_heads": 2, "attn_layer_indices": [1],
               "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16},
    ),
}  # fmt: skip


def build(name: str, dtype: torch.dtype, device: torch.device) -> Any:
    """The model in eval mode, without end-of-sequence ids so that every request runs its length."""
    config_class, model_class, options = MODELS[name]
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = model_class(config_class(**options))
    finally:
        torch.set_default_dtype(default)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    return model.to(dtype).eval().requires_grad_(False)


@dataclass(frozen=True, slots=True)
class Floor:
    """Bytes that a decode step cannot avoid."""

    weight_bytes: int  # read once per step
    state_bytes: int  # of one sequence; read and written

    @staticmethod
    def of(model: Any, state_page_bytes: int) -> Floor:
        """All weights but the embedding table (a step reads one row of it per token)."""
        embedding = model.get_input_embeddings().weight
        tied = model.get_output_embeddings().weight.data_ptr() == embedding.data_ptr()
        total = sum(p.numel() * p.element_size() for p in model.parameters())
        skipped = 0 if tied else embedding.numel() * embedding.element_size()
        return Floor(total - skipped, state_page_bytes)

    def step_bytes(self, rows: int) -> int:
        return self.weight_bytes + 2 * rows * self.state_bytes
