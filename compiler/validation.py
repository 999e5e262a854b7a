"""Everything that a model or a set of pools must satisfy before lowered layers run on it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from midstream.compiler.context import Pools
from midstream.compiler.families import FAMILIES, Family
from midstream.compiler.families.mixer import BINDING
from midstream.compiler.layout import KvLayout, StateLayout
from midstream.errors import ConfigError, ContractError, UnsupportedError

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def check_model(model: Any) -> Family:
    """The family of a model that can be lowered as it stands.

    Raises:
        UnsupportedError: when it is not a causal language model of a supported family.
        ConfigError: when it trains, lies on several devices, or mixes floating dtypes.
        ContractError: when it is lowered already.
    """
    name = model.__name__ if isinstance(model, type) else type(model).__name__
    if not isinstance(model, torch.nn.Module):
        remedy = "load a folder with midstream.load_model(path)"
        if isinstance(model, tuple):
            remedy = "pass its first entry: load_model returns a model and a tokenizer"
        raise ConfigError(
            f"lower: the model is {name} {str(model)[:60]!r}, expected a causal language model of "
            f"transformers in memory; {remedy}"
        )
    compiled_from = getattr(model, "_orig_mod", None)
    if compiled_from is not None:
        raise ConfigError(
            f"lower: the model is what torch.compile made of a {type(compiled_from).__name__}, expected "
            "one as transformers built it: its layers are compiled here; pass model._orig_mod"
        )
    if name not in FAMILIES:
        raise UnsupportedError(
            f"lower: {name} is not a supported family, expected one of {sorted(FAMILIES)}; "
            "pass one of these causal language models of transformers"
        )
    if any(BINDING in vars(module) for module in model.modules()):
        raise ContractError(
            f"lower: this {name} is lowered already, expected a model as transformers built it; "
            "close() the Engine that serves it, or undo() what compile or lower of midstream returned; "
            "where that is lost, call midstream.restore(model)"
        )
    if model.training:
        raise ConfigError(f"lower: {name} is in training mode, expected eval; call model.eval()")
    device_of(model)
    dtype_of(model)
    _check_layers(model)
    _check_forwards(model)
    return FAMILIES[name]


def check_lowering(
    temporal_dtype: Any, compile_mode: Any, kv_block: Any, drafts: Any, experts: Any
) -> None:
    """Raise ConfigError for an option of `lower` that can never work."""
    is_float = isinstance(temporal_dtype, torch.dtype) and temporal_dtype.is_floating_point
    is_mode = compile_mode in ("eager", "inductor")
    is_name = experts is None or isinstance(experts, str)
    for name, value, expected, is_right in (
        ("temporal_dtype", temporal_dtype, "a floating dtype such as torch.float32", is_float),
        ("compile_mode", compile_mode, "'eager' or 'inductor'", is_mode),
        ("kv_block", kv_block, "a whole number >= 1", type(kv_block) is int and kv_block >= 1),
        ("drafts", drafts, "a whole number >= 0", type(drafts) is int and drafts >= 0),
        ("experts", experts, "a name, or None", is_name),
    ):
        if not is_right:
            raise ConfigError(
                f"lower: {name}={value!r}; expected {expected}; see help(midstream.lower)"
            )


def _check_layers(model: Any) -> None:
    """Each decoder layer has parameters of its own: state is kept per layer, not per module."""
    layers = model.base_model.layers
    mixers = [id(child) for layer in layers for child in layer.children()]
    if len(set(map(id, layers))) < len(layers) or len(set(mixers)) < len(mixers):
        raise UnsupportedError(
            f"lower: two of the {len(layers)} decoder layers of this {type(model).__name__} share a module, "
            "expected each to have its own; copy the shared module (copy.deepcopy)"
        )


def device_of(module: Any) -> torch.device:
    """The one device of a module's parameters."""
    devices = {parameter.device for parameter in module.parameters()}
    if devices == {torch.device("meta")}:
        raise ConfigError(
            f"lower: {type(module).__name__} has parameters on meta, which holds shapes only; expected "
            "loaded weights; load them with from_pretrained"
        )
    if len(devices) != 1:
        raise ConfigError(
            f"lower: {type(module).__name__} has parameters on {sorted(map(str, devices))}, expected "
            "one device; load the model without device_map and call model.to(device)"
        )
    return devices.pop()


def dtype_of(module: Any) -> torch.dtype:
    """The one floating dtype of a module's parameters."""
    dtypes = {parameter.dtype for parameter in module.parameters()}
    if len(dtypes) != 1 or not all(dtype.is_floating_point for dtype in dtypes):
        raise ConfigError(
            f"lower: {type(module).__name__} has parameters of {sorted(map(str, dtypes))}, expected "
            "one floating dtype; call model.to(dtype), quantized models are not supported"
        )
    return dtypes.pop()


def check_attention(module: Any, layer: int) -> None:
    """Refuse attention that looks at fewer positions than all before its own.

    Raises:
        UnsupportedError: for a sliding window.
    """
    window = getattr(module, "sliding_window", None)
    if window is not None:
        raise UnsupportedError(
            f"lower: layer {layer} ({type(module).__name__}) attends to a sliding window of {window}, "
            "expected full attention; run this model without lowering"
        )


def check_rope(model: Any) -> None:
    """Refuse rotary embeddings whose frequencies follow the sequence length.

    Raises:
        UnsupportedError: rows of one step have different lengths, and the length is read on the host.
    """
    rope = getattr(model.base_model.rotary_emb, "rope_type", "default")
    if rope in _LENGTH_DEPENDENT_ROPE:
        raise UnsupportedError(
            f"lower: rope_type is {rope!r}, whose frequencies depend on the sequence length; expected "
            "'default', 'linear', 'llama3' or 'yarn'; set config.rope_parameters"
        )


def check_pools(
    pools: Pools, layout: StateLayout, kv_layout: KvLayout, device: torch.device
) -> None:
    """Compare arenas with the layouts that lowered layers address them by.

    Raises:
        ContractError: naming the arena that differs.
    """
    _check_arena(
        "temporal", pools.temporal, layout.temporal_elements, layout.temporal_dtype, device
    )
    _check_arena("conv", pools.conv, layout.conv_elements, layout.conv_dtype, device)
    _check_arena("kv", pools.kv, kv_layout.page_elements, kv_layout.dtype, device)
    if pools.kv_block != kv_layout.kv_block:
        raise ContractError(
            f"LoweredModel: pools have kv_block {pools.kv_block}, expected {kv_layout.kv_block}; "
            "allocate them from LoweredModel.kv_layout"
        )


def _check_arena(
    name: str, arena: Tensor, elements: int, dtype: torch.dtype, device: torch.device
) -> None:
    found = (arena.shape[1], arena.dtype, arena.device)
    if found != (elements, dtype, device):
        raise ContractError(
            f"LoweredModel: the {name} arena has pages of {found}, expected {(elements, dtype, device)}; "
            "allocate it from the layouts of this LoweredModel"
        )


def _check_forwards(model: Any) -> None:
    """Refuse modules whose forward another library replaced: ours would hide it."""
    for path, module in model.named_modules():
        if "forward" in vars(module):
            raise UnsupportedError(
                f"lower: the forward of {path or 'the model'} ({type(module).__name__}) has been "
                "replaced, expected the class's own; remove the hooks (accelerate) that set it"
            )
