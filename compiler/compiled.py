"""
Lowering and graphs for transformers' own `generate`, without an engine.

    with midstream.compile(model, max_batch=4) as compiled:
        compiled.generate(**inputs, max_new_tokens=64)

The model object itself is changed: `model.generate` and `model(...)` use paged state until `undo()`.  A
prompt runs as one packed step without its padding, a decode step replays one graph.  In a decode step the
attention mask is not read: a row that has begun gets a token in every column.  Weights that were moved are
noticed at the next prompt.
"""

from __future__ import annotations

import inspect
import logging
import typing
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from midstream.compiler.attention import PagedCache
from midstream.compiler.changes import WAY_BACK, Changes
from midstream.compiler.lowering import LoweredModel, cache_argument, lower
from midstream.compiler.model_call import CACHE_NAMES, ModelCall, own_cache
from midstream.compiler.row_cache import MidstreamCache
from midstream.compiler.row_memory import RowMemory
from midstream.compiler.row_steps import RowSteps
from midstream.compiler.validation import check_model, device_of
from midstream.errors import CapacityError, ConfigError, ContractError, UnsupportedError
from midstream.graphs.captured import Capturer

_LONGEST = 4096  # default of max_len: all memory is taken at the start
_SAME_TOKENS = (None, "dynamic", "static", "hybrid")  # where keys lie; all give the same tokens
_STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_log = logging.getLogger("midstream")


class CompiledModel:
    """A model whose `generate` and forward run on paged state.  Made by `compile`; belongs to one thread."""

    def __init__(self, lowered: LoweredModel, memory: RowMemory, capturer: Capturer | None) -> None:
        self.model = lowered.model
        self._memory = memory
        self._lowered = lowered
        self._steps = RowSteps(lowered, memory, capturer)
        self._plain = lowered.model.forward  # of the class, over lowered layers
        self._names = list(inspect.signature(self._plain).parameters)
        self._cache_name = cache_argument(lowered.model)
        self._output = typing.get_type_hints(inspect.unwrap(type(lowered.model).forward))["return"]
        self._uses_cache = bool(getattr(lowered.model.config, "use_cache", True))
        self._undone = False
        self._changes = Changes()
        self._changes.set(self.model, "forward", _with_signature_of(self._plain, self._forward))
        self._changes.set(self.model, "_prepare_cache_for_generation", self._prepare_cache)
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
        if not self._undone:
            self._undone = True
            self._steps.forget_graphs()
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
        with torch.no_grad():
            logits = self._run(call, cache)
        output = self._output(logits=logits, **{self._cache_name: cache if uses_cache else None})
        return output if call.return_dict else output.to_tuple()

    def _run(self, call: ModelCall, cache: MidstreamCache) -> Tensor:
        if self.model.training:
            raise ContractError(
                "midstream.compile: the model is in training mode, expected eval; call model.eval()"
            )
        if cache.rows and len(cache.rows) != call.ids.shape[0]:
            raise ContractError(
                f"midstream.compile: a batch of {call.ids.shape[0]} with a cache of {len(cache.rows)} rows, "
                "expected the batch that the cache began with; start with a new cache"
            )
        if call.is_decode():
            return self._steps.decode(cache, call.ids[:, 0])[:, None]
        mask = call.mask(cache.num_columns, cache.lengths)
        call.check_positions(mask, cache.lengths)
        return self._steps.prefill(cache, call.ids, mask, call.kept_columns(mask))

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
        _check_generation(generation_config, mode)
        given = own_cache(model_kwargs.get(self._cache_name), self._memory)
        if given is not None:
            given._is_user_defined = True  # as transformers marks it
        elif generation_config.use_cache is not False:
            model_kwargs[self._cache_name] = MidstreamCache(self._memory)

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
) -> CompiledModel:
    """Lower `model` in place, take memory for its rows, and let `model.generate` replay graphs.

    Args:
        model: a causal language model of transformers, in eval mode, on one device.
        max_batch: rows of all caches that are alive at once; beams count as rows.
        max_len: tokens of prompt and answer together; None: the model's positions, at most 4096.
        graphs: capture decode steps, where there is a GPU.
        compile: "eager", "inductor", or "auto": inductor where there is a GPU.
        kv_block: tokens of a KV page.
        state_dtype: of recurrent state.
    Raises:
        ConfigError: an option or a model that can never work.
        UnsupportedError: a model without lowering.
        ContractError: the model is lowered already.
    """
    check_model(model)
    _check_options(max_batch, max_len, kv_block, graphs, compile, state_dtype)
    _check_outputs(model)
    max_len = _longest(model, max_len)
    is_cuda = device_of(model).type == "cuda"
    inductor = compile == "inductor" or (compile == "auto" and is_cuda)
    lowered = lower(
        model,
        temporal_dtype=_STATE_DTYPES[state_dtype],
        compile_mode="inductor" if inductor else "eager",
        kv_block=kv_block,
    )
    try:
        memory = RowMemory(lowered, max_batch, max_len)
        _log.info(
            "compiled for %d rows of %d tokens: %d bytes", max_batch, max_len, memory.num_bytes
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


def _longest(model: Any, max_len: int | None) -> int:
    positions = getattr(model.config, "max_position_embeddings", None)
    if max_len is None:
        return min(_LONGEST, positions or _LONGEST)
    if positions and max_len > positions:
        raise ConfigError(
            f"midstream.compile: max_len={max_len} exceeds the {positions} positions of the model; lower it"
        )
    return max_len


def _check_options(
    max_batch: Any, max_len: Any, kv_block: Any, graphs: Any, compile: Any, state_dtype: Any
) -> None:
    length = 1 if max_len is None else max_len
    for name, value in (("max_batch", max_batch), ("max_len", length), ("kv_block", kv_block)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"midstream.compile: {name}={value!r}; expected a whole number >= 1")
    if type(graphs) is not bool:
        raise ConfigError(f"midstream.compile: graphs={graphs!r}; expected True or False")
    if compile not in ("auto", "eager", "inductor"):
        raise ConfigError(
            f"midstream.compile: compile={compile!r}; expected 'auto', 'eager' or 'inductor'"
        )
    if not isinstance(state_dtype, str) or state_dtype not in _STATE_DTYPES:
        raise ConfigError(
            f"midstream.compile: state_dtype={state_dtype!r}; expected one of {', '.join(_STATE_DTYPES)}"
        )


def _check_outputs(model: Any) -> None:
    """Refuse a model that is configured to return what paged steps do not compute."""
    names = ("output_hidden_states", "output_attentions", "output_router_logits")
    asked = [name for name in names if getattr(model.config, name, False)]
    if asked:
        raise UnsupportedError(
            f"midstream.compile: the model's config sets {', '.join(asked)}, expected logits only; set them "
            "to False"
        )


def _check_generation(generation_config: Any, mode: Any) -> None:
    """Refuse what a recurrent state, or our storage of it, cannot do."""
    if getattr(mode, "value", mode) == "assisted_generation":
        raise UnsupportedError(
            "midstream.compile: generate was asked for assisted decoding, expected greedy search, sampling "
            "or beams: rejected tokens cannot be taken back from a recurrent state; leave the assistant out"
        )
    implementation = generation_config.cache_implementation
    if implementation not in _SAME_TOKENS:
        raise UnsupportedError(
            f"midstream.compile: cache_implementation={implementation!r}, expected none: keys and states "
            "lie in pools of the compiled model; leave it out, or undo() the compiled model"
        )
