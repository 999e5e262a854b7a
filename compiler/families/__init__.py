"""Which model families are lowered, and by which kind each of their layer modules is served."""

from __future__ import annotations

from dataclasses import dataclass

from midstream.compiler.families.gated_delta import GATED_DELTA
from midstream.compiler.families.mixer import MixerKind
from midstream.compiler.families.ssd import SSD


@dataclass(frozen=True, slots=True)
class Family:
    """Class names of the modules that lowering looks for in a model's decoder layers."""

    name: str
    mixers: dict[str, MixerKind]
    attention: str


# by class of the causal language model
FAMILIES: dict[str, Family] = {
    "BambaForCausalLM": Family("bamba", {"BambaMixer": SSD}, "BambaAttention"),
    "Qwen3NextForCausalLM": Family(
        "qwen3_next", {"Qwen3NextGatedDeltaNet": GATED_DELTA}, "Qwen3NextAttention"
    ),
}
