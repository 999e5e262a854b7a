"""
What a decode step's time is made of: device time by kernel over steps of the engine.

Prints a table (microseconds and launches per step), the share of the time in which the GPU was idle, and one
JSON line.

    python bench/profile_step.py --model B2 --rows 1 --steps 50
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

import measure
import numpy as np
import reference_models
import torch
from torch.autograd.profiler_util import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

import midstream

_STEPS_TO_DECODE = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="B2")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--state-dtype", default="float32")
    args = parser.parse_args()
    model = reference_models.build(args.model, torch.bfloat16, measure.device())
    with midstream.Engine(
        model, max_rows=args.rows, max_len=2048, state_dtype=args.state_dtype
    ) as engine:
        draw = np.random.default_rng(0)
        params = midstream.SamplingParams(max_tokens=1500, temperature=0)
        handles = [engine.add(draw.integers(3, 1000, 64), params) for _ in range(args.rows)]
        for _ in range(_STEPS_TO_DECODE):
            engine.step()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
            for _ in range(args.steps):
                engine.step()
            torch.cuda.synchronize()
        for handle in handles:
            engine.abort(handle)
        engine.step()
        engine.step()
    report(prof.events(), args.steps, vars(args))


def report(events: Any, steps: int, setup: dict[str, Any]) -> None:
    """Print kernels by time per step."""
    on_device = [e for e in events if e.device_type == DeviceType.CUDA]
    micros, launches = Counter[str](), Counter[str]()
    for event in on_device:
        micros[event.name[:90]] += event.time_range.elapsed_us() / steps
        launches[event.name[:90]] += 1
    begin = min(e.time_range.start for e in on_device)
    end = max(e.time_range.end for e in on_device)
    wall, busy = (end - begin) / steps, sum(micros.values())
    print(f"{'us/step':>9} {'launches/step':>13}  kernel")
    for name, value in micros.most_common(30):
        print(f"{value:9.1f} {launches[name] / steps:13.1f}  {name}")
    total = sum(launches.values()) / steps
    print(f"step {wall:.1f} us, busy {busy:.1f} us, {total:.0f} launches")
    rows = [[n, round(v, 2), launches[n] / steps] for n, v in micros.most_common(40)]
    print(json.dumps({"setup": setup | measure.environment(), "step_us": wall, "busy_us": busy,
                      "launches": total, "kernels": rows}))  # fmt: skip


if __name__ == "__main__":
    main()
