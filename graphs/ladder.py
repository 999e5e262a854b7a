"""The sizes that are captured: few enough to start soon, close enough to pad little."""

from __future__ import annotations

from collections.abc import Iterable

from midstream.graphs.dispatch import Form, Forms, GraphKey, Ladder, decode_key, decode_sizes

SHORT = (64, 128, 256, 512)  # tokens: bound by launches, and asked for at once
# bound by arithmetic, so sizes are close; captured when a step first needs one
LONG = (
    *range(768, 2048, 256), *range(2048, 4096, 512), *range(4096, 8193, 1024)
)  # fmt: skip
_FEW_ROWS = 8
_LAST_SHORT = SHORT[-1]


def ladder(max_rows: int) -> tuple[int, ...]:
    """Captured batch sizes: powers of two up to 16, then multiples of 16, 32 from 64 on, and the maximum.

    >>> ladder(6)
    (1, 2, 4, 6)
    >>> ladder(100)
    (1, 2, 4, 8, 16, 32, 48, 64, 96, 100)
    """
    sizes = [1, 2, 4, 8, 16, 32, 48, *range(64, max_rows, 32), max_rows]
    return tuple(sorted({n for n in sizes if n <= max_rows}))


def chunk_ladder(
    max_rows: int, max_tokens: int, sizes: Iterable[int] = SHORT, in_pieces: bool = False
) -> tuple[GraphKey, ...]:
    """Steps with prompt chunks of up to `max_tokens`: a few rows or all of them, at rising numbers of tokens.

    >>> [(key.tokens, key.rows) for key in chunk_ladder(32, 128)]
    [(64, 8), (64, 32), (128, 8), (128, 32)]
    """
    keys = [
        GraphKey(tokens, max(rows, 2), tokens // 32 + 2 * rows, in_pieces)
        for tokens in sizes
        for rows in {min(_FEW_ROWS, max_rows), max_rows}
        if rows <= tokens <= max_tokens
    ]
    return tuple(sorted(keys))


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
    limit = min(max_step_tokens, graph_tokens)
    long = [size for size in LONG if size < limit]
    if limit > _LAST_SHORT:
        long.append(-(-limit // 8) * 8)  # what a full step has; compiled code takes multiples of 8

    def keys(form: Form, sizes: Iterable[int]) -> tuple[GraphKey, ...]:
        if form == "eager":
            return ()
        return chunk_ladder(max_rows, -(-limit // 8) * 8, sizes, form == "pieces")

    return Ladder(decode, (*keys(forms.short, SHORT), *keys(forms.long, long)))
