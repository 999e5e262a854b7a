import pytest

from midstream.runtime.conversation import Conversation
from midstream.runtime.text import ByteTokenizer


class TemplateTokenizer:
    """A tokenizer with a chat template; ids are lengths of words."""

    chat_template = "given"

    def apply_chat_template(self, turns, *, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return "".join(f"<{turn['role']}> {turn['content']} " for turn in turns) + "<assistant>"

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return [len(word) for word in text.split()]


def test_without_a_template_the_turns_are_lines():
    conversation = Conversation(ByteTokenizer())
    conversation.ask("one")
    conversation.answered("two")
    assert conversation.ask("three") == "one\ntwo\nthree\n"


def test_a_template_is_used_where_there_is_one():
    conversation = Conversation(TemplateTokenizer())
    assert conversation.ask("abc") == [6, 3, 11]
    conversation.answered("ab")
    assert conversation.ask("a") == [6, 3, 11, 2, 6, 1, 11]


@pytest.mark.parametrize("template", [None, ""])
def test_an_empty_template_counts_as_none(template):
    tokenizer = TemplateTokenizer()
    tokenizer.chat_template = template
    assert Conversation(tokenizer).ask("abc") == "abc\n"
