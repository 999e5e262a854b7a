"""Chunks of one row at a time, for tests that state claims about ops of linear attention."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from midstream.ops.chunk_table import cut_chunks
from midstream.ops.linear_heads import LinearShape, draw_heads
from midstream.ops.registry import Args, OpSpec

PER_TOKEN = ("out", "q", "k", "v", "g", "beta")
TABLES = ("chunk_start", "chunk_row", "chunk_page", "row_chunk")
LONG = 4000  # tokens after which the drift of a state must still be bounded


def token_args(args: Args, tokens: slice) -> Args:
    """What an op takes besides page and chunk numbers, for some of the tokens; g may be one per head."""
    cut = [n for n in PER_TOKEN if n in args and (n != "g" or args["g"].dim() > 1)]
    whole = [n for n in ("arena", "offset", "g") if n in args and n not in cut]
    return {n: args[n][tokens] for n in cut} | {n: args[n] for n in whole}


def run_alone(
    launch: Callable[..., None], args: Args, row: int, start: int, end: int, page: int
) -> None:
    """Run tokens [start, end) of a row as a step of their own that ends in `page`."""
    table = cut_chunks((end - start,), (page,))
    tables = {name: getattr(table, name).to(args["q"].device) for name in TABLES}
    read_page = args["read_page"][row:]
    launch(**token_args(args, slice(start, end)), read_page=read_page, **tables)


def run_steps(step: Callable[..., None], args: Args, count: int) -> None:
    """Run the first tokens one by one, in place on the first row's page."""
    page = args["read_page"][:1]
    for t in range(count):
        step(**token_args(args, slice(t, t + 1)), read_page=page, write_page=page)


def drift(spec: OpSpec, gates: Callable[..., Args], state_dtype: torch.dtype) -> float:
    """Largest error of state and outputs in LONG steps in place, relative to the largest entry of each.

    Runs what serves the device at hand, next to the reference in float64.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    exact = _long_run(spec.reference, gates)
    run = _draw_long(gates)
    run["arena"] = run["arena"].to(state_dtype)
    run = {name: value.to(device) for name, value in run.items()}
    run_steps(spec, run, LONG)
    return max(relative(run[name], exact[name]) for name in ("arena", "out"))


@functools.cache
def _long_run(reference: Callable[..., None], gates: Callable[..., Args]) -> Args:
    args = _draw_long(gates)
    exact = {n: v.double() if v.is_floating_point() else v for n, v in args.items()}
    run_steps(reference, exact, LONG)
    return exact


def _draw_long(gates: Callable[..., Args]) -> Args:
    rng = torch.Generator().manual_seed(3)
    shape = LinearShape(heads=1, key_heads=1, key_width=4, value_width=8)
    return {
        **draw_heads(rng, LONG, torch.float32, shape),
        **gates(rng, LONG, shape),
        "arena": torch.zeros(2, 64),
        "offset": torch.zeros(1, dtype=torch.int64),
        "read_page": torch.ones(1, dtype=torch.int32),
    }


def relative(have: Tensor, want: Tensor) -> float:
    """Largest error, relative to the largest entry."""
    return float((have.cpu().double() - want).abs().max() / want.abs().max())


def far_page(args: Args, row: int) -> Args:
    """Arguments of a step of one row alone, whose page starts behind 2**31 elements."""
    device, size = args["arena"].device, args["arena"].shape[1]
    arena = torch.empty((3, 2**30 + 2**29), dtype=args["arena"].dtype, device=device)
    arena[2, :size] = args["arena"][args["read_page"][row].item()]
    page = torch.full((1,), 2, dtype=torch.int32, device=device)
    alone = token_args({**args, "out": args["out"].clone()}, slice(row, row + 1))
    return alone | {"arena": arena, "read_page": page, "write_page": page}
