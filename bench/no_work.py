"""A real engine over a device that does nothing: plans, stages and commits steps whose tokens are made up."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import measure
import numpy as np
import pytest
import torch
from torch import Tensor

import midstream
from midstream.compiler.context import StepView
from midstream.compiler.layout import KvLayout, LayerState, StateLayout
from midstream.graphs.table import GraphKey
from midstream.runtime import assembly
from midstream.runtime.device_step import DeviceStep
from midstream.runtime.plan import StepPlan
from midstream.runtime.runner import StepRunner

GPU = torch.cuda.is_available()
NODES = 200  # of a graph: 8 for each of 24 layers, and the index work
BLOCK, KV_BLOCK = 64, 16  # tokens
VOCAB, TOKEN = 512, 7  # ids of the prompts; the id that every row samples


class NoModel(torch.nn.Embedding):
    """As much of a model as the engine looks at."""

    config = SimpleNamespace(max_position_embeddings=4096)

    def get_input_embeddings(self) -> NoModel:
        return self


class NoLayers:
    """In place of a lowered model: small pages, no layers."""

    def __init__(self) -> None:
        self.model, self.device, self.dtype = NoModel(VOCAB, 1), measure.device(), torch.float32
        layer = LayerState(0, "ssd", (1, 1, 32), conv_window_rows=3, conv_channels=32)
        self.layout = StateLayout.of([layer], self.dtype, self.dtype)
        self.export_alignment = 1
        self.kv_layout = KvLayout((1,), kv_heads=1, head_dim=1, dtype=self.dtype, kv_block=KV_BLOCK)

    def bind(self, pools: object) -> None:
        pass

    def undo(self) -> None:
        pass


class NoWork(DeviceStep):
    """A step of NODES one-element kernels; the sampled tokens are there already."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.token.fill_(TOKEN)

    def run(self, view: StepView, rows: int) -> Tensor:
        for _ in range(NODES):
            self.num_moves.add_(0)
        return self.logprob

    def addresses(self) -> dict[str, int]:
        """None: on the CPU every launch would check them."""
        return {}


class NoLaunch(StepRunner):
    """Without a GPU there is nothing to launch."""

    def _replay_or_run(self, key: GraphKey, plan: StepPlan) -> list[Tensor]:
        return super()._replay_or_run(key, plan) if GPU else [self.step.logprob]


def decoding_engine(patch: pytest.MonkeyPatch, lengths: Sequence[int]) -> midstream.Engine:
    """An engine that decodes prompts of the given lengths, one row each."""
    patch.setattr(assembly, "check_model", lambda model: None)
    patch.setattr(assembly, "lower", lambda *args, **options: NoLayers())
    patch.setattr(assembly, "DeviceStep", NoWork)
    patch.setattr(assembly, "StepRunner", NoLaunch)
    rows = len(lengths)
    engine = midstream.Engine(
        NoModel(VOCAB, 1),
        compile="eager",
        state_block=BLOCK,
        kv_block=KV_BLOCK,
        max_rows=rows,
        max_len=1024,
        max_step_tokens=sum(lengths),  # all of them start in one step
        num_kv_pages=1 + 1024 // KV_BLOCK * rows,
        num_state_pages=8 * rows,
    )
    params = midstream.SamplingParams(max_tokens=900, temperature=0.0)
    draw = np.random.default_rng(rows)
    for n in lengths:
        engine.add(draw.integers(0, VOCAB, n), params)
    for _ in range(8):
        engine.step()
    assert engine.stats()["running"] == rows
    return engine
