"""
Keys of prefixes: chained, keyed 128-bit hashes of blocks of tokens.

    root    = PRF(extra, padded)                     one per combination of adapter, salt, ...
    hash[0] = PRF(root    | tokens of block 0)       16 bytes, then int32 little endian
    hash[i] = PRF(hash[i-1] | tokens of block i)

The PRF is SipHash-2-4 with 128-bit output (Aumasson and Bernstein, "SipHash: a fast short-input
PRF", 2012; the wide output is that of the authors' reference implementation).  Equal prefixes have
equal hashes, and nobody without the key can construct two prefixes that collide.  A hash is a
Python int wherever it is a dictionary key: its 16 bytes, little endian.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from itertools import repeat
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from midstream.errors import ConfigError, ContractError
from midstream.ops.host_compile import COMPILES, compiled, inlined

KEY_BYTES = 16
_MASK = (1 << 64) - 1
_INIT = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)

Hashes = NDArray[np.uint64]  # u64[blocks, 2]  low and high half of each hash
Tokens = NDArray[np.int32]  # i32[tokens]


class BlockHasher:
    """Hashes full blocks of `block` tokens under one secret key.  Immutable; any thread may use it.

    Equal keys give equal hashes in every process; without `key` a random one is drawn.

    >>> hasher = BlockHasher(block=4, key=bytes(16))
    >>> tokens = np.arange(11, dtype=np.int32)
    >>> whole = hasher.extend(None, tokens)
    >>> whole.shape  # 3 tokens are left over
    (2, 2)
    >>> tail = hasher.extend(as_keys(whole)[0], tokens[4:])
    >>> as_keys(tail) == as_keys(whole)[1:]
    True
    """

    def __init__(self, *, block: int, key: bytes | None = None, compiled: bool = COMPILES) -> None:
        """`compiled=False` takes the plain Python path: same hashes, about 1000 times slower."""
        if block < 1:
            raise ConfigError(
                f"BlockHasher: block is {block}; expected at least 1 token; pass the KV block size"
            )
        if key is not None and len(key) != KEY_BYTES:
            raise ConfigError(
                f"BlockHasher: the key has {len(key)} bytes; expected {KEY_BYTES}; "
                "pass secrets.token_bytes(16), or None for a random key"
            )
        self.block = block
        self._key = secrets.token_bytes(KEY_BYTES) if key is None else bytes(key)
        self._fill = _fill_hashes if compiled else _fill_hashes_ref
        self._fill_rows = _fill_row_hashes if compiled else _fill_row_hashes_ref
        self._key_words = as_words(self._key)
        self._plain_root = self._root_of(b"")

    def extend(self, parent: int | None, tokens: Tokens, extra: bytes = b"") -> Hashes:
        """Hashes of the full blocks in `tokens`, which continue the prefix that ends in `parent`.

        Args:
            parent: hash of the block before, None when `tokens` start at position 0.
            tokens: i32[n]; the last `n % block` of them are not hashed.
            extra: what else the prefix depends on (`encode_extra`); it enters through the root.
        Raises:
            ContractError: tokens are no int32 vector, or extra keys come after the first block.
        """
        if tokens.dtype != np.int32 or tokens.ndim != 1:
            raise ContractError(
                f"BlockHasher: tokens are {tokens.dtype} with {tokens.ndim} dimensions; "
                "expected an int32 vector; convert with np.asarray(ids, np.int32)"
            )
        if parent is not None and extra:
            raise ContractError(
                f"BlockHasher: {len(extra)} bytes of extra keys came with a parent hash; expected "
                "them with the first block only; the parent already carries them, so pass none"
            )
        if parent is None:
            parent = self.root(extra)
        hashes = np.empty((len(tokens) // self.block, 2), np.uint64)
        self._fill(*self._key_words, *as_words(parent), tokens, self.block, hashes)
        return hashes

    def extend_rows(
        self,
        hashes: Hashes,
        num_hashed: Tokens,
        tokens: Tokens,
        slot: Tokens,
        num_blocks: Tokens,
    ) -> None:
        """Hash several sequences on, one after the other; `num_hashed` follows.

        Args:
            hashes: u64[S, Z + 1, 2]  written: hash of each slot after each number of blocks, its root
                first.  Read is the one after `num_hashed`.
            num_hashed: i32[S]  hashed blocks of each slot.
            tokens: i32[S, length]  of each slot, from position 0.
            slot, num_blocks: i32[n]  whose hashes are wanted, and up to how many blocks.
        """
        self._fill_rows(*self._key_words, hashes, num_hashed, tokens, slot, num_blocks, self.block)

    def root(self, extra: bytes) -> int:
        """What the first block of a prefix with these extra keys continues."""
        return self._root_of(extra) if extra else self._plain_root

    def _root_of(self, extra: bytes) -> int:
        # one 0x80, then zeros up to 4n + 1 bytes: injective, and never as long as a block's message
        padding = b"\x80" + bytes(-len(extra) % 4)
        return sip128(self._key, extra + padding)


def as_keys(hashes: Hashes) -> list[int]:
    """One Python int per hash, for dictionaries and as `parent`."""
    hash_bytes = np.ascontiguousarray(hashes, "<u8").view("V16")[:, 0].tolist()
    order: repeat[Literal["little"]] = repeat("little")
    return list(map(int.from_bytes, hash_bytes, order))


def encode_extra(parts: Mapping[str, str]) -> bytes:
    """Canonical bytes of named extra keys, in any order; empty without any.

    >>> encode_extra({"salt": "a", "adapter": "b"}) == encode_extra({"adapter": "b", "salt": "a"})
    True
    >>> encode_extra({"salt": "ab"}) == encode_extra({"salta": "b"})
    False
    """
    words = [word.encode() for item in sorted(parts.items()) for word in item]
    return b"".join(len(word).to_bytes(8, "little") + word for word in words)


def sip128(key: bytes, message: bytes) -> int:
    """SipHash-2-4-128 in plain Python: the definition that the compiled loop must equal."""
    k0, k1 = (int.from_bytes(key[i : i + 8], "little") for i in (0, 8))
    v = [k0 ^ _INIT[0], k1 ^ _INIT[1] ^ 0xEE, k0 ^ _INIT[2], k1 ^ _INIT[3]]
    tail = len(message) - len(message) % 8
    last = message[tail:].ljust(7, b"\0") + bytes([len(message) & 0xFF])
    for i in range(0, tail + 8, 8):
        word = int.from_bytes(message[i : i + 8] if i < tail else last, "little")
        v[3] ^= word
        _rounds_ref(v, 2)
        v[0] ^= word
    v[2] ^= 0xEE
    _rounds_ref(v, 4)
    low = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    _rounds_ref(v, 4)
    return low | (v[0] ^ v[1] ^ v[2] ^ v[3]) << 64


def _rounds_ref(v: list[int], count: int) -> None:
    for _ in range(count):
        for a, b, turn in ((0, 1, 13), (2, 3, 16)):
            v[a] = (v[a] + v[b]) & _MASK
            v[b] = _turn_ref(v[b], turn) ^ v[a]
        v[0] = _turn_ref(v[0], 32)
        for a, b, turn in ((0, 3, 21), (2, 1, 17)):
            v[a] = (v[a] + v[b]) & _MASK
            v[b] = _turn_ref(v[b], turn) ^ v[a]
        v[2] = _turn_ref(v[2], 32)


def _turn_ref(x: int, bits: int) -> int:
    return (x << bits | x >> 64 - bits) & _MASK


def _fill_hashes_ref(
    k0: np.uint64,
    k1: np.uint64,
    low: np.uint64,
    high: np.uint64,
    tokens: Tokens,
    block: int,
    hashes: Hashes,
) -> None:
    key = int(k0).to_bytes(8, "little") + int(k1).to_bytes(8, "little")
    chain = int(low) | int(high) << 64
    for i in range(len(hashes)):
        words = tokens[i * block : (i + 1) * block].astype("<i4").tobytes()
        chain = sip128(key, chain.to_bytes(16, "little") + words)
        hashes[i] = as_words(chain)


def _fill_row_hashes_ref(
    k0: np.uint64,
    k1: np.uint64,
    hashes: Hashes,
    num_hashed: Tokens,
    tokens: Tokens,
    slot: Tokens,
    num_blocks: Tokens,
    block: int,
) -> None:
    for record, count in zip(slot.tolist(), num_blocks.tolist(), strict=True):
        first = int(num_hashed[record])
        known = tokens[record, first * block : count * block]
        low, high = hashes[record, first]
        _fill_hashes_ref(k0, k1, low, high, known, block, hashes[record, first + 1 : count + 1])
        num_hashed[record] = max(first, count)


def as_words(value: int | bytes) -> tuple[np.uint64, np.uint64]:
    if isinstance(value, bytes):
        value = int.from_bytes(value, "little")
    return np.uint64(value & _MASK), np.uint64(value >> 64)


# From here on every operand is a uint64: Numba turns uint64 with a signed integer into a float.
_U = np.uint64
_S0, _S1, _S2, _S3 = (_U(word) for word in _INIT)
_EE, _DD, _LENGTH_SHIFT = _U(0xEE), _U(0xDD), _U(56)
_13, _16, _17, _21, _32 = _U(13), _U(16), _U(17), _U(21), _U(32)
_64 = _U(64)

_State = tuple[np.uint64, np.uint64, np.uint64, np.uint64]


@inlined
def _turn(x: np.uint64, bits: np.uint64) -> np.uint64:
    return (x << bits) | (x >> (_64 - bits))


@inlined
def _round(v0: np.uint64, v1: np.uint64, v2: np.uint64, v3: np.uint64) -> _State:
    v0 += v1
    v2 += v3
    v1 = _turn(v1, _13) ^ v0
    v3 = _turn(v3, _16) ^ v2
    v0 = _turn(v0, _32)
    v0 += v3
    v2 += v1
    v3 = _turn(v3, _21) ^ v0
    v1 = _turn(v1, _17) ^ v2
    return v0, v1, _turn(v2, _32), v3


@inlined
def _absorb(v0: np.uint64, v1: np.uint64, v2: np.uint64, v3: np.uint64, word: np.uint64) -> _State:
    v0, v1, v2, v3 = _round(v0, v1, v2, v3 ^ word)
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0 ^ word, v1, v2, v3


@inlined
def _squeeze(v0: np.uint64, v1: np.uint64, v2: np.uint64, v3: np.uint64) -> _State:
    for _ in range(4):
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0, v1, v2, v3


@inlined
def _hash_block(
    k0: np.uint64,
    k1: np.uint64,
    low: np.uint64,
    high: np.uint64,
    tokens: Tokens,
    first: int,
    block: int,
    length: np.uint64,
) -> tuple[np.uint64, np.uint64]:
    v0, v1, v2, v3 = k0 ^ _S0, k1 ^ _S1 ^ _EE, k0 ^ _S2, k1 ^ _S3
    v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, low)
    v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, high)
    for t in range(first, first + block - 1, 2):
        pair = _U(np.uint32(tokens[t])) | (_U(np.uint32(tokens[t + 1])) << _32)
        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, pair)
    last = length
    if block % 2:
        last |= _U(np.uint32(tokens[first + block - 1]))
    v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, last)
    v0, v1, v2, v3 = _squeeze(v0, v1, v2 ^ _EE, v3)
    low = v0 ^ v1 ^ v2 ^ v3
    v0, v1, v2, v3 = _squeeze(v0, v1 ^ _DD, v2, v3)
    return low, v0 ^ v1 ^ v2 ^ v3


@compiled
def _fill_hashes(
    k0: np.uint64,
    k1: np.uint64,
    low: np.uint64,  # low half of the parent's hash
    high: np.uint64,
    tokens: Tokens,
    block: int,
    hashes: Hashes,
) -> None:
    length = _U((16 + 4 * block) & 0xFF) << _LENGTH_SHIFT
    for i in range(hashes.shape[0]):
        low, high = _hash_block(k0, k1, low, high, tokens, i * block, block, length)
        hashes[i, 0] = low
        hashes[i, 1] = high


@compiled
def _fill_row_hashes(
    k0: np.uint64,
    k1: np.uint64,
    hashes: Hashes,
    num_hashed: Tokens,
    tokens: Tokens,
    slot: Tokens,
    num_blocks: Tokens,
    block: int,
) -> None:
    length = _U((16 + 4 * block) & 0xFF) << _LENGTH_SHIFT
    for row in range(slot.shape[0]):
        record = slot[row]
        known, chain = tokens[record], hashes[record]
        for place in range(num_hashed[record], num_blocks[row]):
            low, high = _hash_block(
                k0, k1, chain[place, 0], chain[place, 1], known, place * block, block, length
            )
            chain[place + 1, 0] = low
            chain[place + 1, 1] = high
        num_hashed[record] = max(num_hashed[record], num_blocks[row])
