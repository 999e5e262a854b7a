"""
The tensors that ops of linear attention take: what launchers accept, and random ones for cases.

Letters: R rows, T tokens, N pages, E elements of a page, H value heads, G key heads (head h uses key
head h // (H // G)), K key width, V value width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from midstream.errors import ContractError
from midstream.ops.case_data import (
    bench_arena,
    chunk_pages,
    decode_pages,
    draw,
    draw_pitched,
    element_offset,
    poisoned_arena,
)
from midstream.ops.registry import Args, OpCase

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of states and of activations
MAX_KEY_WIDTH = 256  # a program holds whole columns of the state
_START = 192  # element at which the region of a case starts
_OUTSIDE = 5  # tokens of no chunk behind a packed step, all NaN


def check_heads(name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse activations that the kernels cannot read.

    Raises:
        ContractError: heads, widths or strides do not fit.
    """
    if v.shape[1] % k.shape[1] or q.shape != k.shape or k.shape[2] > MAX_KEY_WIDTH:
        raise ContractError(
            f"{name}: q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit; q "
            f"and k must be equal, of width <= {MAX_KEY_WIDTH}, and v's heads a multiple of theirs"
        )
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        raise ContractError(
            f"{name}: q, k and v end in strides {q.stride(-1)}, {k.stride(-1)}, {v.stride(-1)}, "
            "expected 1; make their last dimension contiguous"
        )


