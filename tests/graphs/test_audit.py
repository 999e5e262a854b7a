"""An audit names the owner of every buffer that a captured step is bound to, and what has none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from midstream.errors import UnsupportedError
from midstream.graphs.audit import Owner, Owners, audit
from midstream.graphs.captured import Captured, Capturer
from midstream.graphs.emulator import EmulatedCapture


class Work:
    """A step that reads a weight, a staged buffer and memory that nobody told the audit of."""

    def __init__(self, device: str) -> None:
        # large enough that torch's allocator gives each an own block
        self.weight = torch.ones(4, 1024, device=device)
        self.staged = torch.zeros(1024, device=device)
        self.stray = torch.zeros(1024, device=device)
        self.result = torch.zeros(4, 1024, device=device)

    def run(self) -> None:
        self.result.copy_(self.weight * self.staged + self.stray)

    def capture(self, capturer: Capturer) -> Captured:
        return capturer.capture(self.run, dict, "work")

    def owners(self, *names: str) -> Owners:
        return Owners(Owner.of(name, f"as {name}", getattr(self, name)) for name in names)


def check(make: Callable[[], Capturer], device: str) -> None:
    work, capturer = Work(device), make()
    graph = work.capture(capturer)
    known, stray = ("weight", "staged", "result"), work.stray.data_ptr()
    found = audit(graph, work.owners(*known))
    assert {owner.name for owner, _ in found.bound} == set(known)
    (one,) = [one for one in found.unowned if one.first == stray]
    assert sum(count for _, count in found.operations) == found.num_nodes == graph.num_nodes
    line = f"  UNOWNED: {one.num_addresses} addresses of {one.operation}, the first {stray:#x}"
    assert line in found.lines()
    assert stray not in [one.first for one in audit(graph, work.owners(*known, "stray")).unowned]
    capturer.release()


def test_an_emulated_step_shows_its_buffers_and_the_stray_one() -> None:
    check(EmulatedCapture, "cpu")


def test_an_emulated_step_has_no_other_unowned_buffer() -> None:
    work, known = Work("cpu"), ("weight", "staged", "result")
    graph = work.capture(EmulatedCapture())
    assert [one.num_addresses for one in audit(graph, work.owners(*known)).unowned] == [1]
    assert not audit(graph, work.owners(*known, "stray")).unowned


@pytest.mark.gpu
def test_a_cuda_graph_shows_its_buffers_and_the_stray_one() -> None:
    from midstream.graphs.capture import GraphCapture

    check(lambda: GraphCapture(torch.device("cuda")), "cuda")


@pytest.mark.gpu
def test_memory_of_the_capture_copies_and_fills_are_told_apart() -> None:
    from midstream.graphs.capture import GraphCapture

    source, target = (torch.zeros(4096, device="cuda") for _ in range(2))

    def step() -> None:
        target.copy_(source)
        (source + 1).mul_(2)
        target.zero_()

    capturer = GraphCapture(torch.device("cuda"))
    graph = capturer.capture(step, dict, "step")
    owners = Owners([Owner.of("source", "s", source), Owner.of("target", "t", target)])
    found = audit(graph, owners)
    assert not found.unowned
    assert found.num_in_graph_memory >= 2
    assert dict(found.operations)["copy"] == 1
    assert {owner.name: uses for owner, uses in found.bound} == {"source": 2, "target": 2}
    capturer.release()


def test_sums_and_ranges_of_bound_memory_are_printed() -> None:
    work = Work("cpu")
    found = audit(
        work.capture(EmulatedCapture()), work.owners("weight", "staged", "result", "stray")
    )
    assert found.by_refresh["as weight"] == (1, work.weight.numel() * 4)
    assert any("bound    1 buffers of         16,384 bytes: as weight" in s for s in found.lines())
    begin = work.staged.data_ptr()
    assert any(f"{begin:#x}-{begin + 4096:#x}" in line for line in found.lines(all_buffers=True))


def test_the_span_of_a_view_is_that_of_its_elements() -> None:
    whole = torch.zeros(8, 8)
    view: Tensor = whole[2:4, 1:3]
    owner = Owner.of("view", "", view)
    assert owner.begin == whole.data_ptr() + 4 * 17
    assert owner.num_bytes == 4 * (8 + 2)
    assert Owner.of("none", "", whole[:0]).num_bytes == 0


def test_a_graph_of_another_kind_is_refused() -> None:
    class Other:
        name, memory_bytes, seconds, num_nodes = "other", 0, 0.0, 0

        def replay(self) -> None: ...

        def release(self) -> None: ...

    with pytest.raises(UnsupportedError, match="a Other cannot be looked into"):
        audit(Other(), Owners([]))
