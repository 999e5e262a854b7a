"""
Every error that midstream raises on purpose.

    MidstreamError
    |-- ConfigError(ValueError)          can never work: an option, a model or an argument is wrong
    |-- ContractError(RuntimeError)      a precondition was broken by the caller
    |-- CapacityError(RuntimeError)      valid, but there is no room for it (now)
    `-- UnsupportedError(NotImplementedError)   valid PyTorch or transformers that we refuse

A message says who speaks, what was found, what was expected, and what to do.
"""


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
