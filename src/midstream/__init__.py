"""Run hybrid (attention + recurrent) models at the memory-bandwidth limit."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from midstream.compiler.changes import restore
    from midstream.compiler.compiled import CompiledModel, compile
    from midstream.compiler.lowering import lower
    from midstream.errors import (
        CapacityError,
        ConfigError,
        ContractError,
        MidstreamError,
        UnsupportedError,
    )
    from midstream.runtime.engine import Engine, Handle, Update
    from midstream.runtime.loading import load_model
    from midstream.runtime.request import Output
    from midstream.runtime.sampling import SamplingParams

__all__ = [
    "CapacityError",
    "compile",
    "CompiledModel",
    "ConfigError",
    "ContractError",
    "Engine",
    "Handle",
    "load_model",
    "lower",
    "MidstreamError",
    "Output",
    "restore",
    "SamplingParams",
    "UnsupportedError",
    "Update",
]

# where each name comes from: loaded on first use, so that `midstream --help` needs no torch
_HOME = {
    **dict.fromkeys(__all__, "midstream.errors"),
    "compile": "midstream.compiler.compiled",
    "CompiledModel": "midstream.compiler.compiled",
    "Engine": "midstream.runtime.engine",
    "Handle": "midstream.runtime.engine",
    "load_model": "midstream.runtime.loading",
    "lower": "midstream.compiler.lowering",
    "Output": "midstream.runtime.request",
    "restore": "midstream.compiler.changes",
    "SamplingParams": "midstream.runtime.sampling",
    "Update": "midstream.runtime.engine",
}


_PACKAGES = ("compiler", "graphs", "ops", "runtime")  # imported on first use as well


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"midstream.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'midstream' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, *_PACKAGES]
