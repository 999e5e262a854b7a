"""Builds the parts of an engine from a model and a configuration, and undoes the lowering if that fails."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from midstream.compiler.context import Pools
from midstream.compiler.lowering import LoweredModel, lower
from midstream.compiler.validation import check_model, device_of
from midstream.errors import ConfigError
from midstream.graphs.capture import GraphCapture
from midstream.graphs.captured import Recorder
from midstream.graphs.emulated_queue import EmulatedQueue, Pace
from midstream.graphs.emulator import EmulatedCapture
from midstream.graphs.queue import DeviceQueue, queue_of
from midstream.runtime.admission import Admission
from midstream.runtime.chains import Chains
from midstream.runtime.checkpoints import Checkpoints
from midstream.runtime.commit import Committer
from midstream.runtime.config import (
    STATE_DTYPES,
    EngineConfig,
    ModelLimits,
    ResolvedConfig,
    check_options,
    resolve,
)
from midstream.runtime.device_step import DeviceStep
from midstream.runtime.emit import Emitter
from midstream.runtime.footprint import check_room, shares
from midstream.runtime.hashing import BlockHasher
from midstream.runtime.intake import Intake
from midstream.runtime.live import LiveTable
from midstream.runtime.ownership import PageOwnership
from midstream.runtime.pages import PagePool
from midstream.runtime.planner import PageBytes, describe
from midstream.runtime.prefix import PrefixIndex
from midstream.runtime.retention import Retention
from midstream.runtime.runner import StepRunner
from midstream.runtime.scheduler import Scheduler
from midstream.runtime.slots import SlotLayout, SlotMemory
from midstream.runtime.stage import Stage, stage_limits

_CPU_MEMORY = 2 * 2**30  # a CPU engine plans with no more than this

_log = logging.getLogger("midstream")


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is made of."""

    config: ResolvedConfig
    lowered: LoweredModel
    pools: Pools
    ownership: PageOwnership
    scheduler: Scheduler
    committer: Committer
    runner: StepRunner
    intake: Intake
    emitter: Emitter


def assemble(
    model: Any, tokenizer: Any | None, options: EngineConfig, emulate: Pace | None = None
) -> Parts:
    """Lower the model and build everything around it.  On an error the model is given back unchanged.

    `emulate`: None, or when the work of an emulated device is done (`graphs/emulated_queue.py`).
    """
    check_options(options)
    check_model(model)
    compiles = options.compile == "inductor" or (
        options.compile == "auto" and device_of(model).type == "cuda"
    )
    lowered = lower(
        model,
        temporal_dtype=STATE_DTYPES[options.state_dtype],
        compile_mode="inductor" if compiles else "eager",
        kv_block=options.kv_block,
    )
    try:
        limits = ModelLimits(
            max_positions=getattr(model.config, "max_position_embeddings", None),
            state_page_bytes=lowered.layout.page_bytes,
            kv_page_bytes=lowered.kv_layout.page_bytes,
            is_cuda=lowered.device.type == "cuda",
        )
        config = resolve(options, limits, free_memory(lowered.device))
        page_bytes = PageBytes(limits.state_page_bytes, limits.kv_page_bytes)
        _log.info("%s", describe_pages(config, page_bytes))
        return _build(lowered, tokenizer, config, emulate)
    except BaseException:
        lowered.undo()
        raise


def describe_pages(config: ResolvedConfig, page_bytes: PageBytes) -> str:
    """What the pools hold and how many of the longest sequences they run."""
    return describe(
        config.cache_mode, config.max_len, config.kv_block, config.state_block, config.num_state_pages,
        config.num_kv_pages, page_bytes,
    )  # fmt: skip


