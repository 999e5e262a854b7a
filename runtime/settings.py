"""
Environment variables: for debugging only, read once at construction, strictly.

    MIDSTREAM_POISON=1   before every step, fill all free pages and the null pages with NaN
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from midstream.errors import ConfigError

_PREFIX = "MIDSTREAM_"
_KNOWN = ("MIDSTREAM_POISON",)


@dataclass(frozen=True, slots=True)
class Settings:
    """Debugging switches of one engine."""

    poison: bool


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Raises ConfigError for an unknown name or an odd value.

    >>> read_settings({"MIDSTREAM_POISN": "1"})
    Traceback (most recent call last):
    ...
    midstream.errors.ConfigError: unknown environment variable MIDSTREAM_POISN; known: MIDSTREAM_POISON
    """
    for name in environ:
        if name.startswith(_PREFIX) and name not in _KNOWN:
            raise ConfigError(f"unknown environment variable {name}; known: {', '.join(_KNOWN)}")
    value = environ.get("MIDSTREAM_POISON", "0")
    if value not in ("0", "1"):
        raise ConfigError(f"environment variable MIDSTREAM_POISON={value!r}; expected 0 or 1")
    return Settings(poison=value == "1")
