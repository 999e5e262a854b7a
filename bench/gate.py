"""No figure without right tokens: what a suite of the engine checks on its device before it measures."""

from __future__ import annotations

from typing import Any

import numpy as np
import reference_models
import torch

import midstream

_NEW_TOKENS = 12


def check_engine(device: torch.device) -> None:
    """Cold, resumed and batched requests give the tokens of un-cached full forwards.

    Runs the small fp32 model through the same engine paths as the measured one (graphs on, where there is a
    GPU), so that the comparison is exact whatever dtype is measured.

    Raises:
        AssertionError: with both token lists; nothing is measured then.
    """
    exact = reference_models.build("tiny", torch.float32, device)
    served = reference_models.build("tiny", torch.float32, device)
    served.load_state_dict(exact.state_dict())
    draw = np.random.default_rng(0)
    shared = draw.integers(3, 500, 150).tolist()
    prompts = [shared + draw.integers(3, 500, n).tolist() for n in (7, 30, 70)]
    want = [_full_forwards(exact, prompt) for prompt in prompts]
    params = midstream.SamplingParams(max_tokens=_NEW_TOKENS, temperature=0)
    options = {"max_rows": 4, "num_state_pages": 40, "num_kv_pages": 200, "compile": "eager"}
    with midstream.Engine(served, max_len=512, **options) as engine:
        alone = [next(iter(engine.generate([prompt], params))) for prompt in prompts]
        together = list(engine.generate(prompts, params))
        engine.check_books()
    assert all(out.num_cached_tokens >= 128 for out in alone[1:]), "nothing was resumed"
    for outputs in (alone, together):
        found = [list(out.token_ids) for out in outputs]
        assert found == want, (found, want)


def _full_forwards(model: Any, prompt: list[int]) -> list[int]:
    ids, device = list(prompt), next(model.parameters()).device
    for _ in range(_NEW_TOKENS):
        with torch.no_grad():
            logits = model(torch.tensor([ids], device=device), use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]
