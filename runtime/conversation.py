"""The turns of a chat as one growing prompt."""

from __future__ import annotations

from typing import Any


class Conversation:
    """Uses the tokenizer's chat template if it has one; else the turns are lines of plain text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self._turns: list[dict[str, str]] = []

    def ask(self, message: str) -> str | list[int]:
        """The whole prompt that ends with this message of the user."""
        self._turns.append({"role": "user", "content": message})
        if not self._has_template:
            return "".join(turn["content"] + "\n" for turn in self._turns)
        text = self._tokenizer.apply_chat_template(
            self._turns, tokenize=False, add_generation_prompt=True
        )
        # the template has written the special tokens already
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def answered(self, text: str) -> None:
        """Add the answer to the last `ask`."""
        self._turns.append({"role": "assistant", "content": text})
