"""SIGINT waits for the end of the block, and is not lost."""

import signal
import threading
from collections.abc import Iterator

import pytest

from midstream.runtime.interrupts import deferred_interrupt


@pytest.fixture(autouse=True)
def _heeds_interrupts() -> Iterator[None]:
    """A shell starts what it puts in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_inside_the_block_is_raised_behind_it() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        signal.raise_signal(signal.SIGINT)
        reached.append("end of block")
    assert reached == ["end of block"]


def test_a_second_interrupt_gets_through_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second interrupt was held back")


def test_the_handler_is_the_old_one_afterwards_also_when_the_block_raises() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="inner"), deferred_interrupt():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("inner")
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_leave_the_handler_alone() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with deferred_interrupt():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
