"""
`midstream bench graphs`: what capturing a model's decode step takes, and what it gives, next to other ways.

For each number of rows and each path: time and memory of the capture, nodes of the graph (launches where
there is none), the host's time for a step, the device's, the share of it that is gaps between kernels,
compilations at the start and after.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from midstream.compiler.compiled import CompiledModel
from midstream.errors import ConfigError, MidstreamError
from midstream.runtime.bench_steps import (
    PATHS,
    SLOW_PATHS,
    Timing,
    compiled_for,
    decoding,
    measure,
)
from midstream.runtime.loading import (
    DTYPES,
    check_family,
    find_device,
    first_line,
    load_model,
    read_object,
)

_log = logging.getLogger("midstream")

NEEDS_GPU = "needs a GPU"
_OLD_NAMES = {  # in files of checkpoints, and read under other names
    "auto_map", "full_attention_interval", "partial_rotary_factor", "rope_scaling", "rope_theta",
    "tokenizer_class", "torch_dtype",
}  # fmt: skip
_NO_ROOM = "out of memory"
_NOT_ASKED = "left out (--slow-rows)"


@dataclass(frozen=True, slots=True)
class GraphCost:
    """What a captured graph took."""

    seconds: float
    memory_bytes: int
    num_nodes: int


@dataclass(frozen=True, slots=True)
class Point:
    """One path at one number of rows; `why_not` says why it has no timing."""

    rows: int
    path: str
    timing: Timing | None = None
    graph: GraphCost | None = None
    why_not: str | None = None


def load(source: str, dtype: str, device: str) -> Any:
    """The model in a folder, or of a config file (model_type and sizes) with random weights.

    Raises:
        ConfigError: neither, a family that is not supported, or a misspelt size.
    """
    path = Path(source)
    if not source or not path.exists():
        raise ConfigError(
            f"bench: nothing at --model '{source}'; expected a folder of transformers, or a JSON file with "
            "model_type and sizes; pass one that is there (models are not downloaded)"
        )
    if not path.is_file():
        return load_model(path, dtype, device)[0]
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = read_object(
        path,
        "bench",
        "an object with model_type and sizes",
        "write it as config.json of transformers is written",
    )
    check_family(path, sizes)
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(
            f"bench: --dtype {dtype!r}; expected 'auto' or one of {', '.join(DTYPES)}"
        )
    place = find_device(device)
    kind = DTYPES.get(dtype, torch.bfloat16 if place.type == "cuda" else torch.float32)
    torch.manual_seed(0)
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
        _check_names(config, sizes)
        model = AutoModelForCausalLM.from_config(config, dtype=kind)
    except MidstreamError:
        raise
    except (ValueError, TypeError, RuntimeError, AttributeError, StrictDataclassError) as error:
        raise ConfigError(
            f"bench: no model can be built from '{source}' ({first_line(error)}); expected sizes that "
            "belong together, as in config.json of a checkpoint"
        ) from error
    return model.to(place).eval().requires_grad_(False)


def _check_names(config: Any, sizes: Mapping[str, Any]) -> None:
    """Refuse misspelt sizes: transformers takes any name without a word, and the default for the one meant.

    Raises:
        ConfigError: for a name that is nearly one of the config's.
    """
    kind = type(config)
    known = {*kind().to_dict(), *kind.attribute_map}
    for name in sorted(set(sizes) - known - _OLD_NAMES):
        for meant in get_close_matches(name, known, n=1, cutoff=0.8):
            raise ConfigError(
                f"bench: {kind.__name__} has no {name!r}; expected names as in config.json of a checkpoint; "
                f"did you mean {meant!r}?"
            )
        _log.warning("%s does not know %r: it may change nothing", kind.__name__, name)


def bench(
    model: Any,
    rows: Sequence[int],
    slow_rows: Sequence[int],
    calls: int,
    on_point: Callable[[Point], None] = lambda point: None,
) -> list[Point]:
    """All paths at all numbers of rows.  The path "midstream" lowers the model, and gives it back."""
    points = []
    for path in PATHS:
        compiled = compiled_for(model, max(rows)) if path == "midstream" else None
        try:
            for num in rows:
                point = _point(path, model, compiled, num, slow_rows, calls)
                points.append(point)
                on_point(point)
        finally:
            if compiled is not None:
                compiled.undo()
    return sorted(points, key=lambda point: (point.rows, PATHS.index(point.path)))


def _point(
    path: str,
    model: Any,
    compiled: CompiledModel | None,
    rows: int,
    slow_rows: Sequence[int],
    calls: int,
) -> Point:
    if path in SLOW_PATHS and model.device.type != "cuda":
        return Point(rows, path, why_not=NEEDS_GPU)
    if path in SLOW_PATHS and rows not in slow_rows:
        return Point(rows, path, why_not=_NOT_ASKED)
    try:
        with decoding(path, model, compiled, rows) as step:
            timing = measure(step, calls)
    except torch.OutOfMemoryError:
        return Point(rows, path, why_not=_NO_ROOM)
    except RuntimeError as error:  # as the CPU's allocator says it
        if "can't allocate memory" not in str(error):
            raise
        return Point(rows, path, why_not=_NO_ROOM)
    except ValueError as error:  # e.g. transformers' static cache of a model without attention
        return Point(rows, path, why_not=first_line(error))
    graph = compiled.stats()["graphs"].get(rows) if compiled is not None else None
    return Point(rows, path, timing, GraphCost(**graph) if graph else None)


def table(points: Sequence[Point]) -> list[str]:
    """One line for each point."""
    names = (
        "capture ms",
        "graph MiB",
        "nodes",
        "host us",
        "p20 us",
        "p50 us",
        "p80 us",
        "idle",
        "compiled",
    )
    widths = (10, 9, 7, 9, 9, 9, 9, 5, 8)
    columns = " ".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    head = f"{'rows':>4} {'path':15} {'first s':>8} {columns} {'again':>5}"
    return [head, *map(_line, points)]


def _line(point: Point) -> str:
    start, timing = f"{point.rows:>4} {point.path:15}", point.timing
    if timing is None:
        return f"{start} {point.why_not}"
    capture = memory = nodes = "-"
    if point.graph is not None:
        capture = f"{1e3 * point.graph.seconds:.0f}"
        memory = f"{point.graph.memory_bytes / 2**20:.1f}"
        nodes = str(point.graph.num_nodes)
    elif timing.num_kernels is not None:
        nodes = f"{timing.num_kernels:.0f}"  # launches
    idle = "-" if timing.idle_share is None else f"{timing.idle_share:.0%}"
    times = " ".join(f"{us:>9.1f}" for us in (timing.host_us, *timing.device_us))
    return (
        f"{start} {timing.first_s:>8.2f} {capture:>10} {memory:>9} {nodes:>7} {times} {idle:>5} "
        f"{timing.num_compilations:>8} {timing.num_recompilations:>5}"
    )


def setup(model: Any, source: str) -> dict[str, Any]:
    """What was measured, and on what."""
    is_cuda = model.device.type == "cuda"
    return {
        "model": source,
        "class": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "card": torch.cuda.get_device_name(model.device) if is_cuda else "none (CPU)",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "transformers": version("transformers"),
    }


def write(folder: Path, what: dict[str, Any], points: Sequence[Point]) -> list[Path]:
    """graphs.json, and graphs.png where matplotlib is installed.  Returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "graphs.json"
    data.write_text(
        json.dumps({"setup": what, "points": [asdict(p) for p in points]}, indent=1) + "\n"
    )
    if find_spec("matplotlib") is None:
        return [data]
    return [data, _plot(folder / "graphs.png", what, points)]


def _plot(path: Path, what: dict[str, Any], points: Sequence[Point]) -> Path:
    """Time of a step over rows, for each path: device solid, host dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for color, name in enumerate(PATHS):
        timed = [(p.rows, p.timing) for p in points if p.path == name and p.timing is not None]
        if timed:
            rows, times = zip(*timed, strict=True)
            axes.plot(rows, [t.device_us[1] for t in times], "o-", color=f"C{color}", label=name)
            axes.plot(rows, [t.host_us for t in times], ".--", color=f"C{color}")
    axes.set(xlabel="rows", ylabel="microseconds of a decode step (dashed: host)", yscale="log")
    axes.set_xscale("log", base=2)
    axes.set_title(f"{what['class']}, {what['dtype']}, {what['card']}")
    axes.legend()
    figure.savefig(path, dpi=120)
    return path
