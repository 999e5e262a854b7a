"""
Lowers a transformers model: its layers then run on paged state, and a log of changes leads back.

`lower(model)` replaces the forward of the recurrent mixers, routes attention through the KV pool, and
leaves projections, norms, experts, embeddings and the head to the model's own code.
"""

from __future__ import annotations

import copy
import inspect
import types
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from midstream.compiler.changes import WAY_BACK, Changes
from midstream.compiler.context import PagedContext, Pools, StepView
from midstream.compiler.families import Family
from midstream.compiler.families.mixer import (
    BINDING,
    AttentionBinding,
    MixerBinding,
    MixerKind,
    export_alignment,
)
from midstream.compiler.layout import KvLayout, StateLayout
from midstream.compiler.pieces import Backend, compile_pieces, distinct_sizes
from midstream.compiler.projections import decoding, inductor_with_projections, project_few
from midstream.compiler.validation import (
    check_attention,
    check_lowering,
    check_model,
    check_pools,
    check_rope,
    device_of,
    dtype_of,
)
from midstream.errors import ContractError, UnsupportedError

CompileMode = Literal["eager", "inductor"]


@dataclass(frozen=True, slots=True)
class LayerSite:
    """The module inside one decoder layer that mixes tokens."""

    layer: int
    module: nn.Module
    kind: MixerKind | None  # None: attention


class LoweredModel:
    """A model whose layers read and write paged memory.  Made by `lower`; owns the changes to the model."""

    def __init__(
        self,
        model: Any,
        layout: StateLayout,
        kv_layout: KvLayout,
        context: PagedContext,
        changes: Changes,
        compiled: bool,
        export_alignment: int | None,
    ) -> None:
        from midstream.compiler.attention import PagedCache

        self.model = model
        self.layout = layout
        self.kv_layout = kv_layout
        self.export_alignment = export_alignment  # see families/mixer.py
        self.device = device_of(model)
        self.dtype = dtype_of(model)
        self._context = context
        self._changes = changes
        self._sizes = distinct_sizes if compiled else nullcontext
        self._constant = {"use_cache": True, cache_argument(model): PagedCache()}
        self._undone = False
        # our kernels run on the device that is current
        on_gpu = self.device.type == "cuda"
        self._on_device: Any = torch.cuda.device(self.device) if on_gpu else nullcontext()

    def bind(self, pools: Pools) -> None:
        """Use `pools` in all following steps.

        Raises:
            ContractError: when an arena does not have the layout's page size, dtype or device.
        """
        check_pools(pools, self.layout, self.kv_layout, self.device)
        self._context.bind(pools)

    def forward(self, step: StepView) -> Tensor:
        """Run one step and return logits [R, L] of `step.sample_token`.  Waits for nothing."""
        if self._undone:
            raise ContractError(
                "LoweredModel: forward() after undo(), expected a lowered model; call lower() again"
            )
        with (
            torch.no_grad(),
            self._on_device,
            self._context.running(step),
            self._sizes(),
            decoding(step.kind == "decode"),
        ):
            output = self.model(
                input_ids=step.token_id[None],
                position_ids=step.position[None],
                logits_to_keep=step.sample_token,
                **self._constant,
            )
        logits: Tensor = output.logits[0]
        return logits

    def undo(self) -> None:
        """Give the model back as it was.  May be called again."""
        self._changes.undo()
        self._undone = True


def lower(
    model: Any,
    *,
    temporal_dtype: torch.dtype = torch.float32,
    compile_mode: CompileMode = "eager",
    kv_block: int = 16,
    drafts: int = 0,
    experts: str | None = None,
    backend: Backend = inductor_with_projections,
) -> LoweredModel:
    """Lower `model` in place and return the handle that runs and undoes it.

    Args:
        model: a causal language model of transformers, in eval mode, on one device.
        temporal_dtype: of the recurrent states; convolution windows and KV have the model's dtype.
        compile_mode: "eager", or "inductor" to compile each kind of layer once.
        kv_block: tokens of a KV page.
        drafts: extra rows of the convolution windows, for speculative steps.
        experts: transformers' experts implementation.  None: the one that reads nothing on the host and
            needs the least memory, see `default_experts`.
        backend: what `torch.compile` uses when `compile_mode` is "inductor"; by default Inductor, behind
            `projections.fuse_projections`.

    Raises:
        UnsupportedError: for a family, layer or option without a lowering.
        ConfigError: an option or a model (in training mode, on several devices) that can never work.
        ContractError: when the model is lowered already.
    """
    from midstream.compiler import attention  # transformers is an optional dependency

    family = check_model(model)
    check_lowering(temporal_dtype, compile_mode, kv_block, drafts, experts)
    sites = find_sites(model, family)
    alignment = export_alignment(site.kind for site in sites if site.kind)
    layout = StateLayout.of(
        [site.kind.state(site.module, site.layer) for site in sites if site.kind],
        temporal_dtype,
        dtype_of(model),
        drafts,
    )
    kv_layout = _kv_layout(sites, dtype_of(model), kv_block)
    check_rope(model)
    context, changes = PagedContext(), Changes()
    with ExitStack() as undo_on_error:
        undo_on_error.callback(changes.undo)
        attention.register()
        experts = experts or default_experts(dtype_of(model), device_of(model))
        _set_implementations(model, changes, attention.IMPLEMENTATION, experts)
        _bind_sites(sites, layout, kv_layout, context, changes)
        if compile_mode == "inductor":
            compile_pieces(_pieces(model), changes, backend)
            _project_head(model, changes)
        lowered = LoweredModel(
            model, layout, kv_layout, context, changes, compile_mode == "inductor", alignment
        )
        changes.set(model, WAY_BACK, lowered.undo)
        undo_on_error.pop_all()
    return lowered


