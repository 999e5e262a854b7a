"""
What an engine of these sizes takes beside the model, and the refusal of what a machine does not have.

Sums are of what is allocated at the start; the work space of a step comes on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from midstream.compiler.host_memory import host_memory
from midstream.errors import CapacityError
from midstream.runtime.config import ResolvedConfig
from midstream.runtime.page_passes import NUM_BOOKS
from midstream.runtime.planner import PageBytes
from midstream.runtime.slots import SlotLayout
from midstream.runtime.stage import Cut, StageLimits

_WORD = 4  # bytes of an int32
_HOST_AREAS = 3  # pinned copies of a step's buffers, that rotate
_PAGE_BOOKS = _WORD * (NUM_BOOKS + 2)  # and the page before it, and whether it was just released


@dataclass(frozen=True, slots=True)
class Share:
    """One part of the memory that an engine takes."""

    what: str
    device: int  # bytes
    host: int  # bytes
    advice: str


def shares(
    config: ResolvedConfig, layout: SlotLayout, limits: StageLimits, page_bytes: PageBytes
) -> list[Share]:
    """What is allocated, by the options that decide about it."""
    records = _WORD * layout.num_elements
    tokens = _WORD * layout.num_slots * (config.max_len + 1)
    step = _WORD * Cut(limits).size
    kv, state = config.num_kv_pages, config.num_state_pages
    return [
        Share(
            f"the records of max_rows={config.max_rows} requests of up to {config.max_len} tokens",
            records, records + tokens, "lower max_rows or max_len",
        ),
        Share(
            f"the buffers of max_step_tokens={config.max_step_tokens} and max_rows={config.max_rows}",
            step, _HOST_AREAS * step, "lower max_step_tokens or max_rows",
        ),
        Share(
            f"{kv} KV pages of kv_block={config.kv_block} tokens", kv * page_bytes.kv,
            kv * _PAGE_BOOKS, "lower num_kv_pages, memory or kv_block",
        ),
        Share(
            f"{state} state pages", state * page_bytes.state, state * _PAGE_BOOKS,
            "lower num_state_pages or memory",
        ),
    ]  # fmt: skip


def check_room(parts: list[Share], device: torch.device) -> None:
    """Refuse before anything is allocated.

    Raises:
        CapacityError: naming the part that takes most.
    """
    on_host, on_device = (
        {part: part.host for part in parts},
        {part: part.device for part in parts},
    )
    if device.type == "cuda":
        _check(on_device, str(device), torch.cuda.mem_get_info(device)[1])
    else:
        on_host = {part: part.host + part.device for part in parts}
    _check(on_host, "this machine", host_memory())


def _check(parts: Mapping[Share, int], place: str, room: int) -> None:
    total = sum(parts.values())
    if total > room:
        most = max(parts, key=lambda part: parts[part])
        raise CapacityError(
            f"Engine: {most.what} take {_gib(parts[most])} of the {_gib(total)} that the engine needs on "
            f"{place}; expected at most {_gib(room)}, which it has; {most.advice}"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"
