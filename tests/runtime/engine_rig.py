"""What the tests of the engine over the tiny bamba share."""

import numpy as np
from tiny_models import VOCAB

import midstream

OPTIONS = {
    "state_block": 16,
    "kv_block": 4,
    "max_rows": 8,
    "num_state_pages": 60,
    "num_kv_pages": 200,
}
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def draw(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


def run(engine: midstream.Engine) -> list[midstream.Output]:
    """Step until nothing is left; outputs in order of arrival."""
    outputs = [u.output for u in engine.step() if u.output]
    while engine.num_unfinished:
        outputs += [u.output for u in engine.step() if u.output]
    return outputs
