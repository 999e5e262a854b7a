"""Model in, callable out: lowering of layers to paged ops, and their compilation."""

if __name__ != "midstream.compiler":
    raise ImportError(
        "import midstream.compiler, not compiler: this folder is the source of midstream.compiler"
    )

from midstream.compiler.context import PagedContext, Pools, StepKind, StepView
from midstream.compiler.layout import KvLayout, LayerState, StateLayout, StateRegion
from midstream.compiler.lowering import LoweredModel, lower

__all__ = [
    "KvLayout",
    "LayerState",
    "LoweredModel",
    "PagedContext",
    "Pools",
    "StateLayout",
    "StateRegion",
    "StepKind",
    "StepView",
    "lower",
]
