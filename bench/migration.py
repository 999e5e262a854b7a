"""
Moving state pages ahead of a step: what it costs when no row crosses a block boundary, and its copy rate.

Physics: a move reads and writes one page, so its floor is 2 x page / copy rate; without a move there are
only the nodes of the graph.  Short moves also pay for their launch, so each row has the time of one plain
copy of as many bytes.  `nothing_crosses` replays one pass or many passes, each time right after a
graph of as many one-element kernels.  `moves` walks through more pages than the L2 cache holds.

    pytest bench/migration.py --benchmark-json=migration.json      (--state-dtype bfloat16)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import measure
import pytest
import torch
from percentiles import percentiles_us, seconds_of
from torch import Tensor

from midstream.compiler.layout import LayerState, StateLayout
from midstream.ops.advance import advance
from midstream.ops.page_move import page_move
from midstream.ops.testing import check_kernel
from midstream.runtime.device_step import DeviceStep
from midstream.runtime.slots import SlotLayout, SlotMemory
from midstream.runtime.stage import Stage, stage_limits

GPU = torch.cuda.is_available()
BLOCK = 64  # tokens
ROWS = 256 if GPU else 8
PASSES = 100 if GPU else 2  # in one graph: what a pass adds to a longer graph
ROUNDS = 200 if GPU else 3
POOL_BYTES = 2**32 if GPU else 2**14  # that the moves of one graph walk through

# layers, temporal shape, channels of the convolution
PAGES = {
    "B2": (21, (64, 64, 128), 4352),  # 44.6 MB with float32 state
    "36x2MB": (36, (32, 128, 128), 8192),  # 77.3 MB
    "4x2MB": (4, (32, 128, 128), 8192),  # 8.6 MB
}
TINY = (2, (2, 4, 8), 48)  # for the CPU: shows that the suite runs


@dataclass(frozen=True, slots=True)
class Moves:
    """What `page_move` reads for one step."""

    source: Tensor  # i32[2, R]
    target: Tensor  # i32[R]
    shift: Tensor  # i32[R]
    count: Tensor  # i32[1]


@pytest.fixture(scope="module", autouse=True)
def gate() -> None:
    """No figures unless both kernels equal their references bit for bit (on the CPU they are these)."""
    for spec in (advance, page_move) if GPU else ():
        for case in spec.cases[:2]:
            check_kernel(spec, case, torch.bfloat16, measure.device())


@pytest.mark.parametrize("passes", [1, PASSES])
@pytest.mark.parametrize("migration", ["copyfree", "precopy"])
def test_nothing_crosses(benchmark: Any, state_dtype: str, migration: str, passes: int) -> None:
    """All rows in the middle of their blocks; the copy-free form has no node for moves at all."""
    work = migration_of(layout_of("B2", state_dtype), migration == "precopy")
    element = torch.zeros(1, device=measure.device())
    replay = measure.captured(partial(repeat, work, passes), migration)
    empty = measure.captured(partial(repeat, partial(element.add_, 1), passes), "empty")
    now = measure.clock()
    empty_seconds: list[float] = []

    def time_empty() -> None:
        begin = now()
        empty()
        empty_seconds.append(now() - begin)

    benchmark._timer = now
    benchmark.pedantic(replay, setup=time_empty, rounds=ROUNDS, warmup_rounds=3)
    this, other = (percentiles_us(s, passes) for s in (seconds_of(benchmark), empty_seconds))
    above_us = round(this["p50_us"] - other["p50_us"], 3)
    measure.describe(
        benchmark, None, rows=ROWS, passes=passes, **this, empty=other, above_empty_us=above_us
    )


@pytest.mark.parametrize("moves, among", [(1, 1), (16, 16), (4, 256)])
@pytest.mark.parametrize("pages", PAGES)
def test_moves(benchmark: Any, state_dtype: str, pages: str, moves: int, among: int) -> None:
    """`moves` rows among as many change their page."""
    layout = layout_of(pages, state_dtype)
    steps = max(1, POOL_BYTES // (2 * moves * layout.page_bytes))
    temporal, conv = layout.allocate(1 + 2 * moves * steps, measure.device())
    listed, windows = draw_moves(moves, among, steps), layout.conv_table(measure.device())

    def move_all() -> None:
        for m in listed:
            page_move(
                temporal, conv, m.source, m.target, m.shift, m.count, *windows, layout.window_rows
            )

    replay = measure.captured(move_all, pages)
    check_moves((temporal, conv), listed, replay)
    benchmark._timer = measure.clock()
    benchmark.pedantic(replay, iterations=5, rounds=max(3, ROUNDS // 2), warmup_rounds=1)
    measure.describe(
        benchmark,
        2 * moves * steps * layout.page_bytes,
        page_bytes=layout.page_bytes,
        state_dtype=state_dtype,
        steps_per_replay=steps,
        plain_copy_us=round(measure.copy_us(2 * moves * layout.page_bytes), 3),
        **percentiles_us(seconds_of(benchmark), steps),
    )


def layout_of(pages: str, state_dtype: str) -> StateLayout:
    """State pages of the named size; tiny on the CPU."""
    layers, temporal_shape, channels = PAGES[pages] if GPU else TINY
    states = [LayerState(i, "ssd", temporal_shape, 3, channels) for i in range(layers)]
    return StateLayout.of(states, getattr(torch, state_dtype), torch.bfloat16)


def migration_of(layout: StateLayout, precopy: bool) -> Callable[[], None]:
    """What a decode step does before its layers; each of ROWS rows has one page and stays on it."""
    device, no_model = measure.device(), None
    slots = SlotMemory.allocate(SlotLayout(ROWS, state_cols=1, kv_cols=1), device)
    slots.computed.fill_(BLOCK // 2)
    slots.accepted.fill_(1)
    slots.state_table[:, 0] = torch.arange(1, ROWS + 1)
    stage = Stage(stage_limits(ROWS, ROWS, BLOCK), device)
    arenas = layout.allocate(1 + ROWS, device)
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
    assert int(step.num_moves) == 0
    assert torch.equal(view.read_page, slots.state_table[:, 0])
    assert torch.equal(view.write_page, slots.state_table[:, 0])
    return work


def draw_moves(moves: int, among: int, steps: int) -> list[Moves]:
    """Lists of capacity `among` with `moves` entries; no page occurs twice in all steps together."""
    device = measure.device()
    pages = 1 + torch.randperm(2 * moves * steps, dtype=torch.int32).view(steps, 2, moves)
    count, listed = torch.tensor([moves], dtype=torch.int32, device=device), []
    for source, target in pages.to(device):
        to, shift = torch.zeros((2, among), dtype=torch.int32, device=device)
        to[:moves] = target
        start = torch.zeros((2, among), dtype=torch.int32, device=device)
        start[:, :moves] = source
        listed.append(Moves(start, to, shift, count))
    return listed


def check_moves(
    arenas: tuple[Tensor, Tensor], listed: list[Moves], replay: Callable[[], None]
) -> None:
    """Every moved page equals its source, of random content, bit for bit."""
    for arena in arenas:
        arena.normal_()
    replay()
    for m in listed:
        count = int(m.count)
        pairs = zip(m.source[0, :count].tolist(), m.target[:count].tolist(), strict=True)
        assert all(torch.equal(arena[a], arena[b]) for a, b in pairs for arena in arenas)


def repeat(work: Callable[[], object], times: int) -> None:
    for _ in range(times):
        work()
