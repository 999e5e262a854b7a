"""The options of an engine, as fields that carry their meaning: help and documents are made from them."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

import numpy as np

from midstream.errors import ConfigError, check_known

T = TypeVar("T")

_LARGEST = 2**30  # positions, pages and slots are int32, and two of them are added


def option(default: T, meaning: str) -> T:
    """A dataclass field with a default and, for `meaning_of`, what it does and which values it takes."""
    return field(default=default, metadata={"meaning": meaning})


def meaning_of(field: Field[Any]) -> str:
    """What `option` was told; empty for a plain field."""
    text: str = field.metadata.get("meaning", "")
    return text


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of `midstream.Engine`.  Every field is also a flag of the command line.

    Raises:
        ConfigError: a number that no engine can count to, or a KV page that kernels cannot address.
    """

    cache_mode: str = option(
        "align",
        '"none": no reuse; "align": checkpoints where retention says; "all": every block of '
        "state_block tokens keeps its state while its request lives",
    )
    state_block: int = option(64, "tokens between checkpoints; a multiple of kv_block")
    kv_block: int = option(16, "tokens of a KV page, a power of two, and the grid of resume points")
    max_rows: int = option(256, "live requests at once")
    max_step_tokens: int = option(8192, "tokens computed in one step")
    max_len: int | None = option(
        None, "tokens of prompt and answer together; none: what the model and the pools hold"
    )
    memory: str | int = option(
        "80%", 'for state and KV pages: a share of the free memory, or bytes such as "8GiB"'
    )
    num_state_pages: int | None = option(None, "none: planned from memory")
    num_kv_pages: int | None = option(None, "none: planned from memory")
    graphs: str = option(
        "full",
        '"full": all steps up to graph_tokens are captured whole, those of long prompts when one first '
        'comes; "piecewise": the same steps cut where states and attention are computed; '
        '"full+piecewise": only those of long prompts cut so; "off": every step runs eagerly',
    )
    graph_tokens: int = option(
        8192, "tokens of the longest step with prompts that is captured; longer ones run eagerly"
    )
    migration: str = option(
        "auto",
        '"copyfree": layers read one page and write the next; "precopy": states are copied first; '
        '"auto": copyfree',
    )
    mix: str | None = option(
        None, 'sequences and tokens of each that must run at once, such as "64x4096"'
    )
    retention: str | int | None = option(
        "auto",
        "states kept besides the ends of prompts and answers and the places where prompts part: "
        '"auto": at powers of two; 0: none; n: every n tokens, a multiple of kv_block; none: every block',
    )
    eviction: str = option(
        "value", '"value": saved work per byte, use and age; "lru": longest unused'
    )
    wait_for_prefix: bool = option(
        True, "a request waits for a prefix that another computes at this moment"
    )
    state_dtype: str = option("float32", 'of recurrent state: "float32" or "bfloat16"')
    compile: str = option("auto", '"eager", "inductor", or "auto": inductor where there is a GPU')
    hash_key: str | None = option(
        None, "32 hexadecimal digits; none: random, so that block hashes cannot be predicted"
    )

    def __new__(cls, *args: object, **options: object) -> EngineConfig:
        """Refuse unknown names, which the generated `__init__` would answer with a bare TypeError."""
        check_known("Engine", options, [field.name for field in fields(cls)])
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name in (known.name for known in fields(self)):
            value = getattr(self, name)
            if isinstance(value, np.integer):
                value = int(value)
                object.__setattr__(self, name, value)
            if type(value) is int and value > _LARGEST and name != "memory":
                raise ConfigError(
                    f"Engine: {name}={value}; expected at most {_LARGEST}: the device counts in "
                    "32 bits; lower it"
                )
        block = self.kv_block
        if type(block) is int and block > 0 and block & (block - 1):
            below = 1 << (block.bit_length() - 1)
            raise ConfigError(
                f"Engine: kv_block={block}; expected a power of two; choose e.g. kv_block={below} or "
                f"{2 * below}, and for state_block a multiple of it"
            )