def free_memory(device: torch.device) -> int:
    """Bytes that the pools may be planned from."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    pages = os.sysconf("SC_AVPHYS_PAGES") if hasattr(os, "sysconf") else 0
    return min(pages * os.sysconf("SC_PAGE_SIZE") if pages > 0 else _CPU_MEMORY, _CPU_MEMORY)


def new_capturer(
    config: ResolvedConfig, device: torch.device, queue: DeviceQueue
) -> Recorder | None:
    """What captures the steps of an engine; None where there is no GPU or nothing to capture."""
    if not config.graphs.keys:
        return None
    if isinstance(queue, EmulatedQueue):
        return EmulatedCapture(queue)
    return GraphCapture(device) if device.type == "cuda" else None


def new_queue(device: torch.device, emulate: Pace | None) -> DeviceQueue:
    """The work of the device.  Raises ConfigError where a GPU is asked to be emulated."""
    if emulate is None:
        return queue_of(device)
    if device.type == "cuda":
        raise ConfigError(
            f"Engine: MIDSTREAM_EMULATE={emulate} with a model on {device}; expected a model on the CPU: "
            "unset it, or move the model"
        )
    return EmulatedQueue(emulate)


def _build(
    lowered: LoweredModel, tokenizer: Any | None, config: ResolvedConfig, emulate: Pace | None
) -> Parts:
    device = lowered.device
    queue = new_queue(device, emulate)
    capturer = new_capturer(config, device, queue)
    # without checkpoints the one running page never moves: a single block holds the whole sequence
    block = config.max_len if config.cache_mode == "none" else config.state_block
    layout = SlotLayout(
        config.max_rows, -(-config.max_len // block), -(-config.max_len // config.kv_block)
    )
    limits = stage_limits(config.max_rows, config.max_step_tokens, block)
    page_bytes = PageBytes(lowered.layout.page_bytes, lowered.kv_layout.page_bytes)
    check_room(shares(config, layout, limits, page_bytes), device)
    slots = SlotMemory.allocate(layout, device)
    temporal, conv = lowered.layout.allocate(config.num_state_pages, device)
    kv = lowered.kv_layout.allocate(config.num_kv_pages, device)
    pools = Pools(temporal, conv, kv, slots.kv_table, config.kv_block)
    lowered.bind(pools)

    live = LiveTable(layout, config.max_len)
    scheduler = _scheduler(config, layout, live, lowered, block)
    step = DeviceStep(
        lowered, slots, Stage(limits, device, queue), lowered.layout, (temporal, conv), block,
        config.migration == "precopy",
    )  # fmt: skip
    return Parts(
        config=config,
        lowered=lowered,
        pools=pools,
        ownership=scheduler.ownership,
        scheduler=scheduler,
        committer=Committer(live, scheduler.ownership, scheduler),
        runner=StepRunner(step, live, kv, config.kv_block, config.graphs, capturer, queue),
        intake=Intake(lowered.model, tokenizer, config),
        emitter=Emitter(tokenizer),
    )


def _scheduler(
    config: ResolvedConfig, layout: SlotLayout, live: LiveTable, lowered: LoweredModel, block: int
) -> Scheduler:
    """Everything on the host that decides steps, over fresh pools and an empty index."""
    kv_pool, state_pool = (
        PagePool(config.num_kv_pages, "kv"),
        PagePool(config.num_state_pages, "state"),
    )
    index = PrefixIndex(
        kv_pool,
        state_pool,
        config.kv_block,
        eviction=config.eviction,
        page_bytes=(lowered.kv_layout.page_bytes, lowered.layout.page_bytes),
    )
    keeps_all = config.cache_mode == "all"
    ownership = PageOwnership(
        live, layout, kv_pool, state_pool, index, config.kv_block, block, keeps_all
    )
    hasher = None
    if config.cache_mode != "none":
        hasher = BlockHasher(block=config.kv_block, key=config.hash_key)
    chains = Chains(hasher, live)
    retention = Retention(config.retention, block, config.kv_block)
    checkpoints = Checkpoints(live, ownership, chains, retention, lowered.export_alignment)
    admission = Admission(ownership, chains, config.wait_for_prefix)
    return Scheduler(live, layout, ownership, checkpoints, admission, config.max_step_tokens)
