"""
From one traced graph to a function that replays, records or runs each call.

The graph is analysed, compiled, and handed to `graphs.recorded`.  What it writes in place is written in
the caller's own memory, and parameters are bound where they lie.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._guards import CompileContext

from midstream.compiler.backend_analysis import GraphFacts, analyse
from midstream.compiler.backend_arguments import Argument, arguments_of, unknown_argument
from midstream.compiler.backend_memory import capturer_of, note_recorded
from midstream.compiler.backend_options import BackendOptions
from midstream.compiler.backend_overlap import OverlapCheck
from midstream.compiler.fallbacks import NO_GPU, BackendEvents, Reason, trace_artifact
from midstream.errors import UnsupportedError
from midstream.graphs.recorded import RecordedCalls

_log = logging.getLogger("midstream.compiler.backend")
_numbers = itertools.count()  # of graphs that torch.compile did not number

Flat = Callable[..., Sequence[Any]]  # takes the arguments of the placeholders


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """One traced graph, ready to be called."""

    name: str
    arguments: tuple[Argument, ...]
    num_ops: int
    skipped: Reason | None  # why nothing of it is recorded
    events: BackendEvents
    recorded: RecordedCalls | None  # None where nothing is recorded
    call: Flat


def compile_graph(
    gm: fx.GraphModule, inputs: Sequence[Any], settings: BackendOptions
) -> CompiledGraph:
    """Analyse and compile one traced graph.

    Raises:
        UnsupportedError: when it cannot be recorded and on_unsupported is "error", or cannot be compiled.
    """
    counters["midstream"]["graphs_compiled"] += 1
    compile_id = CompileContext.current_compile_id()
    name = f"graph {next(_numbers) if compile_id is None else compile_id}"
    attributes = [*gm.parameters(), *gm.buffers()]
    unknown = unknown_argument([*inputs, *attributes])
    facts = GraphFacts(obstacles=[unknown]) if unknown else analyse(gm, inputs, attributes)
    skipped = _reason_to_skip(facts, settings) if settings.record else None
    if skipped is not None and settings.on_unsupported == "error":
        raise UnsupportedError(f"backend midstream: {name}: {skipped}")
    arguments = arguments_of(gm, inputs, attributes, facts.written)
    run = _checked(gm, _compiled(gm, inputs, settings, facts), OverlapCheck(inputs, facts.written))
    events = BackendEvents(compile_id)
    _say_what_was_compiled(name, gm, arguments, facts)
    if skipped is not None:
        events.count_skip(name, skipped)
    if skipped is not None or not settings.record or not facts.devices:
        return CompiledGraph(name, arguments, facts.num_ops, skipped, events, None, run)
    recorded = _recorded(run, arguments, name, facts, settings, events)
    call = _without_gradients(recorded, attributes)
    return CompiledGraph(name, arguments, facts.num_ops, None, events, recorded, call)


def _reason_to_skip(facts: GraphFacts, settings: BackendOptions) -> Reason | None:
    """Why nothing of a graph can be recorded, None if it can."""
    if facts.obstacles:
        return facts.obstacles[0]
    if facts.needs_backward:
        return Reason("gradients that a backward may need", "call it under torch.inference_mode()")
    others = [reason for device, reason in facts.devices.items() if device.type != "cuda"]
    if len(others) == len(facts.devices) and settings.emulate:
        return None
    if not torch.cuda.is_available():
        return NO_GPU
    if others:
        return others[0]
    if len(facts.devices) > 1:
        return Reason("multiple devices", "keep all tensors of the function on one GPU")
    return None


def _compiled(
    gm: fx.GraphModule, inputs: Sequence[Any], settings: BackendOptions, facts: GraphFacts
) -> Flat:
    if settings.inner == "eager":
        return gm.forward
    from midstream.compiler.backend_inner import compile_with_inductor  # takes seconds to import

    return compile_with_inductor(gm, inputs, settings, facts)


def _checked(gm: fx.GraphModule, compiled: Flat, overlap: OverlapCheck) -> Flat:
    """Arguments that overlap otherwise than when the graph was compiled go through the trace itself."""

    def run(*flat: Any) -> Sequence[Any]:
        if overlap.holds(flat):
            return compiled(*flat)
        counters["midstream"]["calls_with_other_overlaps"] += 1
        return gm.forward(*flat)

    return run


def _recorded(
    run: Flat,
    arguments: Sequence[Argument],
    name: str,
    facts: GraphFacts,
    settings: BackendOptions,
    events: BackendEvents,
) -> RecordedCalls:
    def run_graph(*everything: Any) -> Sequence[Any]:
        return run(*everything[: facts.num_inputs])

    recorded = RecordedCalls(
        run_graph,
        [argument.role for argument in arguments],
        capturer=capturer_of(next(iter(facts.devices))),
        name=name,
        max_recordings=settings.max_recordings,
        on_unsupported="error" if settings.on_unsupported == "error" else "fallback",
        events=events,
        shapes_are_guarded=True,  # by torch: other sizes are other numbers among the arguments
    )
    note_recorded(recorded)
    return recorded


def _without_gradients(recorded: RecordedCalls, attributes: Sequence[Tensor]) -> Flat:
    """No result needs gradients here, or the graph would have been skipped."""

    def call(*inputs: Any) -> Sequence[Any]:
        if not torch.is_grad_enabled():
            return recorded(*inputs, *attributes)
        with torch.no_grad():
            return recorded(*inputs, *attributes)

    return call


def _say_what_was_compiled(
    name: str, gm: fx.GraphModule, arguments: Sequence[Argument], facts: GraphFacts
) -> None:
    counts = Counter(argument.role.value for argument in arguments)
    _log.info("%s: %d operators, arguments: %s", name, facts.num_ops, dict(counts))
    trace_artifact("graph", lambda: gm.print_readable(print_output=False), "string")
    plan = [(argument.name, argument.role.value, argument.num_bytes) for argument in arguments]
    trace_artifact("state_plan", lambda: {"graph": name, "arguments": plan})
