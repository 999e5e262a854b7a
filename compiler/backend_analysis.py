"""
What a traced graph does with its memory: found by running it once more, on fake tensors.

The trace calls torch functions, whose effects nobody has written down.  Below them are operators whose
schemas mark what they write, and fake tensors share storages as real ones do.  So the answer is exact for
views, for overlapping arguments and for operators of third parties.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._higher_order_ops.triton_kernel_wrap import (
    get_mutated_tensors,
    triton_kernel_wrapper_mutation,
)
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from midstream.compiler.backend_obstacles import find_obstacle
from midstream.compiler.fallbacks import Reason, source_line

_OWN = ("aten", "prims", "prim", "profiler")  # namespaces whose meaning torch itself knows
_BY_ADDRESS = ("aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter")
_READ_ONLY = ("flex_attention", "cond", "while_loop", "scan", "associative_scan", "map_impl")


@dataclass(slots=True)
class GraphFacts:
    """What one run on fake tensors shows.  Inputs are counted as placeholders are, then attributes."""

    written: set[int] = field(
        default_factory=set
    )  # inputs whose memory is written, by whatever name
    obstacles: list[Reason] = field(default_factory=list)  # what no graph can hold
    elided_copies: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)  # (call, argument)
    devices: dict[torch.device, Reason] = field(default_factory=dict)  # -> its first op
    needs_backward: bool = False
    has_foreign_ops: bool = False
    num_ops: int = 0
    num_inputs: int = 0


def analyse(gm: fx.GraphModule, inputs: Sequence[Any], attributes: Sequence[Tensor]) -> GraphFacts:
    """Run `gm` on stand-ins of its inputs.  Neither the inputs nor their fakes change."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    traced = [
        node.meta.get("example_value", given)
        for node, given in zip(placeholders, inputs, strict=True)
    ]
    mode = detect_fake_mode([*traced, *inputs]) or FakeTensorMode()
    with _running(mode):
        stand_ins = [_stand_in(*pair, mode) for pair in zip(traced, inputs, strict=True)]
        run = _Run(gm, stand_ins, attributes, mode)
        outputs = run.run(*stand_ins, enable_io_processing=False)
    run.note_outputs(tree_leaves(outputs))
    if torch.is_grad_enabled():
        run.facts.needs_backward |= any(t.requires_grad and not t.is_leaf for t in _tensors(inputs))
    return run.facts


@contextmanager
def _running(mode: FakeTensorMode) -> Iterator[None]:
    """The state of torch in which a trace is run again: nothing that it sets stays."""
    before = mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True  # attributes of the graph are real
    try:
        with ExitStack() as stack:
            if mode.shape_env is not None:
                stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
            stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
            stack.enter_context(enable_python_dispatcher())  # for sizes that are symbols
            stack.enter_context(mode)
            yield
    finally:
        mode.allow_non_fake_inputs = before


def _stand_in(traced: Any, given: Any, mode: FakeTensorMode) -> Any:
    """Another tensor over the fake storage of an input, so that a new shape of it stays unknown to others."""
    if not isinstance(traced, Tensor):
        return traced
    fake: Any = traced if isinstance(traced, FakeTensor) else mode.from_tensor(traced)
    stand_in: Any = fake.detach().requires_grad_(given.requires_grad and given.is_leaf)
    if fake.item_memo is not None:  # a float of the caller, which the graph reads back with item()
        stand_in.item_memo = fake.item_memo
    return stand_in


