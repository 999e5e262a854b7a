"""
Run lightning attention over chunks of tokens, saving the state at the end of any chunk.

The rule is that of `lightning_step`, token after token.  A row starts from its read page (0: no history)
and runs through its chunks; a chunk with a page saves the state after its last token there and goes on
from what it saved, so a run that resumes from that page equals the run that made it.  The page of a
row's chunk may be the page that the row reads.  Tokens of no chunk keep their `out`.

Within a chunk of n tokens, with the state S before it and i, j counted from 1,
    out_i = exp(i g) S^T q_i + sum_{j<=i} exp((i - j) g) (q_i . k_j) v_j
    S    <- exp(n g) S + sum_j k_j (outer) exp((n - j) g) v_j.
One program carries a tile of S through all chunks of its row.  fp32 activations and very wide keys go
token by token instead: exact fp32 products cannot use tensor cores, and a chunk's do not fit into registers.

Letters: R rows, T tokens, Q chunks, N pages, E elements of a page, H value heads, G key heads,
K key width, V value width.  A chunk has at most CHUNK tokens.
Traffic: q, k, v and out of every token, the state read once a row and written once a page.
Source: Qin et al., "Lightning Attention-2", arXiv:2401.04658, section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.ops.chunk_table import CHUNK
from midstream.ops.lightning_step import check_lightning, lightning_rule
from midstream.ops.linear_heads import LinearShape, chunk_args, chunk_traffic, draw_log_decays
from midstream.ops.linear_step import values_of_warp
from midstream.ops.paged_state import aligned_elements, linear_states
from midstream.ops.registry import NULL_PAGE, PADDING, Args, OpCase, Tolerance, define_op

_TILE_V = 32  # values that one program carries: 128 programs for one row of H=32, V=128
_MAX_TILE_K = 128  # key width up to which the tiles of a chunk fit into registers
# exp of it is 0 in fp32; stronger decay changes nothing, and -inf would give NaN
_LOG_ZERO = -110.0


def lightning_chunk_ref(
    arena: Tensor,  # f32, bf16 or f16 [N, E]  written: the region [H, V, K] of every chunk's page
    out: Tensor,  # [T, H, V]  written
    q: Tensor,  # [T, G, K]
    k: Tensor,  # [T, G, K]
    v: Tensor,  # [T, H, V]
    g: Tensor,  # f32[H]      log of the decay
    offset: Tensor,  # i64[1]      element of a page where the region starts
    read_page: Tensor,  # i32[>= R]   0 = no history
    chunk_start: Tensor,  # i32[Q + 1]  first token of each chunk
    chunk_row: Tensor,  # i32[Q]      -1 in padding
    chunk_page: Tensor,  # i32[Q]      receives the state after the chunk; 0 = none
    row_chunk: Tensor,  # i32[R + 1]  first chunk of each row
) -> None:
    """Say what the kernels mean, one token at a time."""
    states = linear_states(arena, offset, v.shape[1], k.shape[2], v.shape[2])
    start = chunk_start.long()
    real = chunk_row != PADDING
    page_after = torch.zeros(v.shape[0], dtype=torch.long)
    page_after[start[1:][real] - 1] = chunk_page[real].long()
    first, behind = start[row_chunk[:-1]], start[row_chunk[1:]]
    source = read_page[: first.numel()].long()
    state = states[source].to(torch.promote_types(arena.dtype, torch.float32))
    state[source == NULL_PAGE] = 0.0
    for turn in range(max((behind - first).tolist(), default=0)):
        row = (first + turn < behind).nonzero()[:, 0]
        token = first[row] + turn
        state[row], result = lightning_rule(state[row], q[token], k[token], v[token], g)
        out[token] = result.to(out.dtype)
        saves = page_after[token] != NULL_PAGE
        saved = state[row[saves]].to(arena.dtype)
        states[page_after[token[saves]]] = saved
        state[row[saves]] = saved.to(state.dtype)


@triton.jit
def _token(state, q, k, v, decay):
    """One token of one head: a [K, V] tile of the state after it, and its output; all in fp32."""
    result = decay * tl.sum(state * q[:, None], 0) + tl.sum(q * k, 0) * v
    return decay * state + k[:, None] * v[None, :], result


@triton.jit
def _chunk_kernel(
    arena_ptr,  # [N, page_stride]
    out_ptr,  # [T, H, V]
    q_ptr,  # [T, G, K]
    k_ptr,  # [T, G, K]
    v_ptr,  # [T, H, V]
    g_ptr,  # f32[H]
    offset_ptr,  # i64[1]
    read_page_ptr,  # i32[R]
    chunk_start_ptr,  # i32[Q + 1]
    chunk_page_ptr,  # i32[Q]
    row_chunk_ptr,  # i32[R + 1]
    page_stride,  # strides in elements
    out_token,
    out_head,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    TOKEN_WISE: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    LOG_ZERO: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per row, head and tile of values."""
    head = tl.program_id(1)
    row = tl.program_id(2)
    first = tl.load(row_chunk_ptr + row)
    behind = tl.load(row_chunk_ptr + row + 1)
    if first == behind:
        return
    key = tl.arange(0, BLOCK_K)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    state_place = head * (V * K) + value[None, :] * K + key[:, None]
    state_inside = (key[:, None] < K) & (value[None, :] < V)
    offset = tl.load(offset_ptr)
    source = tl.load(read_page_ptr + row)
    # pages and regions start on 128 bytes; without the hint every access would be a scalar one
    read_at = tl.multiple_of(source.to(tl.int64) * page_stride + offset, ALIGN)
    state_mask = state_inside & (source > 0)
    state = tl.load(arena_ptr + read_at + state_place, mask=state_mask, other=0.0).to(tl.float32)
    tl.debug_barrier()  # in place: a small tile is loaded by every warp and stored by one

    g = tl.maximum(tl.load(g_ptr + head).to(tl.float32), LOG_ZERO)
    q_ptr += (head // HEADS_PER_KEY) * q_head
    k_ptr += (head // HEADS_PER_KEY) * k_head
    v_ptr += head * v_head
    out_ptr += head * out_head
    for chunk in tl.range(first, behind):
        start = tl.load(chunk_start_ptr + chunk)
        end = tl.load(chunk_start_ptr + chunk + 1)
        if TOKEN_WISE:
            for step in range(start, end):
                token = tl.zeros([], tl.int64) + step
                q = tl.load(q_ptr + token * q_token + key, mask=key < K, other=0.0).to(tl.float32)
                k = tl.load(k_ptr + token * k_token + key, mask=key < K, other=0.0).to(tl.float32)
                v_at = v_ptr + token * v_token + value
                v = tl.load(v_at, mask=value < V, other=0.0).to(tl.float32)
                state, result = _token(state, q, k, v, tl.exp(g))
                out_at = out_ptr + token * out_token + value
                tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=value < V)
        else:
            place = tl.arange(0, CHUNK)
            count = end - start
            alive = place < count
            token = (start + place).to(tl.int64)
            inside = alive[:, None] & (key[None, :] < K)
            v_inside = alive[:, None] & (value[None, :] < V)
            # dead places hold zeros: they add nothing
            q = tl.load(q_ptr + token[:, None] * q_token + key[None, :], mask=inside, other=0.0)
            k = tl.load(k_ptr + token[:, None] * k_token + key[None, :], mask=inside, other=0.0)
            v = tl.load(v_ptr + token[:, None] * v_token + value[None, :], mask=v_inside, other=0.0)

            apart = place[:, None] - place[None, :]
            decay = tl.where(apart >= 0, tl.exp(g * tl.maximum(apart, 0)), 0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay
            result = tl.dot(q, state.to(q.dtype), input_precision=PRECISION)
            result *= tl.exp(g * (place + 1))[:, None]
            result = tl.dot(scores.to(v.dtype), v, result, input_precision=PRECISION)
            rest = tl.exp(g * tl.maximum(count - 1 - place, 0))
            kept = (v.to(tl.float32) * rest[:, None]).to(v.dtype)
            state *= tl.exp(g * count)
            state = tl.dot(tl.trans(k), kept, state, input_precision=PRECISION)
            out_at = out_ptr + token[:, None] * out_token + value[None, :]
            tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=v_inside)
        page = tl.load(chunk_page_ptr + chunk)
        write_at = tl.multiple_of(page.to(tl.int64) * page_stride + offset, ALIGN)
        saved = state.to(arena_ptr.dtype.element_ty)
        tl.store(arena_ptr + write_at + state_place, saved, mask=state_inside & (page > 0))
        state = tl.where(page > 0, saved.to(tl.float32), state)


def _launch(
    arena: Tensor,
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    offset: Tensor,
    read_page: Tensor,
    chunk_start: Tensor,
    chunk_row: Tensor,
    chunk_page: Tensor,
    row_chunk: Tensor,
    token_wise: bool | None = None,  # None: where tensor cores do not serve
) -> None:
    check_lightning("lightning_chunk", arena, out, q, k, v, g)
    rows = row_chunk.shape[0] - 1
    _, heads, width = v.shape
    if rows == 0 or chunk_row.shape[0] == 0:
        return
    exact = q.dtype == torch.float32
    if token_wise is None:
        token_wise = exact or k.shape[2] > _MAX_TILE_K
    least, warps = (1, 1) if token_wise else (16, 4)  # the sums of a token need no other warp
    block_k = max(least, triton.next_power_of_2(k.shape[2]))
    tile = min(_TILE_V, max(least, triton.next_power_of_2(width)))
    tile = values_of_warp(block_k, width, torch.float32.itemsize) if token_wise else tile
    _chunk_kernel[(triton.cdiv(width, tile), heads, rows)](
        arena, out, q, k, v, g, offset, read_page, chunk_start, chunk_page, row_chunk,
        arena.stride(0), out.stride(0), out.stride(1), q.stride(0), q.stride(1),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), TOKEN_WISE=token_wise,
        HEADS_PER_KEY=heads // k.shape[1], K=k.shape[2], V=width, CHUNK=CHUNK,
        LOG_ZERO=_LOG_ZERO, ALIGN=aligned_elements(arena),
        BLOCK_K=block_k, BLOCK_V=tile, PRECISION="ieee" if exact else None, num_warps=warps,
    )  # fmt: skip


