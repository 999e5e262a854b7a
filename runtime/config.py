"""
The options of an engine: `EngineConfig` is what the user asked for, None means "decide for me".

`ResolvedConfig` is what the engine runs with.  `resolve` is the only bridge; it is pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from midstream.errors import ConfigError, check_known
from midstream.graphs.dispatch import MODES, GraphKey, Ladder, resolve_forms
from midstream.graphs.ladder import chunk_ladder as chunk_ladder  # public from here too
from midstream.graphs.ladder import ladder as ladder
from midstream.graphs.ladder import ladder_of
from midstream.runtime.eviction import EVICTIONS
from midstream.runtime.options import EngineConfig as EngineConfig  # public from here too
from midstream.runtime.planner import PageBytes, parse_memory, parse_mix, plan_pages

CACHE_MODES = ("none", "align", "all")
GRAPH_MODES = tuple(MODES)
MIGRATIONS = ("copyfree", "precopy")
COMPILE_MODES = ("eager", "inductor")
STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What `resolve` needs to know of a lowered model."""

    max_positions: int | None  # longest sequence the model was built for, None if unlimited
    state_page_bytes: int
    kv_page_bytes: int
    is_cuda: bool


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """What the engine runs with.  None is left where it has a meaning."""

    cache_mode: str
    state_block: int
    kv_block: int
    max_rows: int
    max_step_tokens: int
    max_len: int
    num_state_pages: int
    num_kv_pages: int
    graphs: Ladder  # the steps that have graphs; empty: none
    migration: str
    retention: str | int | None  # None: every block
    eviction: str
    wait_for_prefix: bool
    state_dtype: torch.dtype
    compile: str
    hash_key: bytes | None

    @property
    def graph_rows(self) -> tuple[int, ...]:
        """Captured decode steps by rows, ascending."""
        return tuple(key.rows for key in self.graphs.decode)

    @property
    def graph_chunks(self) -> tuple[GraphKey, ...]:
        """Captured steps with prompt chunks, ascending."""
        return self.graphs.chunk


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """The configuration from keyword options.  Raises ConfigError for an unknown name.

    >>> engine_config({"max_row": 4})
    Traceback (most recent call last):
    ...
    midstream.errors.ConfigError: Engine: unknown option 'max_row'; did you mean 'max_rows'?
    """
    check_known("Engine", options, [field.name for field in fields(EngineConfig)])
    return EngineConfig(**options)


def check_options(config: EngineConfig) -> None:
    """Refuse what can be refused without a model.  Raises ConfigError or UnsupportedError."""
    _one_of("cache_mode", config.cache_mode, CACHE_MODES)
    _one_of("eviction", config.eviction, EVICTIONS)
    _one_of("graphs", config.graphs, GRAPH_MODES)
    _one_of("migration", config.migration, ("auto", *MIGRATIONS))
    _one_of("compile", config.compile, ("auto", *COMPILE_MODES))
    _one_of("state_dtype", config.state_dtype, tuple(STATE_DTYPES))
    for name in ("state_block", "kv_block", "max_rows", "max_step_tokens", "graph_tokens"):
        _positive(name, getattr(config, name))
    for name, least in (("max_len", 2), ("num_state_pages", 4), ("num_kv_pages", 2)):
        value = getattr(config, name)
        if value is not None:
            _positive(name, value, least)
    if config.state_block % config.kv_block:
        raise ConfigError(
            f"Engine: state_block={config.state_block} is not a multiple of "
            f"kv_block={config.kv_block}; checkpoints must fall on the KV grid, choose e.g. "
            f"state_block={-(-config.state_block // config.kv_block) * config.kv_block}"
        )
    retention = config.retention
    if not (retention in ("auto", None) or (type(retention) is int and retention >= 0)):
        raise ConfigError(
            f"Engine: retention={retention!r}; expected 'auto', None or a number of tokens >= 0"
        )
    if isinstance(retention, int) and retention % config.kv_block:
        raise ConfigError(
            f"Engine: retention={retention} is not a multiple of kv_block={config.kv_block}; "
            "states are kept on the KV grid, choose e.g. "
            f"retention={-(-retention // config.kv_block) * config.kv_block}"
        )
    if type(config.wait_for_prefix) is not bool:
        raise ConfigError(
            f"Engine: wait_for_prefix={config.wait_for_prefix!r}; expected True or False"
        )
    parse_mix(config.mix)
    parse_memory(config.memory, free_bytes=1)
    parse_hash_key(config.hash_key)


