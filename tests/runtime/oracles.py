"""
The oracles that engine tests share: what right tokens are, and what must hold whatever is served.

`Oracle` compares with un-cached full forwards.  `guarded_engine` serves with NaN in every free page and
checks the books when it closes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import midstream


class Oracle:
    """Greedy continuations by `model(full_ids, use_cache=False)`, one sequence at a time."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._known: dict[tuple[int, ...], int] = {}

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The next `count` tokens after `prompt`."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(self._next(tuple(ids)))
        return ids[len(prompt) :]

    def _next(self, ids: tuple[int, ...]) -> int:
        if ids not in self._known:
            device = next(self.model.parameters()).device
            with torch.no_grad():
                full = torch.tensor([ids], device=device)
                position = torch.arange(len(ids), device=device)[None]
                logits = self.model(full, position_ids=position, use_cache=False).logits
            self._known[ids] = int(logits[0, -1].argmax())
        return self._known[ids]


def five_prompts(vocab: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to 90 tokens, three of which share 37."""
    draw = np.random.default_rng(seed)
    shared = draw.integers(3, vocab, 37).tolist()
    tails = [draw.integers(3, vocab, n).tolist() for n in (20, 31, 53)]
    return [
        draw.integers(3, vocab, 1).tolist(),
        shared + tails[0],
        shared + tails[1],
        shared + tails[2],
        draw.integers(3, vocab, 23).tolist(),
    ]


@contextmanager
def guarded_engine(model: Any, **options: Any) -> Iterator[midstream.Engine]:
    """An engine over poisoned pools whose books must balance at the end, with nothing owned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIDSTREAM_POISON", "1")
        engine = midstream.Engine(model, **options)
    try:
        yield engine
        engine.check_books()
        if not engine.num_unfinished:
            engine.step()
            pages = engine.stats()["pages"]
            assert all(pool["owned"] == 0 for pool in pages.values()), pages
    finally:
        engine.close()


def serve(
    engine: midstream.Engine, prompts: Sequence[Sequence[int]], count: int, **sampling: Any
) -> list[midstream.Output]:
    """Greedy outputs of all prompts at once."""
    params = midstream.SamplingParams(
        max_tokens=count, temperature=sampling.pop("temperature", 0.0), ignore_eos=True, **sampling
    )
    return list(engine.generate(prompts, params))
