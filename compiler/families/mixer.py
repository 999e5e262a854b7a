"""What lowering knows about one kind of layer module, and what it binds to each instance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from midstream.compiler.context import PagedContext
from midstream.compiler.layout import LayerState
from midstream.ops.registry import OpSpec

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
    `chunk_ops` are the ops that carry states through prompt chunks.
    """

    name: str
    state: Callable[[Any, int], LayerState]
    forward: Callable[..., Tensor]
    chunk_ops: tuple[OpSpec, ...]


def export_alignment(kinds: Iterable[MixerKind]) -> int | None:
    """Tokens, from the begin of a chunk on, between positions where all layers can export their states.

    None where some layer can export at the end of a chunk only.

    >>> export_alignment([])
    1
    """
    alignments = [op.export_alignment for kind in kinds for op in kind.chunk_ops]
    known = [alignment for alignment in alignments if alignment is not None]
    return math.lcm(*known) if len(known) == len(alignments) else None


def binding_of(module: Any) -> Any:
    """The binding of a lowered module."""
    return getattr(module, BINDING)
