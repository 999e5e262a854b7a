"""Run hybrid (attention + recurrent) models at the memory-bandwidth limit."""

from midstream.compiler.lowering import lower
from midstream.errors import (
    CapacityError,
    ConfigError,
    ContractError,
    MidstreamError,
    UnsupportedError,
)
from midstream.runtime.engine import Engine, Handle, Update
from midstream.runtime.request import Output
from midstream.runtime.sampling import SamplingParams

__all__ = [
    "CapacityError",
    "ConfigError",
    "ContractError",
    "Engine",
    "Handle",
    "lower",
    "MidstreamError",
    "Output",
    "SamplingParams",
    "UnsupportedError",
    "Update",
]
