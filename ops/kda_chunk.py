"""
Run Kimi delta attention over chunks of tokens, saving the state at the end of any chunk.

The rule is that of `kda_step`, token after token.  A row starts from its read page (0: no history) and
runs through its chunks; a chunk with a page saves the state after its last token there and goes on from
what it saved, so a run that resumes from that page equals the run that made it.  The page of a row's
chunk may be the page that the row reads.  Tokens of no chunk keep their `out`.

Within a chunk the rule is linear.  With the unit keys k_i, the state S before the chunk and the decays
D_ij[c] of channel c from token j to token i, the corrections e_i that the tokens add to the state solve
    e_i + beta_i sum_{j<i} (sum_c D_ij[c] k_i[c] k_j[c]) e_j = beta_i (v_i - S^T (D_i * k_i)).
`kda_prepare` inverts this triangular system for all chunks at once; `_walk_kernel` carries S from chunk
to chunk.  All decays are ratios of at most 1, so that strong decay cannot overflow.
fp32 activations, and keys too wide for the device, go token by token instead (`gated_delta_tokens`).

Letters: R rows, T tokens, Q chunks, N pages, E elements of a page, H value heads, G key heads,
K key width, V value width.  A chunk has at most CHUNK tokens.
Traffic: q, k, g, v and out of every token, the state read once a row and written once a page; in
between three vectors of K per token and head, and two CHUNK x CHUNK matrices per chunk and head.
Source: Kimi Team, "Kimi Linear", arXiv:2510.26692, section 3.
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
from midstream.ops.device_limits import shared_limit
from midstream.ops.gated_delta_step import delta_rule
from midstream.ops.gated_delta_tokens import launch_tokens
from midstream.ops.kda_prepare import prepare_chunks
from midstream.ops.kda_step import check_kda, draw_kda_gates
from midstream.ops.linear_heads import LinearShape, chunk_args, chunk_traffic
from midstream.ops.paged_state import aligned_elements, linear_states
from midstream.ops.registry import NULL_PAGE, PADDING, Args, OpCase, Tolerance, define_op

_TILE_V = 32  # values that one program of the walk carries: 128 programs for one row of H=32, V=128
_MAX_TILE_K = 128  # key width up to which the tiles of a chunk fit into registers


def kda_chunk_ref(
    arena: Tensor,  # f32, bf16 or f16 [N, E]  written: the region [H, V, K] of every chunk's page
    out: Tensor,  # [T, H, V]  written
    q: Tensor,  # [T, G, K]  before normalisation
    k: Tensor,  # [T, G, K]  before normalisation
    v: Tensor,  # [T, H, V]
    g: Tensor,  # f32[T, H, K]  log of the decay
    beta: Tensor,  # [T, H]      strength of the update
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
        state[row], result = delta_rule(
            state[row], q[token], k[token], v[token], g[token], beta[token]
        )
        out[token] = result.to(out.dtype)
        saves = page_after[token] != NULL_PAGE
        saved = state[row[saves]].to(arena.dtype)
        states[page_after[token[saves]]] = saved
        state[row[saves]] = saved.to(state.dtype)


@triton.jit
def _walk_kernel(
    arena_ptr,  # [N, page_stride]
    out_ptr,  # [T, H, V]
    solve_ptr,  # [Q, H, CHUNK, CHUNK]
    attend_ptr,  # [Q, H, CHUNK, CHUNK]
    key_in_ptr,  # [T, H, K]
    query_in_ptr,  # [T, H, K]
    key_out_ptr,  # [T, H, K]
    decay_ptr,  # f32[Q, H, K]
    v_ptr,  # [T, H, V]
    offset_ptr,  # i64[1]
    read_page_ptr,  # i32[R]
    chunk_start_ptr,  # i32[Q + 1]
    chunk_page_ptr,  # i32[Q]
    row_chunk_ptr,  # i32[R + 1]
    page_stride,  # strides in elements
    out_token,
    out_head,
    v_token,
    v_head,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(1)
    row = tl.program_id(2)
    first = tl.load(row_chunk_ptr + row)
    behind = tl.load(row_chunk_ptr + row + 1)
    if first == behind:
        return
    place = tl.arange(0, CHUNK)
    key = tl.arange(0, BLOCK_K)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    square = place[:, None] * CHUNK + place[None, :]
    state_place = head * (V * K) + value[None, :] * K + key[:, None]
    state_inside = (key[:, None] < K) & (value[None, :] < V)
    offset = tl.load(offset_ptr)
    source = tl.load(read_page_ptr + row)
    # pages and regions start on 128 bytes; without the hint every access would be a scalar one
    read_at = tl.multiple_of(source.to(tl.int64) * page_stride + offset, ALIGN)
    state_mask = state_inside & (source > 0)
    state = tl.load(arena_ptr + read_at + state_place, mask=state_mask, other=0.0).to(tl.float32)
    tl.debug_barrier()  # in place: a small tile is loaded by every warp and stored by one

    for chunk in tl.range(first, behind):
        start = tl.load(chunk_start_ptr + chunk)
        alive = place < tl.load(chunk_start_ptr + chunk + 1) - start
        token = (start + place).to(tl.int64)
        inside = alive[:, None] & (key[None, :] < K)
        place_in = token[:, None] * (HEADS * K) + head * K + key[None, :]
        v_at = v_ptr + token[:, None] * v_token + head * v_head + value[None, :]
        v_inside = alive[:, None] & (value[None, :] < V)
        key_in = tl.load(key_in_ptr + place_in, mask=inside, other=0.0)
        query_in = tl.load(query_in_ptr + place_in, mask=inside, other=0.0)
        key_out = tl.load(key_out_ptr + place_in, mask=inside, other=0.0)
        v = tl.load(v_at, mask=v_inside, other=0.0)
        item = head.to(tl.int64) + chunk * HEADS
        solve = tl.load(solve_ptr + item * CHUNK * CHUNK + square)
        attend = tl.load(attend_ptr + item * CHUNK * CHUNK + square)
        decay = tl.load(decay_ptr + item * K + key, mask=key < K, other=0.0)

        before = state.to(v.dtype)
        missing = v - tl.dot(key_in, before, input_precision=PRECISION)
        added = tl.dot(solve, missing.to(v.dtype), input_precision=PRECISION).to(v.dtype)
        result = tl.dot(query_in, before, input_precision=PRECISION)
        result = tl.dot(attend, added, result, input_precision=PRECISION)
        state *= decay[:, None]
        state = tl.dot(tl.trans(key_out), added, state, input_precision=PRECISION)

        out_at = out_ptr + token[:, None] * out_token + head * out_head + value[None, :]
        tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=v_inside)
        page = tl.load(chunk_page_ptr + chunk)
        write_at = tl.multiple_of(page.to(tl.int64) * page_stride + offset, ALIGN)
        saved = state.to(arena_ptr.dtype.element_ty)
        tl.store(arena_ptr + write_at + state_place, saved, mask=state_inside & (page > 0))
        state = tl.where(page > 0, saved.to(tl.float32), state)


def launch_chunks(
    arena: Tensor,
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    offset: Tensor,
    read_page: Tensor,
    chunk_start: Tensor,
    chunk_row: Tensor,
    chunk_page: Tensor,
    row_chunk: Tensor,
) -> None:
    """Run the chunks with dots of the activations' precision; fp32 dots need too many registers."""
    rows, chunks = row_chunk.shape[0] - 1, chunk_row.shape[0]
    _, heads, width = v.shape
    if rows == 0 or chunks == 0:
        return
    chunk = prepare_chunks(q, k, g, beta, chunk_start)
    block, tile = _walk_tile(k.shape[2], width)
    _walk_kernel[(triton.cdiv(width, tile), heads, rows)](
        arena, out, chunk.solve, chunk.attend, chunk.key_in, chunk.query_in, chunk.key_out,
        chunk.decay, v, offset, read_page, chunk_start, chunk_page, row_chunk,
        arena.stride(0), out.stride(0), out.stride(1), v.stride(0), v.stride(1),
        HEADS=heads, K=k.shape[2], V=width, CHUNK=CHUNK, ALIGN=aligned_elements(arena),
        BLOCK_K=block, BLOCK_V=tile, PRECISION="ieee" if q.dtype == torch.float32 else None,
        num_warps=4,
    )  # fmt: skip


