"""The percentiles that every row of a suite reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def percentiles_us(seconds: Sequence[float], parts: int = 1) -> dict[str, float]:
    """p20, p50 and p80 in microseconds of one of `parts` equal parts of each measurement.

    >>> percentiles_us([2e-6, 4e-6, 6e-6], parts=2)
    {'p20_us': 1.4, 'p50_us': 2.0, 'p80_us': 2.6}
    """
    values = 1e6 * np.percentile(seconds, (20, 50, 80)) / parts
    return {f"p{q}_us": round(float(v), 3) for q, v in zip((20, 50, 80), values, strict=True)}


def seconds_of(benchmark: Any) -> list[float]:
    """All rounds of a finished measurement; one NaN under --benchmark-disable."""
    return [math.nan] if benchmark.stats is None else benchmark.stats.stats.data
