"""A picture of a lowered model as text for graphviz: layers in order, and the pools that they use."""

from __future__ import annotations

from collections.abc import Sequence

_POOLS = {"attention": ("kv",)}  # recurrent layers: the other two
_STATE_POOLS = ("temporal", "conv")
_COLORS = ("#dbe9f6", "#fde5cc", "#e0f0d9", "#f3dbe9", "#eeeeee")


def dot_text(model: str, layers: Sequence[tuple[int, str, str]], graphs: Sequence[str]) -> str:
    """
    >>> print(dot_text("M", [(0, "Mixer", "ssd")], ["step of 1 tokens"]).splitlines()[0])
    digraph "M" {

    Args:
        layers: number, class of the mixing module, kind.
        graphs: names of the captured steps.
    """
    kinds = list(dict.fromkeys(kind for _, _, kind in layers))
    color = {kind: _COLORS[place % len(_COLORS)] for place, kind in enumerate(kinds)}
    out = [
        f"digraph {_quoted(model)} {{",
        "  rankdir=TB; node [shape=box, style=filled, fillcolor=white, fontname=Helvetica];",
        "  embedding; norm; head;",
    ]
    for number, module, kind in layers:
        label = f"{number}: {kind}\\n{module}"
        out.append(f'  layer{number} [label="{label}", fillcolor="{color[kind]}"];')
    chain = ["embedding", *(f"layer{number}" for number, _, _ in layers), "norm", "head"]
    out.append(f"  {' -> '.join(chain)};")
    used = {pool for _, _, kind in layers for pool in _POOLS.get(kind, _STATE_POOLS)}
    out += [f'  pool_{pool} [label="{pool} pool", shape=cylinder];' for pool in sorted(used)]
    for number, _, kind in layers:
        for pool in _POOLS.get(kind, _STATE_POOLS):
            out.append(
                f"  layer{number} -> pool_{pool} [dir=both, style=dashed, constraint=false];"
            )
    steps = "\\l".join([*graphs, ""]) if graphs else "none\\l"
    out.append(f'  graphs [shape=note, label="captured steps:\\l{steps}"];')
    return "\n".join([*out, "}", ""])


def _quoted(text: str) -> str:
    return '"' + text.replace('"', "'") + '"'
