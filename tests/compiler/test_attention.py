"""Attention as transformers calls it: windows and soft caps arrive, what cannot be done is refused."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from midstream.compiler import Pools, StepView
from midstream.compiler.attention import paged_attention
from midstream.compiler.context import PagedContext
from midstream.compiler.families.mixer import BINDING, AttentionBinding
from midstream.errors import UnsupportedError
from midstream.ops.chunk_table import cut_chunks

gemma2 = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")

TOKENS, HEADS, KV_HEADS, WIDTH, KV_BLOCK = 23, 4, 2, 16, 4
SCALE = 0.3
CHUNKED = 19  # tokens of the first step; the others decode one by one


def layer(**options: Any) -> Any:
    """An attention module as far as the attention functions look at it."""
    module = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, training=False, **options)
    arena = torch.full((10, 32 + 2 * KV_BLOCK * KV_HEADS * WIDTH), torch.nan)
    table = torch.tensor([[0] * 6, [7, 3, 9, 1, 4, 2]], dtype=torch.int32)
    context = PagedContext()
    context.bind(Pools(torch.empty(0), torch.empty(0), arena, table, KV_BLOCK))
    setattr(module, BINDING, AttentionBinding(context, torch.tensor([32])))
    return module


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    shapes = [(1, heads, TOKENS, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (torch.randn(shape, generator=draw) for shape in shapes)
    return 4 * q, k, v


def step_of(module: Any, begin: int, end: int) -> StepView:
    table = getattr(module, BINDING).context.pools.kv_table[1]
    places = [int(table[p // KV_BLOCK]) * KV_BLOCK + p % KV_BLOCK for p in range(begin, end)]
    chunks = cut_chunks([end - begin], [1])
    rows = {"token_id": [0] * (end - begin), "position": [*range(begin, end)], "kv_slot": places}
    rows |= {"row_slot": [1], "row_start": [0, end - begin], "read_page": [0], "write_page": [1]}
    tensors = {name: torch.tensor(row, dtype=torch.int32) for name, row in rows.items()}
    return StepView(
        kind="chunk" if begin == 0 else "decode",
        sample_token=torch.tensor([end - begin - 1]),
        chunk_start=chunks.chunk_start,
        chunk_row=chunks.chunk_row,
        **tensors,
    )


def run(module: Any, **options: Any) -> Tensor:
    """All tokens: a chunk step, then decode steps.  [1, T, H, D]"""
    results, bounds = [], [0, *range(CHUNKED, TOKENS + 1)]
    for begin, end in pairwise(bounds):
        here = [states[:, :, begin:end] for states in qkv()]
        with getattr(module, BINDING).context.running(step_of(module, begin, end)):
            out, weights = paged_attention(module, *here, None, scaling=SCALE, **options)
        assert weights is None
        results.append(out)
    return torch.cat(results, 1)


def transformers_result(window: int | None, softcap: float | None) -> Tensor:
    """Gemma 2's own attention with a mask as its sliding layers get it: kv > q - window."""
    q, kv = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
    visible = (kv <= q) & (kv > q - window if window else True)
    mask = torch.zeros(1, 1, TOKENS, TOKENS).masked_fill(~visible, torch.finfo(torch.float32).min)
    out, _ = gemma2.eager_attention_forward(layer(), *qkv(), mask, scaling=SCALE, softcap=softcap)
    return out


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3, 10, 99])
def test_windows_and_soft_caps_mean_what_they_mean_in_transformers(
    window: int | None, softcap: float | None
) -> None:
    got = run(layer(), sliding_window=window, softcap=softcap, dropout=0.0)
    torch.testing.assert_close(got, transformers_result(window, softcap), rtol=1e-5, atol=1e-5)


def test_a_layer_that_passes_no_window_has_it_on_the_module() -> None:
    """Some layers have a window for their mask only, and we build no mask."""
    got = run(layer(sliding_window=5, attn_logit_softcapping=3.0))
    torch.testing.assert_close(got, transformers_result(5, 3.0), rtol=1e-5, atol=1e-5)


def test_what_a_layer_passes_counts_more_than_what_its_module_has() -> None:
    got = run(layer(sliding_window=5), sliding_window=None)
    torch.testing.assert_close(got, transformers_result(None, None), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"s_aux": torch.zeros(HEADS)},
        {"position_bias": torch.zeros(1)},
        {"dropout": 0.1},
        {"is_causal": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_refuses_an_argument_that_would_change_the_result(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=f"passes {next(iter(options))}, expected causal"):
        run(layer(), **options)


def test_refuses_a_mask_and_a_module_that_looks_ahead() -> None:
    with pytest.raises(UnsupportedError, match="passes attention_mask, is_causal"):
        paged_attention(layer(is_causal=False), *qkv(), torch.zeros(1), scaling=SCALE)  # type: ignore[arg-type]


def test_no_opinion_on_causality_is_causal() -> None:
    want = run(layer())
    assert torch.equal(run(layer(is_causal=True), is_causal=None), want)
