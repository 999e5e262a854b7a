"""Claims about text: pieces joined are the whole, no character is split, nothing out is taken back."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from midstream.errors import ConfigError, ContractError
from midstream.runtime.text import (
    ByteDecoder,
    ByteTokenizer,
    Decoder,
    IncrementalDecoder,
    Matched,
    StopMatcher,
    decoder_for,
)

SAMPLE = "naïve 日本語 👩‍👩‍👧‍👦 é e\u0301 \N{REPLACEMENT CHARACTER}! 😀😀😀 ₿"
HEAVY = "".join(chr(c) for c in range(0x4E00, 0x4E20)) + "😀👍🏽🇩🇪" * 5  # no byte below 128


class SlowBytes(ByteTokenizer):
    """Bytes through the decoder for any tokenizer; counts the ids that it decodes."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, token_ids, **options) -> str:
        self.decoded += len(token_ids)
        return super().decode(token_ids, **options)


class WordTokenizer:
    """Joins words by spaces, so that a word's text depends on the one before; id 0 is special."""

    words = ("<end>", "one", "two", "three")

    def decode(self, token_ids, **options) -> str:
        return " ".join(self.words[i] for i in token_ids if i)


class FallbackTokenizer:
    """Byte fallback: a run of bytes that is no UTF-8 as a whole shows one mark per byte; 256 is "a"."""

    def decode(self, token_ids, **options) -> str:
        text, run = "", bytearray()
        for i in [*token_ids, None]:
            if i is not None and i < 256:
                run.append(i)
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += "\N{REPLACEMENT CHARACTER}" * len(run)
            run.clear()
            text += "" if i is None else "a"
        return text


class BytePairs(ByteTokenizer):
    """Tokens of two bytes: characters begin and end inside tokens."""

    def decode(self, token_ids, **options) -> str:
        return super().decode([byte for i in token_ids for byte in divmod(i, 256)])


def pieces(decoder: Decoder, token_ids: list[int]) -> list[str]:
    return [*map(decoder.push, token_ids), decoder.finish()]


@pytest.mark.parametrize("text", ["", "plain", SAMPLE, HEAVY, "\0\n\u07ff\u0800\uffff\U0010ffff"])
def test_bytes_become_the_text_they_came_from(text: str) -> None:
    tokenizer = ByteTokenizer()
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids) == text
    for decoder in (ByteDecoder(), IncrementalDecoder(tokenizer)):
        assert "".join(pieces(decoder, token_ids)) == text


def test_a_character_comes_out_whole_with_its_last_byte() -> None:
    for decoder in (ByteDecoder(), IncrementalDecoder(ByteTokenizer())):
        assert pieces(decoder, ByteTokenizer().encode("é😀a")) == [
            "",
            "é",
            *[""] * 3,
            "😀",
            "a",
            "",
        ]


def test_a_text_that_utf8_cannot_write_is_refused_with_the_fix() -> None:
    with pytest.raises(ConfigError, match=r"character 1 of the text .* give bytes as token ids"):
        ByteTokenizer().encode("a\udcff")


def test_an_unfinished_character_is_shown_at_the_end_only() -> None:
    for decoder in (ByteDecoder(), IncrementalDecoder(ByteTokenizer())):
        assert pieces(decoder, [97, 0xF0, 0x9F, 0x98]) == ["a", "", "", "", "\ufffd"]


def test_special_ids_have_no_text() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == 256 == tokenizer.vocab_size - 1
    token_ids = [256, 0xC3, 256, 300, 0xA9, 97, 256]
    assert tokenizer.decode(token_ids) == "éa"
    for decoder in (ByteDecoder(), IncrementalDecoder(tokenizer)):
        assert "".join(pieces(decoder, token_ids)) == "éa"


@given(st.lists(st.integers(0, 256), max_size=80))
@example([0xE2, 0x82] * 30)
@example([0xF0, 0x9F, 0x98] * 20 + [0x80])
@example([0x80] * 50 + [0xC3, 0xA9])
@example([0x80] * 15 + [0xC3, 0xA9])  # the byte that may go on comes when the decoder gives up
def test_pieces_of_any_bytes_join_to_the_decoded_whole(token_ids: list[int]) -> None:
    tokenizer = ByteTokenizer()
    assert "".join(pieces(ByteDecoder(), token_ids)) == tokenizer.decode(token_ids)
    without_special = [i for i in token_ids if i < 256]
    joined = "".join(pieces(IncrementalDecoder(tokenizer), without_special))
    assert joined == tokenizer.decode(token_ids)


@settings(deadline=None)  # the first call builds the table of all characters
@given(st.text(max_size=60))
@example(SAMPLE)
@example(HEAVY)
def test_text_survives_tokens_that_straddle_characters(text: str) -> None:
    data = text.encode()
    data += b" " * (len(data) % 2)
    token_ids = [a * 256 + b for a, b in zip(data[::2], data[1::2], strict=True)]
    assert "".join(pieces(IncrementalDecoder(BytePairs()), token_ids)) == data.decode()


@given(st.text(alphabet="a日é😀", max_size=60))
@example(HEAVY)
def test_runs_of_fallback_bytes_are_never_shown_as_broken(text: str) -> None:
    token_ids = [256 if byte == 97 else byte for byte in text.encode()]
    decoder = IncrementalDecoder(FallbackTokenizer())
    assert "".join(pieces(decoder, token_ids)) == text


