"""
Keep the part of a pytest-benchmark file that says something about the project, and print it as a table.

Drops what describes the machine beyond card and versions, and single samples.  The name of the kept file is
`theme_card_date.json`.

    python bench/keep_result.py decode.json bench/results/decode_h200_2026-11-29.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_STATS = ("min", "q1", "median", "q3", "max", "mean", "stddev", "rounds", "iterations")


def kept(result: dict[str, Any]) -> dict[str, Any]:
    """Name, statistics in seconds and extra information of every benchmark; setup stands once."""
    rows = result["benchmarks"]
    first = rows[0]["extra_info"]
    setup = {k: v for k, v in first.items() if all(r["extra_info"].get(k) == v for r in rows)}
    points = [
        {
            "name": row["name"],
            "seconds": {key: row["stats"][key] for key in _STATS},
            **{k: v for k, v in row["extra_info"].items() if k not in setup},
        }
        for row in rows
    ]
    return {"setup": setup, "points": points}


def table(result: dict[str, Any]) -> str:
    """Milliseconds at p25, p50 and p75, and the fraction of the floor."""
    lines = ["| point | p25 ms | p50 ms | p75 ms | of floor |", "|---|---|---|---|---|"]
    for point in result["points"]:
        times = " | ".join(f"{1e3 * point['seconds'][q]:.3f}" for q in ("q1", "median", "q3"))
        share = f"{point['of_floor']:.0%}" if "of_floor" in point else ""
        lines.append(f"| {point['name']} | {times} | {share} |")
    return "\n".join(lines)


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    result = kept(json.loads(source.read_text()))
    target.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
