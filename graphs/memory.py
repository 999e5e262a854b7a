"""Where a tensor lies: geometry, storage, who else sees it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Geometry = tuple[Any, ...]


def geometry(tensor: Tensor) -> Geometry:
    """All that a compiled function may rely on, but the address."""
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def storage_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def num_holders(tensor: Tensor) -> int:
    """Tensors that share the storage of `tensor`, itself included, also those that only C++ holds."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # less the Python object asked here


def is_foreign(tensor: Tensor) -> bool:
    """Whether somebody whom torch does not count made or sees its memory: numpy, another process."""
    storage = tensor.untyped_storage()
    return not storage.resizable() or (not tensor.is_cuda and storage.is_shared())


def owned_alias(tensor: Tensor) -> Tensor:
    """Another tensor over the same memory that keeps it alive."""
    return _over(tensor.untyped_storage(), tensor)


def unowned_alias(tensor: Tensor) -> Tensor:
    """Another tensor over the same memory that does not keep it alive, as a captured graph does not."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return owned_alias(tensor)
    unowned: Any = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    return _over(unowned, tensor)


def point(tensor: Tensor, target: Tensor) -> None:
    """Let `tensor`, the same object for all who hold it, see the memory of `target`."""
    with torch.inference_mode():  # neither mode of autograd may refuse, and no guard may notice
        tensor.set_(
            target.untyped_storage(), target.storage_offset(), target.shape, target.stride()
        )


def leave_storage(tensor: Tensor) -> None:
    """Give `tensor` a copy of its storage for its own."""
    with torch.inference_mode():
        storage = tensor.untyped_storage().clone()
        tensor.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _over(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    with torch.inference_mode(False):  # may be written in every mode
        tensor = torch.empty(0, dtype=like.dtype, device=like.device)
        return tensor.set_(storage, like.storage_offset(), like.shape, like.stride())
