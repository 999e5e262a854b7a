"""Steps captured in pieces: a replay equals eager, ops between them run anew, failures leave nothing open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from oracles import five_prompts, guarded_engine, serve
from piece_recorder import PieceRecorder
from tiny_models import FAMILIES, VOCAB, build
from torch import Tensor

import midstream
from midstream import ContractError
from midstream.graphs.captured import Recorder
from midstream.graphs.dispatch import GraphKey
from midstream.graphs.emulator import EmulatedCapture
from midstream.graphs.piecewise import SPLITTING_OPS, PiecewiseCapture
from midstream.ops.gates import import_all_ops
from midstream.ops.interception import intercepting
from midstream.ops.kv_write import kv_write
from midstream.ops.registry import OPS
from midstream.runtime.runner import StepRunner

SMALL = {
    "state_block": 16, "kv_block": 4, "max_rows": 4, "num_state_pages": 60, "num_kv_pages": 200,
    "max_step_tokens": 64, "compile": "eager",
}  # fmt: skip
RECORDERS = [PieceRecorder, EmulatedCapture]


# -- a step of kv_write ops between torch operations -------------------------------------------------


class Write:
    """Writes x and 2x into pages, then sums a page: three graphs around two ops."""

    def __init__(self) -> None:
        self.x = torch.ones(1, 2, 8)
        self.arena = torch.zeros(4, 2 * 2 * 4 * 8)
        self.slot = torch.tensor([5], dtype=torch.int32)
        self.offset = torch.zeros(1, dtype=torch.int64)
        self.sum = torch.zeros(1)
        self.num_runs = 0

    def __call__(self) -> None:
        self.num_runs += 1
        for factor in (1.0, 2.0):
            scaled = self.x * factor
            kv_write(self.arena, scaled, scaled + 1.0, self.offset, self.slot, 4)
        self.sum.copy_(self.arena.sum())

    def addresses(self) -> dict[str, int]:
        return {"x": self.x.data_ptr(), "slot": self.slot.data_ptr()}


@contextmanager
def counting_calls(into: list[str]) -> Iterator[None]:
    """Notes the ops that run, by name."""

    def see(name: str, implementation: Callable[..., None], args: Any, kwargs: Any) -> None:
        into.append(name)
        implementation(*args, **kwargs)

    with intercepting(see):
        yield


@pytest.mark.parametrize("make", RECORDERS)
def test_a_replay_reads_its_buffers_anew_in_graphs_and_in_the_ops_between(
    make: Callable[[], Recorder],
) -> None:
    step = Write()
    pieces = PiecewiseCapture(make()).capture(step, step.addresses, "write")
    assert (pieces.num_graphs, pieces.num_calls) == (3, 2)
    num_runs = step.num_runs
    for value, slot in ((3.0, 6), (5.0, 11)):
        step.arena.zero_()
        step.x.fill_(value)
        step.slot.fill_(slot)
        pieces.replay()
        # the second op wrote 2x and 2x + 1 over what the first wrote
        assert step.sum.item() == 16 * (2 * value + 2 * value + 1)
    assert step.num_runs == num_runs, "Python ran again"


def test_an_op_is_remembered_and_not_run_while_recording() -> None:
    step, ran = Write(), list[str]()
    recorder = PieceRecorder()
    warm_up = recorder.warm_up

    def count_warm_up(step: Callable[[], None]) -> None:
        warm_up(step)
        step_arena[:] = [work.arena.clone()]
        work.arena.zero_()

    work, step_arena = step, list[Tensor]()
    recorder.warm_up = count_warm_up  # type: ignore[method-assign]
    pieces = PiecewiseCapture(recorder).capture(step, step.addresses, "write")
    assert step_arena[0].any() and not step.arena.any()
    pieces.replay()
    assert step.arena.any() and ran == []


@pytest.mark.parametrize(
    ("ops", "graphs", "calls"),
    [(SPLITTING_OPS, 3, 2), ({"kv_write"}, 3, 2), ({"ssd_chunk"}, 1, 0), ((), 1, 0)],
    ids=["default", "kv_write", "another", "none"],
)
def test_the_parameter_says_which_ops_split(ops: Any, graphs: int, calls: int) -> None:
    step = Write()
    pieces = PiecewiseCapture(PieceRecorder(), ops).capture(step, step.addresses, "write")
    assert (pieces.num_graphs, pieces.num_calls) == (graphs, calls)
    step.arena.zero_()
    step.sum.zero_()
    pieces.replay()
    assert step.sum.item() == 16 * 5


def test_every_splitting_op_is_an_op_of_ours() -> None:
    import_all_ops()
    assert set(OPS) >= SPLITTING_OPS
    # what moves pages, advances records, samples and projects stays inside of graphs
    others = {
        "advance",
        "gemv",
        "rms_norm",
        "skinny_linear",
        "static_attention_decode",
        "page_move",
        "sample",
        "scatter_slots",
        "post_copy",
        "page_convert",
    }
    assert {name for name in OPS if "::" not in name} - SPLITTING_OPS <= others


def test_nodes_and_memory_are_sums_over_the_pieces() -> None:
    step, recorder = Write(), PieceRecorder()
    pieces = PiecewiseCapture(recorder).capture(step, step.addresses, "write")
    assert pieces.num_nodes == sum(piece.num_nodes for piece in recorder.pieces) == 6
    assert pieces.memory_bytes == 30 and pieces.seconds > 0 and pieces.name == "write"


def test_a_piece_without_work_is_kept_for_its_memory_but_not_replayed() -> None:
    step, recorder = Write(), PieceRecorder()

    def two_ops() -> None:
        step.x.add_(0.0)
        for _ in range(2):  # nothing between
            kv_write(step.arena, step.x, step.x, step.offset, step.slot, 4)

    pieces = PiecewiseCapture(recorder).capture(two_ops, step.addresses, "two")
    assert [piece.num_nodes for piece in recorder.pieces] == [1, 0, 0]
    assert (pieces.num_graphs, pieces.num_calls) == (1, 2)
    pieces.release()
    assert all(piece.is_released for piece in recorder.pieces)


def test_released_pieces_refuse_to_be_replayed() -> None:
    step, recorder = Write(), PieceRecorder()
    pieces = PiecewiseCapture(recorder).capture(step, step.addresses, "write")
    pieces.release()
    pieces.release()
    with pytest.raises(ContractError, match="write: these graphs were released"):
        pieces.replay()


def test_a_failure_leaves_no_open_capture_no_interception_and_no_graph() -> None:
    step, recorder = Write(), PieceRecorder()
    capture = PiecewiseCapture(recorder)
    bad_slot, step.slot = step.slot, torch.zeros(2, dtype=torch.int32)[:1]
    calls = 0

    def fails() -> None:
        nonlocal calls
        calls += 1
        kv_write(step.arena, step.x, step.x, step.offset, bad_slot, 4)
        if calls > 1:  # not in the warm-up
            raise ValueError("in the second piece")

    with pytest.raises(ValueError, match="in the second piece"):
        capture.capture(fails, step.addresses, "fails")
    assert not recorder.is_open and all(piece.is_released for piece in recorder.pieces)
    ran: list[str] = []
    with counting_calls(ran):
        kv_write(step.arena, step.x, step.x, step.offset, bad_slot, 4)
    assert ran == ["kv_write"]
    capture.capture(step, step.addresses, "again").replay()


def test_a_buffer_that_moves_while_it_is_captured_is_named() -> None:
    step, recorder = Write(), PieceRecorder()

    def moves() -> None:
        step()
        step.x = step.x.clone()

    with pytest.raises(ContractError, match="moving: the buffers x moved"):
        PiecewiseCapture(recorder).capture(moves, step.addresses, "moving")
    assert all(piece.is_released for piece in recorder.pieces)


# -- steps of an engine ------------------------------------------------------------------------------


def memory_of(engine: midstream.Engine) -> list[Tensor]:
    pools, step = engine._parts.pools, engine._parts.runner.step
    return [pools.temporal, pools.conv, pools.kv, step.slots.flat, step.token, step.logprob]


def bits(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone().view(torch.uint8) for tensor in tensors]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_replay_is_bit_equal_to_the_same_step_run_eagerly(family: str) -> None:
    """Every step of a run, with prompt chunks and without: pools, records, tokens and logits."""
    with guarded_engine(build(family), **SMALL) as engine:
        runner = engine._parts.runner
        seen: list[GraphKey] = []
        graphs: dict[GraphKey, tuple[Any, list[Tensor]]] = {}

        def restore(saved: list[Tensor]) -> None:
            for tensor, copy in zip(memory_of(engine), saved, strict=True):
                tensor.copy_(copy)

        def compare(key: GraphKey, *others: Any) -> list[Tensor]:
            seen.append(key)
            before = [tensor.clone() for tensor in memory_of(engine)]
            view = runner._view(key)
            if key not in graphs:
                logits: list[Tensor] = []
                step = lambda: logits.append(runner.step.run(view, key.rows))  # noqa: E731
                graphs[key] = (
                    PiecewiseCapture(PieceRecorder()).capture(step, runner.step.addresses, "step"),
                    logits,
                )
                restore(before)
            pieces, logits = graphs[key]
            pieces.replay()
            replayed = bits([*memory_of(engine), logits[-1]])
            restore(before)
            eager = [runner.step.run(view, key.rows)]
            assert pieces.num_calls >= 6
            for a, b in zip(replayed, bits([*memory_of(engine), eager[0]]), strict=True):
                assert torch.equal(a, b)
            return eager

        runner._replay_or_run = compare  # type: ignore[method-assign]
        serve(engine, five_prompts(VOCAB), 6)
    assert len(seen) > len(graphs) > 3, "no graph was replayed for a second step"
    assert {bool(key.chunks) for key in seen} == {True, False}


@pytest.mark.parametrize("make", RECORDERS)
@pytest.mark.parametrize("mode", ["full", "piecewise", "full+piecewise"])
def test_all_modes_give_the_tokens_of_steps_without_graphs(
    monkeypatch: pytest.MonkeyPatch, mode: str, make: Callable[[], Recorder]
) -> None:
    def run(graphs: str) -> tuple[list[list[int]], dict[str, Any]]:
        with guarded_engine(build("bamba"), **SMALL, graphs=graphs) as engine:
            outputs = serve(engine, five_prompts(VOCAB), 5)
            return [list(out.token_ids) for out in outputs], engine.stats()

    want, _ = run("off")
    monkeypatch.setattr("midstream.runtime.assembly.new_capturer", lambda *args: make())
    got, stats = run(mode)
    assert got == want
    assert stats["graph_replays"] == stats["steps"] > 5 and not stats["graph_fallbacks"]


def test_whole_and_split_graphs_share_one_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is one: `release_graphs` takes both kinds."""
    recorder = PieceRecorder()
    monkeypatch.setattr("midstream.runtime.assembly.new_capturer", lambda *args: recorder)
    with guarded_engine(build("bamba"), **SMALL, graphs="piecewise") as engine:
        serve(engine, five_prompts(VOCAB)[:1], 3)
        runner: StepRunner = engine._parts.runner
        assert all(key.in_pieces for key in runner.graphs.keys)
        engine.release_graphs()
        assert runner.graphs.keys == [] and all(piece.is_released for piece in recorder.pieces)
