"""Claims about block hashes: the PRF is the published one, chains commit to everything before them."""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.errors import ConfigError, ContractError
from midstream.runtime.hashing import BlockHasher, as_keys, as_words, encode_extra, sip128

KEY = bytes(range(16))
MESSAGE = bytes(range(64))
# SipHash-2-4-128 of MESSAGE[:length] under KEY: the test vectors published with the algorithm, which
# `openssl mac -macopt hexkey:000102...0f -macopt size:16 SIPHASH` gives as well
VECTORS = Path(__file__).with_name("siphash_vectors.txt").read_text().split()


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def keys_of(hasher: BlockHasher, tokens: np.ndarray, extra: bytes = b"") -> list[int]:
    return as_keys(hasher.extend(None, tokens, extra))


def test_plain_python_gives_all_published_vectors() -> None:
    got = [sip128(KEY, MESSAGE[:length]).to_bytes(16, "little").hex() for length in range(64)]
    assert got == VECTORS


@pytest.mark.parametrize("length", range(20, 64, 4))
def test_compiled_hash_gives_the_published_vectors(length: int) -> None:
    """A block's message is its parent's 16 bytes and its tokens' bytes, so vectors can be fed as both."""
    parent = int.from_bytes(MESSAGE[:16], "little")
    tokens = np.frombuffer(MESSAGE[16:length], "<i4")
    (key,) = as_keys(BlockHasher(block=len(tokens), key=KEY).extend(parent, tokens))
    assert key.to_bytes(16, "little").hex() == VECTORS[length]


@settings(deadline=None)  # the first call compiles
@given(
    tokens=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40),
    block=st.integers(1, 9),
    extra=st.binary(max_size=9),
)
def test_compiled_equals_plain_python(tokens: list[int], block: int, extra: bytes) -> None:
    fast = BlockHasher(block=block, key=KEY)
    slow = BlockHasher(block=block, key=KEY, compiled=False)
    array = ids(*tokens)
    assert np.array_equal(fast.extend(None, array, extra), slow.extend(None, array, extra))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("block", [1, 4, 5])
def test_sequences_hashed_on_together_equal_each_hashed_alone(compiled: bool, block: int) -> None:
    hasher = BlockHasher(block=block, key=KEY, compiled=compiled)
    tokens = np.random.default_rng(block).integers(0, 99, (4, 31)).astype(np.int32)
    alone = [hasher.extend(None, row, b"abc"[:n]) for n, row in enumerate(tokens)]
    num_hashed, hashes = ids(2, 0, 3, 1), np.zeros((4, 7, 2), np.uint64)
    for slot, count in enumerate(num_hashed.tolist()):
        root = as_words(hasher.root(b"abc"[:slot]))
        hashes[slot, count] = alone[slot][count - 1] if count else root
    slot, up_to = ids(3, 0, 1), ids(4, 2, 1)  # three more, none, one; slot 2 is not asked
    want = hashes.copy()
    want[3, 2:5], want[1, 1:2] = alone[3][1:4], alone[1][:1]
    hasher.extend_rows(hashes, num_hashed, tokens, slot, up_to)
    assert np.array_equal(hashes, want) and num_hashed.tolist() == [2, 1, 3, 4]


def test_a_view_with_a_stride_hashes_as_its_copy() -> None:
    hasher = BlockHasher(block=3, key=KEY)
    view = np.arange(40, dtype=np.int32)[::2]
    assert np.array_equal(hasher.extend(None, view), hasher.extend(None, view.copy()))


@settings(deadline=None)  # the first call compiles
@given(st.lists(st.integers(0, 9), max_size=30), st.integers(0, 30))
def test_extending_a_prefix_equals_hashing_the_whole(tokens: list[int], cut: int) -> None:
    hasher = BlockHasher(block=4, key=KEY)
    array, cut = ids(*tokens), min(cut, len(tokens)) // 4 * 4
    head = keys_of(hasher, array[:cut])
    tail = as_keys(hasher.extend(head[-1] if head else None, array[cut:]))
    assert head + tail == keys_of(hasher, array)


def test_a_changed_token_changes_its_block_and_all_after_it() -> None:
    hasher = BlockHasher(block=4, key=KEY)
    one = keys_of(hasher, np.arange(12, dtype=np.int32))
    two = keys_of(hasher, ids(0, 1, 2, 3, 4, 99, 6, 7, 8, 9, 10, 11))
    assert [a == b for a, b in zip(one, two, strict=True)] == [True, False, False]


@pytest.mark.parametrize("name", ["salt", "adapter", "image"])
def test_an_extra_key_changes_every_block(name: str) -> None:  # A-2, D10
    hasher = BlockHasher(block=4, key=KEY)
    tokens = np.arange(12, dtype=np.int32)
    variants = [b"", encode_extra({name: "a"}), encode_extra({name: "b"})]
    hashed = [keys_of(hasher, tokens, extra) for extra in variants]
    assert hashed[1] == keys_of(hasher, tokens, encode_extra({name: "a"}))
    for one, two in itertools.combinations(hashed, 2):
        assert not set(one) & set(two)


