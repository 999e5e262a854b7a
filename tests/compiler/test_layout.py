"""Regions do not overlap, start on aligned addresses, and add up to the page."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import build

from midstream.compiler import KvLayout, LayerState, StateLayout, lower
from midstream.errors import CapacityError, ConfigError, UnsupportedError
from midstream.ops.registry import LAUNCH_ALIGN

_LAYERS = [
    LayerState(0, "ssd", (3, 5, 7), 3, 50),  # 105 and 150 elements: no multiple of the alignment
    LayerState(1, "conv", None, 3, 33),  # a window only
    LayerState(3, "gated_delta", (2, 8, 16), 3, 64),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("drafts", [0, 2], ids="k{}".format)
def test_regions_are_aligned_and_disjoint(dtype: torch.dtype, drafts: int) -> None:
    layout = StateLayout.of(_LAYERS, dtype, torch.bfloat16, drafts)
    temporal_end = conv_end = 0
    for region in layout.regions:
        assert region.temporal_offset * dtype.itemsize % LAUNCH_ALIGN == 0
        assert region.conv_offset * 2 % LAUNCH_ALIGN == 0
        assert region.temporal_offset >= temporal_end
        assert region.conv_offset >= conv_end
        temporal_end = region.temporal_offset + math.prod(region.state.temporal_shape or (0,))
        conv_end = region.conv_offset + (3 + drafts) * region.state.conv_channels
    assert layout.window_rows == 3 + drafts
    assert temporal_end <= layout.temporal_elements
    assert conv_end <= layout.conv_elements
    assert layout.page_bytes % LAUNCH_ALIGN == 0


def test_arenas_hold_whole_zeroed_pages() -> None:
    layout = StateLayout.of(_LAYERS, torch.float32, torch.bfloat16)
    temporal, conv = layout.allocate(4, "cpu")
    assert temporal.nbytes + conv.nbytes == 4 * layout.page_bytes
    assert temporal.dtype is torch.float32
    assert conv.dtype is torch.bfloat16
    assert not temporal.any()
    assert not conv.any()


def test_the_conv_table_lists_layers_with_a_window() -> None:
    layers = [*_LAYERS, LayerState(4, "lru", (8,), 0, 0)]
    layout = StateLayout.of(layers, torch.float32, torch.bfloat16)
    offset, width = layout.conv_table("cpu")
    assert width.tolist() == [50, 33, 64]
    assert offset.tolist() == [layout.region(layer).conv_offset for layer in (0, 1, 3)]


def test_windows_of_two_lengths_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"\[2, 3\] rows"):
        StateLayout.of(
            [_LAYERS[0], LayerState(1, "conv", None, 2, 8)], torch.float32, torch.float32
        )


def test_a_kv_page_holds_every_attention_layer() -> None:
    layout = KvLayout((2, 7), kv_heads=3, head_dim=10, dtype=torch.bfloat16, kv_block=4)
    assert layout.offset(2) == 0
    assert layout.offset(7) == layout.region_elements == 256  # 240 rounded up to 128 bytes
    assert layout.allocate(3, "cpu").nbytes == 3 * layout.page_bytes
    with pytest.raises(ConfigError, match="kv_block is 12"):
        KvLayout((0,), 1, 8, torch.float32, kv_block=12)


def test_a_model_states_its_own_layout() -> None:
    lowered = lower(build("bamba"))
    shapes = [region.state.temporal_shape for region in lowered.layout.regions]
    assert shapes == [(8, 16, 16)] * 3
    assert [region.state.layer for region in lowered.layout.regions] == [0, 1, 3]
    assert lowered.kv_layout == KvLayout((2,), 2, 16, torch.float32, 16)
    lowered = lower(build("qwen3_next", dtype=torch.bfloat16), kv_block=32, drafts=1)
    assert lowered.layout.window_rows == 4
    assert lowered.layout.conv_dtype is torch.bfloat16
    assert lowered.layout.regions[0].state.temporal_shape == (4, 24, 16)  # keys last
    assert lowered.kv_layout == KvLayout((2,), 2, 16, torch.bfloat16, 32)


def test_pools_that_no_machine_holds_are_refused_with_their_size() -> None:
    layout = StateLayout.of(_LAYERS, torch.float32, torch.bfloat16, 0)
    with pytest.raises(CapacityError, match=r"10,000,000,000,000 pages for states take .* GiB"):
        layout.allocate(10**13, "cpu")
