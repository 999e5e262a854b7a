"""
Memory in which recordings bind state tensors, and the moving in and out of their owners.

A recording binds a state tensor where it lies at first: that memory becomes a *home*.  All recordings
and functions that see the tensor there bind the same home, so that they share one state.  When a state
tensor of a new owner comes, the former owner, if it lives, gets its contents back in memory of its own;
then the new contents are copied in, and the new tensor is pointed to the home.  The tensor stays the
same object with the same shape, so that no guard of a compiler notices.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from midstream.graphs.memory import (
    is_foreign,
    leave_storage,
    num_holders,
    owned_alias,
    point,
    storage_address,
)


class Home:
    """Memory of one state tensor.  At most one tensor of a caller, the owner, lies in it."""

    def __init__(self, owner: Tensor) -> None:
        self.memory = owned_alias(owner)
        self.address = owner.data_ptr()
        self.start = storage_address(owner)
        self._owner = weakref.ref(owner)

    def owner(self) -> Tensor | None:
        """The tensor that lies here, if it lives and was not pointed elsewhere since."""
        owner = self._owner()
        return owner if owner is not None and storage_address(owner) == self.start else None

    def has_strangers(self) -> bool:
        """Whether tensors other than the owner see this memory: they would see it change hands."""
        return num_holders(self.memory) > 1 + (self.owner() is not None)

    def take_in(self, tensor: Tensor) -> None:
        """Point `tensor`, whose contents are here, to this memory."""
        point(tensor, self.memory)
        self._owner = weakref.ref(tensor)

    def note_owner(self, tensor: Tensor) -> None:
        """`tensor` lies here."""
        self._owner = weakref.ref(tensor)


Homes = tuple[Home, ...]

_left: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # by id
_homes: weakref.WeakValueDictionary[tuple[Any, ...], Home] = weakref.WeakValueDictionary()


def find_home(tensor: Tensor) -> Home | None:
    """The home in which `tensor` lies, if it is seen there with the same geometry."""
    return _homes.get(_place(tensor))


def homes_where_they_lie(tensors: Sequence[Tensor]) -> Homes | None:
    """Homes at the present addresses; None if one of the tensors shares its memory with others."""
    if any(_is_shared(tensor) for tensor in tensors):
        return None
    return tuple(_home_at(tensor) for tensor in tensors)


def has_returned(tensors: Sequence[Tensor]) -> bool:
    """Whether one of them had to leave its home before: its owner and another one take turns."""
    return any(id(tensor) in _left for tensor in tensors)


def adopt(homes: Homes, tensors: Sequence[Tensor]) -> bool:
    """Move `tensors` to `homes`; False, with nothing moved, if somebody else would notice."""
    moves = [pair for pair in zip(homes, tensors, strict=True) if not _is_in(*pair)]
    if any(home.has_strangers() or _is_shared(tensor) for home, tensor in moves):
        return False
    for home, _ in moves:
        former = home.owner()
        if former is not None:
            leave_storage(former)
            _left[id(former)] = former
    torch._foreach_copy_([home.memory for home, _ in moves], [tensor for _, tensor in moves])
    for home, tensor in moves:
        home.take_in(tensor)
    return True


def _is_in(home: Home, tensor: Tensor) -> bool:
    if tensor.data_ptr() != home.address:
        return False
    home.note_owner(tensor)
    return True


def _is_shared(tensor: Tensor) -> bool:
    return num_holders(tensor) > 1 + (find_home(tensor) is not None) or is_foreign(tensor)


def _home_at(tensor: Tensor) -> Home:
    home = find_home(tensor)
    if home is None:
        home = _homes[_place(tensor)] = Home(tensor)
    home.note_owner(tensor)
    return home


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
