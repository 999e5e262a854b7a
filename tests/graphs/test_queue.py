"""Queues: the same calls at once, late, now and then, or on a stream."""

import pytest
import torch

from midstream.errors import ContractError
from midstream.graphs.emulated_queue import EmulatedQueue, Pace
from midstream.graphs.queue import DeviceQueue, ImmediateQueue, StreamQueue, queue_of


def test_a_cpu_does_its_work_when_it_is_enqueued() -> None:
    queue: DeviceQueue = queue_of(torch.device("cpu"))
    assert isinstance(queue, ImmediateQueue)
    host, event = queue.host_zeros((2,), torch.int32), queue.new_event()
    queue.copy(host, torch.ones(2, dtype=torch.int32))
    event.record()
    assert host.tolist() == [1, 1]
    event.synchronize()
    queue.synchronize()


@pytest.mark.parametrize(
    ("pace", "done"), [("late", [0, 0, 0, 0]), ("early", [1, 2, 3, 4]), (3, [0, 2, 2, 3])]
)
def test_work_is_done_late_early_or_now_and_then_and_always_in_order(
    pace: Pace, done: list[int]
) -> None:
    queue, ran, found = EmulatedQueue(pace), list[int](), list[int]()
    for number in range(4):
        queue.run(lambda number=number: ran.append(number))  # type: ignore[misc]
        found.append(len(ran))
    assert found == done
    queue.synchronize()
    assert ran == [0, 1, 2, 3]


def test_host_memory_that_is_written_too_early_reaches_the_device() -> None:
    """Fault G8: the copy reads what lies there when it runs."""
    queue, device = EmulatedQueue(), torch.zeros(1)
    host = queue.host_zeros((1,), torch.float32)
    host.fill_(1.0)
    queue.copy(device, host)
    host.fill_(2.0)
    queue.synchronize()
    assert device.item() == 2.0


def test_an_event_waits_for_its_last_mark_and_for_nothing_behind_it() -> None:
    queue, ran = EmulatedQueue(), list[str]()
    event = queue.new_event()
    event.synchronize()
    queue.run(lambda: ran.append("a"))
    event.record()
    queue.run(lambda: ran.append("b"))
    event.record()
    queue.run(lambda: ran.append("c"))
    event.synchronize()
    assert ran == ["a", "b"] and queue.waited_for == 2


def test_what_work_enqueues_is_part_of_it() -> None:
    queue, ran = EmulatedQueue(), list[str]()
    queue.run(lambda: (queue.run(lambda: ran.append("inside")), ran.append("after")))
    queue.run(lambda: ran.append("next"))
    queue.synchronize()
    assert ran == ["inside", "after", "next"]


def test_work_that_raises_is_over() -> None:
    queue, ran = EmulatedQueue(), list[str]()
    queue.run(lambda: [][0])
    queue.run(lambda: ran.append("next"))
    with pytest.raises(IndexError):
        queue.synchronize()
    queue.synchronize()
    assert ran == ["next"]


def test_a_copy_between_shapes_is_refused_where_it_is_asked_for() -> None:
    with pytest.raises(ContractError, match=r"a copy of shape \(3,\) into \(2,\)"):
        EmulatedQueue().copy(torch.zeros(2), torch.zeros(3))


@pytest.mark.gpu
def test_a_stream_copies_while_the_host_goes_on_and_an_event_waits() -> None:
    device = torch.device("cuda")
    queue = queue_of(device)
    assert isinstance(queue, StreamQueue)
    host, back = (queue.host_zeros((4,), torch.int32) for _ in range(2))
    assert host.is_pinned()
    host.fill_(7)
    target, event = torch.zeros(4, dtype=torch.int32, device=device), queue.new_event()
    torch.cuda.synchronize()
    torch.cuda._sleep(int(1e8))  # some 50 ms
    queue.copy(target, host)
    queue.run(lambda: target.add_(1))
    queue.copy(back, target)
    event.record()
    assert not torch.cuda.current_stream().query(), "the host waited"
    event.synchronize()
    assert back.tolist() == [8, 8, 8, 8]
