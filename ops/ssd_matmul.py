"""
`ssd_chunk` as matrix products: the same function as its reference, quick enough for a CPU.

Within a chunk, with l the running sum of log decays, position i sees position j <= i through
exp(l_i - l_j) dt_j (C_i . B_j); what came before the chunk decays by exp(l_i).  Dao and Gu, "Transformers
are SSMs" (2024), section 6.
Letters: R rows, T tokens, Q chunks, H heads, G groups, P width of a head, M state size.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from midstream.ops.paged_state import state_region
from midstream.ops.registry import NULL_PAGE


def ssd_chunk_matmul(
    arena: Tensor,
    out: Tensor,
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_min: float,
    dt_max: float,
    offset: Tensor,
    read_page: Tensor,
    chunk_start: Tensor,
    chunk_row: Tensor,
    chunk_page: Tensor,
    row_chunk: Tensor,
) -> None:
    """Arguments as in `ssd_chunk_ref`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    heads, width = x.shape[1:]
    region = state_region(arena, offset, heads, width, B.shape[-1])
    step = F.softplus(dt.to(wide) + dt_bias.to(wide)).clamp(dt_min, dt_max)  # [T, H]
    log_decay = -torch.exp(A_log.to(wide)) * step
    skip = D.to(wide)[:, None] * x.to(wide)
    start, page = chunk_start.tolist(), chunk_page.tolist()
    for row, (first, last) in enumerate(pairwise(row_chunk.tolist())):
        if first == last:
            continue
        source = int(read_page[row])
        state = region[source].to(wide)
        if source == NULL_PAGE:
            state = torch.zeros_like(state)
        for chunk in range(first, last):
            part = slice(start[chunk], start[chunk + 1])
            tokens = (
                x[part].to(wide),
                step[part],
                log_decay[part],
                B[part].to(wide),
                C[part].to(wide),
            )
            seen, state = _scan_chunk(state, *tokens)
            out[part] = (seen + skip[part]).to(out.dtype)
            if page[chunk] != NULL_PAGE:
                region[page[chunk]] = state.to(arena.dtype)


def _scan_chunk(
    state: Tensor,  # [H, P, M]  before the chunk
    x: Tensor,  # [T, H, P]
    step: Tensor,  # [T, H]
    log_decay: Tensor,  # [T, H]
    B: Tensor,  # [T, G, M]
    C: Tensor,  # [T, G, M]
) -> tuple[Tensor, Tensor]:
    """What every position sees, [T, H, P], and the state after the chunk."""
    tokens, heads = step.shape
    shared = heads // B.shape[1]
    total = log_decay.double().cumsum(0)  # [T, H]  double: differences of large sums follow
    past = torch.ones(tokens, tokens, dtype=torch.bool).tril()[..., None]
    between = (
        (total[:, None] - total).masked_fill(~past, float("-inf")).to(x.dtype).exp()
    )  # [T, T, H]
    scores = torch.einsum("igm,jgm->ijg", C, B).repeat_interleave(shared, 2)
    gain = step[..., None] * x  # [T, H, P]
    seen = torch.einsum("ijh,jhp->ihp", scores * between, gain)
    B_heads, C_heads = (z.repeat_interleave(shared, 1) for z in (B, C))
    decay = total.to(x.dtype).exp()
    seen += decay[..., None] * torch.einsum("hpm,ihm->ihp", state, C_heads)
    rest = (total[-1] - total).to(x.dtype).exp()  # [T, H]
    added = torch.einsum("jhp,jhm->hpm", rest[..., None] * gain, B_heads)
    return seen, decay[-1][:, None, None] * state + added
