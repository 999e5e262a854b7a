"""
Run the gated delta rule over chunks of tokens, saving the state at the end of any chunk.

The rule is that of `gated_delta_step`, token after token.  A row starts from its read page (0: no
history) and runs through its chunks; a chunk with a page saves the state after its last token there
and goes on from what it saved, so a run that resumes from that page equals the run that made it.
The page of a row's chunk may be the page that the row reads.  Tokens of no chunk keep their `out`.

Within a chunk the rule is linear.  With the unit keys k_i, the state S before the chunk and the
decay D_ij from token j to token i, the corrections e_i that the tokens add to the state solve
    e_i + beta_i sum_{j<i} D_ij (k_i . k_j) e_j = beta_i (v_i - D_i S^T k_i).
`_solve_kernel` inverts this triangular system for all chunks at once; `_walk_kernel` carries S from
chunk to chunk.  All decays are ratios of at most 1, so that strong decay cannot overflow.
fp32 activations and very wide keys go token by token instead (`gated_delta_tokens`).

Letters: R rows, T tokens, Q chunks, N pages, E elements of a page, H value heads, G key heads,
K key width, V value width.  A chunk has at most CHUNK tokens.
Traffic: q, k, v and out of every token, the state read once a row and written once a page, and in
between two CHUNK x CHUNK matrices per chunk and head.
Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv:2412.06464, section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.ops.case_data import draw_pitched, element_offset, index, poisoned_arena
from midstream.ops.chunk_table import CHUNK, cut_chunks
from midstream.ops.device_limits import shared_limit
from midstream.ops.gated_delta_step import delta_rule
from midstream.ops.gated_delta_tokens import launch_tokens
from midstream.ops.linear_heads import LinearShape, check_heads, draw_gates
from midstream.ops.linear_step import NORM_EPS
from midstream.ops.paged_state import aligned_elements, linear_states
from midstream.ops.registry import NULL_PAGE, PADDING, Args, OpCase, Tolerance, define_op
from midstream.ops.unit_lower_inverse import unit_lower_inverse

_START = 192  # element at which the region of a case starts
_SUB = 16  # side of the diagonal blocks that are inverted row by row
_TILE_V = 32  # values that one program of the walk carries: 128 programs for one row of H=32, V=128
_AHEAD_BYTES = 176 * 1024  # of shared memory that a walk with five stages takes, at most
_MAX_TILE_K = 128  # key width up to which the tiles of a chunk fit into registers
_LOG_ZERO = (
    -110.0
)  # exp of it is 0 in fp32; stronger decay changes nothing, and -inf would give NaN


def gated_delta_chunk_ref(
    arena: Tensor,  # f32 or bf16 [N, E]  written: the region [H, V, K] of every chunk's page
    out: Tensor,  # [T, H, V]  written
    q: Tensor,  # [T, G, K]  before normalisation
    k: Tensor,  # [T, G, K]  before normalisation
    v: Tensor,  # [T, H, V]
    g: Tensor,  # f32[T, H]    log of the decay
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
def _solve_kernel(
    solve_ptr,  # [Q, H, CHUNK, CHUNK]  inverse system, times beta_j
    attend_ptr,  # [Q, H, CHUNK, CHUNK]  D_ij (query_i . key_j) for j <= i
    scale_ptr,  # f32[Q, H, 4, CHUNK]  factors of k and q against S, of k into S, of S
    q_ptr,  # [T, G, K]
    k_ptr,  # [T, G, K]
    g_ptr,  # f32[T, H]
    beta_ptr,  # [T, H]
    chunk_start_ptr,  # i32[Q + 1]
    q_token,  # strides in elements
    q_head,
    k_token,
    k_head,
    g_token,
    beta_token,
    HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    K: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    LOG_ZERO: tl.constexpr,
    CHUNK: tl.constexpr,
    SUB: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE_PRECISION: tl.constexpr,
):
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    start = tl.load(chunk_start_ptr + chunk)
    count = tl.load(chunk_start_ptr + chunk + 1) - start
    if count <= 0:
        return
    place = tl.arange(0, CHUNK)
    alive = place < count
    token = (start + place).to(tl.int64)
    key = tl.arange(0, BLOCK_K)
    inside = alive[:, None] & (key[None, :] < K)
    key_head = head // HEADS_PER_KEY
    k_at = k_ptr + token[:, None] * k_token + key_head * k_head + key[None, :]
    q_at = q_ptr + token[:, None] * q_token + key_head * q_head + key[None, :]
    # dead places hold zeros: they add nothing, and the decay stands still there
    k = tl.load(k_at, mask=inside, other=0.0)
    q = tl.load(q_at, mask=inside, other=0.0)
    g = tl.load(g_ptr + token * g_token + head, mask=alive, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + token * beta_token + head, mask=alive, other=0.0).to(tl.float32)

    g = tl.maximum(g, LOG_ZERO)
    sum_g = tl.cumsum(g, 0)
    last_g = tl.sum(tl.where(place == CHUNK - 1, sum_g, 0.0), 0)  # the same bits as in sum_g
    # lengths enter as factors, so that the products see k and q as they were given, unrounded
    k_scale = tl.rsqrt(tl.sum(k.to(tl.float32) * k.to(tl.float32), 1) + EPS)
    q_scale = tl.rsqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1) + EPS) * SCALE
    not_later = place[:, None] >= place[None, :]
    decay = tl.exp(tl.where(not_later, sum_g[:, None] - sum_g[None, :], LOG_ZERO))
    decay *= k_scale[None, :]

    item = chunk.to(tl.int64) * HEADS + head
    square = item * CHUNK * CHUNK + place[:, None] * CHUNK + place[None, :]
    attend = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay * q_scale[:, None]
    attend = tl.where(not_later, attend, 0.0)
    tl.store(attend_ptr + square, attend.to(attend_ptr.dtype.element_ty))
    alike = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    lower = (beta * k_scale)[:, None] * decay * alike
    lower = tl.where(place[:, None] > place[None, :], lower, 0.0)
    solve = unit_lower_inverse(lower, CHUNK, SUB, INVERSE_PRECISION) * beta[None, :]
    tl.store(solve_ptr + square, solve.to(solve_ptr.dtype.element_ty))

    scale_at = scale_ptr + item * 4 * CHUNK + place
    tl.store(scale_at, k_scale * tl.exp(sum_g))
    tl.store(scale_at + CHUNK, q_scale * tl.exp(sum_g))
    tl.store(scale_at + 2 * CHUNK, k_scale * tl.exp(last_g - sum_g))
    tl.store(scale_at + 3 * CHUNK, tl.exp(last_g + tl.zeros_like(sum_g)))


@triton.jit
def _walk_kernel(
    arena_ptr,  # [N, page_stride]
    out_ptr,  # [T, H, V]
    solve_ptr,  # [Q, H, CHUNK, CHUNK]
    attend_ptr,  # [Q, H, CHUNK, CHUNK]
    scale_ptr,  # f32[Q, H, 4, CHUNK]
    q_ptr,  # [T, G, K]
    k_ptr,  # [T, G, K]
    v_ptr,  # [T, H, V]
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
    HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    LATE: tl.constexpr,  # loads what `out` needs when it is needed
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
    key_head = head // HEADS_PER_KEY
    square = place[:, None] * CHUNK + place[None, :]
    state_place = head * (V * K) + value[None, :] * K + key[:, None]
    state_inside = (key[:, None] < K) & (value[None, :] < V)
    offset = tl.load(offset_ptr)
    source = tl.load(read_page_ptr + row)
    # pages and regions start on 128 bytes; without the hint every access would be a scalar one
    read_at = tl.multiple_of(source.to(tl.int64) * page_stride + offset, ALIGN)
    state_mask = state_inside & (source > 0)
    state = tl.load(arena_ptr + read_at + state_place, mask=state_mask, other=0.0).to(tl.float32)

    for chunk in tl.range(first, behind, num_stages=STAGES):  # with stages all loads run ahead
        start = tl.load(chunk_start_ptr + chunk)
        alive = place < tl.load(chunk_start_ptr + chunk + 1) - start
        token = (start + place).to(tl.int64)
        inside = alive[:, None] & (key[None, :] < K)
        k_at = k_ptr + token[:, None] * k_token + key_head * k_head + key[None, :]
        q_at = q_ptr + token[:, None] * q_token + key_head * q_head + key[None, :]
        v_at = v_ptr + token[:, None] * v_token + head * v_head + value[None, :]
        v_inside = alive[:, None] & (value[None, :] < V)
        k = tl.load(k_at, mask=inside, other=0.0)
        v = tl.load(v_at, mask=v_inside, other=0.0)
        item = head.to(tl.int64) + chunk * HEADS
        solve = tl.load(solve_ptr + item * CHUNK * CHUNK + square)
        attend_at = attend_ptr + item * CHUNK * CHUNK + square
        q = tl.zeros([CHUNK, BLOCK_K], q_ptr.dtype.element_ty)
        attend = tl.zeros([CHUNK, CHUNK], attend_ptr.dtype.element_ty)
        if not LATE:
            q = tl.load(q_at, mask=inside, other=0.0)
            attend = tl.load(attend_at)
        scale_at = scale_ptr + item * 4 * CHUNK + place
        k_scale = tl.load(scale_at)
        q_scale = tl.load(scale_at + CHUNK)
        keep_scale = tl.load(scale_at + 2 * CHUNK)
        decay = tl.load(scale_ptr + item * 4 * CHUNK + 3 * CHUNK)

        before = state.to(k.dtype)
        missing = v - k_scale[:, None] * tl.dot(k, before, input_precision=PRECISION)
        added = tl.dot(solve, missing.to(k.dtype), input_precision=PRECISION)
        if LATE:  # noqa: SIM102 (decided when compiled)
            if start >= 0:  # always; but what a branch loads takes no buffer for each stage
                q = tl.load(q_at, mask=inside, other=0.0)
                attend = tl.load(attend_at)
        result = q_scale[:, None] * tl.dot(q, before, input_precision=PRECISION)
        result = tl.dot(attend, added.to(k.dtype), result, input_precision=PRECISION)
        keep = (keep_scale[:, None] * added).to(k.dtype)
        state = tl.dot(tl.trans(k), keep, state * decay, input_precision=PRECISION)

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
    check_heads("gated_delta_chunk", q, k, v)
    rows, chunks = row_chunk.shape[0] - 1, chunk_row.shape[0]
    _, heads, width = v.shape
    if rows == 0 or chunks == 0:
        return
    exact = q.dtype == torch.float32
    shared = {
        "HEADS": heads,
        "HEADS_PER_KEY": heads // k.shape[1],
        "K": k.shape[2],
        "CHUNK": CHUNK,
        "BLOCK_K": max(16, triton.next_power_of_2(k.shape[2])),
        "PRECISION": "ieee" if exact else None,
    }
    solve = torch.empty((2, chunks, heads, CHUNK, CHUNK), dtype=q.dtype, device=q.device)
    scale = torch.empty((chunks, heads, 4, CHUNK), dtype=torch.float32, device=q.device)
    _solve_kernel[(heads, chunks)](
        solve[0], solve[1], scale, q, k, g, beta, chunk_start,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), g.stride(0), beta.stride(0),
        SCALE=k.shape[2] ** -0.5, EPS=NORM_EPS, LOG_ZERO=_LOG_ZERO, SUB=_SUB,
        INVERSE_PRECISION="ieee" if exact else "tf32x3", num_warps=4, **shared,
    )  # fmt: skip
    tile = min(_TILE_V, max(16, triton.next_power_of_2(width)))
    # loads run ahead where rows have several chunks; that takes the shared memory of a whole SM.
    # Never 1: triton 3.6 then addresses the operands of the dots outside of the shared memory.
    late = shared_limit(q.device) < _AHEAD_BYTES
    stages = 5 if chunks > 2 * rows and not late else 2
    _walk_kernel[(triton.cdiv(width, tile), heads, rows)](
        arena, out, solve[0], solve[1], scale, q, k, v, offset,
        read_page, chunk_start, chunk_page, row_chunk,
        arena.stride(0), out.stride(0), out.stride(1), q.stride(0), q.stride(1),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        V=width, ALIGN=aligned_elements(arena), BLOCK_V=tile,
        STAGES=stages, LATE=late, num_warps=4, **shared,
    )  # fmt: skip


def _launch(arena: Tensor, out: Tensor, q: Tensor, *args: Tensor, **named: Tensor) -> None:
    token_wise = q.dtype == torch.float32 or q.shape[2] > _MAX_TILE_K
    launch = launch_tokens if token_wise else launch_chunks
    launch(arena, out, q, *args, **named)


@dataclass(frozen=True, slots=True)
class _Case:
    """One input.  Row 0 is in place, row 1 has no history; a padded row, chunk and token follow."""

    lengths: tuple[int, ...] = (3, 70, 17)
    exports: tuple[tuple[int, int], ...] = ()  # (row, tokens after which its state is saved)
    heads: int = 2
    key_heads: int = 1
    key_width: int = 16
    value_width: int = 32
    state_dtype: torch.dtype | None = torch.float32  # None: as the activations
    gap: int = 0  # elements between the tokens of q, k and v
    decay: float | None = None  # of every token; None: random
    alike: bool = False  # all keys are the same one

    def id(self) -> str:
        parts = ["T" + ("+".join(map(str, self.lengths)) or "0")]
        parts += [f"H{self.heads}-G{self.key_heads}-K{self.key_width}-V{self.value_width}"]
        parts += [f"exports{len(self.exports)}"] if self.exports else []
        parts += [f"gap{self.gap}"] if self.gap else []
        parts += [f"decay{self.decay:g}"] if self.decay is not None else []
        parts += ["alike"] if self.alike else []
        return "-".join(parts + ([] if self.state_dtype else ["own"]))


def _build(case: _Case, rng: torch.Generator, dtype: torch.dtype, device: torch.device) -> Args:
    rows, tokens = len(case.lengths), sum(case.lengths) + 1
    write = [1 + row for row in range(rows)]
    read = [1 + rows + row for row in range(rows)]
    read[:2] = [*write[:1], NULL_PAGE][: len(read)]
    exports = {at: 1 + 2 * rows + i for i, at in enumerate(case.exports)}
    table = cut_chunks((*case.lengths, 0), (*write, NULL_PAGE), exports, padding_chunks=1)
    pages = 2 + 2 * rows + len(exports)
    size = case.heads * case.key_width * case.value_width
    keys = (tokens, case.key_heads, case.key_width)
    gates = draw_gates(rng, tokens, dtype, LinearShape(case.heads))
    if case.decay is not None:
        gates["g"] = torch.full_like(gates["g"], case.decay).log()
    k = draw_pitched(rng, *keys, dtype=dtype, gap=case.gap)
    args = {
        "arena": poisoned_arena(rng, pages, _START, size, read, case.state_dtype or dtype),
        "out": torch.full((tokens, case.heads, case.value_width), float("nan"), dtype=dtype),
        "q": draw_pitched(rng, *keys, dtype=dtype, gap=case.gap),
        "k": k[:1].expand_as(k).contiguous() if case.alike else k,
        "v": draw_pitched(rng, tokens, case.heads, case.value_width, dtype=dtype, gap=case.gap),
        **gates,
        "offset": element_offset(_START),
        "read_page": index(*read, NULL_PAGE, NULL_PAGE),  # longer than R
        "chunk_start": table.chunk_start,
        "chunk_row": table.chunk_row,
        "chunk_page": table.chunk_page,
        "row_chunk": table.row_chunk,
    }
    return {name: value.to(device) for name, value in args.items()}


def _traffic(args: Args) -> tuple[int, int]:
    arena, k, v = args["arena"], args["k"], args["v"]
    tokens, state = int(args["chunk_start"][-1]), v.shape[1] * k.shape[2] * v.shape[2]
    rows, pages = args["row_chunk"].diff().count_nonzero(), args["chunk_page"].count_nonzero()
    per_token = sum(
        args[name][0].numel() * args[name].element_size() for name in ("out", "q", "k", "v")
    )
    moved = int(rows + pages) * state * arena.element_size() + tokens * per_token
    within = CHUNK * v.shape[1] * (2 * k.shape[2] + 2 * v.shape[2] + CHUNK)
    return moved, tokens * (6 * state + 2 * within)


_CASES = (
    _Case(),
    _Case(lengths=(1, 3, 64, 65, 7)),  # one token, whole chunks, one token behind a whole chunk
    _Case(lengths=(129,), exports=((0, 5), (0, 64), (0, 127))),  # several pages of one row
    _Case(lengths=()),
    _Case(key_width=16, value_width=24),  # a width that is no power of two
    _Case(key_width=5, value_width=3, gap=3),  # nothing is aligned
    _Case(heads=3, key_heads=3, gap=64),
    _Case(decay=1e-12),
    _Case(decay=0.0),
    _Case(alike=True, decay=1.0),  # powers of the triangular matrix would overflow fp32
    _Case(state_dtype=None, exports=((1, 9),)),  # bf16 pages with bf16 activations
    _Case(lengths=(70,), key_width=128, value_width=128),  # widths of qwen3_next
    _Case(lengths=(200,), key_width=128, value_width=128),  # the same, with loads that run ahead
)

gated_delta_chunk = define_op(
    "gated_delta_chunk(Tensor(a!) arena, Tensor(b!) out, Tensor q, Tensor k, Tensor v, Tensor g, "
    "Tensor beta, Tensor offset, Tensor read_page, Tensor chunk_start, Tensor chunk_row, "
    "Tensor chunk_page, Tensor row_chunk) -> ()",
    cuda=_launch,
    cpu=gated_delta_chunk_ref,
    cases=tuple(OpCase(case.id(), partial(_build, case)) for case in _CASES),
    tolerance=Tolerance(
        {torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3},
        "fp32: sums over K and CHUNK of decaying terms, a few eps; bf16: the state, the "
        "corrections and both matrices enter the products rounded to 2**-9 (interpreter: 2**-8), "
        "fp16: to 2**-12",
    ),
    traffic=_traffic,
    export_alignment=1,
)
