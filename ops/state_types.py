"""The element types that recurrent state may have."""

from __future__ import annotations

import torch
from torch import Tensor

from midstream.errors import ContractError

STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_state_dtype(op: str, arena: Tensor) -> None:
    """Raises ContractError where a state would lose its range, or is no number at all.

    >>> check_state_dtype("scan", torch.zeros(1, 8, dtype=torch.float16))
    """
    if arena.dtype not in STATE_DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in STATE_DTYPES)
        raise ContractError(
            f"{op}: the arena holds {arena.dtype}, this op keeps its state in {known}; "
            "allocate the arena with one of them, float32 if in doubt"
        )
