"""
Environment variables: for debugging only, read once at construction, strictly.

    MIDSTREAM_POISON=1       before every step, fill with NaN or nonsense whatever no step may read
    MIDSTREAM_SHADOW=n       run every n-th step that replays a graph eagerly too, and compare all bits
    MIDSTREAM_EMULATE=late   on a CPU, capture and replay steps as a GPU would, with all work done as late as
                             possible; "early": at once; a number: at times drawn from that seed
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from midstream.errors import ConfigError
from midstream.graphs.emulated_queue import Pace

_PREFIX = "MIDSTREAM_"
_KNOWN = ("MIDSTREAM_EMULATE", "MIDSTREAM_POISON", "MIDSTREAM_SHADOW")


@dataclass(frozen=True, slots=True)
class Settings:
    """Debugging switches of one engine."""

    poison: bool = False
    shadow_every: int = 0  # steps; 0: never
    emulate: Pace | None = None  # None: no emulation


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Raises ConfigError for an unknown name or an odd value.

    >>> read_settings({"MIDSTREAM_POISN": "1"})
    Traceback (most recent call last):
    ...
    midstream.errors.ConfigError: unknown environment variable MIDSTREAM_POISN; known: MIDSTREAM_EMULATE, \
MIDSTREAM_POISON, MIDSTREAM_SHADOW
    """
    for name in environ:
        if name.startswith(_PREFIX) and name not in _KNOWN:
            raise ConfigError(f"unknown environment variable {name}; known: {', '.join(_KNOWN)}")
    return Settings(
        poison=bool(_number(environ, "MIDSTREAM_POISON", most=1)),
        shadow_every=_number(environ, "MIDSTREAM_SHADOW"),
        emulate=_pace(environ),
    )


def _number(environ: Mapping[str, str], name: str, most: int | None = None) -> int:
    value = environ.get(name, "0")
    if not (value.isascii() and value.isdigit()) or (most is not None and int(value) > most):
        expected = "a whole number, 0 for never" if most is None else "0 or 1"
        raise ConfigError(f"environment variable {name}={value!r}; expected {expected}")
    return int(value)


def _pace(environ: Mapping[str, str]) -> Pace | None:
    match environ.get("MIDSTREAM_EMULATE"):
        case None | "" | "0":
            return None
        case "late":
            return "late"
        case "early":
            return "early"
        case value if value.isascii() and value.isdigit():
            return int(value)
        case value:
            raise ConfigError(
                f"environment variable MIDSTREAM_EMULATE={value!r}; expected late, early or a seed"
            )
