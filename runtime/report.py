"""What a run tells a person: the configuration first, the numbers last, and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch

from midstream.graphs.emulated_queue import Pace
from midstream.runtime.config import ResolvedConfig
from midstream.runtime.explain import NOTHING_TO_REUSE, REASONS
from midstream.runtime.request import Output
from midstream.runtime.text import ByteTokenizer


def config_line(
    config: ResolvedConfig, model: Any, tokenizer: Any | None, emulate: Pace | None = None
) -> str:
    """All that the engine runs with, in one line.  `emulate`: as in `settings.Settings`."""
    values: dict[str, Any] = {
        "model": type(model).__name__,
        "dtype": model.dtype,
        "device": model.device,
        "tokenizer": _tokenizer_name(tokenizer),
    }
    values |= {field.name: getattr(config, field.name) for field in fields(config)}
    values["graphs"] = _graphs(config, model.device, emulate)
    values["hash_key"] = "random" if config.hash_key is None else "given"  # it is a secret
    return "config: " + " ".join(
        f"{name}={str(value).removeprefix('torch.')}" for name, value in values.items()
    )


def summary_lines(
    outputs: Sequence[Output], seconds: float, stats: dict[str, Any], device: torch.device
) -> list[str]:
    """What was measured, and how the steps ran; empty if nothing was answered."""
    if not outputs:
        return []
    num_tokens = sum(len(output.token_ids) for output in outputs)
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    rate = num_tokens / seconds if seconds else 0.0
    fallbacks = ", ".join(f"{why}: {n}" for why, n in stats["graph_fallbacks"].items())
    return [
        f"{num_tokens} tokens in {seconds:.2f} s, {rate:.1f} tokens/s; "
        f"first token after {_first_token_ms(outputs)}; "
        f"{num_cached} of {num_prompt} prompt tokens reused",
        cache_line(stats),
        f"device {device}; {stats['graph_replays']} graph replays; "
        f"fallbacks: {fallbacks or 'none'}",
    ]


def cache_line(stats: dict[str, Any]) -> str:
    """What prompts found in the cache, and why they found no more."""
    cache = stats["cache"]
    if cache["reasons"] and not cache["asked"]:
        return f"cache: {NOTHING_TO_REUSE}"
    reasons = "; ".join(
        f"{REASONS[why]} ({n} request{'s' * (n > 1)})" for why, n in cache["reasons"].items()
    )
    return (
        f"cache: attention matched {cache['matched_kv']} and states {cache['matched_state']} of "
        f"{cache['asked']} tokens, {cache['reused']} reused, {cache['lost_for_state']} lost for want of a "
        f"state; {'why no more: ' + reasons if reasons else 'nothing was looked up'}"
    )


def logprob_lines(outputs: Sequence[Output], tokenizer: Any | None) -> Iterator[str]:
    """One line for each token of the answers: id, text, log-probability, the likeliest tokens."""
    for place, output in enumerate(outputs, start=1):
        label = f"[{place}] " if len(outputs) > 1 else ""
        for token in output.logprobs or ():
            best = ", ".join(f"{_token(i, tokenizer)} {logprob:.4f}" for i, logprob in token.best)
            line = f"{label}{_token(token.token_id, tokenizer)} {token.logprob:.4f}"
            yield f"{line}; best: {best}" if best else line


def _token(token_id: int, tokenizer: Any | None) -> str:
    return str(token_id) if tokenizer is None else f"{token_id} {tokenizer.decode([token_id])!r}"


def _tokenizer_name(tokenizer: Any | None) -> str:
    if tokenizer is None:
        return "none"
    return "bytes" if isinstance(tokenizer, ByteTokenizer) else type(tokenizer).__name__


def _graphs(config: ResolvedConfig, device: torch.device, emulate: Pace | None) -> str:
    """Which steps are captured, or why none is."""
    if not config.graph_rows:
        return "none (off)"
    if device.type != "cuda" and emulate is None:
        return "none (no CUDA)"
    in_pieces = " in pieces" if config.graphs.decode[0].in_pieces else ""
    text = f"rows {config.graph_rows[0]}-{config.graph_rows[-1]}{in_pieces}"
    whole = [key.tokens for key in config.graph_chunks if not key.in_pieces]
    pieces = [key.tokens for key in config.graph_chunks if key.in_pieces]
    if whole:
        text += f", prompts to {whole[-1]}"
    if pieces:
        text += f", prompts to {pieces[-1]} in pieces"
    return text if emulate is None else f"{text} (emulated on the CPU, work done {_when(emulate)})"


def _when(pace: Pace) -> str:
    return f"at times of seed {pace}" if isinstance(pace, int) else pace


def _first_token_ms(outputs: Sequence[Output]) -> str:
    """Least and most of the times to the first token."""
    times = [o.timing.first_token * 1e3 for o in outputs if o.timing.first_token is not None]
    if not times:
        return "no time: there is none"
    least, most = min(times), max(times)
    return f"{least:.0f} ms" if len(times) == 1 else f"{least:.0f} to {most:.0f} ms"
