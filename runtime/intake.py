"""Turns what a user passes into requests, refusing what can never work, and requests into outputs."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import numpy.typing as npt

from midstream.errors import CapacityError, ConfigError
from midstream.runtime.config import ResolvedConfig
from midstream.runtime.hashing import encode_extra
from midstream.runtime.request import Output, Request, Timing
from midstream.runtime.sampling import MAX_STOP_IDS, SamplingParams, as_int
from midstream.runtime.slots import SlotSampling

Prompt = str | Sequence[int] | npt.NDArray[np.integer[Any]]


class Intake:
    """Checks prompts against one model and one configuration."""

    def __init__(self, model: Any, tokenizer: Any | None, config: ResolvedConfig) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.vocab_size: int = model.get_input_embeddings().num_embeddings
        self.eos_ids = eos_ids(model)
        self._next_id = 0

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        priority: int,
        salt: str | None,
        streamed: bool,
        marks: Iterable[int] = (),
    ) -> Request:
        """A request that `arrive` makes ready for the scheduler.

        Raises:
            ConfigError: an empty prompt, a wrong type, ids out of range, too many stop ids, a mark
                outside of the prompt, a priority that is no number, a salt that is no text.
            CapacityError: longer than the pools or the longest sequence hold.
        """
        params = SamplingParams() if params is None else params
        _check_params(params)
        if not isinstance(streamed, bool):
            raise ConfigError(f"Engine: stream={streamed!r}; expected True or False")
        order = as_int(priority)
        if order is None or not (salt is None or isinstance(salt, str)):
            raise ConfigError(
                f"Engine: priority={priority!r}, salt={salt!r}; expected a whole number, and text or None; "
                "smaller priorities go first, and requests of one salt share saved state"
            )
        if params.stop and self.tokenizer is None:
            raise ConfigError(
                f"Engine: stop={params.stop!r} needs text, but the engine has no tokenizer; "
                "pass tokenizer= to Engine, or use stop_token_ids"
            )
        if (params.logprobs or 0) > self.vocab_size:
            raise ConfigError(
                f"Engine: logprobs={params.logprobs}, but the vocabulary has {self.vocab_size} tokens; "
                "ask for at most as many"
            )
        tokens = self._tokens(prompt)
        room = self.config.max_len - len(tokens)
        if room < 1:
            raise CapacityError(
                f"Engine: the prompt has {len(tokens)} tokens; at most {self.config.max_len - 1} fit "
                f"(max_len is {self.config.max_len}, the KV pages hold {self._kv_tokens()} tokens); "
                f"shorten the prompt, or {self._more_room()}"
            )
        stop_ids = self._stop_ids(params)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        return Request(
            request_id=-1,
            prompt=tokens,
            params=params,
            sampling=SlotSampling(
                params, seed, stop_ids, len(tokens) + min(params.min_tokens, room)
            ),
            max_tokens=min(params.max_tokens, room),
            priority=order,
            root=encode_extra({} if salt is None else {"salt": salt}),
            streamed=streamed,
            watched=streamed or bool(params.stop) or params.logprobs is not None,
            marks=_marks(marks, len(tokens)),
        )

    def requests(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        streamed: bool,
    ) -> list[Request]:
        """One request for each prompt.  An error names the place of the prompt."""
        requests = []
        for place, (prompt, sampling) in enumerate(self._pair(prompts, params)):
            try:
                requests.append(self.request(prompt, sampling, 0, None, streamed))
            except (ConfigError, CapacityError) as error:
                raise type(error)(f"prompt {place}: {error}") from None
        return requests

    def arrive(self, request: Request) -> None:
        """Number a request, and so its place in the order, and start its clock."""
        request.request_id = self._next_id
        request.arrived = time.perf_counter()
        self._next_id += 1

    def _pair(
        self, prompts: Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[tuple[Prompt, SamplingParams | None]]:
        """Each prompt with its parameters.  Raises ConfigError when the numbers differ."""
        if isinstance(prompts, Mapping | Set):
            raise ConfigError(
                f"Engine: prompts is a {type(prompts).__name__}; expected a list of prompts; of what a "
                'tokenizer returned pass ["input_ids"], made without padding'
            )
        given, prompts = prompts, list(prompts) if isinstance(prompts, Iterable) else [0]
        if isinstance(given, str) or any(as_int(prompt) is not None for prompt in prompts):
            raise ConfigError(
                f"Engine: prompts is {str(given)[:40]!r}; expected a list of prompts; "
                "pass [text] or [[1, 2, 3]] for a single one"
            )
        if params is None or isinstance(params, SamplingParams):
            return [(prompt, params) for prompt in prompts]
        if not isinstance(params, (list, tuple)):
            _check_params(params)
        if len(params) != len(prompts):
            raise ConfigError(
                f"Engine: {len(prompts)} prompts but {len(params)} SamplingParams; "
                "expected as many, or one for all"
            )
        return list(zip(prompts, params, strict=True))

    def output(self, request: Request, text: str | None) -> Output:
        """What the user gets of a finished request."""
        now, start = time.perf_counter(), request.arrived
        admitted, first = request.admitted_at, request.first_token_at
        assert request.finish_reason is not None
        return Output(
            request_id=request.request_id,
            prompt_token_ids=tuple(request.prompt.tolist()),
            token_ids=tuple(request.outputs),
            text=text,
            finish_reason=request.finish_reason,
            num_cached_tokens=request.lookup.reused if request.lookup else 0,
            timing=Timing(
                None if admitted is None else admitted - start,
                None if first is None else first - start,
                now - start,
            ),
            logprobs=None if request.params.logprobs is None else tuple(request.logprobs),
            error=request.error,
        )

    def _kv_tokens(self) -> int:
        """Tokens that the KV pages hold."""
        return (self.config.num_kv_pages - 1) * self.config.kv_block

    def _more_room(self) -> str:
        """Which option makes room for longer sequences."""
        if self.config.max_len < self._kv_tokens():
            return "raise max_len, where the model has positions for it"
        return "raise memory or num_kv_pages"

    def _tokens(self, prompt: Prompt) -> npt.NDArray[np.int32]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ConfigError(
                    "Engine: the prompt is text, but the engine has no tokenizer; "
                    "pass tokenizer= to Engine, or token ids"
                )
            prompt = self.tokenizer.encode(prompt)
        try:
            ids = np.asarray(prompt)
        except (RuntimeError, TypeError, ValueError):  # a tensor with gradients, or without memory
            ids = np.zeros((0, 0))
        if ids.ndim == 1 and ids.dtype == object and all(as_int(i) is not None for i in ids):
            self._check_range(min(ids), max(ids))  # beyond 64 bits
        if ids.ndim != 1 or not (ids.dtype.kind in "iu" or ids.size == 0):
            raise ConfigError(
                f"Engine: the prompt is {_described(prompt)}; expected text or a flat list of whole "
                "numbers; a chat becomes one by the tokenizer's apply_chat_template(..., return_dict=False)"
            )
        if not ids.size:
            raise ConfigError("Engine: the prompt is empty; expected at least one token")
        self._check_range(int(ids.min()), int(ids.max()))
        return ids.astype(np.int32)

    def _check_range(self, low: int, high: int) -> None:
        if low < 0 or high >= self.vocab_size:
            raise ConfigError(
                f"Engine: the prompt has token ids from {low} to {high}; expected 0 to "
                f"{self.vocab_size - 1}; is this the model's own tokenizer?"
            )

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        eos = () if params.ignore_eos else self.eos_ids
        ids = tuple(dict.fromkeys((*params.stop_token_ids, *eos)))
        outside = [i for i in params.stop_token_ids if i >= self.vocab_size]
        if outside:
            raise ConfigError(
                f"Engine: stop_token_ids {outside}; expected ids from 0 to {self.vocab_size - 1}; "
                "the model can never produce them"
            )
        if len(ids) > MAX_STOP_IDS:
            raise ConfigError(
                f"Engine: {len(ids)} stop token ids, end-of-sequence ids {eos} included; "
                f"expected at most {MAX_STOP_IDS}; use stop strings for the others"
            )
        return ids


def _described(prompt: Any) -> str:
    """What a prompt is that is neither text nor token ids."""
    if isinstance(prompt, list | tuple):
        for place, item in enumerate(prompt):
            if as_int(item) is None:
                return f"a {type(prompt).__name__} whose item {place} is {item!r:.60}"
    if isinstance(prompt, Mapping):
        return f"a {type(prompt).__name__} with {', '.join(map(repr, prompt))}"
    if hasattr(prompt, "dtype") and hasattr(prompt, "shape"):
        return f"a {type(prompt).__name__} of {prompt.dtype}, shape {tuple(prompt.shape)}"
    return f"{prompt!r:.60}, a {type(prompt).__name__}"


def _marks(marks: Iterable[int], length: int) -> tuple[int, ...]:
    found = [as_int(mark) for mark in marks] if isinstance(marks, Iterable) else [None]
    positions = [mark for mark in found if mark is not None and 1 <= mark <= length]
    if len(positions) < len(found):
        raise ConfigError(
            f"Engine: checkpoint_at={marks}; expected whole numbers from 1 to {length}, the tokens of the "
            "prompt; mark positions inside of the prompt"
        )
    return tuple(sorted(set(positions)))


def _check_params(params: Any) -> None:
    if params is not None and not isinstance(params, SamplingParams):
        raise ConfigError(
            f"Engine: params is {type(params).__name__}; expected SamplingParams; "
            "write midstream.SamplingParams(...), or a list of them, one for each prompt"
        )


def eos_ids(model: Any) -> tuple[int, ...]:
    """End-of-sequence ids of the model's generation config, else of its config."""
    for config in (getattr(model, "generation_config", None), model.config):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)
    return ()
