"""
Chunk scans of long prompts: ours against the kernels of other packages, on the same input.

Physics: a prompt's scan reads its activations once; `of_floor` is the time that this takes at the copy rate
of the run, of the time taken.  What bounds a scan of one row is the chain of its chunks, not memory.
Both sides start without a history, write the state at the end of each row (ours into its page, float32),
and are replayed as one CUDA graph.  A peer runs only where it can be imported and agrees with ours.

    pytest bench/prefill_ops.py --benchmark-json=prefill_ops.json
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import measure
import pytest
import torch
from percentiles import percentiles_us, seconds_of
from torch import Tensor

from midstream.graphs.capture import GraphCapture
from midstream.ops.case_data import element_offset
from midstream.ops.chunk_table import CHUNK, cut_chunks
from midstream.ops.gated_delta_chunk import gated_delta_chunk
from midstream.ops.kda_chunk import kda_chunk
from midstream.ops.lightning_chunk import lightning_chunk
from midstream.ops.registry import Args, OpSpec
from midstream.ops.ssd_chunk import ssd_chunk
from midstream.ops.testing import check_kernel

GPU = torch.cuda.is_available()
ROWS = [(6000,), (750,) * 8] if GPU else [(70,), (9,) * 2]  # tokens of each row
HEADS, WIDTH = (32, 128) if GPU else (2, 16)  # of linear attention, keys and values alike
SSD_HEADS, SSD_WIDTH, SSD_SIZE = (64, 64, 128) if GPU else (2, 8, 16)
DTYPE = torch.bfloat16 if GPU else torch.float32
ROUNDS = 100 if GPU else 1
# of the largest entry: both sides round operands to bf16 (2**-9), at different places
AGREEMENT = 3e-2

Result = tuple[Tensor, Tensor]  # outputs [rows, tokens, ...] and last states [rows, ...]


@dataclass(frozen=True, slots=True)
class Scan:
    """One of our chunk ops and the peer that computes the same."""

    op: OpSpec
    inputs: Callable[[int], Args]  # of so many tokens
    state: tuple[int, ...]  # shape of one row's state
    module: str  # of the peer
    peer: Callable[[Any, Args, int], Result]  # the module, the inputs, the number of equal rows


def draw(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape).to(measure.device(), dtype)


def linear_inputs(tokens: int) -> Args:
    shape = (tokens, HEADS, WIDTH)
    return {"q": draw(*shape), "k": draw(*shape), "v": draw(*shape)}


def log_decay(*shape: int) -> Tensor:
    """From almost none to strong."""
    return -0.3 * torch.nn.functional.softplus(2.0 * draw(*shape, dtype=torch.float32))


def gated_inputs(tokens: int) -> Args:
    gates = {"g": log_decay(tokens, HEADS), "beta": draw(tokens, HEADS).sigmoid()}
    return linear_inputs(tokens) | gates


def kda_inputs(tokens: int) -> Args:
    return gated_inputs(tokens) | {"g": log_decay(tokens, HEADS, WIDTH)}


def lightning_inputs(tokens: int) -> Args:
    return linear_inputs(tokens) | {"g": log_decay(HEADS)}


def ssd_inputs(tokens: int) -> Args:
    return {
        "x": draw(tokens, SSD_HEADS, SSD_WIDTH),
        "dt": draw(tokens, SSD_HEADS),
        "A_log": draw(SSD_HEADS, dtype=torch.float32) / 2,
        "B": draw(tokens, 1, SSD_SIZE),
        "C": draw(tokens, 1, SSD_SIZE),
        "D": draw(SSD_HEADS),
        "dt_bias": draw(SSD_HEADS) - 1,
        "dt_min": 0.0,
        "dt_max": float("inf"),
    }


def by_row(value: Tensor, rows: int) -> Tensor:
    """[T, ...] as [rows, T / rows, ...]."""
    return value.unflatten(0, (rows, -1))


def delta_peer(name: str, module: Any, args: Args, rows: int) -> Result:
    named = {key: by_row(args[key], rows) for key in ("q", "k", "v", "g", "beta")}
    run = getattr(module, name)
    out, state = run(**named, output_final_state=True, use_qk_l2norm_in_kernel=True)
    return out, state.transpose(-1, -2)  # ours has keys last


def lightning_peer(module: Any, args: Args, rows: int) -> Result:
    named = {key: by_row(args[key], rows) for key in ("q", "k", "v")}
    out, state = module.chunk_simple_gla(
        **named, g_gamma=args["g"], scale=1.0, output_final_state=True
    )
    return out, state.transpose(-1, -2)  # ours has keys last


def ssd_peer(module: Any, args: Args, rows: int) -> Result:
    x, dt, B, C = (by_row(args[name], rows) for name in ("x", "dt", "B", "C"))
    return module.mamba_chunk_scan_combined(
        x, dt, -torch.exp(args["A_log"]), B, C, chunk_size=256, D=args["D"],
        dt_bias=args["dt_bias"], dt_softplus=True, return_final_states=True,
    )  # fmt: skip


LINEAR = (HEADS, WIDTH, WIDTH)
SCANS = {
    "ssd": Scan(
        ssd_chunk, ssd_inputs, (SSD_HEADS, SSD_WIDTH, SSD_SIZE),
        "mamba_ssm.ops.triton.ssd_combined", ssd_peer,
    ),
    "gated_delta": Scan(
        gated_delta_chunk, gated_inputs, LINEAR,
        "fla.ops.gated_delta_rule", partial(delta_peer, "chunk_gated_delta_rule"),
    ),
    "kda": Scan(kda_chunk, kda_inputs, LINEAR, "fla.ops.kda", partial(delta_peer, "chunk_kda")),
    "lightning": Scan(
        lightning_chunk, lightning_inputs, LINEAR, "fla.ops.simple_gla", lightning_peer
    ),
}  # fmt: skip
each_scan = pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS)
each_step = pytest.mark.parametrize(
    "lengths", ROWS, ids=lambda lengths: f"{len(lengths)}x{lengths[0]}"
)


@functools.cache
def gate(name: str) -> None:
    """No figures unless our kernel equals its reference (on the CPU it is the reference)."""
    op = SCANS[name].op
    for case in op.cases if GPU else ():
        check_kernel(op, case, torch.bfloat16, measure.device())


@each_scan
@each_step
def test_ours(benchmark: Any, scan: Scan, lengths: tuple[int, ...]) -> None:
    gate(next(name for name in SCANS if SCANS[name] is scan))
    args = our_args(scan, lengths)
    time_replays(benchmark, partial(scan.op, **args), scan, args, "ours")


@each_scan
@each_step
def test_peer(benchmark: Any, scan: Scan, lengths: tuple[int, ...]) -> None:
    module = import_peer(scan.module)
    args, rows = our_args(scan, lengths), len(lengths)
    scan.op(**args)
    result = peer_result(scan, module, args, rows)
    check_agreement(args, result, rows)
    work = partial(peer_result, scan, module, args, rows)
    time_replays(benchmark, work, scan, args, scan.module)


def our_args(scan: Scan, lengths: tuple[int, ...]) -> Args:
    """Random inputs; row r has no history and ends in page r + 1."""
    torch.manual_seed(0)
    device, rows, tokens = measure.device(), len(lengths), sum(lengths)
    table = cut_chunks(lengths, range(1, rows + 1))
    inputs = scan.inputs(tokens)
    like = inputs["x"] if "x" in inputs else inputs["v"]
    elements = torch.Size(scan.state).numel()
    return {
        "arena": torch.zeros((1 + rows, elements), device=device),
        "out": torch.zeros_like(like),
        **inputs,
        "offset": element_offset(0).to(device),
        "read_page": torch.zeros(rows, dtype=torch.int32, device=device),
        "chunk_start": table.chunk_start.to(device),
        "chunk_row": table.chunk_row.to(device),
        "chunk_page": table.chunk_page.to(device),
        "row_chunk": table.row_chunk.to(device),
    }


def import_peer(name: str) -> Any:
    """The peer's module; skips where there is no GPU or no such package."""
    if not GPU:
        pytest.skip(f"{name} needs a CUDA device")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} cannot be imported: {error}")


