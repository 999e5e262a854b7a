"""
Which steps are captured and how, and which graph a step replays: pure functions of modes, sizes and states.

A step is *decode* (every row continues with one token, or with one and its drafts) or has prompt chunks;
which of the two, its requests say.  A shape never does: a prompt chunk of one token is a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from midstream.errors import UnsupportedError

Form = Literal["whole", "pieces", "eager"]


@dataclass(frozen=True, slots=True, order=True)
class GraphKey:
    """Padded shape of a step.  Equal keys replay the same graph; nothing else may decide."""

    tokens: int
    rows: int  # requests
    chunks: int  # 0 in a decode step, where every row has the same number of tokens
    in_pieces: bool = False  # graphs with op calls between

    @property
    def tokens_per_row(self) -> int:
        """1 in plain decode, 1 + drafts where drafts are verified, 0 in a step with chunks."""
        return 0 if self.chunks else self.tokens // self.rows

    def __str__(self) -> str:
        kind = f"{self.chunks} chunks" if self.chunks else f"decode x {self.tokens_per_row}"
        pieces = " in pieces" if self.in_pieces else ""
        return f"step of {self.tokens} tokens, {self.rows} rows, {kind}{pieces}"


@dataclass(frozen=True, slots=True)
class Forms:
    """How each class of steps runs.  A step without a graph of its form runs eagerly."""

    decode: Form
    short: Form  # steps with prompt chunks that are bound by launches
    long: Form  # and those beyond


MODES = {
    "off": Forms("eager", "eager", "eager"),
    "piecewise": Forms("pieces", "pieces", "pieces"),
    "full": Forms("whole", "whole", "whole"),
    "full+piecewise": Forms("whole", "whole", "pieces"),
}


class Support(IntEnum):
    """Which steps the ops of a model can be captured in.  The weakest op decides."""

    NEVER = 0
    ONE_TOKEN = 1  # decode steps of one token in each row
    EQUAL_ROWS = 2  # decode steps, drafts included
    ALWAYS = 3  # every step: sizes and tables are device memory


def resolve_forms(
    mode: str, support: Support = Support.ALWAYS, drafts: int = 0, can_split: bool = True
) -> Forms:
    """How steps run in `mode`, given the weakest op; see `weakened`.

    Raises:
        UnsupportedError: for "full" where no step with these ops can be captured whole.
    """
    if mode == "full" and support == Support.NEVER:
        raise UnsupportedError(
            "graphs='full': an op of this model cannot be captured, expected ops whose sizes are on the "
            "device; choose graphs='piecewise', which runs such ops eagerly, or 'off'"
        )
    return weakened(MODES[mode], support, drafts, can_split)


def weakened(asked: Forms, support: Support, drafts: int = 0, can_split: bool = True) -> Forms:
    """`asked`, with pieces where the weakest op does not allow whole graphs.

    `can_split`: whether those ops are called where a step can be split; else such steps run eagerly.
    """

    def form(wanted: Form, needed: Support) -> Form:
        if wanted == "whole" and support < needed:
            wanted = "pieces"
        return "eager" if wanted == "pieces" and not can_split else wanted

    # where short steps give up whole graphs, longer ones gain from pieces as well
    gives_up = asked.short == "whole" and support < Support.ALWAYS
    return Forms(
        decode=form(asked.decode, Support.EQUAL_ROWS if drafts else Support.ONE_TOKEN),
        short=form(asked.short, Support.ALWAYS),
        long=form(asked.short if gives_up else asked.long, Support.ALWAYS),
    )


@dataclass(frozen=True, slots=True)
class Ladder:
    """The steps that have graphs, ascending."""

    decode: tuple[GraphKey, ...] = ()
    chunk: tuple[GraphKey, ...] = ()

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        return (*self.decode, *self.chunk)

    def decode_step(self, rows: int, tokens_per_row: int = 1) -> GraphKey | None:
        """The smallest graph that holds `rows` rows of this many tokens, None if none does."""
        fitting = (k for k in self.decode if k.rows >= rows and k.tokens_per_row == tokens_per_row)
        return next(fitting, None)

    def chunk_step(self, needed: GraphKey) -> GraphKey | None:
        """The smallest graph that holds a step with chunks, None if none does."""
        return smallest_fit(needed, self.chunk)


def decode_key(rows: int, drafts: int = 0, in_pieces: bool = False) -> GraphKey:
    """Key of a decode step of `rows` padded rows, each of 1 + `drafts` tokens."""
    return GraphKey(rows * (1 + drafts), rows, 0, in_pieces)


def decode_sizes(sizes: Iterable[int], max_rows: int, drafts: int = 0) -> tuple[int, ...]:
    """Rows of the decode graphs for captured token counts `sizes`: multiples of 1 + drafts, none too large.

    >>> decode_sizes((1, 2, 4, 8, 16, 24, 32), 16, drafts=3)
    (1, 2, 4, 6, 8)
    """
    per_row, largest = 1 + drafts, max(sizes := list(sizes), default=0)
    rows = {-(-size // per_row) for size in sizes}
    return tuple(sorted(n for n in rows if n <= max_rows and n * per_row <= largest))


def smallest_fit(needed: GraphKey, keys: Sequence[GraphKey]) -> GraphKey | None:
    """The first of the ascending `keys` that holds a step with chunks, None if none does.

    >>> keys = (GraphKey(64, 8, 18), GraphKey(128, 8, 20), GraphKey(128, 32, 68))
    >>> [str(smallest_fit(GraphKey(*n), keys)) for n in ((100, 3, 5), (60, 9, 9))]
    ['step of 128 tokens, 8 rows, 20 chunks', 'step of 128 tokens, 32 rows, 68 chunks']
    """
    for key in keys:
        if key.tokens >= needed.tokens and key.rows >= needed.rows and key.chunks >= needed.chunks:
            return key
    return None
