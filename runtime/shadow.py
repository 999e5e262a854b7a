"""Debugging: runs a step eagerly as well, from the same memory, and wants the bits of the replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.compiler.context import Pools, StepView
from midstream.errors import ContractError
from midstream.graphs.dispatch import GraphKey
from midstream.graphs.queue import DeviceQueue
from midstream.runtime.device_step import DeviceStep


@dataclass(frozen=True, slots=True)
class _Part:
    """Memory that a step may write: the named rows of a tensor."""

    name: str
    tensor: Tensor
    counts: str  # what its rows are
    rows: Tensor | None  # i64[n]  those that the step may write; None: all

    def copy(self) -> Tensor:
        return self.tensor.clone() if self.rows is None else self.tensor[self.rows]

    def restore(self, saved: Tensor) -> None:
        if self.rows is None:
            self.tensor.copy_(saved)
        else:
            self.tensor[self.rows] = saved


class Shadow:
    """Compares every n-th replay with an eager run.  Such a step waits for the device."""

    def __init__(self, every: int, step: DeviceStep, pools: Pools, queue: DeviceQueue) -> None:
        self.every = every
        self.num_compared = 0
        self._num_steps = 0
        self._step = step
        self._pools = pools
        self._queue = queue

    def is_due(self) -> bool:
        """Count a step; whether it is to be compared."""
        self._num_steps += 1
        return self._num_steps % self.every == 0

    def compare(
        self, key: GraphKey, view: StepView, replay: Callable[[], object], logits: Tensor
    ) -> None:
        """Run the staged step eagerly, put all memory back, replay it, and compare.

        Args:
            replay: enqueues the graph of the step.
            logits: where the graph leaves them.
        Raises:
            ContractError: naming the first buffer and row that differ, or a page that no row was to write.
        """
        self._queue.synchronize()
        parts = list(self._parts(view))
        before, sums = [part.copy() for part in parts], self._page_sums()
        eager_logits = self._step.run(view, key.rows)
        eager = [part.copy() for part in parts]
        self._check_strays(key, "an eager run", parts, sums)
        for part, saved in zip(parts, before, strict=True):
            part.restore(saved)
        replay()
        self._queue.synchronize()
        self._check_strays(key, "a replay", parts, sums)
        for part, wanted in zip(parts, eager, strict=True):
            _check_equal(key, part, part.copy(), wanted)
        live = (view.row_slot[: key.rows] >= 0).nonzero().flatten()
        _check_equal(key, _Part("logits", logits, "row", live), logits[live], eager_logits[live])
        self.num_compared += 1

    def _parts(self, view: StepView) -> Iterator[_Part]:
        """In the order in which a step writes them: the first that differs is nearest to the cause."""
        step = self._step
        for name, field in step.stage.device.items():
            yield _Part(f"stage.{name}", field, "entry", None)
        for name in ("num_moves", "move_to", "move_shift", "move_from"):
            yield _Part(name, getattr(step, name), "entry", None)
        state_pages, kv_pages = _written_pages(view, self._pools.kv_block)
        yield _Part("temporal", self._pools.temporal, "page", state_pages)
        yield _Part("conv", self._pools.conv, "page", state_pages)
        yield _Part("kv", self._pools.kv, "page", kv_pages)
        for name in step.slots.__dataclass_fields__:
            if name != "flat":
                yield _Part(f"slots.{name}", getattr(step.slots, name), "slot", None)
        yield _Part("logprob", step.logprob, "row", None)
        yield _Part("token", step.token, "row", None)

    def _page_sums(self) -> dict[str, Tensor]:
        """A number for each page that changes with its bits, but for rare coincidences."""
        arenas = {name: getattr(self._pools, name) for name in ("temporal", "conv", "kv")}
        return {n: _bits(arena).sum(1, dtype=torch.int64) for n, arena in arenas.items()}

    def _check_strays(
        self, key: GraphKey, run: str, parts: list[_Part], before: dict[str, Tensor]
    ) -> None:
        """No page but those that the step is to write has changed."""
        after = self._page_sums()
        for part in parts:
            if part.name not in before or part.rows is None:
                continue
            changed = before[part.name] != after[part.name]
            changed[part.rows] = False
            if changed.any():
                page = int(changed.nonzero()[0])
                raise ContractError(
                    f"shadow: {run} of the {key} wrote page {page} of {part.name}, expected none but "
                    f"{part.rows.tolist()}; look for a page number or an offset that was frozen"
                )


def _written_pages(view: StepView, kv_block: int) -> tuple[Tensor, Tensor]:
    """Pages of states and of KV that the staged step is to write; padding names the null page or none."""
    tables = [view.write_page] + ([] if view.chunk_page is None else [view.chunk_page])
    state = torch.cat(tables).unique().long()
    places = view.kv_slot[: len(view.token_id)]
    return state[state > 0], (places[places >= 0] // kv_block).unique().long()


def _check_equal(key: GraphKey, part: _Part, found: Tensor, wanted: Tensor) -> None:
    found, wanted = (t.reshape(len(t), -1) for t in (found, wanted))
    differs = (_bits(found) != _bits(wanted)).nonzero()
    if not len(differs):
        return
    place, column = differs[0].tolist()
    row = place if part.rows is None else int(part.rows[place])
    raise ContractError(
        f"shadow: replay and eager run of the {key} differ, first in {part.name}, {part.counts} {row}: found "
        f"{found[place, column].item()}, expected {wanted[place, column].item()}; look for a number, a slice "
        "or an address that the graph froze"
    )


def _bits(tensor: Tensor) -> Tensor:
    """The bits of each element as a whole number."""
    return tensor.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    )
