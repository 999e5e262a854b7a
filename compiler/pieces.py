"""
Compiles a lowered model piece by piece: one compilation serves all decoder layers of a kind.

A piece is a decoder layer, the rotary embedding or the final norm.  Pieces of one kind (same classes
inside) share one compiled function that takes the module as an argument, so that weights, layer offsets
and step tensors are inputs of its graph.  It is compiled once for each step kind, and once more for steps
of a single token, which torch always specializes.

Nearly all that a start with warm caches takes is tracing, and most of tracing is arithmetic with symbolic
sizes.  What pieces hand to each other therefore has one symbol, its count of tokens.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch.fx.experimental import _config as symbolic_config

from midstream.compiler.changes import Changes

Backend = str | Callable[..., Any]

_TOKEN_AXIS = 1  # of what pieces exchange: [1, T, ...]


def compile_pieces(pieces: list[nn.Module], changes: Changes, backend: Backend) -> int:
    """Replace the forward of every piece by its kind's compiled function.  Returns the number of kinds.

    Nothing is compiled yet: that happens at the first call, inside `distinct_sizes`.
    """
    compiled: dict[tuple[type, ...], Callable[..., Any]] = {}
    for piece in pieces:
        kind = tuple(type(module) for module in piece.modules())
        if kind not in compiled:
            run = _own_code(_run_piece, type(piece).__name__)
            run = torch.compile(run, fullgraph=True, dynamic=True, backend=backend)
            compiled[kind] = _with_fixed_widths(run)
        changes.set(piece, "forward", types.MethodType(compiled[kind], piece))
    return len(compiled)


@contextmanager
def distinct_sizes() -> Iterator[None]:
    """How pieces are traced: equal sizes have separate symbols, and floats of modules are constants.

    Otherwise a step whose token count happens to equal the length of a static row buffer compiles a
    graph that demands this equality, and the next step compiles again; and a float that cannot be an
    input is found out late, by tracing again.  Results of operators on fake tensors are not kept: with
    symbolic sizes they are hardly ever found again, and keeping them is a third of the time.
    """
    symbolic = symbolic_config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    tracing = dynamo_config.patch(specialize_float=True, fake_tensor_cache_enabled=False)
    with symbolic, tracing:
        yield


def _with_fixed_widths(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` with all sizes behind the token axis of its inputs marked as constants.

    Without it the width of the rotary embedding's results would be a symbol in attention layers.  All
    calls mark, because torch compiles anew where a mark is there that was not.
    """

    def forward(piece: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for tensor in _tensors((*args, *kwargs.values())):
            for axis in range(_TOKEN_AXIS + 1, tensor.dim()):
                torch._dynamo.mark_static(tensor, axis)
        return run(piece, *args, **kwargs)

    return forward


def _tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    """The tensors among `values` and in tuples of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


def _run_piece(piece: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(piece).forward(piece, *args, **kwargs)


def _own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A copy with a code object of its own.

    torch keeps compilations, and counts them against its limit, per code object: copies keep kinds and
    models apart.
    """
    code = function.__code__.replace(co_name=f"run_{name}")
    return types.FunctionType(code, function.__globals__, code.co_name)
