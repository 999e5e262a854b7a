"""
Write the keys and values of a step's tokens into their KV pages.

Token t goes to page `kv_slot[t] // kv_block`, place `kv_slot[t] % kv_block`; -1 is padding and
writes nothing.  No two tokens of a step share a place.

Letters: T tokens, N pages, E elements of a page, G KV heads, D width of a head.
Traffic: 2 * T * G * D elements read and written.  No arithmetic: bit-exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.errors import ContractError
from midstream.ops.paged_kv import check_contiguous_heads, check_kv_pages, kv_region
from midstream.ops.registry import EXACT, LAUNCH_ALIGN, PADDING, Args, OpCase, define_op

_TILE = 2048  # elements of keys (and of values) that a program moves


def kv_write_ref(
    arena: Tensor,  # [N, E]
    key: Tensor,  # [T, G, D]
    value: Tensor,  # [T, G, D]
    offset: Tensor,  # i64[1]  start of the layer's region in a page
    kv_slot: Tensor,  # i32[>=T]
    kv_block: int,
) -> None:
    """Say what the kernel means."""
    tokens, kv_heads, width = key.shape
    region = kv_region(arena, offset, kv_block, kv_heads, width)
    live = kv_slot[:tokens] != PADDING
    place = kv_slot[:tokens][live].long()
    region[place // kv_block, 0, place % kv_block] = key[live].to(arena.dtype)
    region[place // kv_block, 1, place % kv_block] = value[live].to(arena.dtype)


@triton.jit
def _kv_write_kernel(
    arena_ptr,  # [N, page_stride]
    key_ptr,  # [T, G, D]
    value_ptr,  # [T, G, D]
    offset_ptr,  # i64[1]
    kv_slot_ptr,  # i32[>=T]
    page_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    num_tokens,
    kv_block,
    kv_heads,
    D: tl.constexpr,
    ALIGN: tl.constexpr,  # elements; regions start on multiples of it
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two >= G * D
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(kv_slot_ptr + token, mask=token < num_tokens, other=-1)
    size = kv_heads * D
    element = tl.arange(0, WIDTH)[None, :]
    live = (slot >= 0)[:, None] & (element < size)
    page = (slot // kv_block).to(tl.int64)
    place = slot % kv_block
    region = page * page_stride + tl.multiple_of(tl.load(offset_ptr), ALIGN)
    target = arena_ptr + region[:, None] + place[:, None] * size + element
    source = token.to(tl.int64)[:, None]
    head = (element // D).to(tl.int64)  # a view of heads first has a head stride of tokens * D
    lane = element % D
    key = tl.load(
        key_ptr + source * key_token_stride + head * key_head_stride + lane, mask=live, other=0.0
    )
    value = tl.load(
        value_ptr + source * value_token_stride + head * value_head_stride + lane,
        mask=live,
        other=0.0,
    )
    tl.store(target, key.to(arena_ptr.dtype.element_ty), mask=live)
    tl.store(target + kv_block * size, value.to(arena_ptr.dtype.element_ty), mask=live)


def _launch(
    arena: Tensor, key: Tensor, value: Tensor, offset: Tensor, kv_slot: Tensor, kv_block: int
) -> None:
    check_kv_pages("kv_write", arena)
    check_contiguous_heads("kv_write", key=key, value=value)
    tokens, kv_heads, width = key.shape
    if kv_slot.shape[0] < tokens:
        raise ContractError(
            f"kv_write: {kv_slot.shape[0]} entries of kv_slot for {tokens} tokens, expected at "
            "least one per token; pad kv_slot with -1"
        )
    if tokens == 0:
        return
    padded = triton.next_power_of_2(kv_heads * width)
    per_program = max(1, _TILE // padded) if tokens > 256 else 1
    _kv_write_kernel[(triton.cdiv(tokens, per_program),)](
        arena, key, value, offset, kv_slot,
        page_stride=arena.stride(0),
        key_token_stride=key.stride(0), key_head_stride=key.stride(1),
        value_token_stride=value.stride(0), value_head_stride=value.stride(1),
        num_tokens=tokens, kv_block=kv_block, kv_heads=kv_heads,
        D=width, ALIGN=LAUNCH_ALIGN // arena.element_size(), TOKENS=per_program, WIDTH=padded,
        num_warps=min(8, max(1, per_program * padded // 256)),
    )  # fmt: skip


def _case(
    tokens: int = 5,
    kv_heads: int = 2,
    width: int = 16,
    kv_block: int = 4,
    padding: int = 2,
    pitch: int = 0,
) -> OpCase:
    """`pitch` extra elements between tokens: keys and values are slices of a wider projection."""

    def build(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Args:
        size = kv_heads * width
        wide = torch.randn(tokens, 2 * size + pitch, generator=generator).to(dtype)
        num_pages = -(-tokens // kv_block) + 2
        align = LAUNCH_ALIGN // dtype.itemsize
        page_size = align + -(-2 * kv_block * size // align) * align + align
        places = torch.randperm((num_pages - 1) * kv_block, generator=generator) + kv_block
        kv_slot = places[: tokens + 1].int()
        kv_slot[tokens - padding :] = PADDING
        return {
            "arena": torch.full((num_pages, page_size), torch.nan, dtype=dtype, device=device),
            "key": wide[:, :size].unflatten(1, (kv_heads, width)).to(device),
            "value": wide[:, size : 2 * size].unflatten(1, (kv_heads, width)).to(device),
            "offset": torch.tensor([align], device=device),
            "kv_slot": kv_slot.to(device),
            "kv_block": kv_block,
        }

    extra = f"-pitch{pitch}" if pitch else ""
    return OpCase(f"T{tokens}-G{kv_heads}-D{width}-block{kv_block}-pad{padding}{extra}", build)


def _traffic(args: Args) -> tuple[int, int]:
    return 4 * args["key"].numel() * args["key"].element_size(), 0


kv_write = define_op(
    "kv_write(Tensor(a!) arena, Tensor key, Tensor value, Tensor offset, Tensor kv_slot, "
    "SymInt kv_block) -> ()",
    cuda=_launch,
    cpu=kv_write_ref,
    cases=(
        _case(),
        _case(tokens=1, padding=0),
        _case(padding=5),  # nothing to write
        _case(tokens=0, padding=0),
        _case(kv_heads=1),
        _case(kv_heads=3, width=24),  # 72 elements: not a power of two
        _case(width=64, kv_block=16),
        _case(width=128, kv_block=8),
        _case(pitch=7),  # token rows do not start on 16 bytes
        _case(tokens=300, padding=9),  # several tokens per program, the last program partial
    ),
    tolerance=EXACT,
    traffic=_traffic,
)
