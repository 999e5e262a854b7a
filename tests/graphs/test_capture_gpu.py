"""Capture on a GPU: what it takes, what a failure leaves (nothing), and on which device."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from midstream import ContractError
from midstream.graphs.capture import GraphCapture
from midstream.graphs.unowned import unowned

pytestmark = pytest.mark.gpu

MB = 2**20


def device() -> torch.device:
    return torch.device("cuda", 0)


def reserved() -> int:
    """Bytes that torch holds of the device, after it gave back what it can."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


class Products:
    """`rows` rows through matrix products; temporary memory grows with the rows."""

    def __init__(self, width: int = 4096) -> None:
        self.x = torch.randn(2048, width, device="cuda")
        self.weight = torch.randn(width, width, device="cuda") / width**0.5
        self.result: Tensor | None = None

    def step(self, rows: int) -> Callable[[], None]:
        def run() -> None:
            y = self.x[:rows]
            for _ in range(3):
                y = torch.relu(y @ self.weight) + 1.0
            self.result = y

        return run

    def addresses(self) -> dict[str, int]:
        return {"x": self.x.data_ptr(), "weight": self.weight.data_ptr()}


def test_a_capture_says_what_it_took_and_its_replay_follows_the_buffers() -> None:
    work = Products(width=256)
    graph = GraphCapture(device()).capture(work.step(64), work.addresses, "products")
    result = work.result
    assert result is not None
    assert graph.name == "products" and graph.seconds > 0
    assert 6 <= graph.num_nodes <= 20  # products, activations, sums
    assert graph.memory_bytes >= result.numel() * 4
    for seed in range(3):
        work.x.normal_(generator=torch.Generator("cuda").manual_seed(seed))
        graph.replay()
        replayed = result.clone()
        work.step(64)()
        assert work.result is not None and torch.equal(replayed, work.result)


def test_a_released_graph_refuses_to_be_replayed() -> None:
    work = Products(width=64)
    graph = GraphCapture(device()).capture(work.step(4), work.addresses, "small")
    graph.release()
    graph.release()
    with pytest.raises(ContractError, match="small: this graph was released"):
        graph.replay()


# -- memory: fault G7 ---------------------------------------------------------------------------------


def test_smaller_graphs_captured_after_the_largest_take_little_more() -> None:
    work, capture = Products(), GraphCapture(device())
    graphs = []
    for rows in (2048, 1024, 512, 256, 64, 8, 1):
        graphs.append(capture.capture(work.step(rows), work.addresses, f"{rows} rows"))
        assert work.result is not None
        work.result = unowned(work.result)
    largest = graphs[0].memory_bytes
    assert largest >= 2 * 2048 * 4096 * 4
    assert sum(graph.memory_bytes for graph in graphs) <= 1.2 * largest


def test_release_gives_all_memory_back_and_a_new_capture_works() -> None:
    work, capture = Products(), GraphCapture(device())
    capture.capture(work.step(8), work.addresses, "first use")  # workspaces stay
    work.result = None
    capture.release()
    before = reserved()
    for _ in range(3):
        graph = capture.capture(work.step(2048), work.addresses, "large")
        work.result = None
        assert reserved() > before
        capture.release()
        assert reserved() <= before
        with pytest.raises(ContractError, match="was released"):
            graph.replay()


def test_a_graph_that_is_dropped_without_release_gives_its_memory_back() -> None:
    work, capture = Products(), GraphCapture(device())
    capture.capture(work.step(8), work.addresses, "first use").release()
    work.result = None
    before = reserved()
    graph = capture.capture(work.step(2048), work.addresses, "large")
    work.result = None
    assert reserved() > before
    del graph
    assert reserved() <= before
    capture.capture(work.step(8), work.addresses, "again").replay()


# -- failures: faults G6 and G7 ---------------------------------------------------------------------------


def read_a_value(x: Tensor) -> None:
    x.sum().item()


def wait_for_the_device(x: Tensor) -> None:
    torch.cuda.synchronize()


def copy_from_the_host(x: Tensor) -> None:
    x[:4].copy_(torch.ones(4))


def raise_something(x: Tensor) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("of the step itself")


