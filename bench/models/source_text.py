"""
The source text of the Python standard library as training and held-out bytes.

A token is a byte; END_OF_TEXT stands between files.  The text is read from the running
interpreter; it is under the Python Software Foundation License Version 2.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

END_OF_TEXT = 256
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "encodings"}  # encodings: tables of numbers
HELD_OUT = 0.03  # share of the files
LICENCE = "Python standard library, Python Software Foundation License Version 2"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Files joined by END_OF_TEXT; a file is held out by the hash of its bytes."""

    train: Tensor  # i16[n]
    held_out: Tensor  # i16[n]
    num_files: int
    num_held_out_files: int


def read_files(root: Path) -> dict[str, bytes]:
    """UTF-8 source files under root by the hash of their bytes, in the order of the hashes."""
    files = {}
    for path in root.rglob("*.py"):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts) and path.is_file():
            text = path.read_bytes()
            if text and _is_utf8(text):
                files[hashlib.sha256(text).hexdigest()] = text
    return dict(sorted(files.items()))


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def is_held_out(digest: str) -> bool:
    """Whether the file with this hash is held out.

    >>> is_held_out("00" * 32), is_held_out("ff" * 32)
    (True, False)
    """
    # not the leading digits: they order the files
    return int(digest[-8:], 16) < HELD_OUT * 2**32


def pack(files: list[bytes]) -> Tensor:
    """Join files, each one after an END_OF_TEXT.

    >>> pack([b"a", b"bc"]).tolist()
    [256, 97, 256, 98, 99, 256]
    """
    end = torch.tensor([END_OF_TEXT], dtype=torch.int16)
    parts = [end]
    for text in files:
        parts += [torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int16), end]
    return torch.cat(parts)


def load_corpus(root: Path, device: torch.device) -> Corpus:
    files = read_files(root)
    held_out = [text for digest, text in files.items() if is_held_out(digest)]
    train = [text for digest, text in files.items() if not is_held_out(digest)]
    return Corpus(pack(train).to(device), pack(held_out).to(device), len(train), len(held_out))


def windows(text: Tensor, start: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets i64[R, length] of the windows of text that begin at start i64[R]."""
    window = text[start[:, None] + torch.arange(length + 1, device=text.device)].long()
    return window[:, :-1], window[:, 1:]
