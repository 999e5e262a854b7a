"""Functions compiled by the backend beside the same functions run eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from midstream.compiler.backend_graph import CompiledGraph, compile_graph
from midstream.compiler.backend_options import BackendOptions

EMULATED = {"inner": "eager", "emulate": True}  # recorded and replayed on the CPU


class Watched:
    """`function`, compiled by the backend; its graphs are in `.graphs`."""

    def __init__(
        self,
        function: Callable[..., Any],
        options: dict[str, Any] | None = None,
        **compile_args: Any,
    ) -> None:
        self.graphs: list[CompiledGraph] = []
        self._settings = BackendOptions(**(EMULATED if options is None else options))
        self._compiled = torch.compile(function, backend=self._backend, **compile_args)

    def __call__(self, *args: Any) -> Any:
        with torch.inference_mode():
            return self._compiled(*args)

    @property
    def num_recordings(self) -> int:
        return sum(graph.events.num_recordings for graph in self.graphs)

    @property
    def num_replays(self) -> int:
        return sum(graph.events.num_replays for graph in self.graphs)

    @property
    def num_eager(self) -> int:
        return sum(graph.events.num_eager for graph in self.graphs)

    def _backend(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs.append(compile_graph(gm, inputs, self._settings))
        return self.graphs[-1].call


class Recurrent(nn.Module):
    """One recurrent layer: reads a state, writes it, and uses a weight."""

    def __init__(self, width: int = 4, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(width, width, generator=generator) / width)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        state.mul_(0.5).add_(x @ self.weight)
        return torch.tanh(state)


class TwoLayers(nn.Module):
    """Returns its states instead of writing them: they come back as the arguments of the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Recurrent(seed=seed) for seed in (1, 2))

    def forward(self, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        new: list[Tensor] = []
        for layer, state in zip(self.layers, states, strict=True):
            new.append(state * 0.5 + x @ layer.weight)
            x = torch.tanh(new[-1])
        return x, new


def decay(x: Tensor, state: Tensor) -> Tensor:
    """The least recurrent function."""
    state.mul_(0.5).add_(x)
    return state.sum(-1)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check_steps(
    compiled: Callable[..., Any],
    plain: Callable[..., Any],
    states: Sequence[Tensor],
    inputs: Sequence[Sequence[Any]],
) -> None:
    """Call both with each of `inputs` and `states`; results and states must agree bit for bit."""
    expected = [state.clone() for state in states]
    for given in inputs:
        with torch.inference_mode():
            wanted = plain(*given, *expected)
        found = compiled(*given, *states)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        torch.testing.assert_close(list(states), expected, rtol=0, atol=0)
