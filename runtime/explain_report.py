"""`midstream explain`: the report of an engine as text, as JSON and as a picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from midstream.runtime.engine import Engine
from midstream.runtime.explain_dot import dot_text
from midstream.runtime.explain_model import (
    LayerReport,
    ModelReport,
    explain_model,
)


def run(
    model: Any, options: dict[str, Any], gb_per_s: float | None, all_buffers: bool, out: Path | None
) -> list[str]:
    """The report of an engine made for this purpose, and what was written."""
    with Engine(model, **options) as engine:
        report = explain_model(engine, gb_per_s)
    lines = report_lines(report, all_buffers)
    if out is not None:
        lines += ["", f"written: {', '.join(map(str, write(out, report)))}"]
    return lines


def report_lines(report: ModelReport, all_buffers: bool = False) -> list[str]:
    """For people."""
    out = [
        f"{report.model} ({report.family}): {report.num_parameters:,} parameters, {report.dtype}, "
        f"on {report.device}",
        "",
        "layers:",
        *(_layer_line(layer) for layer in report.layers),
        *(f"  not lowered: {text}" for text in report.unlowered),
        "",
        f"pools: {report.pages}",
        *(f"  {name}: {num:,} bytes" for name, num in report.pool_bytes.items()),
        "",
        f"captured steps: {len(report.graphs)}, {sum(g.memory_bytes for g in report.graphs):,} bytes",
    ]
    for graph in report.graphs:
        out += [f"  {line}" for line in graph.lines(all_buffers)]
    out += [f"  without a graph: {text}" for text in report.ungraphed]
    how = "measured now" if report.rate_is_measured else "as stated"
    out += ["", f"floor of a decode step at {report.gb_per_s:,.0f} GB/s ({how}):"]
    out += [
        f"  {f.rows:>4} rows: {f.micros:>10.1f} us for {f.weight_bytes:,} bytes of weights, "
        f"{f.state_bytes:,} of state, {f.kv_bytes:,} of keys and values ({f.length} tokens a row)"
        for f in report.floors
    ]
    if report.num_unowned:
        out += [
            "",
            f"{report.num_unowned} addresses in captured steps have no owner: see UNOWNED above",
        ]
    return out


def write(folder: Path, report: ModelReport) -> list[Path]:
    """explain.json and explain.dot.  Returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    data, picture = folder / "explain.json", folder / "explain.dot"
    data.write_text(json.dumps(asdict(report), indent=1) + "\n")
    kinds = [(layer.layer, layer.module, layer.kind) for layer in report.layers]
    picture.write_text(dot_text(report.model, kinds, [g.name for g in report.graphs]))
    return [data, picture]


def _layer_line(layer: LayerReport) -> str:
    size = (
        f"{layer.kv_bytes:,} bytes a token"
        if layer.kv_bytes
        else f"{layer.state_bytes:,} bytes a sequence"
    )
    return (
        f"  {layer.layer:>3} {layer.kind:12} {size:28} {', '.join(layer.ops)}; {layer.compile_unit}"
    )
