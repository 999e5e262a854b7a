import itertools

import pytest

from midstream.runtime.conversation import Conversation
from midstream.runtime.text import ByteTokenizer


class TemplateTokenizer:
    """A tokenizer with a chat template; ids are lengths of words."""

    chat_template = "given"

    def apply_chat_template(self, turns, *, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return "".join(f"<{turn['role']}> {turn['content']} " for turn in turns) + "<assistant>"

    def encode(self, text, *, add_special_tokens=True):
        assert add_special_tokens is not bool(self.chat_template)
        return [len(word) for word in text.split()]


def chat(max_prompt_tokens: int = 100) -> Conversation:
    return Conversation(ByteTokenizer(), max_prompt_tokens)


def test_without_a_template_the_turns_are_lines():
    conversation = chat()
    conversation.ask("one")
    conversation.answered("two")
    assert bytes(conversation.ask("three")) == b"one\ntwo\nthree\n"


def test_a_template_is_used_where_there_is_one():
    conversation = Conversation(TemplateTokenizer(), 100)
    assert conversation.ask("abc") == [6, 3, 11]
    conversation.answered("ab")
    assert conversation.ask("a") == [6, 3, 11, 2, 6, 1, 11]


@pytest.mark.parametrize("template", [None, ""])
def test_an_empty_template_counts_as_none(template):
    tokenizer = TemplateTokenizer()
    tokenizer.chat_template = template
    assert Conversation(tokenizer, 100).ask("abc") == [3]


def test_the_oldest_questions_go_with_their_answers_until_half_of_the_room_is_free():
    conversation = chat(max_prompt_tokens=20)
    for i in range(1, 4):
        conversation.ask(f"q{i}")
        assert conversation.answered(f"a{i}") == 0
    assert bytes(conversation.ask("q4")) == b"q3\na3\nq4\n"
    assert conversation.answered("a4") == 2


def test_a_full_chat_keeps_its_beginning_for_many_turns():
    conversation = chat(max_prompt_tokens=120)
    prompts = []
    for turn in range(100):
        prompts.append(bytes(conversation.ask(f"q{turn:03}")))
        conversation.answered(f"a{turn:03}")
    changed = [not b.startswith(a) for a, b in itertools.pairwise(prompts)]
    assert max(map(len, prompts)) <= 120 and sum(changed) <= 100 // 6


def test_a_question_too_long_is_asked_alone_and_stays_out_of_the_history_without_an_answer():
    conversation = chat(max_prompt_tokens=12)
    conversation.ask("q1")
    conversation.answered("a1")
    assert bytes(conversation.ask("q" * 20)) == b"q" * 20 + b"\n"
    assert bytes(conversation.ask("q2")) == b"q1\na1\nq2\n"
