"""
Launches steps and hands their results over one step later.

The only wait of the host is for the event behind the results of an earlier step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from midstream.compiler.context import StepView
from midstream.errors import ContractError
from midstream.graphs.addresses import ParameterWatch, check_addresses
from midstream.graphs.captured import Captured, Capturer, Recorder
from midstream.graphs.dispatch import GraphKey, Ladder
from midstream.graphs.ladder import is_late
from midstream.graphs.piecewise import PiecewiseCapture
from midstream.graphs.queue import DeviceQueue, Event, queue_of
from midstream.graphs.table import GraphTable
from midstream.graphs.unowned import unowned
from midstream.runtime.commit import StepResult
from midstream.runtime.device_step import DeviceStep
from midstream.runtime.live import I32, LiveTable
from midstream.runtime.plan import StepPlan
from midstream.runtime.poison import poison_buffers
from midstream.runtime.shadow import Shadow

F32 = npt.NDArray[np.float32]
MAX_LOGPROBS = 20
_NUM_RESULTS = 3  # areas that rotate: of the step in flight, of the one being read, one to spare
_WATCH_EVERY = 64  # launches between looks at the addresses that graphs hold


@dataclass(frozen=True, slots=True)
class _ResultArea:
    """Pinned host memory for the results of one step."""

    result: Tensor  # i32[2, R]  as `DeviceStep.result`
    token: I32  # i32[R]    of it
    logprob: F32  # f32[R]  of it
    best_id: Tensor  # i32[R, MAX_LOGPROBS]
    best_logprob: Tensor  # f32[R, MAX_LOGPROBS]
    arrived: Event


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
        ladder: Ladder,
        capturer: Recorder | None = None,
        queue: DeviceQueue | None = None,
    ) -> None:
        """
        Args:
            kv: the arena of KV pages.
            ladder: the steps that have graphs; decode steps are padded to it also where nothing captures.
            capturer: records them, None where no step is captured.
            queue: the device's work, by default what a device of its type has.
        """
        self.step = step
        self.live = live
        self.kv = kv
        self.kv_block = kv_block
        self.device = step.slots.flat.device
        self.queue = queue or queue_of(self.device)
        self.ladder = ladder if capturer else Ladder(ladder.decode)
        self.capturer = capturer
        self.graphs = GraphTable(self._capture, late=filter(is_late, ladder.keys))
        self._logits: dict[GraphKey, Tensor] = {}  # of captured steps
        self._bound = step.addresses()
        self._weights = ParameterWatch(step.lowered.model)
        self._areas = [self._new_area() for _ in range(_NUM_RESULTS)]
        self._turn = 0
        self._num_launches = 0
        self.poison = False  # debugging: nonsense in what no step may read
        self.shadow: Shadow | None = None  # debugging: some steps run twice
        on_gpu = self.device.type == "cuda"
        self._on_device: Any = torch.cuda.device(self.device) if on_gpu else nullcontext()

    # -- graphs --------------------------------------------------------------------------------------

    @property
    def graph_keys(self) -> list[GraphKey]:
        """The steps that are captured in `warm_up`; long chunk steps wait until one is asked for."""
        if self.capturer is None:
            return []
        return [key for key in self.ladder.keys if not is_late(key)]

    def warm_up(self, on_captured: Callable[[GraphKey], None]) -> None:
        """Capture `graph_keys`.  All rows are padding meanwhile: no page and no slot changes."""
        self.graphs.warm_up(self.graph_keys, on_captured)

    def release_graphs(self) -> None:
        """Give the memory of all graphs back.  A step that needs one captures it again."""
        self.queue.synchronize()
        self.graphs.release()
        self._logits.clear()
        if self.capturer is not None:
            self.capturer.release()

    def recapture(self) -> None:
        """Capture again what was captured: graphs hold the addresses of weights."""
        captured = self.graphs.keys
        self.release_graphs()
        self._weights.bind()
        self.graphs.warm_up(captured, lambda key: None)

    def moved_weights(self) -> list[str]:
        """Names of the model's tensors that lie elsewhere since they were bound."""
        return self._weights.moved()

    # -- the step ------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> InFlight:
        """Enqueue a step.  Waits for nothing, unless its graph must be captured first.

        Raises:
            ContractError: when buffers or weights moved; looked for now and then.
        """
        self._look_for_moves()
        with self._on_device:
            self._flush_deltas()
            # few: a request that resumes inside a block has one
            for source, target in plan.kv_copies:
                self.queue.copy(self.kv[target], self.kv[source])
            launch = self._launch_decode if plan.kind == "decode" else self._launch_chunks
            return InFlight(plan, self._send_results(plan, *launch(plan)))

    def wait(self, flight: InFlight) -> StepResult:
        """The results of a launched step; waits for its event only."""
        area, rows, best = flight.area, flight.plan.num_rows, flight.plan.num_logprobs
        area.arrived.synchronize()
        return StepResult(
            area.token[:rows],
            area.logprob[:rows],
            area.best_id[:rows, :best].numpy() if best else None,
            area.best_logprob[:rows, :best].numpy() if best else None,
        )

    def _look_for_moves(self) -> None:
        self._num_launches += 1
        is_turn = self._num_launches % _WATCH_EVERY == 0
        if is_turn or self.device.type == "cpu":
            check_addresses(self._bound, self.step.addresses(), "StepRunner")
        if is_turn and (moved := self.moved_weights()):
            raise ContractError(
                f"StepRunner: {len(moved)} tensors of the model moved while requests were running, such as "
                f"{moved[0]}; expected weights that stay; finish or abort all requests, then call "
                "weights_changed()"
            )

    def _launch_decode(self, plan: StepPlan) -> tuple[int, list[Tensor]]:
        step = self.step
        key = self.ladder.decode_step(plan.num_rows) or GraphKey(plan.num_rows, plan.num_rows, 0)
        step.stage.write_decode(plan, self.live.deltas, key.rows)
        return key.rows, self._replay_or_run(key, plan)

    def _launch_chunks(self, plan: StepPlan) -> tuple[int, list[Tensor]]:
        step = self.step
        key = step.stage.write_chunks(plan, self.live, self.kv_block, self._pad)
        return key.rows, self._replay_or_run(key, plan)

    def _pad(self, needed: GraphKey) -> GraphKey:
        """The captured shape that holds a step with chunks, else the smallest that compiled code takes."""
        fit = self.ladder.chunk_step(needed)
        if fit is not None:
            return fit
        tokens = max(8, -(-needed.tokens // 8) * 8)
        return GraphKey(tokens, max(needed.rows, 2), max(needed.chunks, 2))

    def _replay_or_run(self, key: GraphKey, plan: StepPlan) -> list[Tensor]:
        """Enqueue the staged step; returns a list that holds its logits once it has run."""
        if self.poison:
            num, old = self.step.stage.num_deltas, self._logits.get(key)
            self.queue.run(lambda: poison_buffers(self.step, key, num, old))
        if self.capturer is None:
            graphs_are_off = self.device.type == "cuda" or not self.ladder.decode
            self.graphs.count_fallback("graphs are off" if graphs_are_off else "no CUDA device")
        elif key.chunks and key not in self.ladder.chunk:
            self.graphs.count_fallback("more prompt tokens than any graph has")
        elif self._replay(key):
            return [self._logits[key]]
        logits: list[Tensor] = []
        view = self._view(key)
        self.queue.run(lambda: logits.append(self.step.run(view, key.rows)))
        return logits

    def _replay(self, key: GraphKey) -> bool:
        shadow = self.shadow
        if shadow is None or key not in self.graphs.captured or not shadow.is_due():
            return self.graphs.replay(key)
        shadow.compare(key, self._view(key), lambda: self.graphs.replay(key), self._logits[key])
        return True

    def _view(self, key: GraphKey) -> StepView:
        stage = self.step.stage
        return stage.chunk_view(key) if key.chunks else stage.decode_view(key.rows)

    def _flush_deltas(self) -> None:
        """Send deltas that do not fit into the step's own copy ahead of it."""
        while self.step.stage.send_excess(self.live.deltas):
            self.queue.run(self.step.apply_deltas)

    def _send_results(self, plan: StepPlan, rows: int, logits: list[Tensor]) -> _ResultArea:
        self._turn = (self._turn + 1) % _NUM_RESULTS
        area, num = self._areas[self._turn], plan.num_rows
        self.queue.copy(area.result, self.step.result)  # whole: cutting rows out takes longer
        if plan.num_logprobs:
            self.queue.run(lambda: self._send_best(area, num, plan.num_logprobs, logits[0]))
        area.arrived.record()
        return area

    def _send_best(self, area: _ResultArea, num: int, count: int, logits: Tensor) -> None:
        best = torch.log_softmax(logits[:num].float(), -1).topk(count)
        area.best_id[:num, :count].copy_(best.indices, non_blocking=True)
        area.best_logprob[:num, :count].copy_(best.values, non_blocking=True)

    def _capture(self, key: GraphKey) -> Captured:
        assert self.capturer is not None
        whole = self.capturer
        capturer: Capturer = PiecewiseCapture(whole) if key.in_pieces else whole
        view = self._view(key)

        def run() -> None:
            self._logits[key] = self.step.run(view, key.rows)

        with self._blank_stage():
            captured = capturer.capture(run, self.step.addresses, str(key))
        # read before the next replay, which may write over it
        self._logits[key] = unowned(self._logits[key])
        return captured

    @contextmanager
    def _blank_stage(self) -> Iterator[None]:
        """Padding in all device buffers, so that warm-up runs touch no page and no slot; then as before."""
        self.queue.synchronize()
        fields = self.step.stage.device
        staged = {name: field.clone() for name, field in fields.items()}
        for name, field in fields.items():
            padding = name in ("row_slot", "chunk_row", "kv_slot", "decode_kv_slot")
            field.fill_(-1 if padding else 0)
        try:
            yield
        finally:
            for name, field in fields.items():
                field.copy_(staged[name])

    def _new_area(self) -> _ResultArea:
        rows, zeros = self.step.stage.limits.max_rows, self.queue.host_zeros
        result = zeros((2, rows), torch.int32)
        return _ResultArea(
            result,
            result[0].numpy(),
            result[1].view(torch.float32).numpy(),
            zeros((rows, MAX_LOGPROBS), torch.int32),
            zeros((rows, MAX_LOGPROBS), torch.float32),
            self.queue.new_event(),
        )