def find_sites(model: Any, family: Family) -> list[LayerSite]:
    """The mixing module of every decoder layer, in order.

    Raises:
        UnsupportedError: naming the layer, when one has no lowering.
    """
    return [_find_site(layer, index, family) for index, layer in enumerate(model.base_model.layers)]


def default_experts(dtype: torch.dtype, device: torch.device) -> str:
    """How experts are computed.

    `batched_mm` gathers the weights of the chosen experts for each token: right everywhere, but a prompt
    of 1,000 tokens copies 1,000 times top-k experts.  `grouped_mm` sorts tokens by expert instead; on a
    GPU and in bfloat16 its group sizes stay on the device, elsewhere transformers reads them on the host.
    """
    return "grouped_mm" if device.type == "cuda" and dtype == torch.bfloat16 else "batched_mm"


def cache_argument(model: Any) -> str:
    """Name of the argument that carries the cache; it differs between releases."""
    parameters = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    return next(name for name in ("cache", "past_key_values") if name in parameters)


def _find_site(layer: nn.Module, index: int, family: Family) -> LayerSite:
    for child in layer.children():
        name = type(child).__name__
        if name in family.mixers:
            return LayerSite(index, child, family.mixers[name])
        if name == family.attention:
            check_attention(child, index)
            return LayerSite(index, child, None)
    children = ", ".join(type(child).__name__ for child in layer.children())
    raise UnsupportedError(
        f"lower: layer {index} ({type(layer).__name__}: {children}) of family {family.name} has no "
        f"lowering, expected one of {[*family.mixers, family.attention]}; run it without lowering"
    )


def _kv_layout(sites: list[LayerSite], dtype: torch.dtype, kv_block: int) -> KvLayout:
    """Sizes from the attention modules, which are all alike."""
    attention = [site for site in sites if site.kind is None]
    if not attention:
        return KvLayout((), 0, 0, dtype, kv_block)
    module: Any = attention[0].module
    kv_heads = module.config.num_key_value_heads
    layers = tuple(site.layer for site in attention)
    return KvLayout(layers, kv_heads, module.head_dim, dtype, kv_block)


def _set_implementations(model: Any, changes: Changes, attention: str, experts: str) -> None:
    """Select our attention and experts in configs of the model's own: two models may share one object."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            if id(config) not in copies:
                copies[id(config)] = copy.copy(config)
                copies[id(config)]._attn_implementation_internal = attention
                copies[id(config)]._experts_implementation_internal = experts
            changes.set(module, "config", copies[id(config)])


def _bind_sites(
    sites: list[LayerSite],
    layout: StateLayout,
    kv_layout: KvLayout,
    context: PagedContext,
    changes: Changes,
) -> None:
    for site in sites:
        device = device_of(site.module)
        if site.kind is None:
            offset = _offset(kv_layout.offset(site.layer), device)
            changes.set(site.module, BINDING, AttentionBinding(context, offset))
            continue
        region = layout.region(site.layer)
        temporal, conv = region.temporal_offset, region.conv_offset
        binding = MixerBinding(context, _offset(temporal, device), _offset(conv, device))
        changes.set(site.module, BINDING, binding)
        changes.set(site.module, "forward", types.MethodType(site.kind.forward, site.module))


def _project_head(model: Any, changes: Changes) -> None:
    """Let our kernels compute the logits on a GPU, of as many rows as a step has.

    The head is no piece: it runs once in a step, which is not worth a compilation for each kind.
    """
    head = model.get_output_embeddings()
    is_plain = type(head) is nn.Linear and head.bias is None and "forward" not in vars(head)
    if is_plain and device_of(model).type == "cuda":
        changes.set(head, "forward", types.MethodType(_forward_head, head))


def _forward_head(self: Any, hidden_states: Tensor) -> Tensor:
    return project_few(hidden_states, self.weight)


def _offset(elements: int, device: torch.device) -> Tensor:
    return torch.tensor([elements], dtype=torch.int64, device=device)


def _pieces(model: Any) -> list[nn.Module]:
    """What is compiled: the decoder layers, and the small kernels before and after them."""
    base = model.base_model
    norm = base.final_layernorm if hasattr(base, "final_layernorm") else base.norm
    return [*base.layers, base.rotary_emb, norm]
