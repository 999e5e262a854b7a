"""What a request asks of the sampler: checked once, when it is written down."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NoReturn

from midstream.errors import ConfigError
from midstream.runtime.options import option

MAX_STOP_IDS = 8  # columns of the op's stop_id table
MAX_LOGPROBS = 20
_MAX_INT32 = 2**31 - 1
_MAX_SEED = 2**64 - 1
# logits / temperature must stay finite in float32, also for a forbidden token's -inf
_TEMPERATURES = (1e-5, 1e5)
_AS_LONG = f"pass {_MAX_INT32} for an answer as long as there is room under max_len"
_LOWER = "lower it or raise max_tokens"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one answer are chosen and where it ends.  Immutable and valid.

    Sequences are kept as tuples, and one stop string may be given bare.

    >>> SamplingParams(stop="END", stop_token_ids=[7]).stop
    ('END',)
    >>> SamplingParams(top_p=0.0)
    Traceback (most recent call last):
    ...
    midstream.errors.ConfigError: SamplingParams: top_p is 0.0; expected a number above 0 and up \
to 1; pass 1.0 to turn it off, or temperature=0 for greedy decoding
    """

    max_tokens: int = option(16, "the answer is not longer; clipped to the room left under max_len")
    min_tokens: int = option(0, "nothing that ends the answer is sampled before")
    temperature: float = option(1.0, "0: greedy; else from 1e-5 to 1e5")
    top_k: int = option(0, "keep the k likeliest tokens; 0: all")
    top_p: float = option(1.0, "keep the smallest set of tokens with this mass")
    min_p: float = option(0.0, "drop tokens less likely than this part of the likeliest")
    seed: int | None = option(None, "none: the engine draws one")
    stop_token_ids: tuple[int, ...] = option(
        (), "these end the answer, besides end-of-sequence; at most 8 with it"
    )
    stop: tuple[str, ...] = option((), "so do these strings; they are not part of the text")
    ignore_eos: bool = option(False, "end-of-sequence does not end the answer")
    logprobs: int | None = option(
        None, "likeliest tokens reported besides the sampled, 0 to 20; none: no report"
    )

    def __new__(cls, *args: object, **options: object) -> SamplingParams:
        """Refuse unknown names, which the generated `__init__` would answer with a bare TypeError."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]!r}?" if near else "see help(SamplingParams)"
                raise ConfigError(
                    f"SamplingParams: unknown option {name!r}; expected one of {', '.join(known)}; {hint}"
                )
        return object.__new__(cls)

    def __post_init__(self) -> None:
        self._check_int("max_tokens", 1, _MAX_INT32, "ask for at least one token", _AS_LONG)
        self._check_int("min_tokens", 0, self.max_tokens, "pass 0 for none", _LOWER)
        self._check_temperature()
        self._check_int("top_k", 0, _MAX_INT32, "pass 0 to keep all tokens")
        self._check_top_p()
        self._check_real("min_p", 0.0, 1.0, "a number from 0 to 1", "pass 0.0 to turn it off")
        if self.seed is not None:
            self._check_int("seed", 0, _MAX_SEED, "pass None for a random seed")
        self._check_stop_token_ids()
        self._check_stop()
        if not isinstance(self.ignore_eos, bool):
            self._refuse_type("ignore_eos", "True or False", "pass a bool")
        if self.logprobs is not None:
            fix = "pass None for no report"
            self._check_int("logprobs", 0, MAX_LOGPROBS, fix, f"ask for fewer, or {fix}")

    def end_token_ids(self, eos_token_ids: Iterable[int]) -> tuple[int, ...]:
        """All ids that end the answer, ascending: at most `MAX_STOP_IDS`.

        Raises:
            ConfigError: the model's end-of-sequence ids and the request's ids are more together.
        """
        eos = () if self.ignore_eos else tuple(eos_token_ids)
        ids = tuple(sorted({*eos, *self.stop_token_ids}))
        if len(ids) > MAX_STOP_IDS:
            raise ConfigError(
                f"SamplingParams: {len(ids)} token ids end the answer, {len(eos)} of them "
                f"end-of-sequence; expected at most {MAX_STOP_IDS} together; "
                "pass fewer stop_token_ids, or use stop strings"
            )
        return ids

    def _check_temperature(self) -> None:
        low, high = _TEMPERATURES
        what = f"0 (greedy) or a number from {low:g} to {high:g}"
        fix = "pass 0 for greedy decoding"
        self._check_real("temperature", 0.0, high, what, fix)
        if 0.0 < self.temperature < low:
            self._refuse("temperature", what, fix)

    def _check_top_p(self) -> None:
        what = "a number above 0 and up to 1"
        fix = "pass 1.0 to turn it off, or temperature=0 for greedy decoding"
        self._check_real("top_p", 0.0, 1.0, what, fix)
        if self.top_p == 0.0:
            self._refuse("top_p", what, fix)

    def _check_stop_token_ids(self) -> None:
        what = f"at most {MAX_STOP_IDS} token ids, each an integer from 0 to {_MAX_INT32}"
        fix = "pass a list of ids, for example [2]"
        if isinstance(self.stop_token_ids, str | bytes) or not isinstance(
            self.stop_token_ids, Iterable
        ):
            self._refuse_type("stop_token_ids", what, fix)
        given = tuple(self.stop_token_ids)
        ids = [as_int(entry) for entry in given]
        if any(i is None or not 0 <= i <= _MAX_INT32 for i in ids):
            self._refuse("stop_token_ids", what, fix)
        if len(set(ids)) > MAX_STOP_IDS:
            fix = f"pass fewer than these {len(set(ids))}, or use stop strings for others"
            self._refuse("stop_token_ids", what, fix)
        object.__setattr__(self, "stop_token_ids", tuple(ids))

    def _check_stop(self) -> None:
        what = "a string, or several, none of them empty"
        fix = "pass a list of strings, for example ['END']"
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if isinstance(self.stop, bytes) or not isinstance(self.stop, Iterable):
            self._refuse_type("stop", what, fix)
        texts = tuple(self.stop)
        if not all(isinstance(text, str) and text for text in texts):
            self._refuse("stop", what, fix)
        object.__setattr__(self, "stop", texts)

    def _check_int(self, name: str, low: int, high: int, fix: str, too_many: str = "") -> None:
        """`too_many`: what to do about a number above `high`, where that is not `fix`."""
        value = as_int(getattr(self, name))
        expected = f"an integer from {low} to {high}"
        if value is None:
            self._refuse_type(name, expected, fix)
        if not low <= value <= high:
            self._refuse(name, expected, (too_many or fix) if value > high else fix)
        object.__setattr__(self, name, value)

    def _check_real(self, name: str, low: float, high: float, what: str, fix: str) -> None:
        value = _as_float(getattr(self, name))
        if value is None:
            self._refuse_type(name, what, fix)
        if not low <= value <= high:  # false for NaN
            self._refuse(name, what, fix)
        object.__setattr__(self, name, value)

    def _refuse(self, name: str, expected: str, fix: str, of_type: str = "") -> NoReturn:
        raise ConfigError(
            f"SamplingParams: {name} is {getattr(self, name)!r}{of_type}; expected {expected}; {fix}"
        )

    def _refuse_type(self, name: str, expected: str, fix: str) -> NoReturn:
        """For values whose type is the fault, which their text may hide."""
        value = getattr(self, name)
        if value is None:
            fix = "leave it out for the default"
        elif isinstance(value, str) and value.strip().lstrip("+-").replace(".", "", 1).isdecimal():
            number = value.strip()
            is_list = name == "stop_token_ids"
            fix = f"write {name}={f'[{number}]' if is_list else number}, without quotes"
        elif name == "max_tokens" and value == math.inf:
            fix = _AS_LONG
        elif isinstance(value, float) and value.is_integer():
            fix = f"write {name}={int(value)}"
        self._refuse(name, expected, fix, f" of type {type(value).__name__}")


def as_int(value: object) -> int | None:
    """Integers of Python, NumPy and so on; None for all else, arrays, True and False included."""
    is_array = getattr(value, "ndim", 0) > 0  # arrays have the method, and raise in it
    if isinstance(value, bool) or is_array or not hasattr(value, "__index__"):
        return None
    return operator.index(value)


def _as_float(value: object) -> float | None:
    """Real numbers; None for all else, arrays, True and False included."""
    is_array = getattr(value, "ndim", 0) > 0
    if isinstance(value, bool | str | bytes) or is_array or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
