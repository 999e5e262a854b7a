"""
Launches steps and hands their results over one step later.

The only wait of the host is for the event behind the results of an earlier step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.compiler.context import StepView
from midstream.graphs.capture import GraphCapture, check_addresses
from midstream.graphs.table import GraphKey, GraphTable, decode_key, padded_rows, smallest_fit
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
        self,
        step: DeviceStep,
        live: LiveTable,
        kv: Tensor,
        kv_block: int,
        graph_rows: tuple[int, ...],
        graph_chunks: tuple[GraphKey, ...],
    ) -> None:
        """`kv`: the arena of KV pages.  `graph_rows` and `graph_chunks`: the captured steps, ascending."""
        self.step = step
        self.live = live
        self.kv = kv
        self.kv_block = kv_block
        self.device = step.slots.flat.device
        pinned = self.device.type == "cuda"
        self.graph_rows = graph_rows
        self.graph_chunks = graph_chunks if pinned else ()
        self.graphs = GraphTable(self._capture)
        self._logits: dict[GraphKey, Tensor] = {}  # of captured steps
        self._bound = step.addresses()
        self._parameters = step.parameter_addresses()
        self._areas = [self._new_area(pinned) for _ in range(_NUM_RESULTS)]
        self._turn = 0
        self._capturing = GraphCapture(self.device) if pinned and graph_rows else None

    def warm_up(self, on_captured: Callable[[GraphKey], None]) -> None:
        """Capture all keys.  All rows are padding meanwhile: no page and no slot changes."""
        if self._capturing is not None:
            self._blank_stage()
            self.graphs.warm_up(self.graph_keys, on_captured)

    @property
    def graph_keys(self) -> list[GraphKey]:
        """The steps that are captured; none without a GPU."""
        if self._capturing is None:
            return []
        return [*map(decode_key, self.graph_rows), *self.graph_chunks]

    def recapture_if_moved(self) -> None:
        """After the weights changed: graphs hold addresses, so capture again if any moved."""
        found = self.step.parameter_addresses()
        if found != self._parameters:
            self.graphs.clear()
            self._logits.clear()
            self._parameters = found
            self.warm_up(lambda key: None)

    def launch(self, plan: StepPlan) -> InFlight:
        """Enqueue a step.  Waits for nothing."""
        if self.device.type == "cpu":
            check_addresses(self._bound, self.step.addresses(), "StepRunner")
        self._flush_deltas(plan)
        for source, target in plan.kv_copies:  # few: a request that resumes inside a block has one
            self.kv[target].copy_(self.kv[source], non_blocking=True)
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

    def _launch_decode(self, plan: StepPlan) -> tuple[int, Tensor]:
        step = self.step
        rows = padded_rows(plan.num_rows, self.graph_rows) or plan.num_rows
        step.stage.write_decode(
            plan, self.live, step.state_block, self.kv_block, step.precopy, rows
        )
        return rows, self._replay_or_run(decode_key(rows))

    def _launch_chunks(self, plan: StepPlan) -> tuple[int, Tensor]:
        step = self.step
        key = step.stage.write_chunks(
            plan, self.live, step.state_block, self.kv_block, step.precopy, self._pad
        )
        return key.rows, self._replay_or_run(key)

    def _pad(self, needed: GraphKey) -> GraphKey:
        """The captured shape that holds a step with chunks, else the smallest that compiled code takes."""
        fit = smallest_fit(needed, self.graph_chunks)
        if fit is not None:
            return fit
        tokens = max(8, -(-needed.tokens // 8) * 8)
        return GraphKey(tokens, max(needed.rows, 2), max(needed.chunks, 2))

    def _replay_or_run(self, key: GraphKey) -> Tensor:
        """Enqueue the staged step; returns its logits."""
        if self._capturing is None:
            cause = "graphs are off" if self.device.type == "cuda" else "no CUDA device"
            self.graphs.count_fallback(cause)
        elif key.chunks and key not in self._logits:
            self.graphs.count_fallback("more prompt tokens than any graph has")
        elif self.graphs.replay(key):
            return self._logits[key]
        return self.step.run(self._view(key), key.rows)

    def _view(self, key: GraphKey) -> StepView:
        stage = self.step.stage
        return stage.chunk_view(key) if key.chunks else stage.decode_view(key.rows)

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
        view = self._view(key)

        def run() -> None:
            self._logits[key] = self.step.run(view, key.rows)

        return self._capturing.capture(run, self.step.addresses, str(key))

    def _blank_stage(self) -> None:
        """Fill the device buffers with padding, so that warm-up runs touch no page and no slot."""
        fields = self.step.stage.device
        for name, field in fields.items():
            padding = name in ("row_slot", "chunk_row", "kv_slot", "decode_kv_slot")
            field.fill_(-1 if padding else 0)

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
