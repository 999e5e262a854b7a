"""What lowering knows about one kind of layer module, and what it binds to each instance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from midstream.compiler.context import PagedContext
from midstream.compiler.layout import LayerState

BINDING = "midstream"  # attribute of a lowered module that holds its binding


@dataclass(frozen=True, slots=True)
class MixerBinding:
    """Bound to a recurrent mixer.  Offsets are tensors so that one compiled layer serves all of its kind."""

    context: PagedContext
    temporal_offset: Tensor  # i64[1]  elements from the start of a temporal page
    conv_offset: Tensor  # i64[1]  elements from the start of a conv page


@dataclass(frozen=True, slots=True)
class AttentionBinding:
    """Bound to an attention module."""

    context: PagedContext
    offset: Tensor  # i64[1]  elements from the start of a KV page


@dataclass(frozen=True, slots=True)
class MixerKind:
    """A recurrence that several mixer classes share.

    `state(mixer, layer)` reads the module's sizes and raises UnsupportedError for an option that the
    lowered forward does not implement.  `forward` replaces the instance's forward: it keeps the module's
    projections, norms and gates, reads its `MixerBinding`, and ignores every cache and mask argument.
    """

    name: str
    state: Callable[[Any, int], LayerState]
    forward: Callable[..., Tensor]


def binding_of(module: Any) -> Any:
    """The binding of a lowered module."""
    return getattr(module, BINDING)
