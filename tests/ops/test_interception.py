"""Op calls go to one interceptor of their thread, and to nobody else."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from midstream import ContractError
from midstream.ops.interception import intercepting
from midstream.ops.kv_write import kv_write


def write(arena: torch.Tensor) -> None:
    x, slot = torch.ones(1, 1, 4), torch.tensor([1], dtype=torch.int32)
    kv_write(arena, x, x, torch.zeros(1, dtype=torch.int64), slot, 1)


def new_arena() -> torch.Tensor:
    return torch.zeros(3, 8)


def test_an_interceptor_sees_name_and_arguments_and_decides_whether_the_op_runs() -> None:
    arena, seen = new_arena(), list[tuple[str, int]]()

    def skip(name: str, implementation: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        seen.append((name, args[0].data_ptr()))

    with intercepting(skip):
        write(arena)
    assert seen == [("kv_write", arena.data_ptr())] and not arena.any()

    def run(name: str, implementation: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        implementation(*args, **kwargs)

    with intercepting(run):
        write(arena)
    assert arena[1].all() and not arena[2].any()


def test_after_the_block_ops_run_as_before_also_when_it_failed() -> None:
    arena = new_arena()

    def fail(*call: Any) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), intercepting(fail):
        write(arena)
    write(arena)
    assert arena[1].all()


def test_a_second_interceptor_of_one_thread_is_refused() -> None:
    with (
        intercepting(lambda *call: None),
        pytest.raises(ContractError, match="intercepted already"),
        intercepting(lambda *call: None),
    ):
        pass
    write(arena := new_arena())
    assert arena.any()


def test_ops_of_other_threads_run_undisturbed() -> None:
    arena, mine = new_arena(), list[str]()
    with intercepting(lambda name, *call: mine.append(name)):
        other = threading.Thread(target=write, args=(arena,))
        other.start()
        other.join()
    assert arena[1].all() and mine == []


def test_captures_of_two_threads_take_turns() -> None:
    inside, order = threading.Event(), list[str]()

    def second() -> None:
        inside.wait()
        with intercepting(lambda *call: None):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with intercepting(lambda *call: None):
        inside.set()
        thread.join(0.1)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
