"""
What the host does when the tokens of a step have arrived: publish, store, stop, give pages back.

Everything that a step wrote becomes visible to other requests here and not before.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from midstream.runtime.live import I32, LiveTable
from midstream.runtime.ownership import PageOwnership
from midstream.runtime.plan import StepPlan
from midstream.runtime.request import Phase, Request, TokenLogprobs
from midstream.runtime.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought, on the host."""

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

    def commit(self, plan: StepPlan, result: StepResult) -> list[Arrival]:
        """Tokens of requests that are watched, started or finished by this step, in row order."""
        live = self.live
        alive = live.epoch[plan.slot] == plan.epoch
        broken = np.isnan(result.logprob)
        if broken.any():  # earlier steps of such a row may have left checkpoints
            self.ownership.index.reset()
        elif self.scheduler.checkpoints.is_on:
            self.scheduler.checkpoints.publish(plan, alive)
        after = plan.num_computed + plan.num_new
        rows = np.nonzero(alive & (plan.samples != 0))[0]
        slots, tokens = plan.slot[rows], result.token[rows]
        live.tokens[slots, after[rows]] = tokens
        live.num_outputs[slots] = after[rows] + 1 - live.prompt_len[slots]
        stopped = (live.stop_id[slots] == tokens[:, None]).any(axis=1)
        ended = live.num_outputs[slots] >= live.max_tokens[slots]
        first = live.num_outputs[slots] == 1
        arrivals = []
        heeded = stopped | ended | first | live.watched[slots] | broken[rows]
        for i in np.nonzero(heeded)[0].tolist():
            request = live.request[slots[i]]
            assert request is not None
            reason = "stop" if stopped[i] else "length" if ended[i] else None
            arrivals.append(self._arrive(request, int(rows[i]), reason, result))
        self.num_tokens += len(rows)
        arrivals += self._commit_preempted(plan, alive, result)
        self.ownership.give_back(plan)
        return arrivals

    def _arrive(
        self, request: Request, row: int, reason: str | None, result: StepResult
    ) -> Arrival:
        if request.first_token_at is None:
            request.first_token_at = time.perf_counter()
        token = int(result.token[row])
        if request.params.logprobs is not None:
            request.logprobs.append(_logprobs(request.params.logprobs, row, result))
        return Arrival(request, token, reason, bool(np.isnan(result.logprob[row])))

    def _commit_preempted(
        self, plan: StepPlan, alive: npt.NDArray[np.bool_], result: StepResult
    ) -> list[Arrival]:
        """Tokens sampled for requests that lost their slot while the step was in flight are kept."""
        arrivals: list[Arrival] = []
        if not self.scheduler.preempted:
            return arrivals
        for row in np.nonzero(~alive & (plan.samples != 0))[0].tolist():
            request = self.scheduler.preempted.get(int(plan.epoch[row]))
            if request is None or request.phase is not Phase.WAITING:
                continue
            token = int(result.token[row])
            request.outputs.append(token)
            self.num_tokens += 1
            ended = len(request.outputs) >= request.max_tokens
            stopped = token in request.sampling.stop_ids
            reason = "stop" if stopped else "length" if ended else None
            arrivals.append(self._arrive(request, row, reason, result))
        self.scheduler.preempted.clear()
        return arrivals


def _logprobs(count: int, row: int, result: StepResult) -> TokenLogprobs:
    best: tuple[tuple[int, float], ...] = ()
    if count and result.best_id is not None and result.best_logprob is not None:
        ids, values = result.best_id[row, :count], result.best_logprob[row, :count]
        best = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(int(result.token[row]), float(result.logprob[row]), best)