def _walk_tile(key_width: int, value_width: int) -> tuple[int, int]:
    """Keys and values of the state that one program carries; dots take no less than 16."""
    keys, values = (triton.next_power_of_2(x) for x in (key_width, value_width))
    return max(16, keys), min(_TILE_V, max(16, values))


def _walk_bytes(key_width: int, value_width: int, element_bytes: int) -> int:
    """Shared memory of the walk: two chunks of what it loads, and the operands of its dots."""
    keys, values = _walk_tile(key_width, value_width)
    loaded = CHUNK * (3 * keys + values + 2 * CHUNK)
    return (2 * loaded + (keys + CHUNK) * values) * element_bytes + 1024


def _launch(
    arena: Tensor,
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *tables: Tensor,
    **named: Tensor,
) -> None:
    check_kda("kda_chunk", arena, out, q, k, v, g, beta)
    walk_bytes = _walk_bytes(k.shape[2], v.shape[2], q.element_size())
    wide = k.shape[2] > _MAX_TILE_K or walk_bytes > shared_limit(q.device)
    launch = launch_tokens if wide or q.dtype == torch.float32 else launch_chunks
    launch(arena, out, q, k, v, g, beta, *tables, **named)


def _build(
    rng: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
    lengths: Sequence[int],
    exports: Sequence[Sequence[int]],
    decay: float | None,
    strong: bool,
    alike: bool,
    shape: LinearShape,
) -> Args:
    args = chunk_args(rng, dtype, lengths, exports, shape)
    args |= draw_kda_gates(rng, args["q"].shape[0], dtype, shape)
    if decay is not None:
        args["g"] = torch.full_like(args["g"], decay).log()
    if strong:
        args["g"][torch.rand(args["g"].shape, generator=rng) < 1 / 8] = -27.6  # decay 1e-12
    if alike:
        args["k"] = args["k"][:1].expand_as(args["k"]).contiguous()
    for name in ("g", "beta"):
        args[name][sum(lengths) :] = float("nan")
    return {name: value.to(device) for name, value in args.items()}


