"""
Time from a fresh process to the first token, taken apart, and the memory that graphs take.

`cold` has empty caches of Inductor and Triton, `warm` those that cold left.  `import`, `model` (random
weights made on the device), `assemble` (lowering and pools), `capture` (compilation, warm-up runs and
capture of each key) and `first` (a prompt of 100 tokens) add up to the total.  Graph memory is what the
device has less of.

Packages have their bytecode, as installed ones do: a process before the first one imports them and may
write it.  Without it `import` is three times as long.

    pytest bench/start_up.py --benchmark-json=start_up.json      (--model B2 --graphs full)
    python bench/start_up.py B2 bfloat16 full 256                (one process, one JSON line)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BEGIN = time.perf_counter()  # before anything heavy is imported
PROMPT = 100


def start(name: str, dtype: str, graphs: str, max_rows: int) -> dict[str, Any]:
    """Serve one prompt from nothing; seconds of each part."""
    marks = [BEGIN]

    def lap() -> float:
        marks.append(time.perf_counter())
        return round(marks[-1] - marks[-2], 3)

    import measure
    import reference_models
    import torch

    import midstream
    from midstream.runtime import engine as engine_module

    found: dict[str, Any] = {"import_s": lap()}
    model = reference_models.build(name, getattr(torch, dtype), measure.device())
    _synchronize(torch)
    found["model_s"] = lap()

    class TimedEngine(engine_module.Engine):
        """Tells assembly from capture."""

        def _warm_up(self) -> None:
            found["assemble_s"] = lap()
            before = _free_bytes(torch)
            super()._warm_up()
            _synchronize(torch)
            found["capture_s"] = lap()
            found["graph_device_bytes"] = before - _free_bytes(torch)

    with TimedEngine(model, max_rows=max_rows, max_len=4096, graphs=graphs) as engine:
        lap()
        captured = engine._parts.runner.graphs.captured
        found["keys"] = {str(key): round(graph.seconds, 3) for key, graph in captured.items()}
        found["nodes"] = {str(key): graph.num_nodes for key, graph in captured.items()}
        found["graphs"] = engine.stats()["graphs"]
        params = midstream.SamplingParams(max_tokens=1, temperature=0.0)
        prompt = [3 + n * 7919 % 400 for n in range(PROMPT)]
        next(iter(engine.generate([prompt], params)))
        found["first_s"] = lap()
        found["total_s"] = round(time.perf_counter() - BEGIN, 3)
        again = time.perf_counter()
        next(iter(engine.generate([[token + 1 for token in prompt]], params)))
        found["first_again_s"] = round(time.perf_counter() - again, 4)
    return found


def _synchronize(torch: Any) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _free_bytes(torch: Any) -> int:
    """Of the device, when torch keeps nothing that it does not use."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def write_bytecode() -> None:
    """Import what `start` and the compilers do, in a process that writes what is missing."""
    modules = "measure, reference_models, torch._inductor.compile_fx, midstream.runtime.engine"
    folder = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {folder!r}); import {modules}"
    subprocess.run([sys.executable, "-c", code], env=_environ(), check=True, timeout=300)


def _environ() -> dict[str, str]:
    """The environment of processes that may write bytecode."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def run_process(caches: Path, *words: str) -> dict[str, Any]:
    """A fresh process with the caches of compilers in a folder of their own."""
    environ = _environ() | {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    done = subprocess.run(
        [sys.executable, __file__, *words],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_start_up(
    benchmark: Any, pytestconfig: Any, tmp_path_factory: Any, row_counts: list[int], model_name: str
) -> None:
    """Cold and warm in one run: warm needs what cold compiled."""
    import measure

    caches = tmp_path_factory.mktemp("caches")
    dtype, graphs = map(pytestconfig.getoption, ("--dtype", "--graphs"))
    words = (model_name, dtype, graphs, str(max(row_counts)))
    write_bytecode()
    cold = run_process(caches, *words)
    warm: list[dict[str, Any]] = []
    benchmark.pedantic(lambda: warm.append(run_process(caches, *words)), rounds=1, iterations=1)
    for name, result in (("cold", cold), ("warm", warm[0])):
        parts = {k: v for k, v in result.items() if k.endswith("_s")}
        print(
            f"\n{name}: {parts}, graphs {result['graphs']}, device {result['graph_device_bytes']} bytes"
        )
        for key, seconds in result["keys"].items():
            print(f"  {seconds:8.3f} s  {result['nodes'][key]:5d} nodes  {key}")
    measure.describe(benchmark, model=model_name, graphs_mode=graphs, cold=cold, warm=warm[0])


if __name__ == "__main__":
    model, dtype, graphs, rows = sys.argv[1:]
    print(json.dumps(start(model, dtype, graphs, int(rows))))
