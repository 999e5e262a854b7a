"""Options of the compile backend: what users may write, decoded into one strict and frozen object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from midstream.errors import ConfigError

_MODES: dict[str, dict[str, bool]] = {  # mode -> what it sets
    "default": {"record": True, "autotune": False},
    "reduce-overhead": {"record": True, "autotune": False},
    "max-autotune": {"record": True, "autotune": True},
    "max-autotune-no-cudagraphs": {"record": False, "autotune": True},
}
_CHOICES = {
    "mode": tuple(_MODES),
    "inner": ("inductor", "eager"),
    "on_unsupported": ("fallback", "error"),
}


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """Settings of one compiled function; equal settings share compiled code.

    May be passed as `torch.compile(model, backend="midstream", options=BackendOptions(...))`, or as a
    dict of the same names.
    Raises:
        ConfigError: when a value has the wrong type or is not one of those known.
    """

    mode: str = "default"  # as in torch.compile, which refuses `mode` and `options` together
    inner: str = "inductor"  # who compiles the graph: "inductor", or "eager" for nobody
    max_recordings: int = (
        16  # per graph: one for each set of shapes, numbers and weights; beyond, eager
    )
    on_unsupported: str = (
        "fallback"  # where nothing can be recorded; "error" raises with the reason
    )
    emulate: bool = (
        False  # for debugging, with inner="eager": record on the CPU, in graphs.emulator
    )

    def __new__(cls, *args: object, **options: object) -> BackendOptions:
        """Refuse unknown names, which the generated `__init__` would answer with a bare TypeError."""
        _check_names(options)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field.name, getattr(self, field.name), type(field.default))
        if self.max_recordings < 1:
            raise ConfigError(
                f"backend midstream: max_recordings is {self.max_recordings}, expected at least 1; to record "
                "nothing, use mode='max-autotune-no-cudagraphs'"
            )
        if self.emulate and self.inner != "eager":
            raise ConfigError(
                f"backend midstream: emulate is True and inner is {self.inner!r}, expected 'eager': the "
                "emulator sees operators, not what Inductor made of them; pass inner='eager' too"
            )

    @property
    def record(self) -> bool:
        return _MODES[self.mode]["record"]

    @property
    def autotune(self) -> bool:
        return _MODES[self.mode]["autotune"]


def list_options() -> list[str]:
    """Names of all options.

    >>> list_options()
    ['mode', 'inner', 'max_recordings', 'on_unsupported', 'emulate']
    """
    return [field.name for field in fields(BackendOptions)]


def list_mode_options(mode: str | None = None) -> dict[str, Any]:
    """What one mode sets, or what each of them does.

    >>> list_mode_options("max-autotune-no-cudagraphs")
    {'record': False, 'autotune': True}
    """
    if mode is None:
        return {name: dict(values) for name, values in _MODES.items()}
    _check("mode", mode, str)
    return dict(_MODES[mode])


def decode(
    mode: str | None, options: Mapping[str, object] | BackendOptions | None
) -> BackendOptions:
    """The settings that the two keywords of torch.compile ask for.

    Raises:
        ConfigError: for an unknown option, a wrong value, or two different modes.
    """
    if not isinstance(options, BackendOptions):
        options = _from_mapping(options or {}, mode)
    elif mode is not None and mode != options.mode:
        raise _two_modes(mode, options.mode)
    return options


def _from_mapping(options: Mapping[str, object], mode: str | None) -> BackendOptions:
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"backend midstream: options are of type {type(options).__name__}, expected a dict or "
            "BackendOptions; write options={'inner': 'eager'}"
        )
    _check_names(options)
    values: dict[str, Any] = dict(options)
    if mode is not None and values.setdefault("mode", mode) != mode:
        raise _two_modes(mode, values["mode"])
    return BackendOptions(**values)


def _check_names(options: Iterable[str]) -> None:
    known = list_options()
    for name in options:
        if name not in known:
            raise ConfigError(
                f"backend midstream: {name!r} is not an option, expected one of {', '.join(known)}; "
                + _nearest(name, known)
            )


def _check(name: str, value: object, kind: type) -> None:
    if type(value) is not kind:
        raise ConfigError(
            f"backend midstream: {name} is {value!r} of type {type(value).__name__}, expected "
            f"{kind.__name__}; see midstream.compiler.backend_options.BackendOptions"
        )
    choices = _CHOICES.get(name)
    if choices is not None and value not in choices:
        raise ConfigError(
            f"backend midstream: {name} is {value!r}, expected one of {', '.join(choices)}; "
            + _nearest(str(value), choices)
        )


def _nearest(name: object, known: list[str] | tuple[str, ...]) -> str:
    close = get_close_matches(str(name), known, n=1, cutoff=0.4)
    return f"did you mean {close[0]!r}?" if close else "see docs/backend.md"


def _two_modes(mode: str, other: object) -> ConfigError:
    return ConfigError(
        f"backend midstream: mode is {mode!r} and the options say {other!r}, expected one of them; "
        "leave out mode="
    )
