"""A lowered step reads no tensor value on the host, so it can be captured and never waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiler_rig import PagedRig
from tiny_models import FAMILIES, build, prompt
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from midstream.compiler import LoweredModel, StepView, lower

_READS = {
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "equal",
    "masked_select",
    "unique_consecutive",
}


class NoHostReads(TorchDispatchMode):
    """Fails at operations that wait for a device; what midstream's own ops do inside is not looked at."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.partition("::")[2]
        assert name not in _READS, f"{name} reads a value"
        if name == "index":
            masks = [i for i in args[1] if isinstance(i, Tensor) and i.dtype is torch.bool]
            assert not masks, "a boolean index reads its count"
        return func(*args, **(kwargs or {}))


class Watched:
    """A lowered model whose steps run under `NoHostReads`."""

    def __init__(self, lowered: LoweredModel) -> None:
        self._lowered = lowered
        self.layout, self.kv_layout, self.bind = lowered.layout, lowered.kv_layout, lowered.bind

    def forward(self, step: StepView) -> Tensor:
        with NoHostReads():
            return self._lowered.forward(step)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_reads_no_tensor_value_on_the_host(family: str) -> None:
    rig = PagedRig(Watched(lower(build(family))))  # type: ignore[arg-type]
    live, other = rig.start(), rig.start()
    rig.chunk([(live, prompt(9)), (other, prompt(1))], padding=1, padding_tokens=2)
    rig.decode([(live, 5), (other, 6)], padding=1)


def test_the_watch_sees_an_experts_implementation_that_reads() -> None:
    rig = PagedRig(Watched(lower(build("qwen3_next"), experts="eager")))  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="reads a value"):
        rig.chunk([(rig.start(), prompt(9))])
