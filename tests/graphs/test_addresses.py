"""A weight that lies elsewhere is noticed, whichever way it went there."""

from collections.abc import Callable

import pytest
import torch

from midstream.graphs.addresses import ParameterWatch


def module() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4, affine=False))


def move_storage(model: torch.nn.Module) -> None:
    model[0].weight.data = model[0].weight.data.clone()


def replace_parameter(model: torch.nn.Module) -> None:
    model[0].weight = torch.nn.Parameter(torch.zeros(4, 3))


def swap_tensors(model: torch.nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.set_(torch.zeros(4, 3))


@pytest.mark.parametrize("move", [move_storage, replace_parameter, swap_tensors])
def test_a_weight_that_moved_is_named(move: Callable[[torch.nn.Module], None]) -> None:
    model = module()
    watch = ParameterWatch(model)
    assert watch.moved() == []
    move(model)
    assert watch.moved() == ["0.weight"]
    watch.bind()
    assert watch.moved() == []


def test_a_weight_that_is_gone_counts_as_moved() -> None:
    model = module()
    watch = ParameterWatch(model)
    del model[0].weight
    assert "0.weight" in watch.moved()


def test_a_buffer_that_was_replaced_is_named_as_well() -> None:
    model = module()
    watch = ParameterWatch(model)
    model[1].running_mean = torch.ones(4)
    assert watch.moved() == ["1.running_mean"]


def test_values_written_in_place_move_nothing() -> None:
    model = module()
    watch = ParameterWatch(model)
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model.load_state_dict(module().state_dict())
    assert watch.moved() == []
