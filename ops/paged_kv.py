"""
Where a KV page keeps keys and values, in plain torch, for references and cases.

A layer's region starts at `offset` in every page and is `[2, kv_block, G, D]`: keys, then values.
Position p of a slot lies in page `kv_table[slot, p // kv_block]` at place `p % kv_block`.

Letters: N pages, E elements of a page, S slots, Z columns of the block table, T tokens, H query
heads, G KV heads, D width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.errors import ContractError
from midstream.ops.registry import LAUNCH_ALIGN, NULL_PAGE, Tolerance

_SPARE_COLUMNS = 3  # of block tables in cases, behind the last page of the longest row

TOLERANCE = Tolerance(
    {torch.float32: 4e-6, torch.float16: 2.5e-3, torch.bfloat16: 2e-2},
    "an average of values: a few eps of the largest entry; bf16 and fp16 round the weights before "
    "they meet the values, and the result",
)


def kv_region(arena: Tensor, offset: Tensor, kv_block: int, kv_heads: int, width: int) -> Tensor:
    """View of one layer's region in all pages: [N, 2, kv_block, G, D]."""
    start = int(offset)
    size = 2 * kv_block * kv_heads * width
    return arena[:, start : start + size].unflatten(1, (2, kv_block, kv_heads, width))


def attend(
    query: Tensor,
    region: Tensor,
    pages: Tensor,
    position: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Attention of T tokens of one sequence over its pages: [T, H, D], in at least float32.

    query [T, H, D]; region of `kv_region`; pages i[columns] of the sequence; position i[T].
    Query head h uses KV head h // (H // G).  Token t sees positions 0..position[t], of these the last
    `window` where that is not 0.  Scores become softcap * tanh(score / softcap) where that is not 0.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    tokens, heads, width = query.shape
    _, _, kv_block, kv_heads, _ = region.shape
    end = int(position.max()) + 1
    begin = max(0, int(position.min()) + 1 - window) if window else 0
    place = torch.arange(begin, end, device=position.device)
    page = pages[place // kv_block].long()
    key_NGD, value_NGD = region[page, :, place % kv_block].to(wide).unbind(1)
    query_TGHD = query.to(wide).view(tokens, kv_heads, heads // kv_heads, width)
    score = torch.einsum("tghd,ngd->tghn", query_TGHD, key_NGD) * scale
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    visible = place <= position[:, None]
    if window:
        visible &= place > position[:, None] - window
    weight = score.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("tghn,ngd->tghd", weight, value_NGD).reshape(tokens, heads, width)


def check_kv_pages(op: str, arena: Tensor) -> None:
    """Raise ContractError unless pages start where the kernels may assume it."""
    if arena.dim() != 2 or arena.stride(1) != 1:
        raise ContractError(
            f"{op}: arena has shape {tuple(arena.shape)} and strides {arena.stride()}, expected "
            "[pages, elements] with contiguous pages; allocate it with the KV layout"
        )
    if arena.stride(0) * arena.element_size() % LAUNCH_ALIGN:
        raise ContractError(
            f"{op}: pages lie {arena.stride(0) * arena.element_size()} bytes apart, expected a "
            f"multiple of {LAUNCH_ALIGN}; allocate the arena with the KV layout"
        )


def check_contiguous_heads(op: str, **tensors: Tensor) -> None:
    """Raise ContractError unless every tensor is [tokens, heads, width] with contiguous heads."""
    for name, tensor in tensors.items():
        if tensor.dim() != 3 or tensor.stride(2) != 1:
            raise ContractError(
                f"{op}: {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, "
                "expected [tokens, heads, width] whose last dimension is contiguous; "
                "transpose views of (heads, tokens, width)"
            )


def check_shared_heads(op: str, heads: int, kv_heads: int) -> None:
    """Raise ContractError unless every KV head serves the same number of query heads."""
    if heads % kv_heads:
        raise ContractError(
            f"{op}: {heads} query heads and {kv_heads} KV heads, expected a multiple; "
            "pass the model's num_key_value_heads as kv_heads"
        )


def check_score_options(op: str, window: int, softcap: float) -> None:
    """Raise ContractError for a window or a soft cap below zero."""
    if window < 0 or softcap < 0:
        raise ContractError(
            f"{op}: window is {window} and softcap {softcap}, expected both >= 0; pass 0 where the "
            "model has none"
        )


@dataclass(frozen=True, slots=True)
class KvPool:
    """Random keys and values of some sequences in scattered pages; all other memory holds NaN."""

    arena: Tensor  # [N, E]
    offset: Tensor  # i64[1]
    kv_table: Tensor  # i32[S, Z]  slot i holds sequence i; unused columns name a page of NaN


def host_generator(generator: torch.Generator) -> torch.Generator:
    """The generator itself, or one of its seed where it draws on a device."""
    if generator.device.type == "cpu":
        return generator
    return torch.Generator().manual_seed(generator.initial_seed())


def random_pool(
    generator: torch.Generator,
    dtype: torch.dtype,
    lengths: tuple[int, ...],
    kv_block: int,
    kv_heads: int,
    width: int,
    hidden: tuple[int, ...],
) -> KvPool:
    """A pool on the CPU that holds `lengths[i]` positions for slot i, for the cases of attention ops.

    The first `hidden[i]` of them hold NaN; pages that hold nothing else are the null page.
    """
    columns = [-(-length // kv_block) for length in lengths]
    num_pages = sum(columns) + 2  # the null page and one that nobody owns
    start = LAUNCH_ALIGN // dtype.itemsize
    region_size = 2 * kv_block * kv_heads * width
    page_size = -(-(start + region_size) // start) * start + start
    arena = torch.full((num_pages, page_size), torch.nan, dtype=dtype)
    offset = torch.tensor([start])
    region = kv_region(arena, offset, kv_block, kv_heads, width)
    pages = torch.randperm(num_pages - 1, generator=generator) + 1
    table = pages[-1].repeat(len(lengths), max(columns, default=0) + _SPARE_COLUMNS)
    taken = 0
    for slot, (length, count) in enumerate(zip(lengths, columns, strict=True)):
        table[slot, :count] = pages[taken : taken + count]
        taken += count
        data = torch.randn(2, length, kv_heads, width, generator=generator).to(dtype)
        position = torch.arange(hidden[slot], length)
        page = table[slot, position // kv_block]
        region[page, :, position % kv_block] = data[:, position].transpose(0, 1)
        table[slot, : hidden[slot] // kv_block] = NULL_PAGE
    return KvPool(arena, offset, table.int())
