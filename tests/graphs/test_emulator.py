"""The emulator of capture: as frozen, as strict and as late as a GPU."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from midstream.errors import ContractError
from midstream.graphs.emulated_queue import EmulatedQueue
from midstream.graphs.emulator import EmulatedCapture, EmulatedGraph
from midstream.ops.scatter_slots import scatter_slots


def nothing() -> dict[str, int]:
    return {}


def captured(step: Callable[[], Any], owner: EmulatedCapture | None = None) -> EmulatedGraph:
    return (owner or EmulatedCapture()).capture(step, nothing, "step")


# -- frozen -----------------------------------------------------------------------------------------------


def test_a_replay_reads_new_contents_and_keeps_numbers_shapes_and_slices() -> None:
    x, out, host = torch.arange(4.0), torch.zeros(4), {"factor": 2.0, "rows": 3}

    def step() -> None:
        out[: host["rows"]].copy_(host["factor"] * x[: host["rows"]])

    graph = captured(step)
    host |= {"factor": 10.0, "rows": 4}
    x.fill_(1.0)
    out.zero_()
    graph.replay()
    assert out.tolist() == [2.0, 2.0, 2.0, 0.0]


def test_python_does_not_run_again() -> None:
    runs: list[int] = []
    graph = captured(lambda: runs.append(1))
    before = len(runs)
    graph.replay()
    assert len(runs) == before and graph.num_nodes == 0


def test_a_buffer_that_is_replaced_is_not_followed() -> None:
    holder, out = {"x": torch.ones(2)}, torch.zeros(2)
    first = holder["x"]
    graph = captured(lambda: out.copy_(holder["x"]))
    holder["x"] = torch.full((2,), 7.0)
    graph.replay()
    assert out.tolist() == [1.0, 1.0]
    first.fill_(3.0)
    graph.replay()
    assert out.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("how", ["data", "set_"])
def test_a_parameter_whose_storage_moves_is_not_followed(how: str) -> None:
    weight, out = torch.nn.Parameter(torch.ones(2)), torch.zeros(2)
    kept = weight.data

    def step() -> None:
        with torch.no_grad():
            out.copy_(weight)

    graph = captured(step)
    moved = torch.full((2,), 7.0)
    if how == "data":
        weight.data = moved
    else:
        with torch.no_grad():
            weight.set_(moved)
    graph.replay()
    assert out.tolist() == kept.tolist() == [1.0, 1.0]


def test_memory_that_its_owner_gave_up_is_not_read_again() -> None:
    holder, out = {"x": torch.ones(2)}, torch.zeros(2)
    graph = captured(lambda: out.copy_(holder["x"]))
    del holder["x"]
    with pytest.raises(ContractError, match="was freed since"):
        graph.replay()


def test_capture_itself_runs_nothing() -> None:
    count = torch.zeros(1)
    graph = captured(lambda: count.add_(1))
    assert count.item() == 2, "two warm-up runs"
    graph.replay()
    assert count.item() == 3


def test_our_ops_are_one_entry_whatever_they_do_on_a_cpu() -> None:
    flat, index, value, num = (torch.zeros(n, dtype=torch.int32) for n in (4, 3, 3, 1))
    graph = captured(lambda: scatter_slots(flat, index, value, num))
    assert graph.node_names == ["scatter_slots"]
    index.copy_(torch.tensor([1, 3, 0]))
    value.fill_(9)
    num.fill_(2)
    graph.replay()
    assert flat.tolist() == [0, 9, 0, 9]


def test_the_result_of_a_replay_lies_where_the_recorded_one_did() -> None:
    x, kept = torch.ones(2), []
    graph = captured(lambda: kept.append(x * 3))
    x.fill_(2.0)
    graph.replay()
    assert [t.tolist() for t in kept] == [[3.0, 3.0], [3.0, 3.0], [6.0, 6.0]]


def test_a_view_is_not_made_again() -> None:
    x, out = torch.arange(6.0), torch.zeros(2, 3)
    graph = captured(lambda: out.copy_(x[:6].view(2, 3).t().contiguous().t()))
    kept = x.view(6)
    x.set_(torch.full((6,), 5.0))
    kept.add_(1)
    graph.replay()
    assert out.flatten().tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


# -- strict -----------------------------------------------------------------------------------------------

X = torch.arange(4.0)


@pytest.mark.parametrize(
    ("read", "named"),
    [
        (lambda: X[0].item(), "item"),
        (lambda: bool(X[0] > 0), "__bool__"),
        (lambda: 1 if X.sum() else 0, "__bool__"),
        (lambda: int(X[0]), "__int__"),
        (lambda: X.tolist(), "tolist"),
        (lambda: X.numpy(), "numpy"),
        (lambda: np.asarray(X), "__array__"),
        (lambda: X.cpu(), "cpu"),
        (lambda: torch.nonzero(X), "nonzero"),
        (lambda: torch.where(X > 0), "nonzero"),
        (lambda: torch.equal(X, X), "equal"),
        (lambda: X[X > 1], "index with a mask"),
        (lambda: X.masked_select(X > 1), "masked_select"),
        (lambda: torch.unique(X), "unique"),
        (lambda: X.repeat_interleave(torch.tensor(2).expand(4)), "repeat_interleave"),
        (lambda: 1.0 in X, "item|bool|_local_scalar_dense|is_nonzero"),
    ],
)
def test_a_step_that_reads_a_device_value_is_refused_by_name(
    read: Callable[[], Any], named: str
) -> None:
    with pytest.raises(
        ContractError, match=rf"reads a value of a tensor on the host \((\w*{named})"
    ):
        captured(read)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([1, 2]),
        lambda: torch.tensor(1.0, device=X.device),
        lambda: X.new_tensor([1.0]),
        lambda: torch.as_tensor([1.0]),
        lambda: torch.from_numpy(np.zeros(2)),
    ],
)
def test_a_step_that_copies_from_pageable_host_memory_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ContractError, match="from pageable host memory"):
        captured(make)


def test_a_number_from_python_is_no_copy() -> None:
    out = torch.zeros(4)
    graph = captured(lambda: out.copy_(torch.where(X > 1, X, torch.tensor(-1.0))))
    graph.replay()
    assert out.tolist() == [-1.0, -1.0, 2.0, 3.0]


def test_a_step_that_waits_is_refused() -> None:
    queue = EmulatedQueue()
    owner, event = EmulatedCapture(queue), queue.new_event()
    with pytest.raises(ContractError, match="waits for the device"):
        captured(queue.synchronize, owner)
    with pytest.raises(ContractError, match="waits for the device"):
        captured(event.synchronize, owner)


def test_a_buffer_that_moves_while_it_is_captured_is_named() -> None:
    holder = {"x": torch.zeros(2)}

    def step() -> None:
        holder["x"] = torch.zeros(2)

    with pytest.raises(ContractError, match="step: the buffers x moved"):
        EmulatedCapture().capture(
            step, lambda: {n: t.data_ptr() for n, t in holder.items()}, "step"
        )


def test_a_failure_inside_gives_everything_back() -> None:
    owner, out = EmulatedCapture(), torch.zeros(2)

    def step() -> None:
        out.add_(torch.ones(2))
        out.tolist()

    first = captured(lambda: out.copy_(torch.ones(2) * 3), owner)
    before = owner.memory_bytes
    with pytest.raises(ContractError, match="tolist"):
        captured(step, owner)
    assert owner.memory_bytes == before
    first.replay()
    assert out.tolist() == [3.0, 3.0]
    assert torch.ones(2).tolist() == [1.0, 1.0], "torch works as before"


# -- one pool ---------------------------------------------------------------------------------------------


def test_what_an_earlier_replay_left_behind_is_gone() -> None:
    x, out, first = torch.ones(2), torch.zeros(2), {}

    def step() -> None:
        first.setdefault("double", x * 2)  # a cache that is filled once
        out.copy_(first["double"] + torch.zeros(2))

    step()
    del first["double"]
    graph = captured(step)
    graph.replay()
    assert out.tolist() == [2.0, 2.0], "made by the warm-up run, outside of the pool"
    workspace: list[Tensor] = []

    def reads_what_it_left() -> None:
        if not workspace:
            workspace.append(torch.zeros(2))
        keep = torch.empty(2)
        out.copy_(keep)
        keep.copy_(x)

    graph = captured(reads_what_it_left)
    graph.replay()
    assert out.isnan().all()


def test_a_result_that_is_held_outlives_replays_of_graphs_recorded_later_only() -> None:
    owner, x, kept = EmulatedCapture(), torch.ones(2), {}

    def step() -> None:
        kept["large"] = torch.empty(2)
        kept["large"].copy_(x + 1)

    large = captured(step, owner)
    small = captured(lambda: kept.update(small=x + 2), owner)
    large.replay()
    small.replay()
    assert (kept["large"].tolist(), kept["small"].tolist()) == ([2.0, 2.0], [3.0, 3.0])
    large.replay()
    assert kept["large"].tolist() == [2.0, 2.0] and kept["small"].isnan().all()


def test_graphs_share_the_memory_between_inputs_and_results() -> None:
    owner, out = EmulatedCapture(), torch.zeros(100)
    large = captured(lambda: out.copy_(torch.ones(100) + torch.ones(100)), owner)
    small = captured(lambda: out[:10].copy_(torch.ones(10) + torch.ones(10)), owner)
    assert large.memory_bytes == owner.memory_bytes == 1200 and small.memory_bytes == 0
    large.release()
    assert owner.memory_bytes == 120
    owner.release()
    assert owner.memory_bytes == 0


def test_a_released_graph_refuses_to_be_replayed() -> None:
    graph = captured(lambda: X.clone())
    graph.release()
    graph.release()
    with pytest.raises(ContractError, match="step: this graph was released"):
        graph.replay()


# -- late -------------------------------------------------------------------------------------------------


def test_a_replay_runs_when_the_host_waits_for_an_event_behind_it() -> None:
    queue = EmulatedQueue()
    owner, x, out = EmulatedCapture(queue), torch.ones(2), torch.zeros(2)
    graph = captured(lambda: out.copy_(x), owner)
    out.zero_()
    graph.replay()
    event = queue.new_event()
    event.record()
    queue.run(lambda: out.add_(1))
    assert out.tolist() == [0.0, 0.0]
    event.synchronize()
    assert out.tolist() == [1.0, 1.0], "and what is behind the event has not run"
    queue.synchronize()
    assert out.tolist() == [2.0, 2.0]