def resolve(config: EngineConfig, limits: ModelLimits, free_bytes: int) -> ResolvedConfig:
    """Fill every None.  Pure: logs nothing, touches no device, changes no input."""
    check_options(config)
    page_bytes = PageBytes(limits.state_page_bytes, limits.kv_page_bytes)
    num_state, num_kv = plan_pages(config, page_bytes, limits.max_positions, free_bytes)
    kv_tokens = (num_kv - 1) * config.kv_block
    state_tokens = (num_state - 4) * config.state_block
    held = [kv_tokens] if config.cache_mode != "all" else [kv_tokens, state_tokens]
    known = [n for n in (config.max_len, limits.max_positions) if n is not None]
    if config.max_len is not None and limits.max_positions not in (None, 0):
        _at_most("max_len", config.max_len, limits.max_positions or 0, "positions of the model")
    if config.max_len is not None:
        _at_most(
            "max_len", config.max_len, kv_tokens, "tokens that the KV pages hold", "num_kv_pages"
        )
        what = "tokens whose states the state pages hold"
        _at_most("max_len", config.max_len, held[-1], what, "num_state_pages")
    max_len = min([*known, *held])
    if max_len < 2:
        raise ConfigError(
            f"Engine: {num_state} state pages of {config.state_block} tokens and {num_kv} KV pages of "
            f"{config.kv_block} hold a sequence of {max(max_len, 0)} tokens in cache_mode="
            f"{config.cache_mode!r}; expected room for at least 2; raise memory, or "
            "num_state_pages and num_kv_pages"
        )
    return ResolvedConfig(
        cache_mode=config.cache_mode,
        state_block=config.state_block,
        kv_block=config.kv_block,
        max_rows=config.max_rows,
        max_step_tokens=config.max_step_tokens,
        max_len=max_len,
        num_state_pages=num_state,
        num_kv_pages=num_kv,
        graphs=ladder_of(
            resolve_forms(config.graphs),
            config.max_rows,
            config.max_step_tokens,
            config.graph_tokens,
        ),
        migration="copyfree" if config.migration == "auto" else config.migration,
        retention=None if config.cache_mode == "all" else config.retention,
        eviction=config.eviction,
        wait_for_prefix=config.wait_for_prefix,
        state_dtype=STATE_DTYPES[config.state_dtype],
        compile=("inductor" if limits.is_cuda else "eager")
        if config.compile == "auto"
        else config.compile,
        hash_key=parse_hash_key(config.hash_key),
    )


def parse_hash_key(text: str | None) -> bytes | None:
    """16 bytes from 32 hex digits."""
    if text is None:
        return None
    try:
        key = bytes.fromhex(text)
    except (ValueError, TypeError):
        key = b""
    if len(key) != 16:
        raise ConfigError(f"Engine: hash_key={text!r}; expected 32 hexadecimal digits or None")
    return key


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(
            f"Engine: {name}={value!r}; expected one of {', '.join(map(repr, known))}"
        )


def _positive(name: str, value: Any, least: int = 1) -> None:
    if type(value) is not int or value < least:
        raise ConfigError(f"Engine: {name}={value!r}; expected a whole number >= {least}")


def _at_most(name: str, value: int, limit: int, what: str, pages: str = "") -> None:
    if value > limit:
        remedy = f"lower it, or raise memory or {pages}" if pages else "lower it"
        raise ConfigError(f"Engine: {name}={value} exceeds the {limit} {what}; {remedy}")