class _Run(fx.Interpreter):
    """One run of a graph, watched."""

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        attributes: Sequence[Tensor],
        mode: FakeTensorMode,
    ) -> None:
        super().__init__(
            gm, garbage_collect_values=False
        )  # storages are told apart while they live
        self._mode = mode
        self.facts = GraphFacts(num_inputs=len(inputs))
        self._kept: list[Any] = []
        self._inputs = [*inputs, *attributes]
        self._shapes = [_shape(value) for value in inputs]
        self._places: dict[int, list[int]] = {}  # storage -> inputs over it
        self._origins: dict[
            int, set[int]
        ] = {}  # storage -> those whose contents it may be a copy of
        self._watch = _Watch(self._note)
        self._node: fx.Node
        for place, value in enumerate(inputs):
            self._own(place, value)
        for place, value in enumerate(attributes, len(inputs)):
            self._own(place, value)
            self._own(place, mode.from_tensor(value))  # as which operators see it

    def _own(self, place: int, value: Any) -> None:
        for tensor in _tensors(value):
            self._kept.append(tensor)
            self._places.setdefault(_storage(tensor), []).append(place)

    def run_node(self, n: fx.Node) -> Any:
        self._node = n
        if isinstance(n.target, HigherOrderOperator):
            self._note_call_of_functions(n)
            return super().run_node(n)
        with self._watch:
            return super().run_node(n)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A stand-in here too: a number that is written in place would be written for real."""
        value = super().get_attr(target, args, kwargs)
        return self._mode.from_tensor(value) if isinstance(value, Tensor) else value

    def note_outputs(self, outputs: Sequence[Any]) -> None:
        """What the whole run shows at its end."""
        for place, shape in enumerate(self._shapes):
            if _shape(self._inputs[place]) != shape:
                self.facts.obstacles.append(
                    Reason("an input whose shape changes in place", "give the view another name")
                )
        written = [self._inputs[place] for place in self.facts.written]
        self.facts.needs_backward = any(
            tensor.requires_grad and (torch.is_grad_enabled() or not tensor.is_leaf)
            for tensor in _tensors([*outputs, *written])
        )

    def _note(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operator was called."""
        self._kept.append(result)
        self.facts.num_ops += 1
        obstacle = find_obstacle(op, args, self._node) or self._reach_of(op, args, result)
        if obstacle is not None:
            self.facts.obstacles.append(obstacle)
        written = _tensors(_written(op, args, kwargs))
        read = [t for t in _tensors([args, kwargs]) if not any(t is w for w in written)]
        self._note_devices(op, [*_tensors(result), *read])
        self._note_written(written)
        if op.namespace in _OWN:
            self._note_origin(op, written, read, _tensors(result))
        else:
            self.facts.has_foreign_ops = True
            self._note_elided(written, read)

    def _reach_of(self, op: Any, args: Any, result: Any) -> Reason | None:
        """Why a view by address may show memory beside that of an argument, which is not copied with it."""
        if op._schema.name not in _BY_ADDRESS:
            return None
        places = self._places.get(_storage(args[0]))
        if not places or any(_is_within(result, self._inputs[place]) for place in places):
            return None
        return Reason(
            "as_strided that may reach beside its argument",
            "pass the whole tensor and slice it inside",
            str(op),
            source_line(self._node),
        )

    def _note_written(self, written: Iterable[Tensor]) -> None:
        for tensor in written:
            self.facts.written.update(self._places.get(_storage(tensor), ()))

    def _note_devices(self, op: object, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.device not in self.facts.devices and (tensor.dim() or tensor.is_cuda):
                self.facts.devices[tensor.device] = Reason(
                    f"{tensor.device.type} device",
                    "keep all tensors of the function on one GPU",
                    str(op),
                    source_line(self._node),
                )

    def _note_origin(
        self, op: Any, written: Sequence[Tensor], read: Sequence[Tensor], result: Sequence[Tensor]
    ) -> None:
        """Results of one tensor may be copies of it that a compiler leaves out."""
        sources = {_storage(tensor) for tensor in read}
        if len(sources) != 1 or (written and op._schema.name != "aten::copy_"):
            return
        (source,) = sources
        for tensor in (*written, *result):
            if _storage(tensor) != source:
                origins = self._origins.setdefault(_storage(tensor), set())
                origins |= {source} | self._origins.get(source, set())

    def _note_elided(self, written: Sequence[Tensor], read: Sequence[Tensor]) -> None:
        """A foreign operator reads what may be a copy of what it writes."""
        targets = {_storage(tensor) for tensor in written}
        family = targets.union(*(self._origins.get(target, set()) for target in targets))
        for tensor in read:
            storage = _storage(tensor)
            if storage not in targets and family & ({storage} | self._origins.get(storage, set())):
                self.facts.elided_copies += [
                    (self._node, argument)
                    for argument in self._node.all_input_nodes
                    if any(_storage(t) == storage for t in _tensors(self.env[argument]))
                ]

    def _note_call_of_functions(self, node: fx.Node) -> None:
        """Higher-order operators say nothing of what they write: all arguments, where it is not known."""
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        written: Any = [args, kwargs]
        if node.target is triton_kernel_wrapper_mutation:
            self.facts.has_foreign_ops = True
            names = get_mutated_tensors(
                kwargs["kernel_idx"],
                kwargs["constant_args_idx"],
                kwargs["kwargs"],
                kwargs["tma_descriptor_metadata"],
            )
            written = [kwargs["kwargs"][name] for name in names]
        elif str(node.target) in _READ_ONLY:
            written = []
        written = _tensors(written)
        self._note_written(written)
        self._note_elided(
            written, [t for t in _tensors([args, kwargs]) if not any(t is w for w in written)]
        )


class _Watch(TorchDispatchMode):
    """Tells of each operator after it ran."""

    def __init__(self, note: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(func, args, kwargs or {}, result)
        return result


def _written(op: Any, args: Any, kwargs: Any) -> list[Any]:
    """Arguments that the schema marks as written."""
    return [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _is_within(view: Tensor, whole: Any) -> bool:
    """Whether `view` shows nothing but elements of `whole`, for all sizes that the graph may have."""
    begin, end = _span(view)
    whole_begin, whole_end = _span(whole)
    return (
        view.dtype == whole.dtype
        and statically_known_true(whole.numel() == whole_end - whole_begin)  # no gaps
        and statically_known_true(begin >= whole_begin)
        and statically_known_true(end <= whole_end)
    )


def _span(tensor: Tensor) -> tuple[Any, Any]:
    """The first element in the storage, and the one behind the last."""
    begin = tensor.storage_offset()
    steps = [(n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return begin, begin + sum(steps) + 1


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _shape(value: Any) -> Any:
    return (
        (value.shape, value.stride(), value.storage_offset()) if isinstance(value, Tensor) else None
    )
