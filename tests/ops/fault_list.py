"""The faults of `seeded_faults`: what real systems shipped, put into our kernels one at a time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One break: `old` becomes `new` in `file`, and a test of `tests` must fall."""

    file: str
    name: str
    old: str
    new: str

    @property
    def tests(self) -> tuple[str, ...]:
        """The test files of the op."""
        stem = self.file.removeprefix("ops/").removesuffix(".py")
        return tuple(f"tests/ops/test_{name}.py" for name in _TESTED_BY.get(stem, (stem,)))


# a helper's faults show in the op that uses it
_TESTED_BY = {
    "token_filter": ("sample",),
    "gated_delta_tokens": ("gated_delta_chunk",),
    "finish_rows": ("skinny_linear",),
    "paged_attention_split": ("paged_attention_split", "paged_attention_chunk"),
}

FAULTS = (
    Fault(
        "ops/sample.py",
        "noise keyed by the position before the step",
        "    position = tl.load(computed_ptr + slot) + length\n    early",
        "    position = tl.load(computed_ptr + slot)\n    early",
    ),
    Fault(
        "ops/sample.py",
        "a prompt chunk in the middle draws a token",
        "    if tl.load(row_sample_ptr + row) != 1:\n        return\n\n    tile",
        "    if tl.load(row_sample_ptr + row) > 1:\n        return\n\n    tile",
    ),
    Fault(
        "ops/sample.py",
        "padding rows keep an old token",
        "    tl.store(token_ptr + row, -1)\n",
        "",
    ),
    Fault(
        "ops/sample.py",
        "only the first tile of the vocabulary competes",
        "        score = tl.maximum(tile_score, score)\n    return token",
        "        score = tl.maximum(tile_score, float('inf'))\n    return token",
    ),
    Fault(
        "ops/sample.py",
        "counts by row instead of by slot",
        "    tl.store(computed_ptr + slot, position)",
        "    tl.store(computed_ptr + row, position)",
    ),
    Fault(
        "ops/token_filter.py",
        "stop ids refused for ever",
        "    if early:\n        for place",
        "    if True:\n        for place",
    ),
    Fault(
        "ops/token_filter.py",
        "top_p leaves out the token that crosses the mass",
        ">= target, candidate, key)",
        "> target * 1.2, candidate, key)",
    ),
    Fault(
        "ops/token_filter.py",
        "top_p counts the mass that top_k cut",
        "sums += tl.where(ordered(clean) >= lowest_key,",
        "sums += tl.where(clean == clean,",
    ),
    Fault(
        "ops/scatter_slots.py",
        "the stale tail of the deltas is applied",
        "    live = entry < tl.load(count_ptr)",
        "    live = entry >= 0",
    ),
    Fault(
        "ops/ssd_step.py",
        "a padding row writes page 0",
        "    if write_page == _NULL_PAGE:",
        "    if write_page < _NULL_PAGE:",
    ),
    Fault(
        "ops/ssd_step.py",
        "history of page 0 for a new request",
        "mask=inside & (read_page != _NULL_PAGE)",
        "mask=inside",
    ),
    Fault(
        "ops/ssd_step.py",
        "the state goes back to the page it came from",
        "    tl.store(arena_ptr + target + element",
        "    tl.store(arena_ptr + source + element",
    ),
    Fault(
        "ops/ssd_step.py",
        "every head reads the first group",
        "group = head // HEADS_PER_GROUP * M",
        "group = head * 0",
    ),
    Fault(
        "ops/ssd_step.py",
        "padding rows leave their output as it was",
        "        tl.store(out_ptrs, tl.zeros([P_TILE], tl.float32), mask=p < P)\n        return",
        "        return",
    ),
    Fault(
        "ops/ssd_chunk.py",
        "the state of a row's first chunk is saved for all",
        "tl.store(arena_ptr + target + element, state, mask=inside)",
        "tl.store(arena_ptr + target + element, tl.load(incoming_ptrs, mask=inside), mask=inside)",
    ),
    Fault(
        "ops/ssd_chunk.py",
        "tokens of the next row count at the tail of a chunk",
        "        live = token < tl.load(chunk_start_ptr + chunk + 1)\n        x_offsets",
        "        live = token >= 0\n        x_offsets",
    ),
    Fault(
        "ops/ssd_chunk.py",
        "the chunk sees its own future",
        "past = place[:, None] >= place[None, :]",
        "past = place[:, None] >= 0 * place[None, :]",
    ),
    Fault(
        "ops/ssd_chunk.py",
        "the output forgets the state from before the chunk",
        "        y *= tl.exp(sums)[:, None]",
        "        y *= 0.0",
    ),
    Fault(
        "ops/ssd_chunk.py",
        "history of page 0 for a new request",
        "has_state = inside & (read_page != _NULL_PAGE)",
        "has_state = inside",
    ),
    Fault(
        "ops/linear_step.py",
        "history of page 0 for a new request",
        "mask=inside & (source > 0), other=0.0",
        "mask=inside, other=0.0",
    ),
    Fault(
        "ops/linear_step.py",
        "value heads read their own number as key head",
        "key_head = head // HEADS_PER_KEY",
        "key_head = head % HEADS_PER_KEY",
    ),
    Fault(
        "ops/linear_step.py",
        "state kept as key x value",
        "place = lane[:, None] * K + key[None, :]",
        "place = key[None, :] * V + lane[:, None]",
    ),
    Fault(
        "ops/linear_step.py",
        "one decay for all key channels",
        "tl.exp(tl.load(g_at + key, mask",
        "tl.exp(tl.load(g_at + key * 0, mask",
    ),
    Fault(
        "ops/linear_step.py",
        "decayed keys rounded to the 16 bits of the state",
        "tl.where(part < 3, x, 0.0)",
        "tl.where(part < 1, x, 0.0)",
    ),
    Fault(
        "ops/linear_step.py",
        "the state goes back to the page it came from",
        "tl.store(write_ptr + place",
        "tl.store(read_ptr + place",
    ),
    Fault(
        "ops/gated_delta_chunk.py",
        "the running state is not what was saved",
        "        state = tl.where(page > 0, saved.to(tl.float32), state)\n",
        "",
    ),
    Fault(
        "ops/gated_delta_chunk.py",
        "state kept as key x value",
        "state_place = head * (V * K) + value[None, :] * K + key[:, None]",
        "state_place = head * (V * K) + key[:, None] * V + value[None, :]",
    ),
    Fault(
        "ops/gated_delta_chunk.py",
        "the chunk sees its own future",
        "not_later = place[:, None] >= place[None, :]",
        "not_later = place[:, None] >= 0 * place[None, :]",
    ),
    Fault(
        "ops/gated_delta_chunk.py",
        "chunks of later rows start from the first chunk's factors",
        "item = head.to(tl.int64) + chunk * HEADS",
        "item = head.to(tl.int64) + first * HEADS",
    ),
    Fault(
        "ops/page_move.py",
        "the destination's window is read where the source's should be",
        "wide_offset(conv_source, conv_stride) + offset,",
        "wide_offset(conv_target, conv_stride) + offset,",
    ),
    Fault(
        "ops/page_move.py",
        "only the first piece of each program moves",
        "        piece += PROGRAMS\n",
        "        piece = end\n",
    ),
    Fault(
        "ops/page_move.py",
        "the conv part comes from the temporal source",
        "conv_source = tl.load(move_from_ptr + move_stride + move)",
        "conv_source = tl.load(move_from_ptr + move)",
    ),
    Fault(
        "ops/advance.py",
        "a stale accepted count of the slot's previous owner",
        "off = tl.where(fresh, 0, tl.maximum(count - 1, 0))",
        "off = tl.maximum(count - 1, 0)",
    ),
    Fault(
        "ops/advance.py",
        "the accepted count stays when the column changes",
        "        count = tl.where(changed, 1, count)\n",
        "",
    ),
    Fault(
        "ops/advance.py",
        "the page to resume from is used twice",
        "        tl.store(resume_page_ptr + slot, tl.zeros_like(slot), mask=live)\n",
        "",
    ),
    Fault(
        "ops/causal_conv_step.py",
        "the oldest tap is lost",
        "old = (tap < W - 1)",
        "old = (tap < W - 1) & (tap > 0)",
    ),
    Fault(
        "ops/causal_conv_step.py",
        "a padding row writes page 0",
        "    if write_page == _NULL_PAGE:",
        "    if write_page < _NULL_PAGE:",
    ),
    Fault(
        "ops/kv_write.py",
        "padding writes the last slot",
        "other=-1",
        "other=0",
    ),
    Fault(
        "ops/selective_scan_step.py",
        "dt without its bias",
        "softplus(dt + tl.load(dt_bias_ptr + channel, mask=known, other=0.0).to(tl.float32))",
        "softplus(dt)",
    ),
    Fault(
        "ops/selective_scan_chunk.py",
        "the scan starts from zero on a continuation",
        "has_state = inside & (read_page != _NULL_PAGE)",
        "has_state = inside & (read_page < _NULL_PAGE)",
    ),
    Fault(
        "ops/rg_lru_step.py",
        "no reset at position 0",
        "return tl.where(begins, 0.0, tl.exp(log_a)), tl.where(begins, gated, scale * gated)",
        "return tl.exp(log_a), scale * gated",
    ),
    Fault(
        "ops/rg_lru_chunk.py",
        "dead places of the last turn decay the state",
        "_then(decay, update, tl.where(live, a, 1.0), tl.where(live, b, 0.0))",
        "_then(decay, update, a, tl.where(live, b, 0.0))",
    ),
    Fault(
        "ops/paged_attention_decode.py",
        "32-bit product of slot and table pitch",
        "    table_ptr = kv_table_ptr + slot * table_stride",
        "    table_ptr = kv_table_ptr + (slot * table_stride).to(tl.int8)",
    ),
    Fault(
        "ops/paged_attention_split.py",
        "partial results of pieces that are none count",
        '        part_log = tl.load(part_log_ptr + at + row, mask=used, other=float("-inf"))',
        "        part_log = tl.load(part_log_ptr + at + row)",
    ),
    Fault(
        "ops/paged_attention_split.py",
        "a piece in which a token sees no position makes it no number",
        '        shift = tl.where(new_top > float("-inf"), new_top, 0.0)  # -inf minus',
        "        shift = new_top  # -inf minus",
    ),
    Fault(
        "ops/paged_attention_split.py",
        "pieces of later turns counted from the first turn's end",
        "        passed += tl.sum(pieces, 0)",
        "        passed = tl.sum(pieces, 0)",
    ),
    Fault(
        "ops/paged_attention_chunk.py",
        "pieces reach up to the end of their chunk",
        "        end = tl.minimum(end, piece_end)\n",
        "",
    ),
    Fault(
        "ops/paged_attention_chunk.py",
        "pieces weigh without their largest score",
        "top + tl.log2(total))",
        "tl.log2(total))",
    ),
    Fault(
        "ops/paged_attention_chunk.py",
        "rows that divide badly among programs are not added up",
        "(PART_ROWS // M + PROGRAMS - 1) // PROGRAMS * M",
        "PART_ROWS // PROGRAMS",
    ),
    Fault(
        "ops/causal_conv_chunk.py",
        "every slice of a chunk makes its exports",
        "    if slice_ > 0:\n        return\n",
        "",
    ),
    Fault(
        "ops/causal_conv_chunk.py",
        "slices behind the first read zeros for the old window",
        "    out_start = tl.where(reads_window, start, tl.maximum(start, window_end))",
        "    out_start = start",
    ),
    Fault(
        "ops/paged_attention_chunk.py",
        "every query head reads the first KV head",
        "    head_ptr = arena_ptr + region + kv_head * D",
        "    head_ptr = arena_ptr + region + kv_head * 0",
    ),
    Fault(
        "ops/gemv.py",
        "what lies behind a row of weights is summed",
        "    inside = (row[:, None] < N) & (k[None, :] < K)\n",
        "    inside = row[:, None] < N\n",
    ),
    Fault(
        "ops/gemv.py",
        "a norm of the padded width",
        "tl.sum(x * x, 0) / K + eps",
        "tl.sum(x * x, 0) / BLOCK_K + eps",
    ),
    Fault(
        "ops/gemv.py",
        "the gate on the wrong side",
        "y = y * tl.sigmoid(y) * tl.sum(",
        "y = y * tl.sigmoid(1.702 * y) * tl.sum(",
    ),
    Fault(
        "ops/gemv.py",
        "rows of `up` as far apart as those of `weight`",
        "up_ptr + wide_row * up_pitch",
        "up_ptr + wide_row * K",
    ),
    Fault(
        "ops/gemv.py",
        "the last rows are lost",
        "(triton.cdiv(outputs, block_n),)",
        "(outputs // block_n,)",
    ),
    Fault(
        "ops/static_attention_decode.py",
        "the last piece is lost",
        "for first in range(0, pieces, AT_ONCE):",
        "for first in range(0, pieces - 1, AT_ONCE):",
    ),
    Fault(
        "ops/static_attention_decode.py",
        "a row that sees nothing is divided by nothing",
        "result = mixed / tl.where(total != 0, total, 1.0)",
        "result = mixed / total",
    ),
    Fault(
        "ops/static_attention_decode.py",
        "hidden positions of a tile are seen",
        'score = tl.where(seen[None, :], score, float("-inf"))',
        'score = tl.where((place < length)[None, :], score, float("-inf"))',
    ),
    Fault(
        "ops/static_attention_decode.py",
        "every row has the mask of the first",
        "visible_ptr + row * visible_row",
        "visible_ptr + 0 * visible_row",
    ),
    Fault(
        "ops/static_attention_decode.py",
        "values lie as far apart as padded heads",
        "v_at + place[:, None] * v_place",
        "v_at + place[:, None] * WIDTH",
    ),
    Fault(
        "ops/skinny_linear.py",
        "what lies behind a row of weights is summed",
        "            weight_in &= k[None, :] + ahead < K\n",
        "",
    ),
    Fault(
        "ops/skinny_linear.py",
        "all parts multiply the first inputs",
        "k = part * (TURNS * TILE_K) + tl.arange(0, TILE_K)",
        "k = tl.arange(0, TILE_K)",
    ),
    Fault(
        "ops/skinny_linear.py",
        "the second matrix is the gate",
        "y = gate * tl.sigmoid(gate) * y",
        "y = y * tl.sigmoid(y) * gate",
    ),
    Fault(
        "ops/skinny_linear.py",
        "rows of x as far apart as they are wide",
        "row.to(tl.int64)[:, None] * x_pitch",
        "row.to(tl.int64)[:, None] * K",
    ),
    Fault(
        "ops/skinny_linear.py",
        "rows beyond the last one are written",
        "inside = (row[None, :] < R) & (n[:, None] < N)",
        "inside = (row[None, :] < TILE_R) & (n[:, None] < N)",
    ),
    Fault(
        "ops/skinny_linear.py",
        "parts of the gate lie on those of the product",
        "out_ptr + (S + part) * part_size",
        "out_ptr + part * part_size",
    ),
    Fault(
        "ops/finish_rows.py",
        "the last part is lost",
        """        place = part * part_pitch + row * row_pitch + n
        y +=""",
        """        place = tl.maximum(part - 1, 0) * part_pitch + row * row_pitch + n
        y +=""",
    ),
    Fault(
        "ops/finish_rows.py",
        "a norm of the padded width",
        "tl.sum(row * row, 0) / N + eps",
        "tl.sum(row * row, 0) / row.shape[0] + eps",
    ),
    Fault(
        "ops/finish_rows.py",
        "the norm is that of the row without its residual",
        "(y * scale * weight).to(",
        "((y - tl.load(residual_ptr + row * N + n, mask=inside, other=0.0)) * scale * weight).to(",
    ),
    Fault(
        "ops/rms_norm.py",
        "the gate comes behind the norm where it belongs in front",
        "        if GATE_FIRST:\n            h *= gate\n",
        "        if False:\n            h *= gate\n",
    ),
    Fault(
        "ops/rms_norm.py",
        "gates of one row as far from those of the next as rows of x",
        "gate_ptr + row * gate_pitch",
        "gate_ptr + row * N",
    ),
    Fault(
        "ops/rms_norm.py",
        "a shift of the norm's weight is lost",
        "other=0.0).to(tl.float32) + shift",
        "other=0.0).to(tl.float32)",
    ),
)
