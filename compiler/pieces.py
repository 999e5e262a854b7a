"""
Compiles a lowered model piece by piece: one compilation serves all decoder layers of a kind.

A piece is a decoder layer, the rotary embedding or the final norm.  Pieces of one kind (same classes
inside) share one compiled function that takes the module as an argument, so that weights, layer offsets
and step tensors are inputs of its graph.  It is compiled once for each step kind, and once more for steps
of a single token, which torch always specializes.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import _config as symbolic_config

from midstream.compiler.changes import Changes

Backend = str | Callable[..., Any]


def compile_pieces(pieces: list[nn.Module], changes: Changes, backend: Backend) -> int:
    """Replace the forward of every piece by its kind's compiled function.  Returns the number of kinds.

    Nothing is compiled yet: that happens at the first call, inside `distinct_sizes`.
    """
    compiled: dict[tuple[type, ...], Callable[..., Any]] = {}
    for piece in pieces:
        kind = tuple(type(module) for module in piece.modules())
        if kind not in compiled:
            run = _own_code(_run_piece, type(piece).__name__)
            compiled[kind] = torch.compile(run, fullgraph=True, dynamic=True, backend=backend)
        changes.set(piece, "forward", types.MethodType(compiled[kind], piece))
    return len(compiled)


@contextmanager
def distinct_sizes() -> Iterator[None]:
    """Give equal sizes separate symbols while compiling.

    Otherwise a step whose token count happens to equal the length of a static row buffer compiles a
    graph that demands this equality, and the next step compiles again.
    """
    with symbolic_config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        yield


def _run_piece(piece: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(piece).forward(piece, *args, **kwargs)


def _own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A copy with a code object of its own.

    torch keeps compilations, and counts them against its limit, per code object: copies keep kinds and
    models apart.
    """
    code = function.__code__.replace(co_name=f"run_{name}")
    return types.FunctionType(code, function.__globals__, code.co_name)
