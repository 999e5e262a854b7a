"""
Request traces of four kinds of work, drawn from stated seeds, and what each asks a prefix cache to hold.

    chat        turns of conversations behind one system prompt; one in seven begins with a pasted text
    agents      tasks of three kinds with long instructions; context grows by tool results, some of them slow
    documents   visits of popular and rare documents, a few questions each
    system      single questions behind the system prompts of many applications, popular and rare

Times are steps of an engine.  Calls arrive at fixed times, so that all policies see the same sequence; the
next call of a conversation leaves time for the answer before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]

VOCAB = 32000
SEEDS = {"chat": 11, "agents": 12, "documents": 13, "system": 14}
POOLS = (25, 50)  # percent of the working set
_ANSWER_TIME = 15  # steps between the last token of an answer and the earliest next call


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a trace."""

    at: int  # step of its arrival
    prompt: I32
    answer: I32  # what the model will say

    @property
    def tokens(self) -> I32:
        """Prompt and answer."""
        return np.concatenate([self.prompt, self.answer])


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Pages of each kind."""

    kv: int
    state: int

    def part(self, percent: int) -> PoolSize:
        """
        >>> PoolSize(kv=1000, state=90).part(25)
        PoolSize(kv=250, state=22)
        """
        return PoolSize(self.kv * percent // 100, self.state * percent // 100)


class Draw:
    """Random sizes, times and tokens."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def tokens(self, count: int) -> I32:
        return self.rng.integers(0, VOCAB, count, dtype=np.int32)

    def length(self, median: int, least: int, most: int, spread: float = 0.7) -> int:
        """Log-normal, clipped."""
        return int(np.clip(median * np.exp(spread * self.rng.standard_normal()), least, most))

    def wait(self, mean: float) -> int:
        """Exponential."""
        return int(self.rng.exponential(mean))

    def popular(self, count: int, size: int) -> list[int]:
        """`size` draws of `count` things, the n-th in proportion to 1 / n."""
        weight = 1 / np.arange(1, count + 1)
        return self.rng.choice(count, size, p=weight / weight.sum()).tolist()


def chat(seed: int = SEEDS["chat"], conversations: int = 120) -> list[Call]:
    """Conversations of five turns on average, about thirty of them open at once."""
    draw, calls, begin = Draw(seed), [], 0
    system = draw.tokens(200)
    for _ in range(conversations):
        begin += draw.wait(40)
        pasted = (
            draw.tokens(draw.length(1500, 400, 4000)) if draw.rng.random() < 0.15 else system[:0]
        )
        history, at = np.concatenate([system, pasted]), begin
        for _ in range(min(int(draw.rng.geometric(0.2)), 15)):
            message = draw.tokens(draw.length(50, 5, 400))
            call = Call(
                at, np.concatenate([history, message]), draw.tokens(draw.length(100, 8, 400))
            )
            calls.append(call)
            history, at = call.tokens, _after(call, draw.wait(200))
    return _in_order(calls)


def agents(seed: int = SEEDS["agents"], tasks: int = 60) -> list[Call]:
    """Tasks of 4 to 20 calls, about twenty of them open at once; one tool in ten is slow."""
    draw, calls, begin = Draw(seed), [], 0
    instructions = [draw.tokens(count) for count in (1200, 1800, 2600)]
    for _ in range(tasks):
        begin += draw.wait(65)
        kind = int(draw.rng.integers(3))
        history = np.concatenate([instructions[kind], draw.tokens(draw.length(150, 20, 1000))])
        at = begin
        for _ in range(int(draw.rng.integers(4, 21))):
            call = Call(at, history, draw.tokens(draw.length(50, 10, 200)))
            calls.append(call)
            result = draw.tokens(draw.length(150, 10, 1500, spread=1.0))
            history = np.concatenate([call.tokens, result])
            at = _after(call, draw.wait(500 if draw.rng.random() < 0.1 else 27))
    return _in_order(calls)


def documents(seed: int = SEEDS["documents"], count: int = 80) -> list[Call]:
    """Twice as many visits as documents, 1 to 6 questions each; a document is read again by others."""
    draw, calls, begin = Draw(seed), [], 0
    texts = [draw.tokens(draw.length(2500, 500, 8000)) for _ in range(count)]
    for which in draw.popular(count, 2 * count):
        begin += draw.wait(50)
        at = begin
        for _ in range(int(draw.rng.integers(1, 7))):
            question = draw.tokens(draw.length(30, 8, 120))
            prompt = np.concatenate([texts[which], question])
            call = Call(at, prompt, draw.tokens(draw.length(60, 8, 300)))
            calls.append(call)
            at = _after(call, draw.wait(100))
    return _in_order(calls)


def system(seed: int = SEEDS["system"], questions: int = 700, applications: int = 40) -> list[Call]:
    """Every question is asked once; what repeats is the application's prompt."""
    draw, calls, at = Draw(seed), [], 0
    prompts = [draw.tokens(draw.length(1000, 200, 5000)) for _ in range(applications)]
    for which in draw.popular(applications, questions):
        at += draw.wait(7)
        message = draw.tokens(draw.length(60, 8, 600))
        answer = draw.tokens(draw.length(60, 4, 300))
        calls.append(Call(at, np.concatenate([prompts[which], message]), answer))
    return calls


TRACES: dict[str, Callable[[], list[Call]]] = {
    "chat": chat,
    "agents": agents,
    "documents": documents,
    "system": system,
}


def working_set(chains: Sequence[Sequence[int]], asked: Sequence[int]) -> PoolSize:
    """Pages without which some call must compute what an earlier one has computed.

    Those are the KV pages of blocks that are asked again, and a state where each call leaves the known.

    Args:
        chains: keys of the blocks of each call, in order of arrival.
        asked: how many of them the call asks for; the others are its answer.
    """
    known: set[int] = set()
    again: set[int] = set()
    points: set[int] = set()
    for chain, count in zip(chains, asked, strict=True):
        shared = list(takewhile(known.__contains__, chain[:count]))
        again.update(shared)
        points.update(shared[-1:])
        known.update(chain)
    return PoolSize(len(again), len(points))


def longest(calls: Sequence[Call]) -> int:
    """Tokens of the longest call."""
    return max(len(call.prompt) + len(call.answer) for call in calls)


def _after(call: Call, wait: int) -> int:
    return call.at + len(call.answer) + _ANSWER_TIME + wait


def _in_order(calls: list[Call]) -> list[Call]:
    return sorted(calls, key=lambda call: call.at)