def kda_chunk_case(
    lengths: Sequence[int] = (3, 66, 5),
    exports: Sequence[Sequence[int]] = (),  # per row: tokens after which its state is saved
    decay: float | None = None,  # of every token and channel; None: random
    strong: bool = False,  # one in eight decays is 1e-12
    alike: bool = False,  # all keys are the same one
    heads: int = 2,
    key_heads: int = 1,
    **changes: Any,
) -> OpCase:
    """One input, named after what it changes."""
    shape = LinearShape(heads=heads, key_heads=key_heads, **changes)
    why = "".join(
        name
        for name, given in (
            (f"-exports{sum(map(len, exports))}", exports),
            (f"-decay{decay}", decay is not None),
            ("-strong", strong),
            ("-alike", alike),
        )
        if given
    )
    build = partial(
        _build,
        lengths=lengths,
        exports=exports,
        decay=decay,
        strong=strong,
        alike=alike,
        shape=shape,
    )
    return OpCase(f"T{'+'.join(map(str, lengths)) or 0}-{shape}{why}", build)


_case = kda_chunk_case
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
    _case((64,), heads=1, strong=True),  # weak and strong decay in the same chunk and channel
    _case((64,), heads=1, alike=True, decay=1.0),  # powers of the triangular matrix would overflow
    _case((20, 20), ((), (9,)), heads=1, state_dtype=None),  # pages of the activations' dtype
    _case((70,), heads=1, key_width=128, value_width=128),  # widths of Kimi Linear
)

kda_chunk = define_op(
    "kda_chunk(Tensor(a!) arena, Tensor(b!) out, Tensor q, Tensor k, Tensor v, Tensor g, "
    "Tensor beta, Tensor offset, Tensor read_page, Tensor chunk_start, Tensor chunk_row, "
    "Tensor chunk_page, Tensor row_chunk) -> ()",
    cuda=_launch,
    cpu=kda_chunk_ref,
    cases=CASES,
    tolerance=Tolerance(
        {torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3},
        "fp32: sums over K and CHUNK of decaying terms, a few eps; bf16: the state, the "
        "corrections, decayed keys and both matrices enter the products rounded to 2**-9 "
        "(interpreter: 2**-8), fp16 to 2**-11",
    ),
    traffic=partial(chunk_traffic, chunk=CHUNK),
    export_alignment=1,
)
