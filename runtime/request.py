"""One request from arrival to its last token: what was asked, what is known, what it owns."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from midstream.runtime.keys import Keys
from midstream.runtime.sampling import SamplingParams
from midstream.runtime.slots import SlotSampling

if TYPE_CHECKING:
    from midstream.runtime.coordinator import Hit


class Phase(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"  # in the queue; owns nothing
    PREFILL = "prefill"  # in a slot; has known tokens to compute
    DECODE = "decode"  # in a slot; computes the token that it sampled last
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds since the request arrived; None where it never came to it."""

    admitted: float | None
    first_token: float | None
    finished: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of the model's own distribution (before temperature and filters)."""

    token_id: int
    logprob: float
    best: tuple[tuple[int, float], ...]  # (token id, logprob), best first; as many as asked for


@dataclass(frozen=True, slots=True)
class Output:
    """A finished request."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # a stop token included
    text: (
        str | None
    )  # None where the engine has no tokenizer; stop strings and stop tokens left out
    finish_reason: str  # stop | length | abort | error
    num_cached_tokens: int  # prompt tokens resumed from saved state
    timing: Timing
    logprobs: tuple[TokenLogprobs, ...] | None
    error: str | None  # what went wrong, where finish_reason is "error"


@dataclass(frozen=True, slots=True)
class Lookup:
    """What the prefix index knew when a request was admitted (tokens)."""

    asked: int  # known tokens, less the one that must be computed
    kv_match: int  # longest prefix with KV pages
    state_match: int  # longest prefix with a state page, reachable or not
    reused: int  # the resume point
    reason: str  # why it was no more; a key of `explain.REASONS`


@dataclass(slots=True, eq=False)
class Request:
    """Mutable record; the scheduler is its only writer."""

    request_id: int
    prompt: npt.NDArray[np.int32]
    params: SamplingParams
    sampling: SlotSampling
    max_tokens: int  # after clipping to the longest length
    priority: int
    root: bytes  # extra key bytes of the hash chain (salt, adapter)
    streamed: bool  # the user wants each token as it arrives
    watched: bool  # each token needs the host: streamed, or stop strings, or logprobs
    marks: tuple[int, ...] = ()  # prompt positions whose state the application wants kept
    arrived: float = field(default_factory=time.perf_counter)
    phase: Phase = Phase.WAITING
    slot: int = -1
    epoch: int = -1  # of the slot while this request is in it
    outputs: list[int] = field(default_factory=list)  # kept while not in a slot
    hashes: Keys = field(default_factory=Keys)  # of full KV blocks of known tokens
    resume_page: int = 0  # checkpoint held until the first chunk has read it
    tail_page: int = (
        0  # KV page of the checkpoint's last tokens, held until the first chunk copies it
    )
    state_pages: list[int] = field(default_factory=list)  # checkpoints held to the end (mode "all")
    boundaries: list[tuple[int, int]] = field(
        default_factory=list
    )  # key and page of the latest checkpoints of the answer, two at most
    junction: int = 0  # where others part from this prompt, and no state is
    found: tuple[int, Hit] | None = (
        None  # last lookup while waiting, and the index's generation then
    )
    passed_by: int = 0  # requests behind it that were admitted while it had no room
    has_waited: bool = False  # for a state under way
    lookup: Lookup | None = None  # of the first admission
    preempted_in: int = -1  # scheduling pass that took the slot away
    admitted_at: float | None = None
    first_token_at: float | None = None
    finish_reason: str | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: smaller priority, then earlier arrival."""
        return (self.priority, self.request_id)

    @property
    def last_computed(self) -> int:
        """Tokens computed when nothing is left to schedule: the last output is never fed back."""
        return len(self.prompt) + self.max_tokens - 1

    @property
    def num_known(self) -> int:
        """Tokens of the prompt and of the outputs, of a request that is not in a slot."""
        return len(self.prompt) + len(self.outputs)

    def known(self, begin: int, end: int) -> tuple[int, ...]:
        """Known tokens [begin, end) of a request that is not in a slot."""
        length = len(self.prompt)
        if end <= length:
            return tuple(self.prompt[begin:end].tolist())
        return tuple(self.known_tokens()[begin:end].tolist())

    def known_tokens(self) -> npt.NDArray[np.int32]:
        """Prompt and outputs of a request that is not in a slot."""
        return np.concatenate([self.prompt, np.array(self.outputs, np.int32)])
