"""
Compiles a traced graph with Inductor, such that what it writes is written in place and stays apart.

Two faults of Inductor that give wrong results without a word are avoided here, in torch 2.11 and 2.13:

* A copy that an operator reads while it writes the original is left out, so that it reads its own
  results (pytorch#198031).  Such copies are made by an operator that Inductor cannot see through.
* The cache in front of Inductor knows an operator by its name, so that code compiled before its schema
  changed is used again (pytorch#187319).  Graphs with operators that are not torch's own do without it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx
from torch._inductor.exc import InductorError

from midstream.compiler.backend_analysis import GraphFacts
from midstream.compiler.backend_options import BackendOptions
from midstream.compiler.projections import fuse_projections
from midstream.compiler.short_products import spell_out_short_products
from midstream.compiler.static_attention import fuse_static_attention
from midstream.errors import UnsupportedError

_LIBRARY = torch.library.Library("midstream", "FRAGMENT")
_LIBRARY.define("kept_copy(Tensor x) -> Tensor")
_LIBRARY.impl("kept_copy", lambda x: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("midstream::kept_copy", torch.empty_like, lib=_LIBRARY)


def compile_with_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], settings: BackendOptions, facts: GraphFacts
) -> Callable[..., Any]:
    """A function of the same arguments as `gm`, which is left as it is.

    Raises:
        UnsupportedError: when Inductor cannot compile the graph.
    """
    patches = {**_mode_patches(settings), "triton.cudagraphs": False}
    copied = _with_kept_copies(gm, facts)
    fused = 0 if facts.needs_backward else fuse_few_tokens(copied)
    use_cache = functorch_config.enable_autograd_cache and not (facts.has_foreign_ops or fused)
    try:
        with functorch_config.patch(enable_autograd_cache=use_cache):
            compiled: Any = compile_fx(copied, list(inputs), config_patches=patches)
            return compiled
    except InductorError as error:
        raise UnsupportedError(
            f"backend midstream: Inductor cannot compile this graph ({error}), expected one that it can; "
            "pass options={'inner': 'eager'} to record it without Inductor"
        ) from error


def fuse_few_tokens(gm: fx.GraphModule, device_type: str = "cuda") -> int:
    """Rewrite what models compute for one token, or for a few.  Returns how many places."""
    passes = (fuse_projections, fuse_static_attention, spell_out_short_products)
    return sum(rewrite(gm, device_type) for rewrite in passes)


def _mode_patches(settings: BackendOptions) -> dict[str, Any]:
    return list_mode_options("max-autotune-no-cudagraphs") if settings.autotune else {}


def _with_kept_copies(gm: fx.GraphModule, facts: GraphFacts) -> fx.GraphModule:
    """A copy of the graph whose operators read real copies of what they write."""
    graph = fx.Graph(gm)
    place: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, place))
    for call, argument in facts.elided_copies:
        with graph.inserting_before(place[call]):
            kept = graph.call_function(torch.ops.midstream.kept_copy.default, (place[argument],))
        kept.meta = dict(place[argument].meta)
        place[call].replace_input_with(place[argument], kept)
    graph.set_codegen(gm.graph._codegen)
    copied = fx.GraphModule(gm, graph)
    copied.meta = copy.copy(gm.meta)
    return copied
