"""
Where a layer's state lies in the pages of an arena: views for references, checks for launchers.

Letters: N pages, E elements of a page, H heads, K key width, V value width.
"""

from __future__ import annotations

from math import prod

from torch import Tensor

from midstream.errors import ContractError
from midstream.ops.registry import LAUNCH_ALIGN

# Terms of a sum from which on its products may be fused into it.  Below, a lane may hold a single
# product, and lanes that hold copies of one sum would differ in its last bit.
FUSE_FROM = 64


def state_region(arena: Tensor, offset: Tensor, *shape: int) -> Tensor:
    """View [N, *shape] of one layer's region in all pages of a CPU arena."""
    start = int(offset)
    return arena[:, start : start + prod(shape)].unflatten(1, shape)


def linear_states(
    arena: Tensor, offset: Tensor, heads: int, key_width: int, value_width: int
) -> Tensor:
    """View [N, H, K, V] of the states of linear attention, which lie in a page as [H, V, K].

    A step sums over keys: as neighbours they are lanes of one warp, and whole lines of memory.
    """
    return state_region(arena, offset, heads, value_width, key_width).transpose(2, 3)


def aligned_elements(arena: Tensor) -> int:
    """Elements on multiples of which pages and regions start.

    Raises:
        ContractError: pages do not start on multiples of `LAUNCH_ALIGN` bytes.
    """
    page_bytes = arena.stride(0) * arena.element_size()
    if page_bytes % LAUNCH_ALIGN or arena.stride(1) != 1:
        raise ContractError(
            f"arena: pages are {page_bytes} bytes apart and elements {arena.stride(1)}, expected a multiple "
            f"of {LAUNCH_ALIGN} and 1; allocate the arena from its layout"
        )
    return LAUNCH_ALIGN // arena.element_size()
