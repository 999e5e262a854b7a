"""
Serves requests on a lowered model: the whole runtime behind five methods.

    engine = midstream.Engine(model, tokenizer=tokenizer)
    for out in engine.generate(prompts, midstream.SamplingParams(max_tokens=64, temperature=0)):
        print(out.text, out.num_cached_tokens)
    engine.close()

An engine belongs to one thread.  Several engines may live in one process, each with a model of its own.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from tqdm import tqdm

from midstream.compiler.changes import WAY_BACK
from midstream.compiler.one_thread import OneThread
from midstream.errors import ConfigError, ContractError
from midstream.runtime.assembly import Parts, assemble
from midstream.runtime.config import ResolvedConfig, engine_config
from midstream.runtime.events import EventLog
from midstream.runtime.handles import Handle, Update
from midstream.runtime.intake import Prompt
from midstream.runtime.interrupts import deferred_interrupt
from midstream.runtime.ledger import Ledger
from midstream.runtime.metrics import prometheus_text
from midstream.runtime.request import Output, Request
from midstream.runtime.sampling import SamplingParams, as_int
from midstream.runtime.settings import read_settings
from midstream.runtime.shadow import Shadow
from midstream.runtime.stats import collect
from midstream.runtime.text import check_tokenizer
from midstream.runtime.turns import Turns

__all__ = ["Engine", "Handle", "Update"]


class Engine:
    """Continuous batching of many requests over paged state, one graph replay per decode step."""

    def __init__(self, model: Any, tokenizer: Any | None = None, **options: Any) -> None:
        """Lower `model` in place, allocate the pools, capture the decode steps.

        Args:
            model: a causal language model of transformers, in eval mode, on one device.
            tokenizer: for prompts given as text and for `Output.text`; may be None.
            options: such as max_rows=64; `runtime/options.py` and docs/usage.md have them all.
        Raises:
            ConfigError: an option that can never work.
            CapacityError: the machine has no room for an engine of these sizes.
            UnsupportedError: a model or a mode that is not supported.
        """
        settings = read_settings(os.environ)
        check_tokenizer(tokenizer)
        self._parts: Parts = assemble(model, tokenizer, engine_config(options), settings.emulate)
        self._config = self._parts.config
        self._last_stats: dict[str, Any] = {}  # of a closed engine
        # an engine that is dropped without close() gives the model back too, so the model must not hold it
        self._undo = weakref.finalize(self, self._parts.lowered.undo)
        setattr(model, WAY_BACK, weakref.WeakMethod(self.close))
        self._name = f"Engine of {type(model).__name__} on {self._parts.lowered.device}"
        self._ledger = Ledger()
        self._turns = Turns(self._parts, self._ledger)
        self._alone = OneThread("Engine", "a step", "an engine")
        self._closed = False
        self.debug(poison=settings.poison, shadow_every=settings.shadow_every)
        try:
            self._warm_up()
        except BaseException:
            self.close()
            raise

    # -- what users call ----------------------------------------------------------------------------

    @property
    def config(self) -> ResolvedConfig:
        """What the engine runs with."""
        return self._config

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Output]:
        """Outputs in the order of the prompts.

        Arguments are checked at the call, and nothing is queued if one prompt is refused.  The requests are
        queued when the first output is asked for: what is never iterated was never asked.  Leaving the loop
        early aborts the rest.

        Raises:
            ConfigError: a prompt or a parameter can never work.
            CapacityError: a request can never fit.
        """
        self._check_open()
        return self._in_order(self._parts.intake.requests(prompts, params, streamed=False))

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Update]:
        """Updates of all prompts as tokens arrive.  Checks, queues and aborts as `generate` does."""
        self._check_open()
        return self._run(self._parts.intake.requests(prompts, params, streamed=True))

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        salt: str | None = None,
        stream: bool = False,
        checkpoint_at: Iterable[int] = (),
    ) -> Handle:
        """Queue a request; `step()` works on it.

        Args:
            prompt: token ids, or text where the engine has a tokenizer.
            priority: smaller goes first.
            salt: requests share saved state only with requests of the same salt.
            stream: report every token in `step()`, not only the last.
            checkpoint_at: numbers of prompt tokens after which the state is kept, for other requests
                that begin with the same tokens.
        Raises:
            ConfigError: the prompt or a parameter can never work.
            CapacityError: the request can never fit.
        """
        self._check_open()
        request = self._parts.intake.request(prompt, params, priority, salt, stream, checkpoint_at)
        return self._queue(request)

    def step(self) -> list[Update]:
        """Launch the next step and return what the step before it brought.  Empty when nothing arrived."""
        self._check_open()
        self._take_turn()
        return self._ledger.take_updates()

    def abort(self, handle: Handle) -> None:
        """End a request now.  Its output arrives with the next `step()`; unknown handles are ignored."""
        self._check_open()
        request = self._ledger.open.get(self._ledger.id_of(handle))
        if request is not None:
            self._turns.finish(request, "abort", (), None)

    @property
    def num_unfinished(self) -> int:
        """Requests that have not finished, and those whose output waits for the next `step()`."""
        return self._ledger.num_unfinished

    def stats(self) -> dict[str, Any]:
        """Counters since construction, and the pages of both pools now; of a closed engine, as it ended."""
        return self._last_stats if self._closed else collect(self._parts, self._turns.counts)

    def explain(self, request: Handle | Output | int) -> str:
        """Why a request reused what it reused, in a sentence that ends with one of these reasons.

        The words are those that `stats()["cache"]["reasons"]` counts by:
            all: nothing to gain, it reused all but less than one KV page (kv_block tokens).
            longest: it reused the longest beginning that was ever computed here.
            unknown: nothing of its beginning is saved; the first prompt of its kind.
            no state: attention could go further, but no recurrent state was ever saved there; the next
                request with this beginning finds one.  `checkpoint_at` saves it from the start.
            evicted: a state was saved further on, and had to make room; give more memory.
            no attention: a state is saved further on, but the KV pages before it are gone.
            off: the engine runs with cache_mode="none".
        A request that ended before it was looked at says so.

        Args:
            request: what `add` returned, an `Output`, or its `request_id`; `num_cached_tokens` of an
                output is the number alone.
        Raises:
            ContractError: the engine does not know the request.
        """
        number = request.request_id if isinstance(request, Output) else as_int(request)
        return self._ledger.explain(self._ledger.id_of(request) if number is None else number)

    def metrics(self) -> str:
        """The counters of `stats` in the text format of Prometheus."""
        return prometheus_text(self.stats())

    def watch_cache(self) -> EventLog:
        """From now on, what is stored in and removed from the cache; for one reader."""
        self._check_open()
        index = self._parts.ownership.index
        if index.log is None:
            index.log = EventLog()
        return index.log

    def weights_changed(self) -> None:
        """After the model's weights were changed: forget all saved state, capture again if they moved.

        Raises:
            ContractError: while requests are unfinished; their state belongs to the old weights.
        """
        self._check_open()
        if self._ledger.open:
            raise ContractError(
                f"Engine: weights_changed() with {len(self._ledger.open)} unfinished requests; "
                "expected none; finish or abort them"
            )
        self._turns.settle()  # what nobody waits for
        self._parts.ownership.index.reset()
        if self._parts.runner.moved_weights():
            self._parts.runner.recapture()

    def release_graphs(self) -> None:
        """Give the memory of all captured graphs back, e.g. while the engine sleeps.

        A step that needs a graph captures it again, unless `capture_graphs` did before.
        """
        self._check_open()
        self._parts.runner.release_graphs()

    def capture_graphs(self) -> None:
        """Capture again what the engine captured when it was made; needed after `release_graphs` only."""
        self._check_open()
        self._warm_up()

    def debug(self, *, poison: bool | None = None, shadow_every: int | None = None) -> None:
        """Choose the checks that every following step runs under.  Off, they cost one comparison a step.

        What is not named, or None, stays as it was.

        Args:
            poison: fill with NaN or nonsense what no step may read: free pages, null pages, stale entries of
                buffers, results before they are written.  Results stay the same, bit for bit.
            shadow_every: run every n-th step that replays a graph eagerly too, from the same memory, and
                raise ContractError where a bit differs, naming the buffer and the row.  0: never.
        Raises:
            ConfigError: no truth value, or no number of steps.
        """
        self._check_open()
        steps = None if shadow_every is None else as_int(shadow_every)
        is_number = shadow_every is None or (steps is not None and steps >= 0)
        if not isinstance(poison, bool | None) or not is_number:
            raise ConfigError(
                f"Engine: debug(poison={poison!r}, shadow_every={shadow_every!r}); expected True or False, "
                "and a whole number of steps; shadow_every=0 compares none, None keeps what is set"
            )
        parts, runner = self._parts, self._parts.runner
        if poison is not None:
            runner.poison = poison
        if steps is not None:
            runner.shadow = Shadow(steps, runner.step, parts.pools, runner.queue) if steps else None

    def check_books(self) -> None:
        """Raise ContractError unless every page is free, cached or owned, exactly once."""
        self._check_open()
        self._parts.ownership.index.check_books()

    def close(self) -> None:
        """End unfinished requests, drop graphs and pools, give the model back.  May be called again."""
        if self._closed:
            return
        with (
            self._alone,
            ExitStack() as last_first,
        ):  # each of them is done, whatever the others raise
            last_first.callback(self._let_go)
            last_first.callback(self._parts.runner.release_graphs)
            last_first.callback(self._end_all)
            for flight in self._turns.flights:
                self._parts.runner.wait(flight)

    def __repr__(self) -> str:
        stats = self.stats()
        if self._closed:
            return f"<{self._name}: closed after {stats['steps']} steps>"
        pages = ", ".join(
            f"{pool} {held['owned']} of {sum(held.values())}"
            for pool, held in stats["pages"].items()
        )
        return (
            f"<{self._name}: {stats['running']} requests running, {stats['waiting']} waiting; "
            f"pages owned: {pages}; {stats['steps']} steps, {stats['graph_replays']} replayed>"
        )

    def __enter__(self) -> Engine:
        self._check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- helpers ----------------------------------------------------------------------------------------

    def _queue(self, request: Request) -> Handle:
        self._parts.intake.arrive(request)
        handle = self._ledger.enter(request)
        self._parts.scheduler.add(request)
        return handle

    def _in_order(self, requests: list[Request]) -> Iterator[Output]:
        awaited = deque(requests)
        outputs: dict[int, Output] = {}
        for update in self._run(requests):
            if update.output is not None:
                outputs[update.handle.request_id] = update.output
            while awaited and awaited[0].request_id in outputs:
                yield outputs.pop(awaited.popleft().request_id)

    def _run(self, requests: list[Request]) -> Iterator[Update]:
        """Queue requests and step until all are finished; whoever steps, their updates come here."""
        self._check_open()
        inbox: deque[Update] = deque()
        ids = [self._queue(request).request_id for request in requests]
        self._ledger.inboxes |= dict.fromkeys(ids, inbox)
        num_open = len(ids)
        try:
            while num_open or inbox:
                if not inbox:
                    if self._closed:
                        left = f"{num_open} of {len(ids)} requests of this iterator unfinished"
                        raise _closed(f"the engine was closed with {left}")
                    self._take_turn()
                while inbox:
                    update = inbox.popleft()
                    num_open -= update.output is not None
                    yield update
        finally:
            for request_id in ids:
                if not self._closed:
                    self.abort(self._ledger.handle(request_id))
                del self._ledger.inboxes[request_id]

    def _end_all(self) -> None:
        try:
            self._turns.end_all()
        finally:
            self._last_stats = self.stats()
            self._closed = True

    def _let_go(self) -> None:
        self._undo()
        del self._parts, self._turns

    def _warm_up(self) -> None:
        runner = self._parts.runner
        missing = [key for key in runner.graph_keys if key not in runner.graphs.captured]
        if missing:
            with tqdm(
                total=len(missing), desc="capturing graphs", leave=False, disable=None
            ) as bar:
                runner.graphs.warm_up(missing, lambda _: bar.update())

    def _take_turn(self) -> None:
        with self._alone, deferred_interrupt():
            self._turns.turn()

    def _check_open(self) -> None:
        """Before anything that users call."""
        with self._alone:
            pass
        if self._closed:
            raise _closed("the engine is closed")


def _closed(found: str) -> ContractError:
    return ContractError(
        f"Engine: {found}; expected an open one; make a new one, or close it later"
    )
