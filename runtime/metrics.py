"""
Counters of an engine in the text format of Prometheus, without a dependency.

    text = engine.metrics()         # serve it under /metrics, or
    REGISTRY.register(EngineCollector(engine))     # with prometheus_client installed

Source of the format: Prometheus documentation, "Exposition formats", text-based format 0.0.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from midstream.runtime.engine import Engine

_GAUGES = {
    "waiting", "running", "pages", "graphs_live", "graphs_memory_bytes", "graphs_predicted_bytes",
}  # fmt: skip
_LABELS = {"cache_reasons": "reason", "graph_fallbacks": "reason"}


def prometheus_text(stats: Mapping[str, Any]) -> str:
    """All numbers of `Engine.stats`, one family each.

    >>> print(prometheus_text({"steps": 3, "pages": {"kv": {"free": 2}}}), end="")
    # TYPE midstream_steps_total counter
    midstream_steps_total 3
    # TYPE midstream_pages gauge
    midstream_pages{pool="kv",place="free"} 2
    """
    lines: list[str] = []
    for name, kind, samples in families(stats):
        lines.append(f"# TYPE {name} {kind}")
        lines += [f"{name}{_braces(labels)} {value}" for labels, value in samples]
    return "".join(f"{line}\n" for line in lines)


def families(
    stats: Mapping[str, Any],
) -> Iterator[tuple[str, str, list[tuple[dict[str, str], float]]]]:
    """Name, kind and samples (labels, value) of each family."""
    for key, value in stats.items():
        if key == "pages":
            yield (
                "midstream_pages",
                "gauge",
                [
                    ({"pool": pool, "place": place}, number)
                    for pool, places in value.items()
                    for place, number in places.items()
                ],
            )
        elif key in _LABELS:
            yield _name(key), "counter", [({_LABELS[key]: why}, n) for why, n in value.items()]
        elif isinstance(value, Mapping):
            yield from families({f"{key}_{inner}": number for inner, number in value.items()})
        elif isinstance(value, (int, float)):
            kind = "gauge" if key in _GAUGES else "counter"
            name = f"midstream_{key}" if kind == "gauge" else _name(key)
            yield name, kind, [({}, value)]


class EngineCollector:
    """For the registry of prometheus_client; reads the engine when it is scraped, in the engine's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Any]:
        """Families of the client library."""
        core = import_module("prometheus_client.core")
        for name, kind, samples in families(self._engine.stats()):
            labels = list(samples[0][0]) if samples else []
            make = core.GaugeMetricFamily if kind == "gauge" else core.CounterMetricFamily
            family = make(name, name.replace("_", " "), labels=labels)
            for values, number in samples:
                family.add_metric(list(values.values()), number)
            yield family


def _name(key: str) -> str:
    return f"midstream_{key}_total"


def _braces(labels: Mapping[str, str]) -> str:
    text = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{text}}}" if text else ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
