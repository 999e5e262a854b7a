"""Recorded calls as CUDA graphs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from recorded_rig import DECAY, INPUT, PARAMETER, STATE, decay, recorded
from torch import Tensor

from midstream.graphs.capture import GraphCapture
from midstream.graphs.recorded import RecordedCalls

pytestmark = pytest.mark.gpu

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def on_gpu(run: Any, *roles: Any, index: int = 0, **options: Any) -> RecordedCalls:
    capturer = GraphCapture(torch.device("cuda", index))
    return recorded(run, *roles, capturer=capturer, **options)


def drawn(*shape: int, seed: int = 0, index: int = 0) -> Tensor:
    host = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return host.to(f"cuda:{index}")


class GpuTwin:
    """The rig's twin, with everything on a device."""

    def __init__(self, calls: RecordedCalls, weight: Tensor, seed: int = 0) -> None:
        self.calls, self.weight = calls, weight
        self.index = weight.device.index
        self.state = drawn(2, 3, seed=seed, index=self.index)
        self.expected = self.state.clone()
        self._seed = 0

    def step(self) -> Tensor:
        self._seed += 1
        x = drawn(2, 5, seed=self._seed, index=self.index)
        found = self.calls(self.weight, self.state, x)[0]
        assert torch.equal(found, decay(self.weight, self.expected, x)[0])
        self.check()
        return found

    def check(self) -> None:
        assert torch.equal(self.state, self.expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_replays_equal_eager_calls_and_outputs_stay(mode: Any) -> None:
    calls = on_gpu(decay, *DECAY, on_unsupported="error")
    with mode():
        twin = GpuTwin(calls, drawn(5, 3))
        outputs = [twin.step() for _ in range(6)]
        kept = [output.clone() for output in outputs]
        twin.step()
        assert all(map(torch.equal, outputs, kept))
    assert (calls.events.num_recordings, calls.events.num_replays) == (1, 7)


def test_a_new_owner_is_adopted_and_the_former_gets_its_contents_back() -> None:
    calls = on_gpu(decay, *DECAY)
    weight = drawn(5, 3)
    with torch.inference_mode():
        first, second = GpuTwin(calls, weight, 1), GpuTwin(calls, weight, 2)
        first.step()
        address = first.state.data_ptr()
        second.step()
        first.check()
        assert second.state.data_ptr() == address != first.state.data_ptr()
        second.step()
    assert (calls.events.num_recordings, calls.events.num_adoptions) == (1, 1)


def test_h1_a_state_that_is_returned_and_fed_back_is_right_for_ten_steps() -> None:
    def run(weight: Tensor, state: Tensor, x: Tensor) -> list[Tensor]:
        state = state * 0.5 + x @ weight
        return [state.sum(-1), state]

    calls = on_gpu(run, PARAMETER, INPUT, INPUT, on_unsupported="error")
    weight, state = drawn(5, 3), drawn(2, 3)
    expected = state
    history = []
    for step in range(10):
        x = drawn(2, 5, seed=step)
        _, state = calls(weight, state, x)
        _, expected = run(weight, expected, x)
        history.append((state, expected))
    assert all(torch.equal(*pair) for pair in history)


def test_calls_on_two_streams_keep_their_order() -> None:
    calls = on_gpu(decay, *DECAY)
    twin = GpuTwin(calls, drawn(5, 3))
    twin.step()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for step in range(6):
        stream = streams[step % 2]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            twin.step()
        torch.cuda.current_stream().wait_stream(stream)


def test_random_numbers_are_those_of_eager_calls() -> None:
    def noisy(state: Tensor, x: Tensor) -> list[Tensor]:
        state.add_(torch.rand_like(x))
        return [x + state]

    results = []
    for run in (noisy, on_gpu(noisy, STATE, INPUT, on_unsupported="error")):
        torch.cuda.manual_seed(7)
        state = torch.zeros(4, device="cuda")
        x = torch.ones(4, device="cuda")
        results.append([run(state, x)[0] for _ in range(3)] + [torch.rand(2, device="cuda")])
    for eager, replayed in zip(*results, strict=True):
        assert torch.equal(eager, replayed)


def test_a_failing_capture_leaves_no_trace() -> None:
    def run(state: Tensor, x: Tensor) -> list[Tensor]:
        state.add_(x)
        return [x * float(state.sum())]

    calls = on_gpu(run, STATE, INPUT)
    state, expected = drawn(1 << 20), drawn(1 << 20)
    x = drawn(1 << 20, seed=1)
    run(expected, x)
    expected.copy_(state)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        output, wanted = calls(state, x)[0], run(expected, x)[0]
        assert torch.equal(output, wanted) and torch.equal(state, expected)
    del output, wanted
    gc.collect()
    assert calls.events.num_eager == 3 and not calls.events.num_recordings
    assert torch.cuda.memory_allocated() - before < 1 << 20
    good = on_gpu(decay, *DECAY, on_unsupported="error")  # the device still captures
    GpuTwin(good, drawn(5, 3)).step()


def test_a_tensor_on_the_host_is_named() -> None:
    calls = on_gpu(lambda state, x: [state.add_(x) + 1], STATE, INPUT)
    calls(torch.zeros(2, device="cuda"), torch.ones(()))
    [reason] = calls.events.eager
    assert "lies on cpu" in reason


@two_gpus
@pytest.mark.parametrize("current", [0, 1])
def test_o5_a_function_on_the_second_gpu_works_whichever_is_current(current: int) -> None:
    calls = on_gpu(decay, *DECAY, index=1, on_unsupported="error")
    with torch.cuda.device(current):
        twin = GpuTwin(calls, drawn(5, 3, index=1))
        for _ in range(3):
            twin.step()
    with torch.cuda.device(1 - current):
        twin.step()
    assert calls.events.num_replays == 4


def test_o5_odd_sizes_and_length_one_are_recorded() -> None:
    def window(weight: Tensor, columns: Tensor, x: Tensor) -> list[Tensor]:
        columns.copy_(torch.cat([columns[..., 1:], x], -1))
        return [torch.nn.functional.conv1d(columns, weight, groups=weight.shape[0])]

    for channels in (1, 3, 13):
        calls = on_gpu(window, PARAMETER, STATE, INPUT, on_unsupported="error")
        weight = drawn(channels, 1, 4)
        columns = drawn(2, channels, 4)
        expected = columns.clone()
        for seed in range(3):
            x = drawn(2, channels, 1, seed=seed)
            found, wanted = calls(weight, columns, x)[0], window(weight, expected, x)[0]
            torch.testing.assert_close(found, wanted)
            assert torch.equal(columns, expected)
