"""
A recording of device work on the CPU, as a CUDA graph would keep it.

Numbers, addresses and slices are those of the recorded run: a tensor is kept as memory, offset, shape and
strides, so that whoever moves or re-creates a buffer later is not followed.  Views are not made again, Python
does not run again, and results land in the memory of the recorded run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from midstream.errors import ContractError


@dataclass(frozen=True, slots=True)
class Node:
    """One piece of enqueued work."""

    name: str
    run: Callable[[], None]


class Memory:
    """Memory that recorded runs took, and who holds it now.  Tapes of one pool share it."""

    def __init__(self) -> None:
        self.taken: dict[int, Tensor] = {}  # all of each storage, by its address
        self._num_ours: Counter[int] = Counter()  # references that the tapes hold

    @property
    def held(self) -> frozenset[int]:
        """Addresses of what somebody outside holds, so that no later recording may take it."""
        return frozenset(address for address in self.taken if self.is_held(address))

    def is_held(self, address: int) -> bool:
        """Whether anybody but the tapes holds a storage."""
        return _num_references(address) > self._num_ours[address]

    def num_bytes(self, addresses: Iterable[int]) -> int:
        return sum(self.taken[address].untyped_storage().nbytes() for address in addresses)

    def poison(self, keep: Collection[int]) -> None:
        """Fill all but `keep` with NaN, or with numbers that are no index, as its next user would."""
        for address, memory in self.taken.items():
            if address not in keep:
                memory.fill_(garbage(memory.dtype))

    def own(self, tensor: Tensor) -> Tensor:
        """A tensor over the same memory that the tapes hold."""
        self._num_ours[address_of(tensor)] += 1
        return _over(tensor, tensor.storage_offset(), tensor.shape, tensor.stride())

    def drop(self, taken: Iterable[int], owned: Counter[int]) -> None:
        """A tape is gone, with what it took and its references."""
        self._num_ours -= owned
        for address in taken:
            del self.taken[address]


class Tape:
    """The work of one run, in order."""

    def __init__(self, memory: Memory | None = None) -> None:
        self.memory = Memory() if memory is None else memory
        self.nodes: list[Node] = []
        self.taken: dict[int, Tensor] = {}  # memory taken in this run, by address of the storage
        self._outside: dict[int, Tensor] = {}  # memory that was there before the run
        self._constants: dict[int, Tensor] = {}  # made from numbers of Python
        self._numbers: set[int] = (
            set()
        )  # of `_outside`, what may be a number: launches take it by value
        self._before: dict[
            int, Tensor
        ] = {}  # what memory from outside held, where the run wrote it
        self._owned: Counter[int] = Counter()  # our references, by address

    @property
    def bound(self) -> list[tuple[int, int]]:
        """Address and bytes of all memory that was there before the run, numbers aside."""
        storages = [
            memory.untyped_storage()
            for address, memory in self._outside.items()
            if address not in self._numbers
        ]
        return [(storage.data_ptr(), storage.nbytes()) for storage in storages]

    @torch.no_grad()
    def replay(self) -> None:
        """Do the work again, on the same memory.

        Raises:
            ContractError: when memory that the work reads or writes was given up by its owner.
        """
        if not all(map(self.memory.is_held, self._outside.keys() - self._numbers)):
            raise ContractError(
                "recorded step: memory that it was bound to was freed since, where a captured graph would "
                "read whatever lies there now; expected buffers that live as long as the recording; keep "
                "them, or record again"
            )
        for node in self.nodes:
            node.run()

    # -- what a recorder tells ---------------------------------------------------------------------------

    def meet(self, tensors: Iterable[Tensor]) -> None:
        """Arguments: memory that the run did not take is somebody's outside."""
        for tensor in tensors:
            address = address_of(tensor)
            if address not in self._outside and not self._is_known(address):
                self._outside[address] = self._hold(tensor)
                if not tensor.dim():
                    self._numbers.add(address)

    def bind(self, value: Any) -> Any:
        """The same arguments by address: tensors of our own over the same memory."""
        return tree_map_only(Tensor, self._bind, value)

    def take(self, tensor: Tensor) -> bool:
        """A result: whether it lies in memory that the run has just taken."""
        address = address_of(tensor)
        if address in self._outside or self._is_known(address):
            return False
        self.taken[address] = self.memory.taken[address] = self._hold(tensor)
        return True

    def keep_constant(self, tensor: Tensor) -> None:
        """A number from Python: neither memory of the run nor of an owner outside."""
        self._constants[address_of(tensor)] = self._hold(tensor)

    def save(self, tensors: Iterable[Tensor]) -> None:
        """Remember what memory from outside holds, before it is written for the first time."""
        for tensor in tensors:
            address = address_of(tensor)
            if not self._is_known(address) and address not in self._before:
                self._before[address] = _whole(tensor).clone()
                self.meet([tensor])

    def put_back(self) -> None:
        """Capture runs nothing: memory from outside is as it was."""
        for address, content in self._before.items():
            _over(self._outside[address], 0, content.shape, content.stride()).copy_(content)
        self._before.clear()

    def drop(self) -> None:
        """Give up all memory.  Nothing can be replayed any more."""
        self.memory.drop(self.taken, self._owned)
        self.nodes.clear()
        self.taken.clear()
        self._outside.clear()
        self._constants.clear()
        self._owned.clear()

    def _is_known(self, address: int) -> bool:
        return address in self.memory.taken or address in self._constants

    def _bind(self, tensor: Tensor) -> Tensor:
        self.meet([tensor])
        self._owned[address_of(tensor)] += 1
        return self.memory.own(tensor)

    def _hold(self, tensor: Tensor) -> Tensor:
        """The whole storage of a tensor."""
        self._owned[address_of(tensor)] += 1
        return self.memory.own(_whole(tensor))


def garbage(dtype: torch.dtype) -> float | int | bool:
    """What no right result is made of: NaN, or a number that is no index, slot, page or token.

    >>> garbage(torch.bfloat16), garbage(torch.int32), garbage(torch.bool)
    (nan, 1073741823, True)
    """
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max // 2


def _num_references(address: int) -> int:
    """Tensors over a storage; torch counts its own look as one more."""
    return torch._C._storage_Use_Count(address) - 1


def address_of(tensor: Tensor) -> int:
    """Of the storage object, which stays the same while its tensors move."""
    return tensor.untyped_storage()._cdata


def _whole(tensor: Tensor) -> Tensor:
    """All of the memory that a tensor lies in."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return _over(tensor, 0, (count,), (1,))


def _over(tensor: Tensor, offset: Any, shape: Any, stride: Any) -> Tensor:
    """A new tensor over the memory of another: no view of it, and one more reference to the memory."""
    new = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return new.set_(tensor.untyped_storage(), offset, shape, stride)
