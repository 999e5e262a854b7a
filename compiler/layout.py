"""
Where each layer's memory lies inside a page: sizes and offsets only, no device needed.

A state page holds the states of all recurrent layers after the same number of tokens, in two typed
arenas: temporal states (float32 by default) and convolution windows (the model's dtype).  A KV page holds
keys and values of `kv_block` tokens of all attention layers.  Every region and every page starts on a
multiple of `LAUNCH_ALIGN` bytes, so that kernels may assume aligned vector accesses.

Letters: N pages, E elements of a page, W taps, D channels, k drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.errors import CapacityError, ConfigError, UnsupportedError
from midstream.ops.registry import LAUNCH_ALIGN


@dataclass(frozen=True, slots=True)
class LayerState:
    """What one recurrent layer keeps per sequence."""

    layer: int  # index among the model's decoder layers
    kind: str  # name of the recurrence: "ssd", "gated_delta"
    temporal_shape: tuple[int, ...] | None  # None: the layer has a convolution window only
    conv_window_rows: int  # W - 1 newest inputs; 0 where the layer has no convolution
    conv_channels: int  # D


@dataclass(frozen=True, slots=True)
class StateRegion:
    """A layer's place in the two arenas, in elements from the start of a page."""

    state: LayerState
    temporal_offset: int  # in the temporal arena
    conv_offset: int  # in the conv arena; the region is token-major [W - 1 + k, D]


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Regions of all recurrent layers in one state page."""

    regions: tuple[StateRegion, ...]  # in layer order
    temporal_dtype: torch.dtype
    conv_dtype: torch.dtype
    window_rows: int  # W - 1 + k, the same in all layers; 0 without convolutions
    temporal_elements: int  # E of the temporal arena
    conv_elements: int  # E of the conv arena

    @staticmethod
    def of(
        layers: Sequence[LayerState],
        temporal_dtype: torch.dtype,
        conv_dtype: torch.dtype,
        drafts: int = 0,
    ) -> StateLayout:
        """Lay the regions out one after the other.

        Raises:
            UnsupportedError: when convolution windows differ in length; page moves shift all alike.
        """
        window_rows = _common_window(layers)
        window_rows += drafts if window_rows else 0
        regions, temporal_end, conv_end = [], 0, 0
        for state in layers:
            regions.append(StateRegion(state, temporal_end, conv_end))
            temporal_end += aligned(math.prod(state.temporal_shape or (0,)), temporal_dtype)
            rows = window_rows if state.conv_window_rows else 0
            conv_end += aligned(rows * state.conv_channels, conv_dtype)
        return StateLayout(
            tuple(regions), temporal_dtype, conv_dtype, window_rows, temporal_end, conv_end
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in both arenas together.

        >>> layer = LayerState(0, "ssd", (2, 4, 8), conv_window_rows=3, conv_channels=48)
        >>> StateLayout.of([layer], torch.float32, torch.bfloat16).page_bytes
        640
        """
        temporal = self.temporal_elements * self.temporal_dtype.itemsize
        return temporal + self.conv_elements * self.conv_dtype.itemsize

    def region(self, layer: int) -> StateRegion:
        """The region of decoder layer `layer`, which must be recurrent."""
        return next(region for region in self.regions if region.state.layer == layer)

    def allocate(self, num_pages: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Zeroed arenas: temporal [N, E] and conv [N, E].

        Raises:
            CapacityError: when the device has no room for them.
        """
        return (
            _zeros("states", num_pages, self.temporal_elements, self.temporal_dtype, device),
            _zeros("convolution windows", num_pages, self.conv_elements, self.conv_dtype, device),
        )

    def conv_table(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """For `page_move`: offset i64[layers] and channels i32[layers] of all convolution windows."""
        regions = [region for region in self.regions if region.state.conv_window_rows]
        offsets = [region.conv_offset for region in regions]
        widths = [region.state.conv_channels for region in regions]
        return (
            torch.tensor(offsets, dtype=torch.int64, device=device),
            torch.tensor(widths, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Regions of all attention layers in one KV page; a region is [2, kv_block, kv_heads, head_dim]."""

    layers: tuple[int, ...]  # decoder layers with attention, ascending
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_block: int = 16  # tokens of a page

    def __post_init__(self) -> None:
        if self.kv_block < 1 or self.kv_block & (self.kv_block - 1):
            raise ConfigError(
                f"KvLayout: kv_block is {self.kv_block}, expected a power of two; use 16 or 32"
            )

    @property
    def region_elements(self) -> int:
        """Elements of one layer's region, padding included."""
        return aligned(2 * self.kv_block * self.kv_heads * self.head_dim, self.dtype)

    @property
    def page_elements(self) -> int:
        """E of the KV arena."""
        return len(self.layers) * self.region_elements

    @property
    def page_bytes(self) -> int:
        """Bytes of one page.

        >>> KvLayout((2, 5), kv_heads=2, head_dim=16, dtype=torch.float32).page_bytes
        8192
        """
        return self.page_elements * self.dtype.itemsize

    def offset(self, layer: int) -> int:
        """First element of the region of decoder layer `layer`, which must have attention."""
        return self.layers.index(layer) * self.region_elements

    def allocate(self, num_pages: int, device: torch.device | str) -> Tensor:
        """Zeroed arena [N, E].

        Raises:
            CapacityError: when the device has no room for it.
        """
        return _zeros("keys and values", num_pages, self.page_elements, self.dtype, device)


def _zeros(
    what: str, num_pages: int, elements: int, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    try:
        return torch.zeros((num_pages, elements), dtype=dtype, device=device)
    except RuntimeError as error:
        size = num_pages * elements * dtype.itemsize
        raise CapacityError(
            f"pools: {num_pages:,} pages for {what} take {size / 2**30:,.1f} GiB, which {device} does not "
            "have; expected pools that fit beside the model; lower memory, num_kv_pages or num_state_pages "
            "of Engine, or max_batch or max_len of compile"
        ) from error


def aligned(elements: int, dtype: torch.dtype) -> int:
    """Round up to whole units of `LAUNCH_ALIGN` bytes.

    >>> aligned(33, torch.float32), aligned(0, torch.bfloat16)
    (64, 0)
    """
    unit = LAUNCH_ALIGN // dtype.itemsize
    return -(-elements // unit) * unit


def _common_window(layers: Sequence[LayerState]) -> int:
    """W - 1 of the layers that have a convolution; 0 when none has."""
    windows = {state.conv_window_rows for state in layers if state.conv_window_rows}
    if len(windows) > 1:
        raise UnsupportedError(
            f"StateLayout: convolution windows of {sorted(windows)} rows in one model, expected one "
            "length; page moves shift all windows alike, lower the layers as separate models"
        )
    return next(iter(windows), 0)
