"""The sizes that are captured: few enough to start soon, close enough to pad little."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from midstream.graphs.dispatch import Form, Forms, GraphKey, Ladder, decode_key, decode_sizes

SHORT = (64, 128, 256, 512)  # tokens: bound by launches, and asked for at once
# bound by arithmetic, so sizes are close; captured when a step first needs one
LONG = (
    *range(768, 2048, 256), *range(2048, 4096, 512), *range(4096, 8193, 1024)
)  # fmt: skip
_FEW_ROWS = 8


def ladder(max_rows: int) -> tuple[int, ...]:
    """Captured batch sizes: powers of two up to 16, then multiples of 16, 32 from 64 on, and the maximum.

    >>> ladder(6)
    (1, 2, 4, 6)
    >>> ladder(100)
    (1, 2, 4, 8, 16, 32, 48, 64, 96, 100)
    """
    sizes = [1, 2, 4, 8, 16, 32, 48, *range(64, max_rows, 32), max_rows]
    return tuple(sorted({n for n in sizes if n <= max_rows}))


def chunks_of(tokens: int, rows: int) -> int:
    """Chunks that a captured step has room for: of the grid and of blocks, and each row's ends."""
    return tokens // 32 + 2 * rows


def chunk_ladder(
    max_rows: int, max_tokens: int, sizes: Iterable[int] = SHORT, in_pieces: bool = False
) -> tuple[GraphKey, ...]:
    """Steps with prompt chunks of up to `max_tokens`: a few rows or all of them, at rising numbers of tokens.

    >>> [(key.tokens, key.rows) for key in chunk_ladder(32, 128)]
    [(64, 8), (64, 32), (128, 8), (128, 32)]
    """
    keys = [
        GraphKey(tokens, max(rows, 2), chunks_of(tokens, rows), in_pieces)
        for tokens in sizes
        for rows in {min(_FEW_ROWS, max_rows), max_rows}
        if rows <= tokens <= max_tokens
    ]
    return tuple(sorted(keys))


def chunk_sizes(limit: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens of captured steps with prompt chunks, short ones and long ones; the last takes `limit` tokens.

    >>> chunk_sizes(1000)
    ((64, 128, 256, 512), (768, 1000))
    >>> chunk_sizes(100)
    ((64, 104), ())
    """
    sizes = [size for size in (*SHORT, *LONG) if size <= limit]
    end = -(-limit // 8) * 8  # compiled code takes multiples of 8
    while sizes and sizes[-1] < limit:
        step = sizes[-1] // 8 if sizes[-1] >= LONG[-1] else end
        sizes.append(min(sizes[-1] + step, end))
    short = bisect_right(sizes, SHORT[-1])
    return tuple(sizes[:short]), tuple(sizes[short:])


def is_late(key: GraphKey) -> bool:
    """Whether this is captured when a step first needs it, and not at the start."""
    return bool(key.chunks) and (key.in_pieces or key.tokens > SHORT[-1])


def ladder_of(
    forms: Forms, max_rows: int, max_step_tokens: int, graph_tokens: int, drafts: int = 0
) -> Ladder:
    """All steps that have graphs.  `graph_tokens`: of the longest prompt chunks among them."""
    decode: tuple[GraphKey, ...] = ()
    if forms.decode != "eager":
        sizes = ladder(min(max_rows * (1 + drafts), max_step_tokens))
        rows = decode_sizes(sizes, min(max_rows, max_step_tokens // (1 + drafts)), drafts)
        decode = tuple(decode_key(n, drafts, forms.decode == "pieces") for n in rows)
    short, long = chunk_sizes(min(max_step_tokens, graph_tokens))

    def keys(form: Form, sizes: tuple[int, ...]) -> tuple[GraphKey, ...]:
        if form == "eager" or not sizes:
            return ()
        return chunk_ladder(max_rows, sizes[-1], sizes, form == "pieces")

    return Ladder(decode, (*keys(forms.short, short), *keys(forms.long, long)))
