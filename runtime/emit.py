"""Text of the answers: one decoder and one stop matcher per request that needs text while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from midstream.runtime.commit import Arrival
from midstream.runtime.request import Request
from midstream.runtime.text import Decoder, StopMatcher, decoder_for


@dataclass(slots=True)
class _TextState:
    decoder: Decoder
    matcher: StopMatcher
    pieces: list[str] = field(default_factory=list)
    num_tokens: int = 0
    ended: bool = False  # nothing is held back


class Emitter:
    """Turns arrivals into text.  Without a tokenizer every text is None."""

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer
        self._states: dict[int, _TextState] = {}

    def push(self, arrival: Arrival) -> tuple[str | None, bool]:
        """New text of a watched request, and whether a stop string ended it."""
        if self.tokenizer is None:
            return None, False
        request, piece = arrival.request, ""
        state = self._state(request)
        if arrival.token_id not in request.sampling.stop_ids:
            state.num_tokens += 1
            if state.num_tokens < request.params.min_tokens:
                piece = state.decoder.push(arrival.token_id)  # too early to stop
                state.pieces.append(piece)
                return piece, False
            matched = state.matcher.push(state.decoder.push(arrival.token_id))
            if matched.stop is not None:
                state.ended = True
                state.pieces.append(matched.text)
                return matched.text, True
            piece = matched.text
        if arrival.finish_reason is not None:
            piece += self._tail(state)
        state.pieces.append(piece)
        return piece, False

    def finish(self, request: Request, outputs: list[int]) -> str | None:
        """The whole text of a finished request."""
        if self.tokenizer is None:
            return None
        state = self._states.pop(request.request_id, None)
        if state is None:  # nobody watched it: decode at once
            state = _TextState(decoder_for(self.tokenizer), StopMatcher(()))
            kept = [token for token in outputs if token not in request.sampling.stop_ids]
            state.pieces = [state.decoder.push(token) for token in kept]
        if not state.ended:
            state.pieces.append(self._tail(state))
        return "".join(state.pieces)

    def abandon(self, request: Request) -> str | None:
        """The text that is out of a request that failed; decodes nothing more."""
        state = self._states.pop(request.request_id, None)
        return None if state is None else "".join(state.pieces)

    def _state(self, request: Request) -> _TextState:
        state = self._states.get(request.request_id)
        if state is None:
            assert self.tokenizer is not None
            state = _TextState(decoder_for(self.tokenizer), StopMatcher(request.params.stop))
            self._states[request.request_id] = state
        return state

    def _tail(self, state: _TextState) -> str:
        state.ended = True
        matched = state.matcher.push(state.decoder.finish())
        return matched.text + ("" if matched.stop else state.matcher.finish())