def test_extra_keys_are_encoded_without_ambiguity() -> None:
    parts = [{}, {"a": ""}, {"a": "b"}, {"ab": ""}, {"a": "", "b": ""}, {"a": "\0"}, {"": "a"}]
    assert len({encode_extra(p) for p in parts}) == len(parts)
    assert encode_extra({"x": "1", "y": "2"}) == encode_extra({"y": "2", "x": "1"})
    hasher = BlockHasher(block=1, key=KEY)
    endings = [b"", b"\x80", b"\x80\0", b"\0", b"\0\0", b"a", b"a\x80", b"a\0"]
    assert len({keys_of(hasher, ids(1), extra)[0] for extra in endings}) == len(endings)


def test_extra_bytes_cannot_imitate_a_chain() -> None:
    """A salt that spells the message of a block must not continue that block's chain."""
    hasher = BlockHasher(block=2, key=KEY)
    first, second = keys_of(hasher, ids(1, 2, 3, 4))
    spelled = first.to_bytes(16, "little") + ids(3, 4).tobytes()
    follow = as_keys(hasher.extend(second, ids(5, 6)))
    assert not set(follow) & set(keys_of(hasher, ids(5, 6), spelled))


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (3, 0), (7, 1), (8, 2), (11, 2)])
def test_only_full_blocks_are_hashed(num_tokens: int, blocks: int) -> None:
    hashes = BlockHasher(block=4, key=KEY).extend(None, np.arange(num_tokens, dtype=np.int32))
    assert hashes.shape == (blocks, 2) and hashes.dtype == np.uint64


def test_a_coarser_grid_is_a_view_of_the_same_hashes() -> None:
    keys = keys_of(BlockHasher(block=16, key=KEY), np.arange(80, dtype=np.int32))
    assert len(keys) == 5 and keys[1::2] == [keys[1], keys[3]]


def test_equal_blocks_under_different_parents_differ() -> None:  # D9
    hasher = BlockHasher(block=2, key=KEY)
    same = keys_of(hasher, ids(*[7, 7] * 50))
    assert len(set(same)) == 50


def test_a_thousand_random_prompts_share_exactly_their_common_prefixes() -> None:  # D9
    rng = random.Random(20)
    hasher = BlockHasher(block=2, key=KEY)
    prefix_of: dict[int, tuple[int, ...]] = {}
    for _ in range(1000):
        prompt = tuple(rng.randrange(3) for _ in range(12))
        for i, key in enumerate(keys_of(hasher, ids(*prompt))):
            assert prefix_of.setdefault(key, prompt[: 2 * i + 2]) == prompt[: 2 * i + 2]
    assert len(prefix_of) == len(set(prefix_of.values()))


def test_engines_without_a_given_key_do_not_agree() -> None:
    tokens = np.arange(8, dtype=np.int32)
    one, two = (keys_of(BlockHasher(block=4), tokens) for _ in range(2))
    assert not set(one) & set(two)


def test_q1_threads_get_the_hashes_of_plain_python() -> None:
    tokens = np.random.default_rng(20).integers(0, 32000, 4096, dtype=np.int32)
    fast = BlockHasher(block=16, key=KEY)
    slow = BlockHasher(block=16, key=KEY, compiled=False).extend(None, tokens[:320])
    with ThreadPoolExecutor(8) as threads:
        for hashes in threads.map(lambda _: fast.extend(None, tokens), range(32)):
            assert np.array_equal(hashes[:20], slow)


def test_keys_are_whole_hashes() -> None:
    hashes = BlockHasher(block=1, key=KEY).extend(None, np.arange(5, dtype=np.int32))
    joined = b"".join(key.to_bytes(16, "little") for key in as_keys(hashes))
    assert joined == hashes.astype("<u8").tobytes()
    assert as_keys(hashes[:0]) == []


def test_refuses_what_it_cannot_hash() -> None:
    hasher = BlockHasher(block=4, key=KEY)
    with pytest.raises(ContractError, match=r"tokens are int64 .* np\.asarray"):
        hasher.extend(None, np.arange(4))
    with pytest.raises(ContractError, match="tokens are int32 with 2 dimensions"):
        hasher.extend(None, np.zeros((2, 4), np.int32))
    with pytest.raises(ContractError, match="4 bytes of extra keys came with a parent"):
        hasher.extend(1, ids(1, 2, 3, 4), b"salt")
    with pytest.raises(ConfigError, match="block is 0"):
        BlockHasher(block=0)
    with pytest.raises(ConfigError, match="the key has 3 bytes"):
        BlockHasher(block=4, key=b"abc")
