"""
Every error that midstream raises on purpose.

    MidstreamError
    |-- ConfigError(ValueError)          can never work: an option, a model or an argument is wrong
    |-- ContractError(RuntimeError)      a precondition was broken by the caller
    |-- CapacityError(RuntimeError)      valid, but there is no room for it (now)
    `-- UnsupportedError(NotImplementedError)   valid PyTorch or transformers that we refuse

A message says who speaks, what was found, what was expected, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class MidstreamError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(MidstreamError, ValueError):
    """An option, a model or an argument that can never work."""


class ContractError(MidstreamError, RuntimeError):
    """A precondition was broken by the caller."""


class CapacityError(MidstreamError, RuntimeError):
    """Valid, but there is no room for it."""


class UnsupportedError(MidstreamError, NotImplementedError):
    """Valid PyTorch or a valid model that midstream refuses."""


def check_known(who: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise ConfigError for the first name that is not known, with the one that was meant or with all."""
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"{who}: unknown option {name!r}; {hint}")