launch_chunks = partial(_launch, token_wise=False)  # also for fp32, to check the products exactly


def _build(
    rng: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
    lengths: Sequence[int],
    exports: Sequence[Sequence[int]],
    decay: float | None,
    shape: LinearShape,
) -> Args:
    args = chunk_args(rng, dtype, lengths, exports, shape)
    args["g"] = draw_log_decays(rng, shape.heads)
    if decay is not None:
        args["g"] = torch.full_like(args["g"], decay).log()
    return {name: value.to(device) for name, value in args.items()}


def lightning_chunk_case(
    lengths: Sequence[int] = (3, 66, 5),
    exports: Sequence[Sequence[int]] = (),  # per row: tokens after which its state is saved
    decay: float | None = None,  # of every head; None: random
    heads: int = 2,
    key_heads: int = 1,
    **changes: Any,
) -> OpCase:
    """One input, named after what it changes."""
    shape = LinearShape(heads=heads, key_heads=key_heads, **changes)
    why = f"-exports{sum(map(len, exports))}" if exports else ""
    why += f"-decay{decay}" if decay is not None else ""
    build = partial(_build, lengths=lengths, exports=exports, decay=decay, shape=shape)
    return OpCase(f"T{'+'.join(map(str, lengths)) or 0}-{shape}{why}", build)


