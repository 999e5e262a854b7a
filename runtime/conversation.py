"""
The turns of a chat as one growing prompt, without the oldest ones when they no longer fit.

When something must go, half of the room is made free at once.  The prompt then begins alike for many turns,
and each of them resumes from the saved state of the one before; a pair dropped in every turn would change
the beginning of every prompt, and all of it would be computed again each time.
"""

from __future__ import annotations

from typing import Any

Turn = dict[str, str]


class Conversation:
    """Uses the tokenizer's chat template if it has one; else the turns are lines of plain text."""

    def __init__(self, tokenizer: Any, max_prompt_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self._turns: list[Turn] = []
        self._asked: list[Turn] = []  # the turns of the last `ask`

    def ask(self, message: str) -> list[int]:
        """The prompt that ends with this message, which is in it however long it is.

        The question stays out of the history until `answered`.
        """
        self._asked = [*self._turns, {"role": "user", "content": message}]
        token_ids = self._encode(self._asked)
        if len(token_ids) > self._max_prompt_tokens:
            while len(token_ids) > self._max_prompt_tokens // 2 and len(self._asked) > 1:
                self._asked = self._asked[2:]  # a question and its answer
                token_ids = self._encode(self._asked)
        return token_ids

    def answered(self, text: str) -> int:
        """Add the last question and its answer.  Returns the earlier pairs that `ask` left out."""
        num_left_out = (len(self._turns) + 1 - len(self._asked)) // 2
        self._turns = [*self._asked, {"role": "assistant", "content": text}]
        return num_left_out

    def _encode(self, turns: list[Turn]) -> list[int]:
        token_ids: list[int]
        if not self._has_template:
            token_ids = self._tokenizer.encode("".join(turn["content"] + "\n" for turn in turns))
            return token_ids
        text = self._tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True
        )
        # the template has written the special tokens already
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        return token_ids
