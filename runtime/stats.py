"""The counters of an engine as one dictionary."""

from __future__ import annotations

from typing import Any

from midstream.runtime.assembly import Parts


def collect(parts: Parts, counts: dict[str, int]) -> dict[str, Any]:
    """See `Engine.stats`; `counts`: those that the turns keep."""
    scheduler, index, graphs = parts.scheduler, parts.ownership.index, parts.runner.graphs
    return counts | {
        "waiting": len(scheduler.waiting),
        "running": len(scheduler.running),
        "output_tokens": parts.committer.num_tokens,
        "preemptions": scheduler.num_preemptions,
        "cache": scheduler.admission.counters.as_dict()
        | {"lookups": index.num_lookups, "evictions": index.evictions},
        "graph_replays": graphs.num_replays,
        "graph_fallbacks": dict(graphs.fallbacks),
        "graphs": graphs.stats(),
        "pages": parts.ownership.pages_by_pool(),
    }
