"""
The main job in one run: three requests share one long prefix, and the later ones resume midstream.

Prints for each request the text, the tokens reused and the time to the first token, cold and warm; then
whether a run that reuses nothing gives the same tokens.  Exit status 1 if it does not.

    python bench/demo.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import midstream

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "bench" / "models" / "bytes"
PREFIX_BYTES = 3000
QUESTIONS = (
    "\n\ndef main():\n    ",
    "\n\nclass TestPages(unittest.TestCase):\n    def setUp(self):\n        ",
    "\n\nimport os\nimport ",
)


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = midstream.load_model(MODEL, dtype="float32", device=device)
    prefix = (ROOT / "runtime" / "pages.py").read_text()[:PREFIX_BYTES]
    params = midstream.SamplingParams(max_tokens=120, temperature=0.6, top_p=0.9, seed=3)
    print(
        f"device {device}, prefix of {len(prefix)} bytes from runtime/pages.py, three continuations"
    )
    with midstream.Engine(model, tokenizer=tokenizer, max_rows=4, max_len=4096) as engine:
        _run(engine, prefix + QUESTIONS[0], params, "warm up")  # as long as those that are timed
        first = _run(engine, prefix + QUESTIONS[0], params, None)
        shared = [first, *(_run(engine, prefix + q, params, None) for q in QUESTIONS[1:])]
        fresh = [_run(engine, prefix + q, params, str(i)) for i, q in enumerate(QUESTIONS)]
        stats = engine.stats()
    for i, (warm, cold) in enumerate(zip(shared, fresh, strict=True), 1):
        print(f"\n-- request {i}: {QUESTIONS[i - 1].strip()!r} continues as")
        print((warm.text or "").rstrip())
        print(
            f"-- reused {warm.num_cached_tokens} of {len(warm.prompt_token_ids)} tokens; first token after "
            f"{_first_ms(warm):.1f} ms, without reuse {_first_ms(cold):.1f} ms"
        )
    same = all(w.token_ids == c.token_ids for w, c in zip(shared, fresh, strict=True))
    print(f"\nresumed and fresh runs give the same tokens: {'yes' if same else 'NO'}")
    print(
        f"graph replays {stats['graph_replays']}, steps without a graph {stats['graph_fallbacks']}"
    )
    return 0 if same and all(out.num_cached_tokens for out in shared[1:]) else 1


def _run(
    engine: midstream.Engine, prompt: str, params: midstream.SamplingParams, salt: str | None
) -> midstream.Output:
    """One request, alone.  Requests of different salts share nothing."""
    handle = engine.add(prompt, params, salt=salt)
    while True:
        for update in engine.step():
            if update.handle == handle and update.output is not None:
                return update.output


def _first_ms(output: midstream.Output) -> float:
    assert output.timing.first_token is not None
    return 1e3 * output.timing.first_token


if __name__ == "__main__":
    sys.exit(main())
