"""What each argument of a recorded call is to the recording."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from operator import itemgetter
from typing import Any

Pick = Callable[[Sequence[Any]], tuple[Any, ...]]


class InputRole(Enum):
    """How a recording takes an argument."""

    PARAMETER = "parameter"  # bound where it lies, never written; elsewhere means another recording
    STATE = "state"  # written in place; bound where it lies, and moved there if it lies elsewhere
    INPUT = "input"  # copied into memory of the recording before each replay
    NUMBER = "number"  # a Python value, burnt into the recording


class Places:
    """Places of the arguments of each role, and functions that pick them out of a call."""

    def __init__(self, roles: Sequence[InputRole]) -> None:
        self.parameters = _places(roles, InputRole.PARAMETER)
        self.states = _places(roles, InputRole.STATE)
        self.inputs = _places(roles, InputRole.INPUT)
        self.bound = self.parameters + self.states
        self.tensors = self.bound + self.inputs
        self.pick_numbers = picker(_places(roles, InputRole.NUMBER))
        self.pick_parameters = picker(self.parameters)
        self.pick_states = picker(self.states)
        self.pick_inputs = picker(self.inputs)
        self.pick_bound = picker(self.bound)
        self.pick_tensors = picker(self.tensors)


def picker(places: Sequence[int]) -> Pick:
    """Picks the items at `places`, always as a tuple.

    >>> [picker(places)("abc") for places in ((), (1,), (2, 0))]
    [(), ('b',), ('c', 'a')]
    """
    if not places:
        return lambda items: ()
    if len(places) == 1:
        only = places[0]
        return lambda items: (items[only],)
    return itemgetter(*places)


def _places(roles: Iterable[InputRole], role: InputRole) -> list[int]:
    return [place for place, found in enumerate(roles) if found is role]
