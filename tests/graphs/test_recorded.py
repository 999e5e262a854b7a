"""Recorded calls on the CPU: a replay is worth an eager call, and what cannot be recorded is counted."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch
from recorded_rig import DECAY, INPUT, NUMBER, PARAMETER, STATE, Twin, decay, drawn, recorded
from torch import Tensor, nn

from midstream.errors import CapacityError, UnsupportedError
from midstream.graphs.emulator import EmulatedCapture


def test_replays_equal_eager_calls_and_write_state_in_place() -> None:
    calls = recorded(decay, *DECAY)
    twin = Twin(calls, drawn(5, 3), drawn(2, 3))
    for _ in range(5):
        twin.step()
    assert (calls.events.num_recordings, calls.events.num_replays) == (1, 5)
    assert not calls.events.eager


def test_recording_draws_no_random_number_more_than_the_call_itself() -> None:
    def noisy(state: Tensor, x: Tensor) -> list[Tensor]:
        state.add_(torch.rand_like(x))
        return [x + state]

    results = []
    for run in (noisy, recorded(noisy, STATE, INPUT)):
        torch.manual_seed(7)
        state = torch.zeros(4)
        results.append([run(state, torch.ones(4))[0] for _ in range(3)] + [torch.rand(2)])
    for eager, replayed in zip(*results, strict=True):
        assert torch.equal(eager, replayed)


def test_outputs_stay_when_later_calls_overwrite_graph_memory() -> None:
    twin = Twin(recorded(decay, *DECAY), drawn(5, 3), drawn(2, 3))
    outputs = [twin.step() for _ in range(4)]
    kept = [output.clone() for output in outputs]
    twin.step()
    assert all(map(torch.equal, outputs, kept))


def test_an_output_that_is_an_argument_or_a_view_of_one_is_the_callers_memory() -> None:
    def run(weight: Tensor, state: Tensor, x: Tensor) -> list[Any]:
        state.add_(x)
        return [state, state[1:, :2], x.view(-1), weight.view(torch.int32), 3]

    calls = recorded(run, PARAMETER, STATE, INPUT)
    weight, pool = drawn(4), drawn(3, 2, 3)
    for step in range(3):
        state, x = pool[1], drawn(2, 3, seed=step)
        outputs = calls(weight, state, x)
        assert outputs[0] is state and outputs[4] == 3
        assert torch.equal(outputs[1], state[1:, :2])
        for output, owner in zip(outputs[1:4], (pool, x, weight), strict=True):
            assert output.untyped_storage().data_ptr() == owner.untyped_storage().data_ptr()
        assert torch.equal(outputs[2], x.view(-1))
        assert torch.equal(outputs[3], weight.view(torch.int32))


def test_outputs_that_are_lazy_conjugates_or_negatives_stay_what_they_are() -> None:
    def run(state: Tensor, x: Tensor) -> list[Tensor]:
        state.mul_(1j).add_(x)
        fresh = x * 3
        return [state.conj(), state.conj().imag, x.conj(), fresh.conj()[::2], fresh.conj().imag]

    calls = recorded(run, STATE, INPUT)
    state, expected = (torch.zeros(4, dtype=torch.complex64) for _ in range(2))
    for step in range(3):
        x = torch.arange(4) + 1j * step
        for found, wanted in zip(calls(state, x), run(expected, x), strict=True):
            assert torch.equal(found, wanted)


def test_a_backward_notices_that_a_replay_wrote_what_it_kept() -> None:
    calls = recorded(decay, *DECAY)
    weight, state, factor = drawn(5, 3), drawn(2, 3), torch.ones(2, 3, requires_grad=True)
    calls(weight, state, drawn(2, 5))
    kept = (state * factor).sum()
    calls(weight, state, drawn(2, 5))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


def test_a_broadcast_view_of_a_state_is_recorded_beside_it() -> None:
    def run(wide: Tensor, state: Tensor) -> list[Tensor]:
        before = wide.sum()
        state.add_(1)
        return [before, wide.sum()]

    calls = recorded(run, STATE, STATE)
    state, expected = torch.arange(4.0), torch.arange(4.0)
    for _ in range(3):
        found = calls(state[:1].expand(4), state)
        wanted = run(expected[:1].expand(4), expected)
        assert torch.equal(torch.stack(found), torch.stack(wanted))
        assert torch.equal(state, expected)
    assert not calls.events.eager


def test_calls_that_are_collected_while_others_record_give_back_their_memory() -> None:
    capturer = EmulatedCapture()

    def leave_a_cycle() -> None:
        calls = recorded(decay, *DECAY, capturer=capturer)
        calls.itself = calls  # type: ignore[attr-defined]
        calls(drawn(5, 3), drawn(2, 3), drawn(2, 5))

    def collecting(state: Tensor) -> list[Tensor]:
        gc.collect()
        return [state.add_(1) * 2]

    leave_a_cycle()
    calls, state = recorded(collecting, STATE, capturer=capturer), torch.zeros(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # pytest warns of what a finalizer raises
        calls(state)
    calls.release()
    assert capturer.memory_bytes == 0


def test_outputs_that_share_memory_go_on_sharing_it_and_keep_their_strides() -> None:
    def run(x: Tensor) -> list[Tensor]:
        y = x * 2
        return [y, y.t(), (x + 1)[:, ::2], (x[0] - 1).expand(3, 4)]

    calls = recorded(run, INPUT)
    for seed in range(2):
        x = drawn(2, 4, seed=seed)
        found, wanted = calls(x), run(x)
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other) and one.stride() == other.stride()
        found[0].zero_()
        assert not found[1].any()


def test_h1_a_state_that_is_returned_and_fed_back_is_right_for_ten_steps() -> None:
    def run(weight: Tensor, state: Tensor, x: Tensor) -> list[Tensor]:
        state = state * 0.5 + x @ weight
        return [state.sum(-1), state]

    calls = recorded(run, PARAMETER, INPUT, INPUT)
    weight, state, expected = drawn(5, 3), torch.zeros(2, 3), torch.zeros(2, 3)
    history = []
    for step in range(10):
        x = drawn(2, 5, seed=step)
        output, state = calls(weight, state, x)
        wanted, expected = run(weight, expected, x)
        history.append((state, expected))
        assert torch.equal(output, wanted)
    assert all(torch.equal(*pair) for pair in history)
    assert calls.events.num_recordings == 1


@pytest.mark.parametrize("move", ["storage", "object"])
def test_g2_a_parameter_that_moved_is_recorded_again(move: str) -> None:
    calls = recorded(decay, *DECAY, shapes_are_guarded=True)
    twin = Twin(calls, nn.Parameter(drawn(5, 3), requires_grad=False), drawn(2, 3))
    twin.step()
    if move == "storage":
        twin.weight.data = drawn(5, 3, seed=9)
    else:
        twin.weight = drawn(5, 3, seed=9)
    twin.step()
    twin.step()
    assert calls.events.num_recordings == 2


def test_a_bound_tensor_of_another_shape_at_the_same_address_is_recorded_again() -> None:
    def run(state: Tensor, x: Tensor) -> list[Tensor]:
        state.add_(x)
        return [state.sum(0)]

    calls = recorded(run, STATE, INPUT)
    state, x = torch.zeros(2, 6), torch.ones(())
    assert calls(state, x)[0].shape == (6,)
    assert calls(state.view(3, 4), x)[0].shape == (4,)
    assert torch.equal(state, torch.full((2, 6), 2.0))


def test_g9_shapes_that_alternate_a_hundred_times_are_recorded_once_each() -> None:
    calls = recorded(decay, *DECAY)
    weight = drawn(5, 3)
    twins = [Twin(calls, weight, drawn(rows, 3)) for rows in (1, 4)]
    for step in range(100):
        twins[step % 2].step()
    assert (calls.events.num_recordings, calls.events.num_replays) == (2, 100)


def test_a_number_is_part_of_what_was_recorded() -> None:
    calls = recorded(lambda x, n: [x * n], INPUT, NUMBER)
    x = drawn(3)
    assert all(torch.equal(calls(x, n)[0], x * n) for n in (2, 3, 2, 5))
    assert calls.events.num_recordings == 3


def test_two_hundred_shapes_take_no_more_than_the_agreed_recordings() -> None:
    calls = recorded(lambda x: [x + 1], INPUT, max_recordings=3)
    for step in range(200):
        x = drawn(1 + step * 37 % 101)
        assert torch.equal(calls(x)[0], x + 1)
    assert calls.num_recordings == 3
    assert calls.events.num_recordings == 3, "keys that come rarely replace none"
    assert calls.events.eager["all 3 recordings are in use"] == 200 - calls.events.num_replays


def test_keys_that_are_all_in_use_do_not_push_each_other_out() -> None:
    calls = recorded(lambda x: [x + 1], INPUT, max_recordings=3)
    for step in range(80):
        calls(drawn(1 + step % 4))
    assert (calls.events.num_recordings, calls.events.num_releases) == (3, 0)
    assert calls.events.num_replays == 60


def test_a_recording_that_is_no_longer_used_makes_room_for_a_key_that_comes_again() -> None:
    capturer = EmulatedCapture()
    calls = recorded(lambda x: [x + 1], INPUT, max_recordings=2, capturer=capturer)
    for size in [1, 2] + [3] * 20:
        calls(drawn(size))
    assert calls.events.num_releases == 1
    assert calls.events.num_recordings == 3
    assert len(capturer._graphs) == 2
    assert torch.equal(calls(drawn(1))[0], drawn(1) + 1), "runs eagerly now"


def test_a_recording_of_moved_parameters_makes_room_at_once() -> None:
    calls = recorded(decay, *DECAY, max_recordings=1)
    twin = Twin(calls, nn.Parameter(drawn(5, 3), requires_grad=False), drawn(2, 3))
    twin.step()
    twin.weight.data = drawn(5, 3, seed=9)
    twin.step()  # a key that comes for the first time replaces none
    twin.step()
    assert (calls.num_recordings, calls.events.num_recordings) == (1, 2)


def _reads_a_value(state: Tensor, x: Tensor) -> list[Tensor]:
    state.add_(x)
    return [x * float(state.sum())]


def test_a_failing_recording_leaves_no_trace_and_is_tried_once() -> None:
    runs = []

    def run(state: Tensor, x: Tensor) -> list[Tensor]:
        runs.append(1)
        return _reads_a_value(state, x)

    capturer = EmulatedCapture()
    calls = recorded(run, STATE, INPUT, capturer=capturer)
    state, expected = torch.zeros(3), torch.zeros(3)
    for seed in range(3):
        runs.clear()
        x = drawn(3, seed=seed)
        assert torch.equal(calls(state, x)[0], _reads_a_value(expected, x)[0])
        assert torch.equal(state, expected)
    assert len(runs) == 1
    assert not capturer._graphs and capturer.memory_bytes == 0
    [(reason, count)] = calls.events.eager.items()
    assert reason.startswith("recording failed") and count == 3


def test_a_failing_recording_raises_in_strict_mode_with_the_state_as_it_was() -> None:
    calls = recorded(_reads_a_value, STATE, INPUT, on_unsupported="error")
    state = drawn(3)
    before = state.clone()
    with pytest.raises(Exception, match="value"):
        calls(state, torch.ones(3))
    assert torch.equal(state, before)


class _Subclass(Tensor):
    pass


_ODD: dict[str, Any] = {
    "is a _Subclass": lambda state: drawn(2).as_subclass(_Subclass),
    "layout": lambda state: torch.eye(2).to_sparse(),
    "lazy conjugate": lambda state: torch.ones(2, dtype=torch.complex64).conj(),
    "requires gradients": lambda state: drawn(2).requires_grad_(),
    "shares memory with a state": lambda state: state[:2],
    "overlaps itself": lambda state: drawn(4).as_strided((2, 2), (1, 1)),
    "lies on meta": lambda state: drawn(2).to("meta"),
}


@pytest.mark.parametrize("reason", _ODD)
def test_an_argument_that_cannot_be_recorded_is_run_eagerly_and_named(reason: str) -> None:
    seen = []
    calls = recorded(lambda state, x: seen.append(x) or [state + 1], STATE, INPUT)
    strict = recorded(lambda state, x: [state + 1], STATE, INPUT, on_unsupported="error")
    state = drawn(4)
    x = _ODD[reason](state)
    calls(state, x)
    assert seen[0] is x and not calls.events.num_recordings
    [found] = calls.events.eager
    assert reason in found
    with pytest.raises(UnsupportedError, match=f"{reason}.*expected.*on_unsupported"):
        strict(state, x)


def test_an_input_that_shares_memory_with_a_state_is_noticed_after_recording_too() -> None:
    def run(state: Tensor, x: Tensor) -> list[Tensor]:
        state.add_(1)
        return [x + 0]

    calls = recorded(run, STATE, INPUT, shapes_are_guarded=True)
    state = torch.zeros(4)
    calls(state, torch.zeros(2))
    assert torch.equal(calls(state, state[2:])[0], torch.full((2,), 2.0))
    assert calls.events.num_eager == 1


def test_gradients_that_are_wanted_later_are_noticed() -> None:
    calls = recorded(lambda w, x: [w * x], PARAMETER, INPUT)
    weight = nn.Parameter(drawn(2))
    with torch.no_grad():
        calls(weight, torch.ones(2))
    assert calls(weight, torch.ones(2))[0].requires_grad


def test_without_a_capturer_every_call_is_eager_and_counted() -> None:
    calls = recorded(decay, *DECAY, capturer=None)
    twin = Twin(calls, drawn(5, 3), drawn(2, 3))
    twin.step()
    twin.step()
    assert calls.events.num_eager == 2


def test_strict_mode_raises_when_all_recordings_are_in_use() -> None:
    calls = recorded(lambda x: [x + 1], INPUT, max_recordings=1, on_unsupported="error")
    calls(drawn(1))
    with pytest.raises(CapacityError, match="all 1 recordings are in use"):
        calls(drawn(2))


@pytest.mark.parametrize(
    "x",
    [drawn(1, 4).expand(3, 4), drawn(3, 8)[:, ::2], drawn(4, 3).t(), torch.ones(()), drawn(0, 4)],
    ids=["broadcast", "gaps", "transposed", "scalar", "empty"],
)
def test_inputs_keep_their_strides(x: Tensor) -> None:
    seen: list[tuple[int, ...]] = []

    def run(x: Tensor) -> list[Tensor]:
        seen.append(x.stride())
        return [x * 2]

    calls = recorded(run, INPUT)
    for step in range(3):
        given = x + step if x.stride() == (x + step).stride() else x
        assert torch.equal(calls(given)[0], given * 2)
    assert set(seen) == {x.stride()}
    assert calls.events.num_replays == 3


def test_modes_of_autograd_may_change_between_calls() -> None:
    calls = recorded(lambda state, x: [state.add_(x) + 1], STATE, INPUT)
    state = torch.zeros(2)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            calls(state, torch.ones(2))
    assert torch.equal(state, torch.full((2,), 4.0))
    assert calls.events.num_replays == 4


def test_two_threads_take_turns() -> None:
    calls = recorded(decay, *DECAY)
    weight = drawn(5, 3)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            twin = Twin(calls, weight, drawn(2 + seed, 3))
            for _ in range(30):
                twin.step()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and calls.events.num_replays == 60


def test_nothing_of_the_caller_is_kept_when_the_function_goes() -> None:
    capturer = EmulatedCapture()
    calls = recorded(decay, *DECAY, capturer=capturer)
    twin = Twin(calls, drawn(5, 3), drawn(2, 3))
    twin.step()
    gone = [weakref.ref(item) for item in (calls, twin.weight, twin.state)]
    del calls, twin
    gc.collect()
    assert not any(ref() is not None for ref in gone)
    assert not capturer._graphs


def test_a_recording_keeps_no_weight_and_no_tensor_object_alive() -> None:
    calls = recorded(decay, *DECAY)
    twin = Twin(calls, drawn(5, 3), drawn(2, 3))
    twin.step()
    gone = [weakref.ref(twin.weight), weakref.ref(twin.state)]
    del twin
    gc.collect()
    assert not any(ref() is not None for ref in gone)


def test_release_gives_everything_back_and_later_calls_record_again() -> None:
    capturer = EmulatedCapture()
    calls = recorded(decay, *DECAY, capturer=capturer)
    twin = Twin(calls, drawn(5, 3), drawn(2, 3))
    twin.step()
    calls.release()
    assert not capturer._graphs
    twin.step()
    assert calls.events.num_recordings == 2
