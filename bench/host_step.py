"""
The host's part of a decode step: what Python does between two launches, and the index kernels below it.

Physics: none; the host must be done before the device is, so that the device never waits.  The engine is the
real one from `Engine.step` down to the graph launch, but its graphs hold one-element kernels, about as many as
a model has nodes, and its tokens are made up; each step begins with an idle device.  On the CPU nothing runs
in place of the graph.  Index kernels are timed next to their plain-Python twins and to NumPy.

    pytest bench/host_step.py --benchmark-json=host_step.json
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import measure
import numpy as np
import numpy_rows
import pytest
import torch
from numpy_rows import I32
from percentiles import percentiles_us, seconds_of
from torch import Tensor

import midstream
from midstream.compiler.context import StepView
from midstream.compiler.layout import KvLayout, LayerState, StateLayout
from midstream.graphs.table import GraphKey
from midstream.ops import host_rows
from midstream.runtime import assembly
from midstream.runtime.device_step import DeviceStep
from midstream.runtime.request import Phase
from midstream.runtime.runner import StepRunner

GPU = torch.cuda.is_available()
NODES = 200  # kernels of a graph: 24 layers of 8
BLOCK, KV_BLOCK = 64, 16  # tokens of a checkpoint and of a KV page
PROMPT = 24
QUIET_STEPS = 256
PARTS = ("schedule", "stage", "commit")


class NoLayers:
    """In place of a lowered model: the layouts of one recurrent and one attention layer."""

    def __init__(self) -> None:
        self.device, self.dtype = measure.device(), torch.bfloat16
        state = LayerState(0, "ssd", (1, 1, 32), 3, 32)
        self.layout = StateLayout.of([state], torch.float32, self.dtype)
        self.kv_layout = KvLayout((1,), kv_heads=1, head_dim=8, dtype=self.dtype, kv_block=KV_BLOCK)
        self.model = torch.nn.Embedding(512, 1)
        self.model.config = SimpleNamespace(max_position_embeddings=4096)
        self.model.get_input_embeddings = lambda: self.model
'''
