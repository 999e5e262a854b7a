"""
`torch.compile(model, backend="midstream")`: any model that keeps its state in tensors, replayed as graphs.

torch finds this file by the entry point in pyproject.toml; docs/backend.md is for users.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from midstream.compiler.backend_graph import compile_graph
from midstream.compiler.backend_memory import release_all
from midstream.compiler.backend_options import (
    BackendOptions,
    decode,
    list_mode_options,
    list_options,
)

__all__ = ["BackendOptions", "list_mode_options", "list_options", "midstream_backend", "reset"]


def midstream_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | BackendOptions | None = None,
) -> Callable[..., Sequence[Any]]:
    """Compile one traced graph; what torch.compile calls.

    Raises:
        ConfigError: for an unknown mode, an unknown option or a value that no option takes.
        UnsupportedError: when the graph cannot be recorded and on_unsupported is "error", or when
            Inductor cannot compile it.
    """
    return compile_graph(gm, example_inputs, decode(mode, options)).call


def reset() -> None:
    """Drop all recordings and their memory; compiled functions that are still called record again."""
    release_all()


midstream_backend.reset = reset  # type: ignore[attr-defined]  # torch._dynamo.reset() calls it
