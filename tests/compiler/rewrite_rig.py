"""Runs what Dynamo traces through a rewriting pass, with no compiler behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Rewritten:
    """A function whose traced graphs go through `rewrite`."""

    def __init__(
        self,
        function: Callable[..., Any],
        rewrite: Callable[[torch.fx.GraphModule, str], int],
        **compile_args: Any,
    ) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.num_rewritten = 0
        self._rewrite = rewrite
        torch.compiler.reset()  # functions of torch share one wrapper, which compiles anew only so often
        self.call = torch.compile(function, backend=self.backend, **compile_args)

    def backend(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.num_rewritten += self._rewrite(gm, "cpu")
        gm.graph.lint()
        self.graphs.append(gm)
        return gm.forward

    def calls(self, target: Any) -> list[torch.fx.Node]:
        """Nodes that are left after the pass."""
        return [node for gm in self.graphs for node in gm.graph.nodes if node.target is target]


def check_rewritten(
    function: Callable[..., Any],
    rewrite: Callable[[torch.fx.GraphModule, str], int],
    *args: Any,
    rewritten: int,
    tolerance: float = 2e-5,
) -> Rewritten:
    """Equal results, and so many places rewritten."""
    found = Rewritten(function, rewrite)
    with torch.no_grad():
        torch.testing.assert_close(
            found.call(*args), function(*args), rtol=tolerance, atol=tolerance
        )
    assert found.num_rewritten == rewritten
    return found


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
