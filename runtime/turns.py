"""
One turn of an engine: launch the next step, then take in what the step before it brought.

A step that breaks ends its requests with an error; the others go on, and no page is lost.
"""

from __future__ import annotations

import logging
from collections import deque

from midstream.runtime.assembly import Parts
from midstream.runtime.commit import Arrival
from midstream.runtime.ledger import Ledger
from midstream.runtime.plan import StepPlan
from midstream.runtime.poison import poison_free_pages
from midstream.runtime.request import Request
from midstream.runtime.runner import InFlight

_log = logging.getLogger("midstream")


class Turns:
    """Drives the parts of an engine, and tells the ledger what became of its requests."""

    def __init__(self, parts: Parts, ledger: Ledger) -> None:
        self.parts = parts
        self.ledger = ledger
        self.flights: deque[InFlight] = deque()  # launched, not committed
        self.arrivals: deque[Arrival] = deque()  # committed, not yet looked at
        self.counts = dict.fromkeys(("steps", "prompt_tokens", "cached_tokens"), 0)

    def turn(self) -> None:
        """Launch the next step and take in what the step before it brought."""
        self._deliver()
        if self.parts.scheduler.waiting and not self.parts.scheduler.running:
            self.settle()  # nobody computes meanwhile: what starts finds all that the last step leaves
        self._notice_moved_weights()
        plan = self._schedule()
        if plan is not None:
            self.launch(plan)
        elif not self.flights:
            self._refuse_stuck()
        if len(self.flights) > 1 or (plan is None and self.flights):
            self._commit(self.flights.popleft())

    def settle(self) -> None:
        """Take in all that is in flight."""
        while self.flights:
            self._commit(self.flights.popleft())

    # -- steps ------------------------------------------------------------------------------------------

    def _schedule(self) -> StepPlan | None:
        scheduler = self.parts.scheduler
        try:
            return scheduler.next_step()
        except BaseException as error:
            failed, scheduler.starting = scheduler.starting, None
            if failed in scheduler.waiting:  # it would fail again
                self.fail([failed], error)
            self.fail(list(scheduler.running), error)  # which of them were moved is not known
            raise

    def _notice_moved_weights(self) -> None:
        """Before requests start on an idle engine: graphs and saved state of other weights must go."""
        parts = self.parts
        if parts.scheduler.running or not parts.scheduler.waiting:
            return
        if moved := parts.runner.moved_weights():
            _log.warning(
                "%d tensors of the model moved, such as %s: saved state is dropped and graphs are captured "
                "again; call weights_changed() after changing weights", len(moved), moved[0],
            )  # fmt: skip
            parts.ownership.index.reset()
            parts.runner.recapture()

    def launch(self, plan: StepPlan) -> None:
        """Send a step to the device."""
        parts = self.parts
        try:
            if parts.runner.poison:
                poison_free_pages(parts)
            self.flights.append(parts.runner.launch(plan))
        except BaseException as error:
            self._give_up(plan, error)
            raise
        self.counts["steps"] += 1
        self.counts["prompt_tokens"] += sum(chunk.end - chunk.begin for chunk in plan.chunks)

    def _commit(self, flight: InFlight) -> None:
        try:
            self.parts.committer.prepare(flight.plan)
            result = self.parts.runner.wait(flight)
            self.arrivals += self.parts.committer.commit(flight.plan, result)
        except BaseException as error:
            self._give_up(flight.plan, error)
            raise
        self._deliver()

    def _give_up(self, plan: StepPlan, error: BaseException) -> None:
        """A step broke: its requests end with an error."""
        epochs = set(plan.epoch.tolist())
        self.fail([r for r in self.parts.scheduler.running if r.epoch in epochs], error)
        self.parts.ownership.give_back(plan)

    # -- tokens -----------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        """Look at the tokens that were committed; an exception leaves the rest to the next turn."""
        while self.arrivals:
            arrival = self.arrivals.popleft()
            request = arrival.request
            try:
                # what an exception left behind may have ended since
                if request.request_id in self.ledger.open:
                    self._arrive(arrival)
            except BaseException as error:
                if request.request_id in self.ledger.open:
                    self.fail([request], error)
                raise

    def _arrive(self, arrival: Arrival) -> None:
        request, reason = arrival.request, arrival.finish_reason
        text = None
        if request.watched:
            text, stopped = self.parts.emitter.push(arrival)
            reason = "stop" if stopped else reason
        if arrival.is_broken:
            cause = "the model's logits are NaN or infinite; check its weights and dtype"
            self.fail([request], f"{cause}; all saved state was dropped")
        elif reason is not None:
            self.finish(request, reason, (arrival.token_id,), text)
        elif request.streamed:
            self.ledger.post(request, (arrival.token_id,), text, None)

    # -- endings ----------------------------------------------------------------------------------------

    def finish(
        self, request: Request, reason: str, token_ids: tuple[int, ...], text: str | None
    ) -> None:
        """End a request; `token_ids` and `text` are the last news of it."""
        # the last state of an answer serves the next turn
        self.parts.scheduler.drop(request, keep=reason in ("stop", "length"))
        try:
            whole = self.parts.emitter.finish(request, request.outputs)
        except BaseException as error:
            self.fail([request], error)
            raise
        request.finish_reason = reason
        self._close(request, token_ids, text, whole)

    def fail(self, requests: list[Request], error: BaseException | str) -> None:
        """End requests with an error; the others go on."""
        for request in requests:
            self.parts.scheduler.drop(request)
            request.finish_reason = "error"
            request.error = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
            self._close(request, (), None, self.parts.emitter.abandon(request))

    def _close(
        self, request: Request, token_ids: tuple[int, ...], text: str | None, whole: str | None
    ) -> None:
        output = self.parts.intake.output(request, whole)
        self.counts["cached_tokens"] += output.num_cached_tokens
        self.ledger.close(request, token_ids, text, output)

    def _refuse_stuck(self) -> None:
        """Nothing runs and nothing can start: end the first request rather than wait for ever."""
        scheduler = self.parts.scheduler
        if scheduler.waiting and not scheduler.running:
            pages = self.parts.ownership.pages_by_pool()
            remedy = "raise memory (or num_kv_pages and num_state_pages), or lower max_rows"
            self.fail([scheduler.waiting[0]], f"no room to start it, pages: {pages}; {remedy}")

    def end_all(self) -> None:
        """Close the books: no request is left, every page is free or cached."""
        try:
            for request in reversed(list(self.ledger.open.values())):
                self.parts.scheduler.drop(request)
                request.finish_reason = "abort"
                self.ledger.end_unheard(request)
            while self.flights:
                self.parts.ownership.give_back(self.flights.popleft().plan)
        finally:
            self.ledger.open.clear()
