"""One recorded call: what it binds, what is copied in before a replay, what is handed out after it."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from midstream.graphs.adoption import Homes
from midstream.graphs.captured import Captured, Capturer
from midstream.graphs.input_buffers import InputBuffers, narrowing
from midstream.graphs.memory import storage_address, unowned_alias
from midstream.graphs.outputs import Outputs
from midstream.graphs.roles import Places

Run = Callable[..., Sequence[Any]]

# of builds for CUDA; a tenth of a microsecond per tensor is what the check costs anyhow
_addresses_equal = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


@dataclass(frozen=True, slots=True)
class _Memory:
    """What the recorded work reads and writes by address."""

    arguments: list[
        Any
    ]  # as the recorded run saw them: buffers of inputs, unowned aliases of the rest
    buffers: InputBuffers
    outputs: Outputs


class Recording:
    """A captured call.  It holds no memory of the caller, but the homes of state tensors."""

    def __init__(
        self, captured: Captured, memory: _Memory, places: Places, flat: Sequence[Any]
    ) -> None:
        self.captured = captured
        self.homes: Homes | None = (
            None  # None: the states share memory with tensors that are not ours
        )
        self.last_call = 0
        self._memory: _Memory | None = memory  # None: released
        self._places = places
        bound = places.pick_bound(flat)
        self._addresses = list(map(Tensor.data_ptr, bound))
        self._address_at: list[int | None] = [None] * len(flat)
        for place, address in zip(places.bound, self._addresses, strict=True):
            self._address_at[place] = address
        self._parameters = [weakref.ref(tensor) for tensor in places.pick_parameters(flat)]
        self._states = _Ranges(places.pick_states(flat))
        self._ids: list[int] = []
        self._witnesses: list[weakref.ref[Tensor]] = []
        self._streams: set[int] = set()

    def binds(self, flat: Sequence[Any]) -> bool:
        """Whether all tensors that are bound by address lie where they lay."""
        if _addresses_equal is not None:
            return _addresses_equal(list(flat), self._address_at, list(self._places.bound))
        return list(map(Tensor.data_ptr, self._places.pick_bound(flat))) == self._addresses

    def knows(self, flat: Sequence[Any]) -> bool:
        """Whether the bound tensors are the very objects that were recognised last."""
        return list(map(id, self._places.pick_bound(flat))) == self._ids

    def recognise(self, flat: Sequence[Any]) -> None:
        """The bound tensors of `flat` have the shapes that were recorded."""
        bound = self._places.pick_bound(flat)
        self._ids = list(map(id, bound))
        self._witnesses = [
            weakref.ref(tensor, self._forget) for tensor in bound
        ]  # an id may be used again
        for home, tensor in zip(self.homes or (), self._places.pick_states(flat), strict=False):
            home.note_owner(tensor)

    def overlaps(self, inputs: Sequence[Tensor]) -> bool:
        """Whether an input shares memory with a state: its copy would not see what the call writes."""
        return any(tensor.data_ptr() in self._states for tensor in inputs)

    def is_stale(self) -> bool:
        """Whether a parameter that lives has moved since."""
        return any(
            tensor is not None and tensor.data_ptr() != address
            for tensor, address in zip(
                (ref() for ref in self._parameters), self._addresses, strict=False
            )
        )

    def replay(self, flat: Sequence[Any], stream: int) -> list[Any]:
        """Run the recorded work with the arguments `flat` on the current stream, whose number is `stream`."""
        memory = self._memory
        assert memory is not None, "a released recording was kept"
        if stream not in self._streams:
            self._use_on(stream, memory)
        memory.buffers.fill(self._places.pick_inputs(flat))
        self.captured.replay()
        increment_version(self._places.pick_states(flat))  # a backward that kept one must notice
        return memory.outputs.hand_out(flat)

    def release(self) -> None:
        """Give back its memory."""
        self.captured.release()
        self.homes = self._memory = None
        self._witnesses.clear()

    def _use_on(self, stream: int, memory: _Memory) -> None:
        self._streams.add(stream)
        for tensor in memory.buffers.tensors:
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def _forget(self, _: weakref.ref[Tensor]) -> None:
        self._ids = []


class _Ranges:
    """Ranges of addresses of storages."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        ranges = sorted({(storage_address(t), t.untyped_storage().nbytes()) for t in tensors})
        self._starts = [start for start, _ in ranges]
        self._ends = [start + nbytes for start, nbytes in ranges]

    def __contains__(self, address: int) -> bool:
        at = bisect_right(self._starts, address) - 1
        return at >= 0 and address < self._ends[at]


def record(
    run: Run, flat: Sequence[Any], places: Places, capturer: Capturer, name: str
) -> Recording:
    """Capture `run(*flat)` without a trace: states and random generators are left as they were."""
    buffers = InputBuffers(places.pick_inputs(flat))
    buffers.fill(places.pick_inputs(flat))
    arguments = list(flat)
    for place in places.bound:
        arguments[place] = unowned_alias(flat[place])
    for place, buffer in zip(places.inputs, buffers.tensors, strict=True):
        arguments[place] = buffer
    device = arguments[places.tensors[0]].device
    results: list[Any] = []

    def step() -> None:
        results[:] = run(*arguments)

    def addresses() -> dict[str, int]:
        return {f"argument {place}": flat[place].data_ptr() for place in places.bound}

    captured = None
    try:
        with _unchanged(places.pick_states(arguments)), _same_random_numbers(device):
            captured = capturer.capture(step, addresses, name)
        outputs = Outputs(results, arguments, device)
    except BaseException:
        if captured is not None:
            captured.release()
        raise
    finally:
        results.clear()  # whoever keeps `step`, or a traceback, must not keep graph memory
    return Recording(captured, _Memory(arguments, buffers, outputs), places, flat)


@contextmanager
def _unchanged(states: Sequence[Tensor]) -> Iterator[None]:
    """Contents of `states` are the same after the block, whatever happens in it."""
    states = [narrowing(state)(state) for state in states]
    saved = [_saved(state) for state in states]
    try:
        yield
    finally:
        for state, before in zip(states, saved, strict=True):
            state.copy_(before)


def _saved(tensor: Tensor) -> Tensor:
    try:
        return tensor.clone()
    except torch.OutOfMemoryError:
        return tensor.cpu()


@contextmanager
def _same_random_numbers(device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
