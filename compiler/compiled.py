"""
Lowering and graphs for transformers' own `generate`, without an engine.

    with midstream.compile(model, max_batch=4) as compiled:
        compiled.generate(**inputs, max_new_tokens=64)

The model object itself is changed: `model.generate` and `model(...)` use paged state until `undo()`.  A
prompt runs as one packed step without its padding, a decode step replays one graph.  In a decode step the
attention mask is not read: a row that has begun gets a token in every column.  Weights that were moved are
noticed at the next prompt, and so is a turn that begins otherwise than what its kept cache holds.
"""

from __future__ import annotations

import functools
import inspect
import logging
import typing
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal, Never

import torch
from torch import Tensor

from midstream.compiler.attention import PagedCache
from midstream.compiler.changes import WAY_BACK, Changes
from midstream.compiler.compiled_options import (
    OPTIONS,
    STATE_DTYPES,
    check_options,
    check_outputs,
    longest,
)
from midstream.compiler.lowering import LoweredModel, cache_argument, lower
from midstream.compiler.model_call import (
    CACHE_NAMES,
    ModelCall,
    check_cache_kind,
    check_mode,
    check_turn,
    own_cache,
    refuse_batches,
)
from midstream.compiler.one_thread import OneThread
from midstream.compiler.row_cache import MidstreamCache
from midstream.compiler.row_memory import RowMemory
from midstream.compiler.row_steps import Mask, RowSteps
from midstream.compiler.validation import check_model, device_of
from midstream.errors import (
    CapacityError,
    ConfigError,
    ContractError,
    check_known,
)
from midstream.graphs.captured import Capturer

# what generate calls with its mode; the first comes before code would be downloaded for one
_TAKE_MODE = ("_get_deprecated_gen_repo", "_validate_generation_mode")
_CONTINUOUS_BATCHING = ("generate_batch", "init_continuous_batching")

_log = logging.getLogger("midstream")


