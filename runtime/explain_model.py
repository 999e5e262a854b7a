"""
What an engine makes of a model: layers, pools, captured steps, and the floor of a step.

The floor of a decode step is what no implementation avoids: all weights read once (of the embedding table
only rows), the state of each row read and written, and its keys and values read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from midstream.compiler.families import FAMILIES
from midstream.compiler.families.mixer import BINDING
from midstream.compiler.lowering import LayerSite, LoweredModel, find_sites
from midstream.errors import ConfigError
from midstream.graphs.audit import GraphAudit, Owner, Owners, audit
from midstream.runtime.assembly import Parts, describe_pages
from midstream.runtime.config import ResolvedConfig
from midstream.runtime.engine import Engine
from midstream.runtime.planner import PageBytes

FLOOR_LENGTH = 1024  # tokens of each row where the floor counts keys and values, at most max_len
_COPY_BYTES = {"cuda": 2**31, "cpu": 2**26}


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One decoder layer."""

    layer: int
    module: str  # class that mixes its tokens
    kind: str  # "attention" or the recurrence
    ops: tuple[str, ...]  # that take the pools
    state_bytes: int  # of one sequence, whatever its length
    kv_bytes: int  # of one token
    compile_unit: str  # layers with the same unit share one compilation


@dataclass(frozen=True, slots=True)
class Floor:
    """Bytes of a decode step of `rows` rows of `length` tokens, and their time."""

    rows: int
    length: int
    weight_bytes: int
    state_bytes: int
    kv_bytes: int
    micros: float


@dataclass(frozen=True, slots=True)
class ModelReport:
    """All that `midstream explain` says."""

    model: str
    family: str
    device: str
    dtype: str
    num_parameters: int
    layers: tuple[LayerReport, ...]
    unlowered: tuple[str, ...]  # what keeps transformers' own code, and why
    pages: str
    pool_bytes: dict[str, int]
    graphs: tuple[GraphAudit, ...]
    ungraphed: tuple[str, ...]  # steps that run without a graph, and why
    floors: tuple[Floor, ...]
    gb_per_s: float
    rate_is_measured: bool

    @property
    def num_unowned(self) -> int:
        """Addresses in captured steps that no owner claims."""
        return sum(one.num_addresses for graph in self.graphs for one in graph.unowned)


def explain_model(engine: Engine, gb_per_s: float | None = None) -> ModelReport:
    """Look at a running engine.

    Args:
        gb_per_s: read plus written, of device memory; None: measure a copy.
    Raises:
        ConfigError: a rate that is not above 0.
    """
    check_rate(gb_per_s)
    parts = engine._parts
    lowered, config = parts.lowered, parts.config
    rate = copy_rate(lowered.device) if gb_per_s is None else gb_per_s
    owners = Owners(owners_of(parts))
    pools = parts.pools
    return ModelReport(
        model=type(lowered.model).__name__,
        family=FAMILIES[type(lowered.model).__name__].name,
        device=str(lowered.device),
        dtype=str(lowered.dtype).removeprefix("torch."),
        num_parameters=sum(p.numel() for p in lowered.model.parameters()),
        layers=tuple(_layers(lowered, config.compile)),
        unlowered=tuple(_unlowered(lowered)),
        pages=describe_pages(
            config, PageBytes(lowered.layout.page_bytes, lowered.kv_layout.page_bytes)
        ),
        pool_bytes={
            name: _num_bytes(arena)
            for name, arena in (
                ("temporal", pools.temporal),
                ("conv", pools.conv),
                ("kv", pools.kv),
            )
        },
        graphs=tuple(audit(graph, owners) for graph in parts.runner.graphs.captured.values()),
        ungraphed=tuple(_ungraphed(parts)),
        floors=tuple(_floors(lowered, config, rate)),
        gb_per_s=rate,
        rate_is_measured=gb_per_s is None,
    )


def check_rate(gb_per_s: float | None) -> None:
    """Raise ConfigError for a rate at which no step has a least time."""
    if gb_per_s is not None and not 0 < gb_per_s < math.inf:
        raise ConfigError(
            f"explain: gb_per_s (--gb-per-s) is {gb_per_s}; expected a finite rate above 0, that "
            "of device memory, such as 4800; leave it out to have it measured"
        )


def owners_of(parts: Parts) -> Iterator[Owner]:
    """Whose memory captured steps may be bound to."""
    runner, step, model = parts.runner, parts.runner.step, parts.lowered.model
    for name, field in step.stage.device.items():
        yield Owner.of(f"stage.{name}", "staged every step", field)
    yield Owner.of("slots", "per-slot memory, changed by deltas and steps", step.slots.flat)
    for name in ("temporal", "conv", "kv"):
        yield Owner.of(f"pools.{name}", "arena, written by steps", getattr(parts.pools, name))
    for name, value in vars(step).items():
        if isinstance(value, Tensor) and name not in ("temporal", "conv"):
            refresh = "constant" if name.startswith("conv_") else "written by the step itself"
            yield Owner.of(f"step.{name}", refresh, value)
    every_row = step.stage.decode_view(step.stage.limits.max_rows).sample_token
    yield Owner.of("stage.every_row", "constant", every_row)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield Owner.of(name, "weight", tensor)
    for path, module in model.named_modules():
        binding = vars(module).get(BINDING)
        if binding is not None:
            yield from _offsets(path, binding)
    for key, logits in runner._logits.items():
        yield Owner.of(f"logits of a {key}", "result", logits)


