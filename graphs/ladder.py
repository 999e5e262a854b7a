"""The sizes that are captured: few enough to start soon, close enough to pad little."""

from __future__ import annotations

from collections.abc import Iterable

from midstream.graphs.dispatch import Form, Forms, GraphKey, Ladder, decode_key, decode_sizes

SHORT = (64, 128, 256, 512)  # tokens; longer prompts are bound by arithmetic, not by launches
_LONG_STEP = 256  # tokens between longer sizes: padding there costs arithmetic
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


def ladder_of(
    forms: Forms, max_rows: int, max_step_tokens: int, piece_tokens: int, drafts: int = 0
) -> Ladder:
    """All steps that have graphs.  `piece_tokens`: of the longest step that is captured in pieces."""
    decode: tuple[GraphKey, ...] = ()
    if forms.decode != "eager":
        sizes = ladder(min(max_rows * (1 + drafts), max_step_tokens))
        rows = decode_sizes(sizes, min(max_rows, max_step_tokens // (1 + drafts)), drafts)
        decode = tuple(decode_key(n, drafts, forms.decode == "pieces") for n in rows)
    long = range(SHORT[-1] + _LONG_STEP, piece_tokens + 1, _LONG_STEP)

    def keys(form: Form, sizes: Iterable[int]) -> tuple[GraphKey, ...]:
        if form == "eager":
            return ()
        limit = min(max_step_tokens, piece_tokens) if form == "pieces" else max_step_tokens
        return chunk_ladder(max_rows, limit, sizes, form == "pieces")

    return Ladder(decode, (*keys(forms.short, SHORT), *keys(forms.long, long)))
