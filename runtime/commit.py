"""
What the host does when the tokens of a step have arrived: publish, store, stop, give pages back.

Everything that a step wrote becomes visible to other requests here and not before.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from midstream.ops import host_decode
from midstream.runtime.live import I32, LiveTable
from midstream.runtime.ownership import PageOwnership
from midstream.runtime.plan import StepPlan
from midstream.runtime.request import Phase, Request, TokenLogprobs
from midstream.runtime.scheduler import Scheduler

_REASONS = (None, "stop", "length")  # by GOES_ON, STOPPED, TOO_LONG of ops/host_decode.py


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought, on the host.  Arrays may be longer than the step has rows R."""

    token: I32  # i32[R]  sampled token, -1 where the row samples none
    logprob: npt.NDArray[np.float32]  # f32[R]
    best_id: I32 | None  # i32[R, n]  most likely tokens, best first; None where nobody asked
    best_logprob: npt.NDArray[np.float32] | None  # f32[R, n]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A token that needs the host's attention."""

    request: Request
    token_id: int
    finish_reason: str | None  # stop | length when this token is the last
    is_broken: bool  # the logits were not finite: the token means nothing


class Committer:
    """Applies results in the order of the steps."""

    def __init__(self, live: LiveTable, ownership: PageOwnership, scheduler: Scheduler) -> None:
        self.live = live
        self.ownership = ownership
        self.scheduler = scheduler
        self.num_tokens = 0  # that requests got so far
        num_slots = len(live.request)
        self._heeded: I32 = np.zeros((2, num_slots), np.int32)
        self._filled: I32 = np.zeros(num_slots, np.int32)
        self._tally: I32 = np.zeros(5, np.int32)
        self._commit_rows = partial(
            host_decode.commit_rows, live.slots, live.tokens, live.stop_id,
            ownership.kv_block, self._heeded, self._filled, self._tally,
        )  # fmt: skip

    def prepare(self, plan: StepPlan) -> None:
        """What `commit` needs and can be made while the device computes; may be left out."""
        self.scheduler.checkpoints.prepare(plan)

    def commit(self, plan: StepPlan, result: StepResult) -> list[Arrival]:
        """Tokens of requests that are watched, started or finished by this step, in row order."""
        self._commit_rows(plan.rows, plan.num_rows, result.token, result.logprob)
        num_heeded, num_filled, num_broken, num_lost, num_tokens = self._tally.tolist()
        if num_broken:  # earlier steps of such a row may have left checkpoints
            self.ownership.index.reset()
        elif self.scheduler.checkpoints.is_on:
            self.scheduler.checkpoints.publish(plan, self._filled[:num_filled])
        self.num_tokens += num_tokens
        arrivals: list[Arrival] = []
        if num_heeded:
            rows, reasons = self._heeded[:, :num_heeded].tolist()
            for row, reason in zip(rows, reasons, strict=True):
                arrivals.append(self._arrive(plan, row, _REASONS[reason], result))
        if self.scheduler.preempted:
            if num_lost:
                arrivals += self._commit_preempted(plan, result)
            self.scheduler.preempted.clear()
        self.ownership.give_back(plan)
        return arrivals

    def _arrive(self, plan: StepPlan, row: int, reason: str | None, result: StepResult) -> Arrival:
        request = self.live.request[plan.slot[row]]
        assert request is not None
        return _arrival(request, row, reason, result)

    def _commit_preempted(self, plan: StepPlan, result: StepResult) -> list[Arrival]:
        """Tokens sampled for requests that lost their slot while the step was in flight are kept."""
        arrivals: list[Arrival] = []
        lost = self.live.epoch[plan.slot] != plan.epoch
        for row in np.nonzero(lost & (plan.samples != 0))[0].tolist():
            request = self.scheduler.preempted.get(int(plan.epoch[row]))
            if request is None or request.phase is not Phase.WAITING:
                continue
            token = int(result.token[row])
            request.outputs.append(token)
            self.num_tokens += 1
            ended = len(request.outputs) >= request.max_tokens
            stopped = token in request.sampling.stop_ids
            reason = "stop" if stopped else "length" if ended else None
            arrivals.append(_arrival(request, row, reason, result))
        return arrivals


def _arrival(request: Request, row: int, reason: str | None, result: StepResult) -> Arrival:
    if request.first_token_at is None:
        request.first_token_at = time.perf_counter()
    if request.params.logprobs is not None:
        request.logprobs.append(_logprobs(request.params.logprobs, row, result))
    is_broken = bool(np.isnan(result.logprob[row]))
    return Arrival(request, int(result.token[row]), reason, is_broken)


def _logprobs(count: int, row: int, result: StepResult) -> TokenLogprobs:
    best: tuple[tuple[int, float], ...] = ()
    if count and result.best_id is not None and result.best_logprob is not None:
        ids, values = result.best_id[row, :count], result.best_logprob[row, :count]
        best = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(int(result.token[row]), float(result.logprob[row]), best)
