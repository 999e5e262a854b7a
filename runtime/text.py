"""
Turns token ids into text, piece by piece, so that the pieces joined are the text of the answer.

    token ids -> decoder.push -> text -> StopMatcher.push -> text for the user

A decoder holds back bytes that may still become a character, a matcher holds back text that may
still become a stop string.  What either has released never changes; `finish` releases the rest.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from midstream.errors import ConfigError, ContractError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_PENDING = 16  # tokens without the end of a character; valid text needs 4 bytes
_KEPT = 8  # of them: more than the bytes of two characters


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that text streaming uses."""

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool = ...,
        clean_up_tokenization_spaces: bool = ...,  # would change text that is out already
    ) -> str: ...


class Decoder(Protocol):
    """Text of one answer, as it arrives."""

    def push(self, token_id: int) -> str:
        """Text that this token completes; often empty inside a character."""

    def finish(self) -> str:
        """What is left: replacement characters for bytes that never became a character."""


class ByteTokenizer:
    """One token per UTF-8 byte (ids 0 to 255), and 256, which begins and ends a text.

    Ids above are padding of a model's vocabulary and have no text.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("né")
    [110, 195, 169]
    >>> tokenizer.decode([110, 195, 169, 256])
    'né'
    """

    vocab_size = 257
    bos_token_id = 256
    eos_token_id = 256

    def encode(self, text: str) -> list[int]:
        """Raises ConfigError for a text that UTF-8 cannot write: half a surrogate pair."""
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"ByteTokenizer: character {error.start} of the text is {text[error.start]!r}, half of a "
                "surrogate pair (so Python writes a byte that is not UTF-8); expected text that UTF-8 can "
                "write; give bytes as token ids: list(data)"
            ) from error

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        """Text of the bytes.  Special ids have none, spaces stay: the options change nothing."""
        return bytes(i for i in token_ids if i < 256).decode(errors="replace")


def check_tokenizer(tokenizer: object) -> None:
    """Raise ConfigError for what cannot decode; None is no tokenizer."""
    # a class has the method too, and bytes
    decodes = not isinstance(tokenizer, type | bytes) and callable(
        getattr(tokenizer, "decode", None)
    )
    if tokenizer is None or decodes:
        return
    raise ConfigError(
        f"Engine: tokenizer={repr(tokenizer)[:60]}; expected None or an object with encode and decode; pass "
        "transformers.AutoTokenizer.from_pretrained(folder), or midstream.runtime.text.ByteTokenizer() for "
        "bytes"
    )


def decoder_for(tokenizer: Tokenizer) -> Decoder:
    """A fresh decoder for one answer."""
    return ByteDecoder() if isinstance(tokenizer, ByteTokenizer) else IncrementalDecoder(tokenizer)


class ByteDecoder:
    """Decoder of `ByteTokenizer`'s ids: the pieces joined equal its `decode`."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(bytes((token_id,))) if token_id < 256 else ""

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class IncrementalDecoder:
    """Decoder over any tokenizer, by decoding the last few tokens again.

    A token's text may depend on its neighbours: bytes of one character, spaces between words.  So
    new tokens are decoded behind those of the piece before, and held back while the text ends in a
    replacement character, which may be the beginning of a character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # tokens of the piece before
        self._pending: list[int] = []  # tokens whose text is not out, or not all of it
        self._released = 0  # characters of the text of both that are out

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._text(self._context + self._pending)
        if not text.endswith(_REPLACEMENT):
            return self._settle(text[self._released :])
        if len(self._pending) >= _MAX_PENDING:
            return self._give_up(text)
        return ""

    def finish(self) -> str:
        return self._settle(self._text(self._context + self._pending)[self._released :])

    def _settle(self, piece: str) -> str:
        """Release a piece that later tokens cannot change; with any text it becomes the context."""
        if piece:
            self._context = self._pending
            self._released = len(self._text(self._context))
        self._pending = []
        return piece

    def _give_up(self, text: str) -> str:
        """Release bytes that are no text, but not the last: it may still become a character."""
        self._context, self._pending = [], self._pending[-_KEPT:]
        kept = self._text(self._pending)
        held = int(kept.endswith(_REPLACEMENT))
        piece = text[self._released : len(text) - held]
        self._released = len(kept) - held
        return piece

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


@dataclass(frozen=True, slots=True)
class Matched:
    """What a piece of text released, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Cuts a text before the first stop string, however the text is split into pieces.

    The stop string that is complete first wins; of those that end at one character, the longest.

    >>> matcher = StopMatcher(("END",))
    >>> matcher.push("the E"), matcher.push("N"), matcher.push("Dless")
    (Matched(text='the ', stop=None), Matched(text='', stop=None), Matched(text='', stop='END'))
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        if isinstance(stop, str) or not all(stop):
            raise ConfigError(
                f"StopMatcher: stop strings {stop!r}; expected a tuple of strings, none of them "
                "empty; pass SamplingParams.stop"
            )
        self._stop = stop
        self._longest = max(map(len, stop), default=0)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> Matched:
        """Release what can no longer be part of a stop string.

        Raises:
            ContractError: a stop string was found before; the text has ended.
        """
        if self._stopped:
            raise ContractError(
                f"StopMatcher: {text!r} was pushed after a stop string; expected no more text; "
                "end the request when Matched.stop is set"
            )
        text = self._held + text
        found = [
            (start + len(stop), start, stop)
            for stop in self._stop
            if (start := text.find(stop)) >= 0
        ]
        if found:
            _, start, stop = min(found)
            self._held, self._stopped = "", True
            return Matched(text[:start], stop)
        keep = len(text) - self._open_chars(text)
        self._held = text[keep:]
        return Matched(text[:keep])

    def finish(self) -> str:
        """The text that was held back, when the answer ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _open_chars(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for count in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stop):
                return count
        return 0