class CompiledModel:
    """A model whose `generate` and forward run on paged state, for one thread at a time.

    Made by `compile`.
    """

    def __init__(self, lowered: LoweredModel, memory: RowMemory, capturer: Capturer | None) -> None:
        self.model = lowered.model
        self._memory = memory
        self._lowered = lowered
        self._steps = RowSteps(lowered, memory, capturer)
        self._plain = lowered.model.forward  # of the class, over lowered layers
        self._num_ids = int(lowered.model.get_input_embeddings().num_embeddings)
        self._names = list(inspect.signature(self._plain).parameters)
        self._cache_name = cache_argument(lowered.model)
        self._output = typing.get_type_hints(inspect.unwrap(type(lowered.model).forward))["return"]
        self._uses_cache = bool(getattr(lowered.model.config, "use_cache", True))
        self._undone = False
        self._alone = OneThread("midstream.compile", "a call", "a model")
        self._generating: MidstreamCache | None = None  # the cache that generate asked for
        self._changes = Changes()
        self._changes.set(self.model, "forward", _with_signature_of(self._plain, self._forward))
        self._changes.set(self.model, "generate", self._checked(lowered.model.generate))
        self._changes.set(self.model, "_prepare_cache_for_generation", self._prepare_cache)
        for name in filter(functools.partial(hasattr, self.model), _TAKE_MODE):
            self._changes.set(self.model, name, _mode_checked(getattr(self.model, name)))
        for name in _CONTINUOUS_BATCHING:
            self._changes.set(self.model, name, refuse_batches)
        # generate would switch the experts between prefill and decode, and so compile layers again
        self._changes.set(self.model, "_optimize_model_for_decode", nullcontext)
        self._changes.set(self.model, WAY_BACK, self.undo)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`model.generate`; a cache may come under either name, `cache` or `past_key_values`."""
        self._check_open()
        return self.model.generate(*args, **self._renamed(kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`model(...)`."""
        self._check_open()
        return self.model(*args, **self._renamed(kwargs))

    def new_cache(self) -> MidstreamCache:
        """An empty cache, to pass to `generate` or to the model and to keep between calls."""
        self._check_open()
        return MidstreamCache(self._memory)

    def stats(self) -> dict[str, Any]:
        """Rows, bytes of the pools, steps by how they ran, and the captured graphs."""
        steps, memory = self._steps, self._memory
        return {
            "rows": memory.num_rows,
            "free_rows": memory.num_free,
            "pool_bytes": memory.num_bytes,
            "steps": dict(steps.counts),
            "graphs": {
                rows: {
                    "seconds": graph.seconds,
                    "memory_bytes": graph.memory_bytes,
                    "num_nodes": graph.num_nodes,
                }
                for rows, graph in sorted(steps.graphs.items())
            },
        }

    def undo(self) -> None:
        """Give the model back as it was and drop graphs.  May be called again; caches are of no use then."""
        with self._alone:
            if not self._undone:
                self._undone = True
                self._steps.forget_graphs()
                self._memory.is_open = False
                self._changes.undo()
                self._lowered.undo()

    def __repr__(self) -> str:
        name = f"CompiledModel of {type(self.model).__name__} on {self._lowered.device}"
        if self._undone:
            return f"<{name}: undone>"
        memory, steps = self._memory, self._steps
        ran = ", ".join(f"{number} {how}" for how, number in steps.counts.items())
        return (
            f"<{name}: {memory.num_free} of {memory.num_rows} rows of {memory.max_len} tokens free; "
            f"steps: {ran or 'none'}; {len(steps.graphs)} graphs>"
        )

    def __enter__(self) -> CompiledModel:
        self._check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.undo()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward while it is compiled."""
        kwargs.update(zip(self._names, args, strict=False))
        if type(kwargs.get(self._cache_name)) is PagedCache:  # from LoweredModel.forward
            return self._plain(**kwargs)
        call = ModelCall.of(kwargs, self._memory)
        uses_cache = self._uses_cache if call.use_cache is None else call.use_cache
        cache = MidstreamCache(self._memory) if call.cache is None else call.cache
        try:
            with self._alone, torch.no_grad():
                logits = self._run(call, cache)
        except BaseException:  # its traceback, which may be kept, holds the cache
            if call.cache is None:
                cache.reset()
            raise
        output = self._output(logits=logits, **{self._cache_name: cache if uses_cache else None})
        return output if call.return_dict else output.to_tuple()

    def _run(self, call: ModelCall, cache: MidstreamCache) -> Tensor:
        if self.model.training:
            raise ContractError(
                "midstream.compile: the model is in training mode, expected eval; call model.eval()"
            )
        cache.check_batch(call.ids.shape[0])
        mask = None
        if call.is_decode():
            logits = self._steps.decode(cache, call.ids[:, 0])[:, None]
        else:
            mask = call.mask(cache.num_columns, cache.lengths)
            call.check_positions(mask, cache.lengths)
            _check_ids(call.ids, mask, self._num_ids)
            logits = self._steps.prefill(cache, call.ids, mask, call.kept_columns(mask))
        cache.remember(call.ids, mask)
        return logits

    def _prepare_cache(
        self, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, *sizes: Any
    ) -> None:
        """What `generate` calls to get its cache."""
        longest = sizes[-1]
        if longest > self._memory.max_len:
            raise CapacityError(
                f"midstream.compile: generate may reach {longest} tokens, compiled for max_len="
                f"{self._memory.max_len}; expected prompt and new tokens within it; lower max_new_tokens, or "
                "compile with a larger max_len"
            )
        check_cache_kind(generation_config)
        given = own_cache(model_kwargs.get(self._cache_name), self._memory)
        if given is not None:
            given._is_user_defined = True  # as transformers marks it
        elif generation_config.use_cache is not False:
            self._generating = MidstreamCache(self._memory)
            model_kwargs[self._cache_name] = self._generating

    def _checked(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """`generate`, after a look at what it is given; one that fails keeps no rows."""

        @functools.wraps(generate)
        def checked(inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
            with self._alone:
                check_turn(
                    kwargs.get("input_ids") if inputs is None else inputs, kwargs, self._memory
                )
                try:
                    return generate(inputs, *args, **kwargs)
                except BaseException:  # as in a forward
                    if self._generating is not None:
                        self._generating.reset()
                    raise
                finally:
                    self._generating = None

        return checked

    def _renamed(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The cache under the name that this release of transformers uses."""
        for name in CACHE_NAMES:
            if name in arguments:
                arguments[self._cache_name] = arguments.pop(name)
        return arguments

    def _check_open(self) -> None:
        if self._undone:
            raise ContractError(
                "midstream.compile: used after undo(), expected a compiled model; compile it again"
            )