@given(st.lists(st.integers(0, 3), max_size=60))
@example([1] + [0] * 40 + [2])
def test_text_that_depends_on_neighbours_joins_to_the_decoded_whole(token_ids: list[int]) -> None:
    decoder = IncrementalDecoder(WordTokenizer())
    assert "".join(pieces(decoder, token_ids)) == WordTokenizer().decode(token_ids)


@pytest.mark.parametrize("byte", [97, 0x80, 0xE2], ids=["text", "garbage", "unfinished"])
def test_work_per_token_does_not_grow(byte: int) -> None:
    tokenizer = SlowBytes()
    pieces(IncrementalDecoder(tokenizer), [byte] * 2000)
    assert tokenizer.decoded < 2000 * 20


def test_each_tokenizer_gets_its_decoder() -> None:
    assert isinstance(decoder_for(ByteTokenizer()), ByteDecoder)
    assert isinstance(decoder_for(WordTokenizer()), IncrementalDecoder)


def transformers_tokenizer(fallback: bool):
    """A tokenizer of transformers with a token per byte, of the byte-level or fallback kind."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    if fallback:
        vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁hi": 256, "<s>": 257}
        model = tokenizers.models.BPE(vocab, [], byte_fallback=True, unk_token="<s>")
        inner = tokenizers.Tokenizer(model)
        d = tokenizers.decoders
        inner.decoder = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse()])
    else:
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        model = tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, [])
        inner = tokenizers.Tokenizer(model)
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner)


def test_byte_level_tokenizers_of_transformers_stream_their_text() -> None:
    tokenizer = transformers_tokenizer(fallback=False)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.integers(0, 255), max_size=60))
    def random_ids(token_ids: list[int]) -> None:
        joined = "".join(pieces(decoder_for(tokenizer), token_ids))
        assert joined == tokenizer.decode(token_ids)

    random_ids()
    for text in (SAMPLE, HEAVY):
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(token_ids) == len(text.encode())
        assert "".join(pieces(decoder_for(tokenizer), token_ids)) == text


def test_byte_fallback_tokenizers_of_transformers_stream_their_text() -> None:
    tokenizer = transformers_tokenizer(fallback=True)
    token_ids = [256, *HEAVY.encode(), 256, *SAMPLE.encode(), 256]
    joined = "".join(pieces(decoder_for(tokenizer), token_ids))
    assert joined == tokenizer.decode(token_ids) == f" hi{HEAVY} hi{SAMPLE} hi"


def run(stop: tuple[str, ...], *texts: str) -> tuple[str, str | None]:
    """(text that came out, stop string) of pieces pushed one after the other."""
    matcher, out = StopMatcher(stop), ""
    for text in texts:
        matched = matcher.push(text)
        out += matched.text
        if matched.stop is not None:
            assert matcher.finish() == ""
            return out, matched.stop
    return out + matcher.finish(), None


def naive_cut(stop: tuple[str, ...], text: str) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        hits = [s for s in stop if text[:end].endswith(s)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    ("stop", "texts", "expected"),
    [
        (("END",), ["a", "E", "N", "D", "b"], ("a", "END")),
        (("END",), ["aENDb"], ("a", "END")),
        (("END",), ["aE", "NE", "ND!"], ("aEN", "END")),  # the first E was not the beginning
        (("aab",), ["aa", "aa", "b"], ("aa", "aab")),  # overlaps itself
        (("abcd", "bc"), ["ab", "c"], ("a", "bc")),  # complete first
        (("bc", "abc"), ["ab", "cd"], ("", "abc")),  # both end here: the longest
        (("\n\n",), ["x\n", "y\n", "\nz"], ("x\ny", "\n\n")),
        (("😀!",), ["a😀", "b😀", "!"], ("a😀b", "😀!")),
        (("END",), ["a", "EN"], ("aEN", None)),  # what was held back comes at the end
        ((), ["a", "b"], ("ab", None)),
        (("END",), ["", ""], ("", None)),
    ],
)
def test_text_ends_before_the_first_stop_string(stop, texts, expected) -> None:
    assert run(stop, *texts) == expected


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple),
    st.lists(st.text("ab", max_size=3), max_size=12),
)
def test_the_cut_does_not_depend_on_how_text_is_split(stop, texts) -> None:
    assert run(stop, *texts) == naive_cut(stop, "".join(texts))


def test_text_is_held_back_only_while_it_may_become_a_stop_string() -> None:
    matcher = StopMatcher(("<end>",))
    assert matcher.push("x<e") == Matched("x")
    assert matcher.push("n") == Matched("")
    assert matcher.push("t<") == Matched("<ent")
    assert matcher.push("b") == Matched("<b")


def test_no_text_follows_a_stop_string() -> None:
    matcher = StopMatcher(("a",))
    matcher.push("a")
    with pytest.raises(ContractError, match="'b' was pushed after a stop string"):
        matcher.push("b")


@pytest.mark.parametrize("stop", [("",), "END", ("a", "")])
def test_refuses_stop_strings_that_cannot_match(stop) -> None:
    with pytest.raises(ConfigError, match="StopMatcher: stop strings"):
        StopMatcher(stop)


def test_a_stop_string_is_found_across_tokens_that_split_its_characters() -> None:
    decoder = ByteDecoder()
    texts = [decoder.push(token_id) for token_id in ByteTokenizer().encode("aß1ß€z")]
    assert run(("ß€",), *texts) == ("aß1", "ß€")
