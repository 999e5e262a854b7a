"""
Writes tapes: lists what a piece of Python enqueues, as a CUDA graph would on a GPU.

Entries are torch operations, our ops (one entry each, whatever their CPU implementation does) and kernels of
Triton's interpreter.  As strict as capture: reading a value of a tensor on the host, sizes that depend on
values, and tensors made from Python data are refused by name.  Capture runs nothing, so memory that was
there before is put back as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from midstream.errors import ContractError
from midstream.ops.tape import Node, Tape

_HOST_READS = (
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "nonzero_numpy", "masked_select", "unique",
    "_unique", "_unique2", "unique_dim", "unique_consecutive",
)  # fmt: skip
_PYTHON_READS = (
    "tolist", "numpy", "__array__", "cpu", "item", "__bool__", "__int__", "__float__", "__index__",
)  # fmt: skip
_FROM_DATA = ("tensor", "as_tensor", "asarray", "new_tensor")
_NO_WORK = ("set_", "resize_", "resize_as_")  # change a tensor, not its memory


def tape_of(work: Callable[[], object]) -> Tape:
    """Record `work`, which has run before.

    Raises:
        ContractError: naming the operation that a captured graph cannot hold.
    """
    with Recorder() as recorder:
        recorder.begin(Tape())
        work()
        return recorder.end()


class Recorder:
    """Writes tapes while torch runs inside of its block.  Between `end` and `begin` nothing is recorded."""

    def __init__(self) -> None:
        self.tape: Tape | None = None
        self._inside = False  # an operation runs: what it does by itself is not recorded
        self._modes = ExitStack()

    def __enter__(self) -> Recorder:
        self._modes.enter_context(_interpreted_launches(self))
        self._modes.enter_context(_PythonReads(self))
        self._modes.enter_context(_Operations(self))
        return self

    def __exit__(self, *exc: object) -> None:
        self._modes.close()
        if self.tape is not None:
            self.end().drop()

    def begin(self, tape: Tape) -> None:
        """Record from here on; may be called from inside of an op."""
        self.tape = tape

    def end(self) -> Tape:
        """Stop."""
        assert self.tape is not None, "end() without begin()"
        tape, self.tape = self.tape, None
        tape.put_back()
        return tape

    @property
    def is_listening(self) -> bool:
        return self.tape is not None and not self._inside

    def launch(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Work that is no torch operation: which of its arguments it writes is not known."""
        tape = self.tape
        assert tape is not None
        tape.save(t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        bound_args, bound_kwargs = tape.bind((args, kwargs))
        tape.nodes.append(Node(name, lambda: run(*bound_args, **bound_kwargs)))
        with self._running():
            run(*args, **kwargs)

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation of torch and write down what does it again."""
        tape, name = self.tape, func._schema.name.partition("::")[2]
        assert tape is not None
        _check(name, func, args, kwargs)
        written = list(_written(func, args, kwargs))
        tape.save(written)
        with self._running():
            result = func(*args, **kwargs)
        if self.tape is not tape or name in _NO_WORK:  # an op that ended a tape is in none
            return result
        leaves = [r for r in tree_leaves(result) if isinstance(r, Tensor)]
        if name == "lift_fresh":
            tape.keep_constant(leaves[0])
            return result
        tape.meet(t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        is_new = [tape.take(r) for r in leaves]
        if (written or any(is_new)) and not name.startswith(("empty", "new_empty")):
            results = [tape.bind(r) if new else None for r, new in zip(leaves, is_new, strict=True)]
            tape.nodes.append(Node(name, _again(name, func, tape.bind((args, kwargs)), results)))
        return result

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._inside = True
        try:
            yield
        finally:
            self._inside = False


class _Operations(TorchDispatchMode):
    """Hears of every operation of torch."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.recorder.is_listening:
            return func(*args, **(kwargs or {}))
        return self.recorder.operation(func, args, kwargs or {})


class _PythonReads(TorchFunctionMode):
    """Refuses what reaches the memory of a tensor without an operation that a recorder would see."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if self.recorder.is_listening:
            if name in _PYTHON_READS:
                raise _reads_a_value(name)
            of_data = name in _FROM_DATA and not (args and isinstance(args[-1], Tensor))
            if of_data and (name == "new_tensor" or (kwargs or {}).get("device") is not None):
                raise _makes_a_tensor(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def _interpreted_launches(recorder: Recorder) -> Iterator[None]:
    """Record kernels of Triton's interpreter."""
    from triton.runtime.interpreter import GridExecutor  # nothing else needs it

    launch = GridExecutor.__call__

    def run(executor: Any, *args: Any, **kwargs: Any) -> None:
        if recorder.is_listening:
            recorder.launch("kernel", lambda *a, **k: launch(executor, *a, **k), args, kwargs)
        else:
            launch(executor, *args, **kwargs)

    GridExecutor.__call__ = run
    try:
        yield
    finally:
        GridExecutor.__call__ = launch


def _again(name: str, func: Any, bound: Any, results: list[Tensor | None]) -> Callable[[], None]:
    """Run an operation and put its new results where the recorded ones are."""
    args, kwargs = bound
    if not any(kept is not None for kept in results):
        return lambda: func(*args, **kwargs)

    def run() -> None:
        leaves = (r for r in tree_leaves(func(*args, **kwargs)) if isinstance(r, Tensor))
        for kept, new in zip(results, leaves, strict=True):
            if kept is None:
                continue
            if kept.shape != new.shape:
                raise ContractError(
                    f"recorded step: {name} gives a result of shape {tuple(new.shape)}, expected the "
                    f"recorded {tuple(kept.shape)}; a captured graph has one shape: use an operation "
                    "whose result does not depend on values"
                )
            kept.copy_(new)

    return run


def _check(name: str, func: Any, args: Any, kwargs: Any) -> None:
    if name in _HOST_READS:
        raise _reads_a_value(name)
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        raise _reads_a_value(name)
    masks = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
        t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]
    )
    if masks and not (name.startswith("index_put") and args[2].numel() == 1):
        raise _reads_a_value(f"{name} with a mask")
    if name == "lift_fresh" and args[0].dim():
        raise _makes_a_tensor("torch.tensor, torch.as_tensor or torch.from_numpy")


def _reads_a_value(name: str) -> ContractError:
    return ContractError(
        f"recorded step: reads a value of a tensor on the host ({name}), which a captured graph cannot "
        "do, or keeps for good; expected device work only; leave it on the device, or take it as an argument"
    )


def _makes_a_tensor(name: str) -> ContractError:
    return ContractError(
        f"recorded step: makes a tensor from Python data ({name}), a copy from pageable host memory that a "
        "capture refuses; expected device work only; make it before, or write it into a staged buffer"
    )


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that the schema marks as written."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        yield from (t for t in tree_leaves(value) if isinstance(t, Tensor))
