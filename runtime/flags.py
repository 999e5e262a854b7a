"""Command-line flags made from the fields of a dataclass, parsed by the fields' types."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from types import NoneType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from midstream.runtime.options import meaning_of


class OneLineParser(argparse.ArgumentParser):
    """Refuses in one line, without the usage of all flags."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


class FlagParser(OneLineParser):
    """Names the nearest flag when one is unknown, before it misses another."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._refuse_unknown(args or ())
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"{rest[0]!r} belongs to no flag; a text with spaces needs quotes")
        return found, rest

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        for word in words:
            name = word.partition("=")[0]
            # argparse takes words with spaces for values, and beginnings of flags for flags
            if not name.startswith("--") or name == "--" or " " in name:
                continue
            if not any(flag.startswith(name) for flag in known):
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                self.error(f"unknown flag {name}{hint}")


def add_flags(parser: argparse._ActionsContainer, config: type) -> None:
    """Add `--field-name` for every field of `config`; a flag that is not given leaves no trace."""
    hints = get_type_hints(config)
    for field in fields(config):
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            dest=field.name,
            default=argparse.SUPPRESS,
            **_action(hints[field.name]),
            help=_help(field, hints[field.name]),
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


def default_text(field: Field[Any]) -> str:
    """How help and documents write the default of a field."""
    return "none" if field.default in (None, (), MISSING) else str(field.default)


def _help(field: Field[Any], hint: Any) -> str:
    text = f"{meaning_of(field)} ({type_name(hint)}, default {default_text(field)})"
    return text.lstrip().replace("%", "%%")  # argparse expands % in help


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