@torch.no_grad()
def peer_result(scan: Scan, module: Any, args: Args, rows: int) -> Result:
    return scan.peer(module, args, rows)


def check_agreement(args: Args, peer: Result, rows: int) -> None:
    """Outputs and last states of both sides are equal up to the rounding of bf16."""
    ours = by_row(args["out"], rows), args["arena"][1:].view_as(peer[1])
    for name, one, other in zip(("out", "state"), ours, peer, strict=True):
        error = (one.float() - other.float()).abs().max() / one.float().abs().max()
        assert error < AGREEMENT, f"{name} differs by {error:.1e} of the largest entry"


def time_replays(
    benchmark: Any, work: Callable[[], object], scan: Scan, args: Args, who: str
) -> None:
    def run() -> None:
        work()

    replay = GraphCapture(measure.device()).capture(run, dict, who).replay if GPU else run
    moved, operations = scan.op.traffic(args)
    benchmark._timer = measure.clock()
    benchmark.pedantic(replay, iterations=5 if GPU else 1, rounds=ROUNDS, warmup_rounds=1)
    measure.describe(
        benchmark,
        moved,
        who=who,
        op=scan.op.name,
        operations=operations,
        chunk=CHUNK,
        dtype=str(DTYPE),
        **percentiles_us(seconds_of(benchmark), 1),
    )
