"""
Moving state pages ahead of a step: what it costs when no row crosses a block boundary, and its copy rate.

Physics: a move reads and writes one page, so its floor is 2 x page / copy rate; without a move there are
only the nodes of the graph.  `nothing_crosses` runs one pass or many in a graph, each time right after a
graph of as many one-element kernels (`empty`).  `moves` walks through more pages than the L2 cache holds.

    pytest bench/migration.py --benchmark-json=migration.json      (--state-dtype bfloat16)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import measure
import pytest
import torch
from percentiles import percentiles_us, seconds_of
from torch import Tensor

from midstream.compiler.layout import LayerState, StateLayout
from midstream.graphs.capture import GraphCapture
from midstream.ops.advance import advance
from midstream.ops.page_move import page_move
from midstream.ops.testing import check_kernel, check_reference
from midstream.runtime.device_step import DeviceStep
from midstream.runtime.slots import SlotLayout, SlotMemory
from midstream.runtime.stage import Stage, stage_limits

GPU = torch.cuda.is_available()
BLOCK = 64  # tokens
ROWS = 256 if GPU else 8
PASSES = 100 if GPU else 2  # in one graph: what a pass adds to a longer graph
ROUNDS = 200 if GPU else 3
POOL_BYTES = 2**32 if GPU else 2**14  # walked through by the moves of one graph

# layers, temporal shape, channels of the convolution
PAGES = {
    "B2": (21, (64, 64, 128), 4352),  # 44.6 MB with float32 state
    "36x2MB": (36, (32, 128, 128), 8192),  # 77.3 MB
    "4x2MB": (4, (32, 128, 128), 8192),  # 8.6 MB
}
TINY = (2, (2, 4, 8), 48)  # for the CPU: shows that the suite runs


@pytest.fixture(scope="module", autouse=True)
def gate() -> None:
    """No figures unless both ops equal their references bit for bit."""
    cases = (*op_cases(advance), *op_cases(page_move))
    for spec, case in [pair for pair in cases if pair[1] in pair[0].cases[:2]]:
        if GPU:
            check_kernel(spec, case, torch.bfloat16, measure.device())


@pytest.mark.parametrize("passes", [1, PASSES])
@pytest.mark.parametrize("migration", ["copyfree", "precopy"])
def test_nothing_crosses(benchmark: Any, state_dtype: str, migration: str, passes: int) -> None:
    """All rows in the middle of their blocks; the copy-free form has no node for moves at all."""
    work = migrate(layout_of("B2", state_dtype), migration == "precopy")
    element = torch.zeros(1, device=measure.device())
    replay = captured(lambda: repeat(work, passes), migration)
    empty = captured(lambda: repeat(lambda: element.add_(1), passes), "empty")
    now, empty_seconds = measure.clock(), list[float]()

    def time_empty() -> None:
        begin = now()
        empty()
        empty_seconds.append(now() - begin)

    benchmark._timer = now
    benchmark.pedantic(replay, setup=time_empty, rounds=ROUNDS, warmup_rounds=3)
    pass_us = percentiles_us(seconds_of(benchmark), passes)
    empty_us = percentiles_us(empty_seconds[3:], passes)
    measure.describe(
        benchmark,
        rows=ROWS,
        passes=passes,
        **pass_us,
        empty_us=empty_us,
        above_empty_us=round(pass_us["p50_us"] - empty_us["p50_us"], 3),
    )


@pytest.mark.parametrize(("moves", "rows"), [(1, 1), (16, 16), (4, 256)], ids=lambda n: str(n))
@pytest.mark.parametrize("pages", PAGES)
def test_moves(benchmark: Any, state_dtype: str, pages: str, moves: int, rows: int) -> None:
    """`moves` of `rows` rows change their page."""
    layout = layout_of(pages, state_dtype)
    steps = max(1, POOL_BYTES // (2 * moves * layout.page_bytes))
    arenas = layout.allocate(1 + 2 * moves * steps, measure.device())
    for arena in arenas:
        arena.normal_()
    listed = move_lists(moves, steps, rows)
    offset_and_width = layout.conv_table(measure.device())
    replay = captured(lambda: move_all(arenas, listed, offset_and_width, layout.window_rows), pages)
    replay()
    assert all(same_pages(arena, listed, moves) for arena in arenas)

    benchmark._timer = measure.clock()
    benchmark.pedantic(replay, iterations=5, rounds=max(3, ROUNDS // 5), warmup_rounds=1)
    measure.describe(
        benchmark,
        2 * moves * steps * layout.page_bytes,
        pages=pages,
        page_bytes=layout.page_bytes,
        state_dtype=state_dtype,
        moves=moves,
        rows=rows,
        steps_per_replay=steps,
        **percentiles_us(seconds_of(benchmark), steps),
    )


def layout_of(pages: str, state_dtype: str) -> StateLayout:
    """One state page of the named kind; tiny on the CPU."""
    layers, temporal_shape, channels = PAGES[pages] if GPU else TINY
    states = [LayerState(i, "ssd", temporal_shape, 3, channels) for i in range(layers)]
    return StateLayout.of(states, getattr(torch, state_dtype), torch.bfloat16)


def migrate(layout: StateLayout, precopy: bool) -> Callable[[], None]:
    """What a decode step of ROWS rows does between its deltas and its layers, nothing crossing."""
    device, no_model = measure.device(), None
    slots = SlotMemory.allocate(SlotLayout(ROWS, state_cols=1, kv_cols=1), device)
    slots.computed.fill_(BLOCK // 2)
    slots.accepted.fill_(1)
    slots.state_table[:, 0] = 1 + torch.arange(ROWS)
    stage, arenas = Stage(stage_limits(ROWS, ROWS, BLOCK), device), layout.allocate(1 + ROWS, device)
    step = DeviceStep(no_model, slots, stage, layout, arenas, BLOCK, precopy)  # type: ignore[arg-type]
    view = stage.decode_view(ROWS)
    view.row_slot.copy_(torch.arange(ROWS))
    view.row_start.copy_(torch.arange(ROWS + 1))

    def work() -> None:
        step._advance(view, ROWS)
        if precopy:
            page_move(
                step.temporal, step.conv, step.move_from, step.move_to, step.move_shift,
                step.num_moves, step.conv_offset, step.conv_width, step.window_rows,
            )  # fmt: skip

    work()
    assert int(step.num_moves) == 0 and torch.equal(view.read_page, slots.state_table[:, 0])
    return work


def move_lists(moves: int, steps: int, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Source i32[2, rows] and target i32[rows] pages of each step, drawn without repetition."""
    drawn = 1 + torch.randperm(2 * moves * steps, dtype=torch.int32)
    listed = []
    for source, target in drawn.view(steps, 2, moves):
        move = torch.zeros((3, rows), dtype=torch.int32)
        move[:2, :moves], move[2, :moves] = source, target
        move = move.to(measure.device())
        listed.append((move[:2], move[2]))
    return listed


def move_all(
    arenas: tuple[Tensor, Tensor], listed: list[tuple[Tensor, Tensor]], windows: tuple[Tensor, Tensor],
    num_moves: Tensor, window_rows: int,
) -> None:  # fmt: skip
    """One `page_move` per step; no window is shifted."""
    for source, target in listed:
        shift = torch.zeros_like(target)