def check_linear(name: str, arena: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse what the kernels cannot read or write.

    Raises:
        ContractError: heads, widths, strides or dtypes do not fit.
    """
    check_heads(name, q, k, v)
    if arena.dtype not in DTYPES:
        raise ContractError(
            f"{name}: states are {arena.dtype}, expected float32, bfloat16 or float16; allocate the "
            "arena with one of these"
        )
    if not (q.dtype == k.dtype == v.dtype and q.dtype in DTYPES):
        raise ContractError(
            f"{name}: q, k and v are {q.dtype}, {k.dtype} and {v.dtype}, expected the same of float32, "
            "bfloat16 and float16; cast them before the call"
        )
    if out.shape != v.shape or out.stride(-1) != 1:
        raise ContractError(
            f"{name}: out has shape {tuple(out.shape)} and strides {out.stride()}, expected the shape of "
            f"v, {tuple(v.shape)}, and a contiguous last dimension; allocate it like v"
        )


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Sizes of a random layer."""

    heads: int = 4
    key_heads: int = 2
    key_width: int = 16
    value_width: int = 32
    gap: int = 0  # elements between the tokens of q, k and v
    state_dtype: torch.dtype | None = torch.float32  # None: as the activations

    @property
    def elements(self) -> int:
        """Of one layer's state."""
        return self.heads * self.key_width * self.value_width

    def __str__(self) -> str:
        sizes = f"H{self.heads}-G{self.key_heads}-K{self.key_width}-V{self.value_width}"
        gap = f"-gap{self.gap}" if self.gap else ""
        return sizes + gap + ("" if self.state_dtype else "-own")


def draw_heads(rng: torch.Generator, tokens: int, dtype: torch.dtype, shape: LinearShape) -> Args:
    """Queries, keys and values, and an output of NaN."""
    pitched = partial(draw_pitched, rng, tokens, dtype=dtype, gap=shape.gap)
    return {
        "out": torch.full((tokens, shape.heads, shape.value_width), float("nan"), dtype=dtype),
        "q": pitched(shape.key_heads, shape.key_width),
        "k": pitched(shape.key_heads, shape.key_width),
        "v": pitched(shape.heads, shape.value_width),
    }


def decode_args(rng: torch.Generator, dtype: torch.dtype, rows: int, shape: LinearShape) -> Args:
    """Rows in turn: in place, to another page, fresh, padding."""
    pages, read_page, write_page = decode_pages(rows, rng)
    live = read_page[:rows][write_page[:rows] > 0].tolist()
    state_dtype = shape.state_dtype or dtype
    return {
        "arena": poisoned_arena(rng, pages, _START, shape.elements, live, state_dtype),
        **draw_heads(rng, rows, dtype, shape),
        "offset": element_offset(_START),
        "read_page": read_page,
        "write_page": write_page,
    }


def chunk_args(
    rng: torch.Generator,
    dtype: torch.dtype,
    lengths: Sequence[int],
    exports: Sequence[Sequence[int]],
    shape: LinearShape,
) -> Args:
    """Rows as `chunk_pages` has them, a row without tokens, then tokens of no chunk, which are NaN."""
    plan = chunk_pages((*lengths, 0), exports, rng)
    live = plan.read_page[: len(lengths)].tolist()
    state_dtype = shape.state_dtype or dtype
    tokens = draw_heads(rng, sum(lengths) + _OUTSIDE, dtype, shape)
    for name in ("q", "k", "v"):
        tokens[name][sum(lengths) :] = float("nan")
    return {
        "arena": poisoned_arena(rng, plan.pages, _START, shape.elements, live, state_dtype),
        **tokens,
        "offset": element_offset(_START),
        "read_page": plan.read_page,
        "chunk_start": plan.table.chunk_start,
        "chunk_row": plan.table.chunk_row,
        "chunk_page": plan.table.chunk_page,
        "row_chunk": plan.table.row_chunk,
    }


Gates = Callable[[torch.Generator, int, torch.dtype, LinearShape], Args]


def draw_gates(rng: torch.Generator, tokens: int, dtype: torch.dtype, shape: LinearShape) -> Args:
    """Decay and strength of the update, for every token and head."""
    g = draw_log_decays(rng, tokens, shape.heads)
    return {"g": g, "beta": draw_strengths(rng, tokens, dtype, shape)}


def draw_log_decays(rng: torch.Generator, *shape: int) -> Tensor:
    """From almost none to strong."""
    return -0.3 * torch.nn.functional.softplus(2.0 * draw(rng, *shape, dtype=torch.float32))


def draw_strengths(
    rng: torch.Generator, tokens: int, dtype: torch.dtype, shape: LinearShape
) -> Tensor:
    """Of updates, in (0, 1)."""
    return draw(rng, tokens, shape.heads, dtype=torch.float32).sigmoid().to(dtype)


def step_case(gates: Gates, rows: int = 4, **changes: Any) -> OpCase:
    """A step of a random layer, the sizes of which differ from `LinearShape()` by `changes`."""
    shape = LinearShape(**changes)

    def build(rng: torch.Generator, dtype: torch.dtype, device: torch.device) -> Args:
        args = decode_args(rng, dtype, rows, shape) | gates(rng, rows, dtype, shape)
        return {name: value.to(device) for name, value in args.items()}

    return OpCase(f"R{rows}-{shape}", build)


def bench_step_cases(gates: Gates, shape: LinearShape) -> tuple[OpCase, ...]:
    """Every row in place, at the sizes of a real model and in two dtypes of the state."""

    def build(
        rng: torch.Generator,
        dtype: torch.dtype,
        device: torch.device,
        rows: int,
        state_dtype: torch.dtype,
    ) -> Args:
        arena, page = bench_arena(rng, rows, shape.elements, state_dtype)
        host = torch.Generator().manual_seed(0)
        args = draw_heads(host, rows, dtype, shape) | gates(host, rows, dtype, shape)
        args = {name: value.to(device) for name, value in args.items()}
        offset = element_offset(0).to(device)
        return {"arena": arena, **args, "offset": offset, "read_page": page, "write_page": page}

    return tuple(
        OpCase(
            f"R{rows}-{shape}-{str(state_dtype).removeprefix('torch.')}",
            partial(build, rows=rows, state_dtype=state_dtype),
        )
        for state_dtype in (torch.float32, torch.bfloat16)
        for rows in (1, 32, 256)
    )


def step_traffic(args: Args) -> tuple[int, int]:
    """Bytes and operations of a step: the state once in and once out, and three products per element."""
    arena, k, v = args["arena"], args["k"], args["v"]
    live = int(args["write_page"][: v.shape[0]].count_nonzero())
    states = live * v.shape[1] * k.shape[2] * v.shape[2]
    around = sum(args[name].numel() * args[name].element_size() for name in ("out", "q", "k", "v"))
    return 2 * states * arena.element_size() + around, 8 * states


def chunk_traffic(args: Args, chunk: int) -> tuple[int, int]:
    """Bytes and operations of chunks of `chunk` tokens: activations once, a state per row and page."""
    arena, k, v = args["arena"], args["k"], args["v"]
    tokens, state = int(args["chunk_start"][-1]), v.shape[1] * k.shape[2] * v.shape[2]
    rows, pages = args["row_chunk"].diff().count_nonzero(), args["chunk_page"].count_nonzero()
    per_token = sum(
        args[name][0].numel() * args[name].element_size() for name in ("out", "q", "k", "v")
    )
    moved = int(rows + pages) * state * arena.element_size() + tokens * per_token
    within = chunk * v.shape[1] * (k.shape[2] + v.shape[2])
    return moved, tokens * (4 * state + 2 * within)
