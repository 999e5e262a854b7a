"""Tensors over memory of a graph that do not keep it from later graphs of the same pool."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def unowned(tensor: Tensor) -> Tensor:
    """The same memory, dtype, shape and strides; on a GPU its owner may free or reuse the memory.

    What a replay writes is valid until the next replay of any graph of the pool, on the same stream.  Who
    reads it before then needs no ownership; who owned it would keep later captures from using this memory
    again, and a ladder of graphs would take the sum of its results.
    On the CPU, where graphs have no pool, the tensor itself.
    """
    if tensor.device.type != "cuda" or not tensor.numel():
        return tensor
    storage = tensor.untyped_storage()
    memory = torch.as_tensor(_Memory(storage.data_ptr(), storage.nbytes()), device=tensor.device)
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    alias.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return alias


class _Memory:
    """Bytes of a device in the form that torch takes without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 2,
        }