def copy_rate(device: torch.device) -> float:
    """GB/s, read plus written, of a copy on this device now (median of 7)."""
    size = _COPY_BYTES.get(device.type, 2**26)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(9):
        _wait(device)
        begin = time.perf_counter()
        target.copy_(source)
        _wait(device)
        seconds.append(time.perf_counter() - begin)
    return 2 * size / sorted(seconds[2:])[3] / 1e9


def _layers(lowered: LoweredModel, compile_mode: str) -> Iterator[LayerReport]:
    layers = lowered.model.base_model.layers
    for site in find_sites(lowered.model, FAMILIES[type(lowered.model).__name__]):
        kind = "attention" if site.kind is None else site.kind.name
        name = type(site.module).__name__
        unit = f"{type(layers[site.layer]).__name__} with {name}"
        state, kv = _layer_bytes(lowered, site)
        yield LayerReport(
            layer=site.layer,
            module=name,
            kind=kind,
            ops=_ops(lowered, site),
            state_bytes=state,
            kv_bytes=kv,
            compile_unit=unit if compile_mode == "inductor" else "eager (compile='eager')",
        )


def _ops(lowered: LoweredModel, site: LayerSite) -> tuple[str, ...]:
    if site.kind is None:
        return ("kv_write", "paged_attention_decode", "paged_attention_chunk")
    scans = (f"{site.kind.name}_step", f"{site.kind.name}_chunk")
    has_conv = lowered.layout.region(site.layer).state.conv_window_rows
    return ("causal_conv_step", "causal_conv_chunk", *scans) if has_conv else scans


def _layer_bytes(lowered: LoweredModel, site: LayerSite) -> tuple[int, int]:
    """Of one sequence's state and of one token's keys and values."""
    kv = lowered.kv_layout
    if site.kind is None:
        return 0, kv.region_elements * kv.dtype.itemsize // kv.kv_block
    state = lowered.layout.region(site.layer).state
    temporal = torch.Size(state.temporal_shape or (0,)).numel()
    window = lowered.layout.window_rows if state.conv_window_rows else 0
    conv = window * state.conv_channels * lowered.layout.conv_dtype.itemsize
    return temporal * lowered.layout.temporal_dtype.itemsize + conv, 0


def _unlowered(lowered: LoweredModel) -> Iterator[str]:
    yield "projections, norms, feed-forward layers, embeddings and head: transformers' code, no state in them"
    experts = getattr(lowered.model.config, "_experts_implementation", None)
    if any("experts" in name for name, _ in lowered.model.named_modules()):
        yield f"experts: transformers' {experts!r}, which reads nothing on the host here"


def _ungraphed(parts: Parts) -> Iterator[str]:
    runner, config = parts.runner, parts.config
    if runner.capturer is None:
        yield "all: graphs='off'" if not config.graphs.keys else "all: no CUDA device"
        return
    longest = max((key.tokens for key in runner.ladder.chunk), default=0)
    yield f"prompts of more than {longest} tokens in a step: bound by arithmetic, not by launches"
    late = [key for key in runner.ladder.keys if key not in runner.graphs.captured]
    if late:
        yield f"{len(late)} steps in pieces are captured when one is needed first"
    for why, count in runner.graphs.fallbacks.items():
        yield f"{count} so far: {why}"


def _floors(lowered: LoweredModel, config: ResolvedConfig, gb_per_s: float) -> Iterator[Floor]:
    model, kv = lowered.model, lowered.kv_layout
    most, length = config.max_rows, min(FLOOR_LENGTH, config.max_len)
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    weights = sum(map(_num_bytes, model.parameters()))
    if head.data_ptr() != table.data_ptr():
        weights -= _num_bytes(table)  # a step reads one row of it for each token
    for rows in sorted({1, min(32, most), most}):
        state = 2 * rows * lowered.layout.page_bytes
        read = rows * length * kv.page_bytes // kv.kv_block
        micros = (weights + state + read) / gb_per_s / 1e3
        yield Floor(rows, length, weights, state, read, micros)


def _offsets(path: str, binding: Any) -> Iterator[Owner]:
    for name in ("temporal_offset", "conv_offset", "offset"):
        value = getattr(binding, name, None)
        if value is not None:
            yield Owner.of(f"{path}.{name}", "constant", value)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
