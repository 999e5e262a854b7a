"""
Bytes to pages: how many pages of each pool a budget gives, what they hold, and how many sequences that runs.

    KV pages of a sequence       ceil(length / kv_block)
    state pages of a sequence    mode "none"     1: the running page never moves
                                 mode "align"    3: running, the one that it was read from, and one more
                                                 where two steps in a row change the page
                                 mode "all"      ceil(length / state_block) + 2: every block keeps its page
    and once for each pool       the null page; state: one that the next admission looks for

Without a stated mix KV gets pages for `max_rows` sequences of the longest length, but at most half of the
budget, and the rest is recurrent state, at most four checkpoints for each block of those KV pages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from midstream.errors import ConfigError
from midstream.runtime.options import EngineConfig


@dataclass(frozen=True, slots=True)
class PageBytes:
    """Bytes of one page of each pool."""

    state: int
    kv: int


@dataclass(frozen=True, slots=True)
class Mix:
    """Sequences that run at once, of prompt and answer together."""

    sequences: int
    length: int


def parse_mix(text: str | None) -> Mix | None:
    """
    >>> parse_mix("64x4096")
    Mix(sequences=64, length=4096)
    """
    if text is None:
        return None
    parts = str(text).lower().replace(" ", "").split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(
            f"Engine: mix={text!r}; expected sequences x tokens of each, such as '64x4096'"
        )
    return Mix(int(parts[0]), int(parts[1]))


def kv_pages(length: int, kv_block: int) -> int:
    """KV pages of a sequence."""
    return -(-length // kv_block)


def state_pages(mode: str, length: int, state_block: int) -> int:
    """State pages that a running sequence may own at once."""
    if mode == "none":
        return 1
    return 3 if mode == "align" else -(-length // state_block) + 2


def capacity(
    mode: str, length: int, kv_block: int, state_block: int, num_state: int, num_kv: int
) -> int:
    """Sequences of `length` tokens that run at once, without taking pages from one another.

    >>> capacity("align", 4096, 16, 64, num_state=200, num_kv=16385)
    64
    """
    by_kv = (num_kv - 1) // kv_pages(length, kv_block)
    by_state = (num_state - 2) // state_pages(mode, length, state_block)
    return max(0, min(by_kv, by_state))


def plan_pages(
    config: EngineConfig, page_bytes: PageBytes, max_positions: int | None, free_bytes: int
) -> tuple[int, int]:
    """Page counts (state, KV), null pages included, that fit the byte budget.

    A number of pages that is given is taken from the budget first.

    Raises:
        ConfigError: when the budget cannot hold one running sequence, or not the mix.
    """
    budget = parse_memory(config.memory, free_bytes)
    mix = parse_mix(config.mix)
    if mix is not None:
        _check_mix(mix, config, max_positions)
        return _pages_for(mix, config, page_bytes, budget)
    longest = config.max_len or max_positions or 8192
    num_kv = config.num_kv_pages
    if num_kv is None:
        wanted = config.max_rows * kv_pages(longest, config.kv_block) + 1
        left = budget // 2
        if config.num_state_pages is not None:
            left = budget - config.num_state_pages * page_bytes.state
        num_kv = min(wanted, left // max(page_bytes.kv, 1))
    num_state = config.num_state_pages
    if num_state is None:
        left = budget - num_kv * page_bytes.kv
        num_state = min(_states_wanted(config, longest, num_kv), left // max(page_bytes.state, 1))
    if num_kv < 2 or num_state < 4:
        _refuse(config, page_bytes, budget, num_state, num_kv)
    return num_state, num_kv


def describe(
    mode: str, length: int, kv_block: int, state_block: int, num_state: int, num_kv: int,
    page_bytes: PageBytes,
) -> str:  # fmt: skip
    """The sum, for the log: what was given to what, and what it runs."""
    runs = capacity(mode, length, kv_block, state_block, num_state, num_kv)
    total = num_state * page_bytes.state + num_kv * page_bytes.kv
    each = (
        f"{kv_pages(length, kv_block)} KV and {state_pages(mode, length, state_block)} state pages"
    )
    return (
        f"{num_kv} KV pages of {page_bytes.kv:,} bytes + {num_state} state pages of {page_bytes.state:,} "
        f"bytes = {total:,} bytes; {each} for a sequence of {length} tokens: {runs} of them at once"
    )


def _states_wanted(config: EngineConfig, longest: int, num_kv: int) -> int:
    if config.cache_mode == "none":
        return config.max_rows + 3
    checkpoints = 4 * num_kv * config.kv_block // config.state_block + 4
    if config.cache_mode == "all":
        return config.max_rows * state_pages("all", longest, config.state_block) + checkpoints
    return 2 * config.max_rows + checkpoints


def _check_mix(mix: Mix, config: EngineConfig, max_positions: int | None) -> None:
    longest = min(n for n in (config.max_len, max_positions or None, mix.length) if n is not None)
    if mix.sequences > config.max_rows or mix.length > longest:
        raise ConfigError(
            f"Engine: mix={config.mix!r}, but max_rows is {config.max_rows} and the longest sequence has "
            f"{longest} tokens; expected a mix within both; raise max_rows or max_len, or plan for less"
        )


def _pages_for(
    mix: Mix, config: EngineConfig, page_bytes: PageBytes, budget: int
) -> tuple[int, int]:
    """The mix, exactly; what is left is shared by checkpoints and the KV pages that they need."""
    fixed = [n for n in ("num_kv_pages", "num_state_pages") if getattr(config, n) is not None]
    if fixed:
        raise ConfigError(
            f"Engine: mix={config.mix!r} and {', '.join(fixed)} are given; expected one of them; "
            "leave page numbers to the mix"
        )
    num_kv = mix.sequences * kv_pages(mix.length, config.kv_block) + 1
    num_state = mix.sequences * state_pages(config.cache_mode, mix.length, config.state_block) + 2
    need = num_kv * page_bytes.kv + num_state * page_bytes.state
    if need > budget:
        raise ConfigError(
            f"Engine: mix={config.mix!r} needs {num_kv} KV pages of {page_bytes.kv:,} bytes and {num_state} "
            f"state pages of {page_bytes.state:,} bytes = {need:,} bytes; expected at most {budget:,}; "
            "raise memory, or lower mix: fewer or shorter sequences"
        )
    if config.cache_mode != "none":
        left = budget - need
        more_kv = min(left // 2 // max(page_bytes.kv, 1), 3 * num_kv)
        left -= more_kv * page_bytes.kv
        per_kv = 4 * config.kv_block / config.state_block
        num_kv += more_kv
        num_state += min(left // max(page_bytes.state, 1), int(per_kv * num_kv) + 4)
    return max(num_state, 4), num_kv


def _refuse(
    config: EngineConfig, page_bytes: PageBytes, budget: int, num_state: int, num_kv: int
) -> None:
    fixed = [n for n in ("num_kv_pages", "num_state_pages") if getattr(config, n) is not None]
    for name, size in (("num_kv_pages", page_bytes.kv), ("num_state_pages", page_bytes.state)):
        pages = getattr(config, name) or 0
        if pages * size > budget:
            raise ConfigError(
                f"Engine: {name}={pages} takes {pages * size:,} of memory={config.memory!r} ({budget:,} "
                f"bytes); expected pages of both kinds within it; lower {name}, raise memory, or set "
                "num_kv_pages and num_state_pages both"
            )
    raise ConfigError(
        f"Engine: memory={config.memory!r} ({budget:,} bytes) holds {max(num_state, 0)} state pages "
        f"of {page_bytes.state:,} bytes and {max(num_kv, 0)} KV pages of "
        f"{page_bytes.kv:,} bytes; expected at least 4 and 2; "
        f"set memory to {_least_memory(config, page_bytes):,} bytes or more"
        f"{', or change ' + fixed[0] if fixed else ''}"
    )


def _least_memory(config: EngineConfig, page_bytes: PageBytes) -> int:
    """Bytes from which on `plan_pages` finds the pages that an engine needs."""
    state, kv = max(page_bytes.state, 1), max(page_bytes.kv, 1)
    if config.num_kv_pages is not None:
        return max(config.num_kv_pages, 2) * page_bytes.kv + 4 * state
    if config.num_state_pages is not None:
        return max(config.num_state_pages, 4) * page_bytes.state + 2 * kv
    return 2 * max(4 * state, 2 * kv)  # KV pages take at most half of it


_UNITS = {"B": 1} | {
    f"{prefix}{kind}B": base ** (power + 1)
    for kind, base in (("I", 1024), ("", 1000))
    for power, prefix in enumerate("KMGT")
}
_UNITS_WRITTEN = "B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
_AMOUNT = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)(%|[A-Z]*)")


def parse_memory(memory: Any, free_bytes: int) -> int:
    """Bytes for a share of the free memory or an amount.

    >>> parse_memory("50%", 1000), parse_memory("1.5 KiB", 0), parse_memory(7, 0)
    (500, 1536, 7)

    Raises:
        ConfigError: for what is neither, saying why.
    """
    text = str(memory).strip().upper().replace(" ", "")
    found = _AMOUNT.fullmatch(text) if type(memory) in (int, str) else None
    if found is None:
        raise _no_memory(memory, _why_no_amount(memory, text))
    number, unit = Fraction(found[1]), found[2] or "B"
    if unit == "%":
        if not 0 < number <= 100:
            raise _no_memory(memory, "a share is above 0% and at most 100%")
        return int(free_bytes * number / 100)
    if unit not in _UNITS:
        raise _no_memory(memory, f"{found[2]} is no unit, known are {_UNITS_WRITTEN} and %")
    if number * _UNITS[unit] < 1:
        raise _no_memory(memory, "an amount is one byte at least")
    return int(number * _UNITS[unit])


def _why_no_amount(memory: Any, text: str) -> str:
    if type(memory) is float and 0 < memory <= 1:
        return f"write a share as '{100 * memory:g}%'"
    if text.startswith("-"):
        return "neither may be negative"
    return f"write a number and one of {_UNITS_WRITTEN} and %"


def _no_memory(memory: Any, why: str) -> ConfigError:
    return ConfigError(
        f"Engine: memory={memory!r}; expected a share of the free memory such as '80%', or an amount such as "
        f"'8GiB' or a whole number of bytes; {why}"
    )
