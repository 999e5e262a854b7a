"""State tensors of new owners move to where recordings bind them, and nobody else notices."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from recorded_rig import DECAY, INPUT, STATE, Twin, decay, drawn, recorded
from torch import Tensor

from midstream.graphs.adoption import find_home, homes_where_they_lie


def test_a_new_owner_is_adopted_once_and_stays_the_same_object() -> None:
    calls = recorded(decay, *DECAY)
    weight = drawn(5, 3)
    first = Twin(calls, weight, drawn(2, 3))
    first.step()
    address = first.state.data_ptr()
    del first
    for seed in range(1, 4):
        twin = Twin(calls, weight, drawn(2, 3, seed=seed))
        state = twin.state
        for _ in range(3):
            twin.step()
        assert twin.state is state and state.data_ptr() == address
    assert (calls.events.num_recordings, calls.events.num_adoptions) == (1, 3)


def test_a_former_owner_that_lives_gets_its_contents_back() -> None:
    calls = recorded(decay, *DECAY)
    weight = drawn(5, 3)
    first, second = (Twin(calls, weight, drawn(2, 3, seed=seed)) for seed in (1, 2))
    first.step()
    second.step()
    first.check()
    first.state.zero_()
    second.check()


def test_owners_that_take_turns_get_recordings_of_their_own() -> None:
    calls = recorded(decay, *DECAY)
    twins = [Twin(calls, drawn(5, 3), drawn(2, 3, seed=seed)) for seed in (1, 2)]
    twins[1].weight = twins[0].weight
    for step in range(10):
        twins[step % 2].step()
        twins[1 - step % 2].check()
    assert (calls.events.num_recordings, calls.events.num_adoptions) == (2, 1)


def test_owners_take_turns_in_one_home_where_there_is_no_room_for_recordings() -> None:
    calls = recorded(decay, *DECAY, max_recordings=1)
    weight = drawn(5, 3)
    twins = [Twin(calls, weight, drawn(2, 3, seed=seed)) for seed in (1, 2)]
    for step in range(10):
        twins[step % 2].step()
        twins[1 - step % 2].check()
    assert (calls.events.num_recordings, calls.events.num_adoptions) == (1, 9)


@pytest.mark.parametrize("who", ["new owner", "former owner"])
def test_memory_that_others_see_is_left_alone_and_the_call_recorded_again(who: str) -> None:
    calls = recorded(decay, *DECAY)
    weight = drawn(5, 3)
    first, second = (Twin(calls, weight, drawn(2, 3, seed=seed)) for seed in (1, 2))
    first.step()
    seen = first if who == "former owner" else second
    view = seen.state[1:]
    second.step()
    first.step()
    second.step()
    assert torch.equal(view, seen.state[1:])
    assert view.data_ptr() == seen.state[1:].data_ptr()
    assert (calls.events.num_recordings, calls.events.num_adoptions) == (2, 0)


def test_memory_that_numpy_sees_is_no_home_and_is_not_left() -> None:
    calls, weight = recorded(decay, *DECAY), drawn(5, 3)
    arrays = [np.zeros((2, 3), np.float32) for _ in range(2)]
    for array in arrays:
        twin = Twin(calls, weight, torch.from_numpy(array))
        for _ in range(2):
            twin.step()
            assert np.array_equal(array, twin.expected.numpy())
        array += 1
        assert np.array_equal(array, twin.state.numpy())
    assert (calls.events.num_recordings, calls.events.num_adoptions) == (2, 0)


def test_a_view_of_a_dead_owner_is_left_alone() -> None:
    calls = recorded(decay, *DECAY)
    weight = drawn(5, 3)
    first, second = (Twin(calls, weight, drawn(2, 3, seed=seed)) for seed in (1, 2))
    first.step()
    view, before = first.state[1:], first.state[1:].clone()
    del first
    second.step()
    assert torch.equal(view, before)


def test_an_output_that_views_its_state_is_left_alone() -> None:
    calls = recorded(lambda state, x: [state.add_(x)[1:]], STATE, INPUT)
    outputs = []
    for value in (1.0, 2.0, 3.0):
        state = torch.full((3,), value)
        outputs.append(calls(state, torch.ones(()))[0])
    assert [output.tolist() for output in outputs] == [[2, 2], [3, 3], [4, 4]]


def test_states_in_one_pool_are_bound_where_they_lie() -> None:
    def run(first: Tensor, second: Tensor, x: Tensor) -> list[Tensor]:
        first.add_(x)
        second.mul_(x)
        return [first + second]

    calls = recorded(run, STATE, STATE, INPUT)
    for _ in range(2):
        pool, expected = drawn(3, 4), drawn(3, 4)
        for first, second in ((0, 1), (0, 1), (1, 1), (2, 0), (0, 1)):
            x = drawn(4)
            found = calls(pool[first], pool[second], x)
            assert torch.equal(found[0], run(expected[first], expected[second], x)[0])
            assert torch.equal(pool, expected)
    assert not calls.events.num_adoptions
    assert calls.events.num_recordings <= 6


def test_pools_that_come_and_go_take_no_more_than_the_agreed_recordings() -> None:
    calls = recorded(lambda state, x: [state.add_(x) + 0], STATE, INPUT, max_recordings=2)
    kept = []
    for seed in range(20):
        pool = drawn(2, 3, seed=seed)
        kept.append(pool)
        assert torch.equal(calls(pool[0], torch.ones(3))[0], drawn(2, 3, seed=seed)[0] + 1)
    assert calls.num_recordings == 2 and calls.events.num_recordings == 2


def test_states_that_swapped_memory_are_moved_back() -> None:
    def run(first: Tensor, second: Tensor) -> list[Tensor]:
        first.add_(1)
        second.mul_(2)
        return [first + second]

    calls = recorded(run, STATE, STATE, max_recordings=1)
    first, second = drawn(3), drawn(3, seed=1)
    one, other = first.clone(), second.clone()
    for a, b, c, d in ((first, second, one, other), (second, first, other, one)) * 2:
        assert torch.equal(calls(a, b)[0], run(c, d)[0])
        assert torch.equal(first, one) and torch.equal(second, other)


def test_two_functions_over_one_cache_share_its_home() -> None:
    weight = drawn(5, 3)
    prefill, decode = (recorded(decay, *DECAY) for _ in range(2))
    for seed in range(3):
        twin = Twin(prefill, weight, drawn(2, 3, seed=seed))
        twin.step()
        for _ in range(3):
            twin.calls = decode
            twin.step()
            twin.calls = prefill
            twin.step()
    assert prefill.events.num_adoptions == 2
    assert decode.events.num_adoptions == 0
    assert prefill.events.num_recordings == decode.events.num_recordings == 1


def test_functions_with_homes_of_their_own_come_to_share_one() -> None:
    weight = drawn(5, 3)
    prefill, decode = (recorded(decay, *DECAY) for _ in range(2))
    for calls in (prefill, decode):
        Twin(calls, weight, drawn(2, 3)).step()
    twin = Twin(prefill, weight, drawn(2, 3, seed=1))
    for step in range(10):
        twin.calls = (prefill, decode)[step % 2]
        twin.step()
    assert prefill.events.num_adoptions + decode.events.num_adoptions == 1
    assert decode.events.num_recordings == 2


@pytest.mark.parametrize("made_in", [True, False])
@pytest.mark.parametrize("called_in", [True, False])
def test_adoption_works_for_inference_tensors_and_in_inference_mode(
    made_in: bool, called_in: bool
) -> None:
    calls = recorded(lambda state, x: [x + 1], STATE, INPUT)
    for seed in range(3):
        with torch.inference_mode(made_in):
            state = drawn(2, 3, seed=seed)
        with torch.inference_mode(called_in):
            calls(state, torch.ones(2))
        assert state.is_inference() == made_in
        assert torch.equal(state, drawn(2, 3, seed=seed))
    assert (calls.events.num_recordings, calls.events.num_adoptions) == (1, 2)


def test_homes_are_written_in_every_mode() -> None:
    calls = recorded(lambda state, x: [state.add_(x) + 0], STATE, INPUT)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            state = drawn(2, 3)
            assert torch.equal(calls(state, torch.ones(3))[0], drawn(2, 3) + 1)
    assert (calls.events.num_recordings, calls.events.num_adoptions) == (1, 3)


def _over(tensor: Tensor, *shape: int) -> Tensor:
    """Another tensor over the same memory, of which PyTorch knows no relation."""
    return torch.empty(0).set_(tensor.untyped_storage(), 0, shape)


def test_memory_that_is_seen_with_another_shape_is_no_home_for_that_shape() -> None:
    calls = recorded(lambda state, x: [state.add_(x) + 0], STATE, INPUT)
    state = torch.zeros(2, 6)
    calls(state, torch.ones(()))
    other = _over(state, 3, 4)
    del state
    for owner in (other, torch.ones(3, 4), torch.ones(3, 4)):
        assert torch.equal(calls(owner, torch.ones(()))[0], torch.full((3, 4), 2.0))


def test_another_object_over_the_same_memory_becomes_the_owner() -> None:
    calls = recorded(lambda state, x: [state.add_(x) + 0], STATE, INPUT)
    state = torch.zeros(2, 3)
    calls(state, torch.ones(()))
    other = _over(state, 2, 3)
    del state
    calls(other, torch.ones(()))
    calls(torch.zeros(2, 3), torch.ones(()))
    assert torch.equal(other, torch.full((2, 3), 2.0))
    assert (calls.events.num_recordings, calls.events.num_adoptions) == (1, 1)


def test_a_former_owner_that_was_pointed_elsewhere_stays_there() -> None:
    calls = recorded(lambda state, x: [state.add_(x) + 0], STATE, INPUT)
    state, elsewhere = torch.zeros(2, 3), torch.ones(2, 3)
    calls(state, torch.ones(()))
    state.set_(elsewhere.untyped_storage(), 0, (2, 3))
    calls(torch.zeros(2, 3), torch.ones(()))
    elsewhere.fill_(7)
    assert torch.equal(state, elsewhere)
    assert calls.events.num_adoptions == 1


def test_a_longer_cache_and_another_batch_are_recorded_beside() -> None:
    calls = recorded(decay, *DECAY)
    weight = drawn(5, 3)
    for rows in (2, 4, 2, 8, 4):
        twin = Twin(calls, weight, drawn(rows, 3))
        twin.step()
    assert (calls.events.num_recordings, calls.events.num_adoptions) == (3, 2)


def test_layers_of_one_function_with_weights_of_their_own_leave_each_other_in_place() -> None:
    calls = recorded(decay, *DECAY)
    twins = [Twin(calls, drawn(5, 3, seed=n), drawn(2, 3, seed=n)) for n in range(6)]
    for _ in range(3):
        for twin in twins:
            twin.step()
    assert (calls.events.num_recordings, calls.events.num_adoptions) == (6, 0)


def test_a_home_lives_as_long_as_recordings_bind_it() -> None:
    calls = recorded(decay, *DECAY)
    twin = Twin(calls, drawn(5, 3), drawn(2, 3))
    assert find_home(twin.state) is None
    twin.step()
    home = weakref.ref(find_home(twin.state))  # type: ignore[arg-type]
    assert home() is not None
    calls.release()
    gc.collect()
    assert home() is None
    twin.step()


def test_a_tensor_that_shares_its_memory_has_no_home() -> None:
    state = drawn(2, 3)
    assert homes_where_they_lie([state[0]]) is None
    assert homes_where_they_lie([state]) is not None


class _Owner:
    def __init__(self) -> None:
        self.state = torch.zeros(2, 3)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_guard_of_dynamo_notices_an_adoption(mode: Any) -> None:
    compilations = []
    calls = recorded(lambda state, x: [state.add_(x) * 2], STATE, INPUT)

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        compilations.append(graph)
        names = [
            node.meta["example_value"].shape for node in graph.graph.find_nodes(op="placeholder")
        ]
        order = [names.index((2, 3)), names.index((3,))]

        def compiled(*flat: Tensor) -> list[Tensor]:
            return calls(flat[order[0]], flat[order[1]])

        return compiled

    @torch.compile(backend=backend, fullgraph=True)
    def step(owner: _Owner, x: Tensor) -> Tensor:
        return owner.state.add_(x) * 2

    kept = []
    with mode():
        for seed in range(4):
            owner = _Owner()
            torch._dynamo.mark_static_address(owner.state)
            kept.append(owner if seed % 2 else None)
            expected = torch.zeros(2, 3)
            for step_seed in range(3):
                x = drawn(3, seed=step_seed)
                assert torch.equal(step(owner, x), expected.add_(x) * 2)
            assert torch.equal(owner.state, expected)
    assert len(compilations) == 1
    assert (calls.events.num_recordings, calls.events.num_adoptions) == (1, 3)
