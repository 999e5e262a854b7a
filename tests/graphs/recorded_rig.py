"""A recorded function beside the same function called eagerly on states of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from midstream.graphs.emulator import EmulatedCapture
from midstream.graphs.recorded import Events, InputRole, RecordedCalls

PARAMETER, STATE, INPUT, NUMBER = InputRole


def recorded(run: Callable[..., Sequence[Any]], *roles: InputRole, **options: Any) -> RecordedCalls:
    """`run`, recorded by the emulator; counts are in `.events`."""
    events = Events()
    settings = {
        "capturer": EmulatedCapture(),
        "name": "test",
        "max_recordings": 8,
        "on_unsupported": "fallback",
        "events": events,
        **options,
    }
    calls = RecordedCalls(run, roles, **settings)
    calls.events = settings["events"]  # type: ignore[attr-defined]
    return calls


def decay(weight: Tensor, state: Tensor, x: Tensor) -> list[Any]:
    """A recurrent step."""
    state.mul_(0.5).add_(x @ weight)
    return [state.sum(-1)]


DECAY = (PARAMETER, STATE, INPUT)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Twin:
    """A state that a recorded `decay` writes, and one that the eager function writes."""

    def __init__(self, calls: RecordedCalls, weight: Tensor, state: Tensor) -> None:
        self.calls = calls
        self.weight = weight
        self.state = state
        self.expected = state.clone()
        self._seed = 0

    def step(self) -> Tensor:
        """One call of each, which must agree; the recorded output."""
        self._seed += 1
        x = drawn(self.state.shape[0], self.weight.shape[0], seed=self._seed)
        with torch.inference_mode(self.state.is_inference()):
            found = self.calls(self.weight, self.state, x)
            wanted = decay(self.weight, self.expected, x)
        self.check()
        assert torch.equal(found[0], wanted[0])
        return found[0]

    def check(self) -> None:
        assert torch.equal(self.state, self.expected)
