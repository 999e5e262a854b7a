"""Model in, callable out: lowering of layers to paged ops, and their compilation."""

if __name__ != "midstream.compiler":
    raise ImportError(
        "import midstream.compiler, not compiler: this folder is the source of midstream.compiler"
    )

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from midstream.compiler.backend import midstream_backend
    from midstream.compiler.backend_explain import explain_backend
    from midstream.compiler.backend_options import BackendOptions
    from midstream.compiler.context import PagedContext, Pools, StepKind, StepView
    from midstream.compiler.layout import KvLayout, LayerState, StateLayout, StateRegion
    from midstream.compiler.lowering import LoweredModel, lower

__all__ = [
    "BackendOptions",
    "explain_backend",
    "KvLayout",
    "LayerState",
    "lower",
    "LoweredModel",
    "midstream_backend",
    "PagedContext",
    "Pools",
    "StateLayout",
    "StateRegion",
    "StepKind",
    "StepView",
]

# where each name comes from: loaded on first use, so that the backend needs no transformers, and
# TORCH_LOGS may name modules of this package while torch itself is being imported
_HOME = {
    "BackendOptions": "backend_options",
    "explain_backend": "backend_explain",
    "lower": "lowering",
    "LoweredModel": "lowering",
    "midstream_backend": "backend",
    **dict.fromkeys(("KvLayout", "LayerState", "StateLayout", "StateRegion"), "layout"),
    **dict.fromkeys(("PagedContext", "Pools", "StepKind", "StepView"), "context"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'midstream.compiler' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"midstream.compiler.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