def compile(  # as in torch.compile
    model: Any,
    *,
    max_batch: int = 1,
    max_len: int | None = None,
    graphs: bool = True,
    compile: Literal["auto", "eager", "inductor"] = "auto",
    kv_block: int = 16,
    state_dtype: Literal["float32", "bfloat16"] = "float32",
    **unknown: Never,
) -> CompiledModel:
    """Lower `model` in place, take memory for its rows, and let `model.generate` replay graphs.

    The model stays so while it lives, also where the handle is dropped: it may be passed on, to a pipeline
    for one.  The handle's `undo()`, or `midstream.restore(model)`, leads back.

    Args:
        model: a causal language model of transformers, in eval mode, on one device.
        max_batch: rows of all caches that are alive at once; beams count as rows.
        max_len: tokens of prompt and answer together; None: the model's positions, at most 4096.
        graphs: capture decode steps, where there is a GPU.
        compile: "eager", "inductor", or "auto": inductor where there is a GPU.
        kv_block: tokens of a KV page.
        state_dtype: of recurrent state.
        unknown: nothing; a misspelt option is refused with its neighbour.
    Raises:
        ConfigError: an option or a model that can never work.
        UnsupportedError: a model without lowering.
        ContractError: the model is lowered already.
    """
    check_known("midstream.compile", unknown, OPTIONS)
    check_model(model)
    check_options(max_batch, max_len, kv_block, graphs, compile, state_dtype)
    check_outputs(model)
    length = longest(model, max_len)
    is_cuda = device_of(model).type == "cuda"
    inductor = compile == "inductor" or (compile == "auto" and is_cuda)
    lowered = lower(
        model,
        temporal_dtype=STATE_DTYPES[state_dtype],
        compile_mode="inductor" if inductor else "eager",
        kv_block=kv_block,
    )
    try:
        memory = RowMemory(lowered, max_batch, length)
        _log.info(
            "compiled for %d rows of %d tokens: %d bytes", max_batch, length, memory.num_bytes
        )
        return CompiledModel(lowered, memory, _capturer(lowered) if graphs else None)
    except BaseException:
        lowered.undo()
        raise


def _capturer(lowered: LoweredModel) -> Capturer | None:
    """What captures decode steps; None without a GPU."""
    if lowered.device.type != "cuda":
        _log.info("midstream.compile: no CUDA device, decode steps run eagerly")
        return None
    from midstream.graphs.capture import GraphCapture

    return GraphCapture(lowered.device)


def _with_signature_of(original: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, looking like the forward it replaces: `generate` reads its parameters."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return forward


def _mode_checked(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of transformers that takes the mode of `generate` first."""

    @functools.wraps(original)
    def checked(mode: Any, *args: Any, **kwargs: Any) -> Any:
        check_mode(mode)
        return original(mode, *args, **kwargs)

    return checked


def _check_ids(ids: Tensor, mask: Mask | None, num_ids: int) -> None:
    """Refuse what the embedding has no row for; on a GPU it would stop the process.  Waits for the device."""
    found = ids.cpu().numpy()
    found = found if mask is None else found[mask]
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= num_ids:
        raise ConfigError(
            f"midstream.compile: the prompt has token ids from {low} to {high}; expected 0 to {num_ids - 1}; "
            "is this the model's own tokenizer?"
        )
