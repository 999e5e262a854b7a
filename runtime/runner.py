"""
Launches steps and hands their results over one step later.

The only wait of the host is for the event behind the results of an earlier step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.graphs.capture import GraphCapture, check_addresses
from midstream.graphs.table import GraphKey, GraphTable, padded_rows
from midstream.runtime.commit import StepResult
from midstream.runtime.device_step import DeviceStep
from midstream.runtime.live import LiveTable
from midstream.runtime.plan import StepPlan

MAX_LOGPROBS = 20
_NUM_RESULTS = (
    3  # areas that rotate: results of the step in flight, of the one being read, one to spare
)


@dataclass(frozen=True, slots=True)
class _ResultArea:
    """Pinned host memory for the results of one step."""

    token: Tensor  # i32[R]
    logprob: Tensor  # f32[R]
    best_id: Tensor  # i32[R, MAX_LOGPROBS]
    best_logprob: Tensor  # f32[R, MAX_LOGPROBS]
    arrived: torch.cuda.Event | None


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched step."""

    plan: StepPlan
    area: _ResultArea


class StepRunner:
    """Stages a plan, replays its graph or runs it eagerly, and sends the results back."""

    def __init__(
        self, step: DeviceStep, live: LiveTable, kv_block: int, graph_rows: tuple[int, ...]
    ) -> None:
        self.step = step
        self.live = live
        self.kv_block = kv_block
        self.device = step.slots.flat.device
        self.graph_rows = graph_rows
        self.graphs = GraphTable(self._capture)
        self._views = {rows: step.stage.decode_view(rows) for rows in self._decode_sizes()}
        self._logits: dict[int, Tensor] = {}  # of captured steps, by rows
        self._bound = step.addresses()
        self._parameters = step.parameter_addresses()
        pinned = self.device.type == "cuda"
        self._areas = [self._new_area(pinned) for _ in range(_NUM_RESULTS)]
        self._turn = 0
        self._capturing = GraphCapture(self.device) if pinned and graph_rows else None

    def warm_up(self, on_captured: Callable[[int], None]) -> None:
        """Capture the ladder.  All rows are padding meanwhile: no page and no slot changes."""
        if self._capturing is None:
            return
        self._blank_stage()
        keys = [GraphKey(rows) for rows in self.graph_rows]
        self.graphs.warm_up(keys, lambda key: on_captured(key.rows))

    def recapture_if_moved(self) -> None:
        """After the weights changed: graphs hold addresses, so capture again if any moved."""
        found = self.step.parameter_addresses()
        if found != self._parameters:
            self.graphs.clear()
            self._logits.clear()
            self._parameters = found
            self.warm_up(lambda rows: None)

    def launch(self, plan: StepPlan) -> InFlight:
        """Enqueue a step.  Waits for nothing."""
        if self.device.type == "cpu":
            check_addresses(self._bound, self.step.addresses(), "StepRunner")
        self._flush_deltas(plan)
        if plan.kind == "decode":
            rows, logits = self._launch_decode(plan)
        else:
            rows, logits = self._launch_chunks(plan)
        return InFlight(plan, self._send_results(plan, rows, logits))

    def wait(self, flight: InFlight) -> StepResult:
        """The results of a launched step; waits for its event only."""
        area, rows, best = flight.area, flight.plan.num_rows, flight.plan.num_logprobs
        if area.arrived is not None:
            area.arrived.synchronize()
        return StepResult(
            area.token[:rows].numpy(),
            area.logprob[:rows].numpy(),
            area.best_id[:rows, :best].numpy() if best else None,
            area.best_logprob[:rows, :best].numpy() if best else None,
        )

    def _decode_sizes(self) -> tuple[int, ...]:
        return self.graph_rows or (self.step.stage.limits.max_rows,)

    def _launch_decode(self, plan: StepPlan) -> tuple[int, Tensor]:
        step = self.step
        rows = padded_rows(plan.num_rows, self.graph_rows) or plan.num_rows
        step.stage.write_decode(
            plan, self.live, step.state_block, self.kv_block, step.precopy, rows
        )
        if self._capturing is not None and self.graphs.replay(GraphKey(rows)):
            return rows, self._logits[rows]
        if self._capturing is None:
            self.graphs.count_fallback(
                "graphs are off" if self.device.type == "cuda" else "no CUDA device"
            )
        view = self._views.get(rows)
        return rows, step.run(step.stage.decode_view(rows) if view is None else view, rows)

    def _launch_chunks(self, plan: StepPlan) -> tuple[int, Tensor]:
        step = self.step
        self.graphs.count_fallback("the step has prompt chunks")
        shape = step.stage.write_chunks(
            plan, self.live, step.state_block, self.kv_block, step.precopy
        )
        return shape.rows, step.run(step.stage.chunk_view(shape), shape.rows)

    def _flush_deltas(self, plan: StepPlan) -> None:
        """Send deltas that do not fit into the step's own copy ahead of it."""
        limit = self.step.stage.limits.max_deltas
        while len(plan.deltas) > limit:
            part = dict(list(plan.deltas.items())[:limit])
            for index in part:
                del plan.deltas[index]
            self.step.stage.send_deltas(part)
            self.step.apply_deltas()

    def _send_results(self, plan: StepPlan, rows: int, logits: Tensor) -> _ResultArea:
        self._turn = (self._turn + 1) % _NUM_RESULTS
        area, num = self._areas[self._turn], plan.num_rows
        area.token[:num].copy_(self.step.token[:num], non_blocking=True)
        area.logprob[:num].copy_(self.step.logprob[:num], non_blocking=True)
        if plan.num_logprobs:
            best = torch.log_softmax(logits[:num].float(), -1).topk(plan.num_logprobs)
            area.best_id[:num, : plan.num_logprobs].copy_(best.indices, non_blocking=True)
            area.best_logprob[:num, : plan.num_logprobs].copy_(best.values, non_blocking=True)
        if area.arrived is not None:
            area.arrived.record()
        return area

    def _capture(self, key: GraphKey) -> Callable[[], None]:
        assert self._capturing is not None
        view = self.step.stage.decode_view(key.rows)

        def run() -> None:
            self._logits[key.rows] = self.step.run(view, key.rows)

        return self._capturing.capture(run, self.step.addresses, f"decode, {key.rows} rows")

    def _blank_stage(self) -> None:
        """Fill the device buffers with padding, so that warm-up runs touch no page and no slot."""
        fields = self.step.stage.device
        fields["row_slot"].fill_(-1)
        fields["decode_kv_slot"].fill_(-1)
        for name in ("delta_count", "row_start", "read_page", "write_page", "row_sample",
                     "decode_token_id", "decode_position"):  # fmt: skip
            fields[name].zero_()

    def _new_area(self, pinned: bool) -> _ResultArea:
        rows = self.step.stage.limits.max_rows

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=pinned)

        return _ResultArea(
            empty(torch.int32, rows),
            empty(torch.float32, rows),
            empty(torch.int32, rows, MAX_LOGPROBS),
            empty(torch.float32, rows, MAX_LOGPROBS),
            torch.cuda.Event() if pinned else None,
        )
