"""Run hybrid (attention + recurrent) models at the memory-bandwidth limit."""

from midstream.compiler.lowering import lower
from midstream.errors import (
    CapacityError,
    ConfigError,
    ContractError,
    MidstreamError,
    UnsupportedError,
)
from midstream.runtime.config import EngineConfig
from midstream.runtime.engine import Engine, Handle, Update
from midstream.runtime.loading import load_model
from midstream.runtime.request import Output
from midstream.runtime.sampling import SamplingParams

__all__ = [
    "CapacityError",
    "ConfigError",
    "ContractError",
    "Engine",
    "EngineConfig",
    "Handle",
    "load_model",
    "lower",
    "MidstreamError",
    "Output",
    "SamplingParams",
    "UnsupportedError",
    "Update",
]
