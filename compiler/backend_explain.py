"""What the backend makes of a function: graphs, breaks, state, recordings, and the floor of a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import counters

from midstream.compiler.backend_graph import CompiledGraph, compile_graph
from midstream.compiler.backend_options import BackendOptions, decode
from midstream.errors import ConfigError
from midstream.graphs.recorded import InputRole


@dataclass(frozen=True, slots=True)
class GraphReport:
    """One traced graph, after one call."""

    name: str
    num_ops: int
    parameters: tuple[str, ...]  # bound where they lie
    states: tuple[str, ...]  # written in place
    inputs: tuple[str, ...]  # copied in before each replay
    parameter_bytes: int
    state_bytes: int
    input_bytes: int
    num_recordings: int
    recorded_bytes: int  # by which recordings made their pool grow
    reasons: tuple[str, ...]  # why calls ran without a recording

    @property
    def floor_bytes(self) -> int:
        """Traffic that no implementation avoids: weights read once, state read and written."""
        return self.parameter_bytes + 2 * self.state_bytes


@dataclass(frozen=True, slots=True)
class BackendReport:
    """What `explain_backend` returns.  `str` of it is meant for people."""

    graphs: tuple[GraphReport, ...]
    breaks: tuple[str, ...]  # why the function is more than one graph
    bytes_per_second: float | None  # of device memory, as the caller states it

    @property
    def floor_seconds(self) -> float | None:
        """Least time of one call at the stated bandwidth."""
        if self.bytes_per_second is None:
            return None
        return sum(graph.floor_bytes for graph in self.graphs) / self.bytes_per_second

    def __str__(self) -> str:
        lines = [f"{len(self.graphs)} graphs, {len(self.breaks)} kinds of graph breaks"]
        lines += [f"  break: {reason}" for reason in self.breaks]
        for graph in self.graphs:
            lines += _lines(graph)
        if self.floor_seconds is not None:
            rate = (self.bytes_per_second or 0.0) / 1e9
            lines.append(f"floor: {1e6 * self.floor_seconds:.1f} us a call at {rate:.0f} GB/s")
        return "\n".join(lines)


def explain_backend(
    function: Callable[..., Any],
    *args: Any,
    options: Mapping[str, object] | BackendOptions | None = None,
    bytes_per_second: float | None = None,
    **kwargs: Any,
) -> BackendReport:
    """Compile `function` anew, call it once with the arguments, and say what came of it.

    The call is a real one: state that the function writes is written.

    Args:
        options: as in `torch.compile(backend="midstream", options=...)`.
        bytes_per_second: of device memory, for the least time of a call.
    Raises:
        ConfigError: an unknown option, a wrong value, or nothing that can be called.
    """
    _check_rate(bytes_per_second)
    if not callable(function):
        raise ConfigError(
            f"explain_backend: the function is {repr(function)[:60]}, expected a function or a module; "
            "pass it first and its arguments behind it"
        )
    settings = decode(None, options)
    graphs: list[CompiledGraph] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Sequence[Any]]:
        graphs.append(compile_graph(gm, inputs, settings))
        return graphs[-1].call

    before = dict(counters["graph_break"])
    plain = getattr(function, "_orig_mod", function)  # of a module that is compiled already
    torch.compile(plain, backend=backend)(*args, **kwargs)
    breaks = [
        text for text, count in counters["graph_break"].items() if count > before.get(text, 0)
    ]
    return BackendReport(
        tuple(map(_report, graphs)), tuple(map(_summary, breaks)), bytes_per_second
    )


def _check_rate(bytes_per_second: Any) -> None:
    is_number = isinstance(bytes_per_second, Real) and not isinstance(bytes_per_second, bool)
    if bytes_per_second is not None and not (is_number and 0 < bytes_per_second < math.inf):
        raise ConfigError(
            f"explain_backend: bytes_per_second={bytes_per_second!r}, expected a finite number above 0; pass "
            "the bandwidth of the device, such as 4.8e12, or leave it out for a report without times"
        )


def _summary(text: str) -> str:
    """What torch says first of a graph break: its kind and its explanation."""
    return " ".join(line.strip() for line in text.splitlines()[:2])


def _report(graph: CompiledGraph) -> GraphReport:
    arguments = {
        role: [argument for argument in graph.arguments if argument.role is role]
        for role in InputRole
    }
    names = {role: tuple(argument.name for argument in found) for role, found in arguments.items()}
    num_bytes = {
        role: sum(argument.num_bytes for argument in found) for role, found in arguments.items()
    }
    skipped = () if graph.skipped is None else (str(graph.skipped),)
    recorded = graph.recorded
    return GraphReport(
        name=graph.name,
        num_ops=graph.num_ops,
        parameters=names[InputRole.PARAMETER],
        states=names[InputRole.STATE],
        inputs=names[InputRole.INPUT],
        parameter_bytes=num_bytes[InputRole.PARAMETER],
        state_bytes=num_bytes[InputRole.STATE],
        input_bytes=num_bytes[InputRole.INPUT],
        num_recordings=0 if recorded is None else recorded.num_recordings,
        recorded_bytes=0 if recorded is None else recorded.memory_bytes,
        reasons=(*skipped, *graph.events.eager),
    )


def _lines(graph: GraphReport) -> list[str]:
    return [
        f"{graph.name}: {graph.num_ops} operators, {graph.num_recordings} recordings of "
        f"{graph.recorded_bytes} bytes",
        f"  {len(graph.parameters)} weights of {graph.parameter_bytes} bytes, "
        f"{len(graph.states)} states of {graph.state_bytes} bytes, "
        f"{len(graph.inputs)} inputs of {graph.input_bytes} bytes",
        *(f"  state: {name}" for name in graph.states),
        *(f"  {reason}" for reason in graph.reasons),
    ]
