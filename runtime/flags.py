"""Command-line flags made from the fields of a dataclass, parsed by the fields' types."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, Field, fields
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints


def add_flags(parser: argparse._ActionsContainer, config: type) -> None:
    """Add `--field-name` for every field of `config`; a flag that is not given leaves no trace."""
    hints = get_type_hints(config)
    for field in fields(config):
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            dest=field.name,
            default=argparse.SUPPRESS,
            **_action(hints[field.name]),
            help=f"{type_name(hints[field.name])}, default {_default(field)}",
        )


def given(args: argparse.Namespace, config: type) -> dict[str, Any]:
    """The fields of `config` that the command line set, by name."""
    found = {f.name: getattr(args, f.name) for f in fields(config) if hasattr(args, f.name)}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}


def parse_value(text: str, hint: Any) -> Any:
    """The value that `text` says, of the first of the types in `hint` that can read it.

    >>> [parse_value(t, str | int | None) for t in ("none", "64", "auto")]
    [None, 64, 'auto']
    >>> parse_value("0.5", float)
    0.5

    Raises:
        ArgumentTypeError: when no type of `hint` can read it.
    """
    kinds = _kinds(hint)
    if NoneType in kinds and text.lower() == "none":
        return None
    for kind in (int, float, str):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    raise argparse.ArgumentTypeError(f"{text!r} found, {type_name(hint)} expected")


def type_name(hint: Any) -> str:
    """How help and errors name a type.

    >>> type_name(int | None), type_name(tuple[int, ...]), type_name(bool)
    ('int or none', 'int ...', 'switch')
    """
    if get_origin(hint) in (tuple, list):
        return f"{type_name(get_args(hint)[0])} ..."
    names = {NoneType: "none", bool: "switch", str: "text"}
    return " or ".join(names.get(kind, kind.__name__) for kind in _kinds(hint))


def _action(hint: Any) -> dict[str, Any]:
    """The argparse keywords that read a value of this type."""
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) in (tuple, list):
        item = get_args(hint)[0]
        return {"action": "extend", "nargs": "+", "type": lambda text: parse_value(text, item)}
    return {"type": lambda text: parse_value(text, hint)}


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) or (hint,)


def _default(field: Field[Any]) -> str:
    if field.default is not MISSING:
        # argparse expands % in help
        return "none" if field.default in (None, ()) else str(field.default).replace("%", "%%")
    return "none"