@pytest.mark.parametrize(
    ("fail", "error", "words"),
    [
        (read_a_value, ContractError, r"bad step: capture failed in `x\.sum\(\)\.item\(\)`"),
        (wait_for_the_device, ContractError, "bad step: capture failed in .*synchronize"),
        (copy_from_the_host, ContractError, r"bad step: capture failed in `x\[:4\]\.copy_"),
        (raise_something, ValueError, "of the step itself"),
    ],
)
def test_a_failed_capture_is_named_gives_its_memory_back_and_leaves_nothing_open(
    fail: Callable[[Tensor], None], error: type[Exception], words: str
) -> None:
    work, capture = Products(), GraphCapture(device())
    capture.capture(work.step(2048), work.addresses, "first use").release()
    work.result = None
    before = reserved()

    def bad() -> None:
        y = work.x @ work.weight
        fail(y[0])
        work.step(2048)()

    for _ in range(3):
        with pytest.raises(error, match=words):
            capture.capture(bad, work.addresses, "bad step")
        work.result = None
        assert not torch.cuda.is_current_stream_capturing()
        assert reserved() <= before, "memory of a failed capture stays"
    torch.randn(8, device="cuda")  # generators are out of the capture too
    graph = capture.capture(work.step(64), work.addresses, "good step")
    kept = work.result
    graph.replay()
    work.step(64)()
    assert kept is not None and work.result is not None and torch.equal(kept, work.result)


def test_a_failure_between_good_captures_leaves_their_graphs_and_their_pool_alone() -> None:
    work, capture = Products(width=1024), GraphCapture(device())
    first = capture.capture(work.step(512), work.addresses, "first")
    result = work.result
    with pytest.raises(ContractError, match="capture failed"):
        capture.capture(lambda: read_a_value(work.x), work.addresses, "bad")
    grown = torch.cuda.memory_reserved()
    second = capture.capture(work.step(256), work.addresses, "second")
    assert torch.cuda.memory_reserved() <= grown + 22 * MB  # shares the pool of the first
    first.replay()
    kept = result.clone() if result is not None else None
    second.replay()
    work.step(512)()
    assert kept is not None and work.result is not None and torch.equal(kept, work.result)


def test_a_bound_buffer_that_moves_is_named_and_nothing_stays_captured() -> None:
    work, capture = Products(width=256), GraphCapture(device())
    capture.capture(work.step(4), work.addresses, "first use").release()
    work.result = None

    def moves() -> None:
        work.step(4)()
        work.x = work.x.clone()

    with pytest.raises(ContractError, match="moving: the buffers x moved"):
        capture.capture(moves, work.addresses, "moving")
    assert all(graph.is_released for graph in capture._graphs)


def test_what_happens_for_the_first_time_happens_in_the_warm_up() -> None:
    """A shape, a dtype and a library that nothing used before, on a fresh stream: no error in capture."""
    x = torch.randn(3, 5, 77, device="cuda", dtype=torch.float64)
    out = torch.zeros(3, 5, 5, device="cuda", dtype=torch.float64)

    def step() -> None:
        waves = torch.fft.rfft(x).real.contiguous()
        torch.bmm(waves, waves.transpose(1, 2), out=out)

    graph = GraphCapture(device()).capture(step, dict, "cold")
    step()
    want = out.clone()
    out.zero_()
    graph.replay()
    assert torch.equal(out, want)


# -- devices ----------------------------------------------------------------------------------------------


def test_a_capture_is_on_the_device_of_its_buffers_whichever_is_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", 1)
    x = torch.arange(8.0, device=other)
    out = torch.zeros(8, device=other)

    def step() -> None:
        out.copy_(x * 2.0)

    assert torch.cuda.current_device() == 0
    graph = GraphCapture(other).capture(step, lambda: {"x": x.data_ptr()}, "elsewhere")
    assert torch.cuda.current_device() == 0
    out.zero_()
    x.add_(1.0)
    torch.cuda.synchronize(other)
    with torch.cuda.device(other):
        graph.replay()
    torch.cuda.synchronize(other)
    assert out.tolist() == [2.0 * (n + 1) for n in range(8)]


# -- memory that a graph lends ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.bool]
)
def test_an_unowned_tensor_is_the_same_memory_shape_and_strides(dtype: torch.dtype) -> None:
    whole = torch.randint(0, 2, (6, 10), device="cuda").to(dtype)
    for view in (whole, whole[1:4, 2:9:2], whole.t(), whole[5:, 9:], whole[:0]):
        alias = unowned(view)
        assert alias.dtype == dtype and alias.device == view.device
        assert alias.shape == view.shape and torch.equal(alias, view)
        assert not view.numel() or (alias.stride(), alias.data_ptr()) == (
            view.stride(),
            view.data_ptr(),
        )
    unowned(whole).fill_(1)
    assert whole.all()


def test_an_unowned_tensor_keeps_nothing_alive() -> None:
    before = torch.cuda.memory_allocated()
    whole = torch.zeros(4 * MB, device="cuda")
    alias = unowned(whole)
    del whole
    assert torch.cuda.memory_allocated() == before
    assert alias.shape == (4 * MB,)
