"""Answers prompts for a person: text as it arrives, in the order of the prompts."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TextIO

from midstream.errors import CapacityError, ConfigError
from midstream.runtime.engine import Engine, Handle, Update
from midstream.runtime.request import Output
from midstream.runtime.sampling import SamplingParams

Prompt = str | list[int]


class AnswerPrinter:
    """Prints answers in order: the first unfinished one as it arrives, later ones in their turn.

    Several answers are labelled [1], [2], ...; without text, token ids are printed.
    """

    def __init__(self, num_answers: int, stream: TextIO) -> None:
        self._stream = stream
        self._waiting: list[list[str]] = [[] for _ in range(num_answers)]  # not yet printed
        self._ended = [False] * num_answers
        self._turn = 0
        self._begin()

    def push(self, answer: int, update: Update) -> None:
        """Take the news of one answer."""
        text = update.text
        if text is None:
            text = "".join(f"{token_id} " for token_id in update.token_ids)
        self._waiting[answer].append(text)
        self._ended[answer] = update.output is not None
        self._flush()

    def _flush(self) -> None:
        while self._turn < len(self._ended):
            self._stream.write("".join(self._waiting[self._turn]))
            self._waiting[self._turn].clear()
            if not self._ended[self._turn]:
                break
            self._stream.write("\n")
            self._turn += 1
            self._begin()
        self._stream.flush()

    def _begin(self) -> None:
        if len(self._ended) > 1 and self._turn < len(self._ended):
            self._stream.write(f"[{self._turn + 1}] ")


class Session:
    """Answers prompts with one engine and one set of sampling parameters, and keeps the outputs."""

    def __init__(self, engine: Engine, params: SamplingParams, stream: TextIO) -> None:
        self._engine = engine
        self._params = params
        self._stream = stream
        self.outputs: list[Output] = []  # of all answers, those cut off included
        self.seconds = 0.0  # of answering, reading input excluded

    @property
    def num_failed(self) -> int:
        """Requests that ended with an error."""
        return sum(output.finish_reason == "error" for output in self.outputs)

    def answer(self, prompts: Sequence[Prompt]) -> list[Output]:
        """Print the answers as they arrive; returns them in the order of the prompts.

        Raises:
            ConfigError, CapacityError: a prompt is refused; nothing was printed.
        """
        started = time.perf_counter()
        outputs: dict[Handle, Output] = {}
        handles = self._add_all(prompts)
        places = {handle: place for place, handle in enumerate(handles)}
        printer = AnswerPrinter(len(handles), self._stream)
        try:
            while self._engine.num_unfinished:
                for update in self._engine.step():
                    printer.push(places[update.handle], update)
                    if update.output is not None:
                        outputs[update.handle] = update.output
        except KeyboardInterrupt:
            self._stream.write("\n")
            outputs |= self._cut_off(handles)
            raise
        finally:
            self.seconds += time.perf_counter() - started
            done = [outputs[handle] for handle in handles if handle in outputs]
            self.outputs += done
        _print_errors(done)
        return done

    def _add_all(self, prompts: Sequence[Prompt]) -> list[Handle]:
        """Queue all prompts, or none if one is refused, which is named."""
        handles: list[Handle] = []
        for place, prompt in enumerate(prompts, start=1):
            try:
                handles.append(self._engine.add(prompt, self._params, stream=True))
            except (ConfigError, CapacityError) as error:
                self._cut_off(handles)
                if len(prompts) == 1:
                    raise
                raise type(error)(f"prompt {place} of {len(prompts)}: {error}") from error
        return handles

    def _cut_off(self, handles: Sequence[Handle]) -> dict[Handle, Output]:
        """End these requests; returns how far they came."""
        for handle in handles:
            self._engine.abort(handle)
        updates = self._engine.step()
        return {update.handle: update.output for update in updates if update.output is not None}


def _print_errors(outputs: Sequence[Output]) -> None:
    for place, output in enumerate(outputs, start=1):
        if output.error is not None:
            print(f"midstream: request {place} failed: {output.error}", file=sys.stderr)