_case = lightning_chunk_case
CASES = (
    _case(),
    _case((1, 3, 64, 65, 7), heads=1),  # one token, whole chunks, one token behind a whole chunk
    _case((129, 1, 2, 9), ((5, 64, 127), (), (1,), (1, 2, 6)), heads=1),  # several pages of a row
    _case(()),
    _case((20,), heads=1, value_width=24),  # a width that is no power of two
    _case((7, 3), key_width=5, value_width=3, gap=3),  # nothing is aligned
    _case((5,), heads=3, key_heads=3, gap=64),
    _case((20,), heads=1, decay=1e-12),
    _case((20,), heads=1, decay=0.0),
    _case((70,), heads=1, decay=1.0),
    _case((20, 20), ((), (9,)), heads=1, state_dtype=None),  # pages of the activations' dtype
    _case((70,), heads=1, key_width=128, value_width=128),  # widths of MiniMax-01
)

lightning_chunk = define_op(
    "lightning_chunk(Tensor(a!) arena, Tensor(b!) out, Tensor q, Tensor k, Tensor v, Tensor g, "
    "Tensor offset, Tensor read_page, Tensor chunk_start, Tensor chunk_row, Tensor chunk_page, "
    "Tensor row_chunk) -> ()",
    cuda=_launch,
    cpu=lightning_chunk_ref,
    cases=CASES,
    tolerance=Tolerance(
        {torch.float32: 8e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3},
        "fp32: the rounding of the decay compounds over its memory, up to 130 tokens here; bf16: the "
        "state, decayed values and scores enter the products rounded to 2**-9 (interpreter: 2**-8), "
        "fp16 to 2**-11",
    ),
    traffic=partial(chunk_traffic, chunk=CHUNK),
    export_alignment=1,
)
