"""One run of an engine for a person: answers as they arrive, numbers at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TextIO

import torch

from midstream.runtime.engine import Engine, Update
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
    """Answers prompts with one engine and one set of sampling parameters, and keeps the count."""

    def __init__(self, engine: Engine, params: SamplingParams, stream: TextIO) -> None:
        self._engine = engine
        self._params = params
        self._stream = stream
        self._outputs: list[Output] = []
        self._seconds = 0.0  # of answering, reading input excluded

    @property
    def num_failed(self) -> int:
        """Requests that ended with an error."""
        return sum(output.finish_reason == "error" for output in self._outputs)

    def answer(self, prompts: Sequence[Prompt]) -> list[Output]:
        """Print the answers as they arrive; returns them in the order of the prompts."""
        printer = AnswerPrinter(len(prompts), self._stream)
        outputs: list[Output | None] = [None] * len(prompts)
        started = time.perf_counter()
        handles = [self._engine.add(prompt, self._params, stream=True) for prompt in prompts]
        # request id -> place among the prompts
        places = {handle.request_id: place for place, handle in enumerate(handles)}
        while self._engine.num_unfinished:
            for update in self._engine.step():
                place = places[update.handle.request_id]
                printer.push(place, update)
                outputs[place] = update.output
        self._seconds += time.perf_counter() - started
        done = [output for output in outputs if output is not None]
        self._report_errors(done)
        self._outputs += done
        return done

    def summary(self, device: torch.device) -> list[str]:
        """What was measured, and how the steps ran; empty if nothing was answered."""
        stats, outputs = self._engine.stats(), self._outputs
        if not outputs:
            return []
        num_tokens = sum(len(output.token_ids) for output in outputs)
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        num_cached = sum(output.num_cached_tokens for output in outputs)
        rate = num_tokens / self._seconds if self._seconds else 0.0
        fallbacks = ", ".join(f"{why}: {n}" for why, n in stats["graph_fallbacks"].items())
        return [
            f"{num_tokens} tokens in {self._seconds:.2f} s, {rate:.1f} tokens/s; "
            f"first token after {_first_token_ms(outputs)}; "
            f"{num_cached} of {num_prompt} prompt tokens reused",
            f"device {device}; {stats['graph_replays']} graph replays; "
            f"fallbacks: {fallbacks or 'none'}",
        ]

    def _report_errors(self, outputs: Sequence[Output]) -> None:
        for place, output in enumerate(outputs, start=1):
            if output.error is not None:
                print(f"midstream: request {place} failed: {output.error}", file=sys.stderr)


def _first_token_ms(outputs: Sequence[Output]) -> str:
    """Least and most of the times to the first token."""
    times = [o.timing.first_token * 1e3 for o in outputs if o.timing.first_token is not None]
    if not times:
        return "no time: there is none"
    least, most = min(times), max(times)
    return f"{least:.0f} ms" if len(times) == 1 else f"{least:.0f} to {most:.0f} ms"
