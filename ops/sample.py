"""
Draw the next token of every row and count the step's tokens.

A row samples when `row_sample` is 1, i.e. when its tokens end the known sequence.  The token is
drawn by Gumbel's trick from those that temperature, top_k, top_p and min_p allow
(`ops/token_filter.py`). Temperature 0 takes the largest logit, the lowest id among equals.  Noise
is keyed by the request's seed and the new token's position (`ops/noise.py`), so a replay draws the
same tokens.

* Stop ids are refused while the new token's position is below `min_position`.
* NaN counts as the smallest logit and +inf as the largest float32; a row without a finite logit
  gives token 0.  The log-probability shows such rows: it is that of the raw logits, hence NaN.

Letters: R rows, S slots, L vocabulary.
Traffic: the logits once for greedy rows and rows without top_k, top_p and min_p.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from midstream.errors import ContractError
from midstream.ops.noise import NOISE_SPAN, log_exponential, log_exponential_ref, philox_words
from midstream.ops.registry import PADDING, Args, OpCase, Tolerance, define_op
from midstream.ops.token_filter import (
    LARGEST,
    STOP_IDS,
    allowed_tokens,
    inverse_temperature,
    load_logits,
    lowest_allowed_key,
    ordered,
)

_NO_TOKEN = -1
_TILE = 4096  # logits that a program scans
_SEARCH_TILE = 8192  # logits of a turn of the search for top_k and top_p


def sample_ref(
    token: Tensor,  # i32[>=R]  -1 where nothing is drawn
    logprob: Tensor,  # f32[>=R]  log softmax of the raw logits, 0 where nothing is drawn
    last_token: Tensor,  # i32[S]
    computed: Tensor,  # i32[S]  tokens before this step; afterwards with this step's
    accepted: Tensor,  # i32[S]  1 afterwards
    logits: Tensor,  # [>=R, L]  at the last token of each row
    row_slot: Tensor,  # i32[>=R]  -1 in padding
    row_start: Tensor,  # i32[>=R + 1]
    row_sample: Tensor,  # i32[>=R]  1 where the row draws a token
    temperature: Tensor,  # i32[S]  bits of float32
    top_k: Tensor,  # i32[S]  0 is off
    top_p: Tensor,  # i32[S]  bits of float32; 1.0 is off
    min_p: Tensor,  # i32[S]  bits of float32; 0.0 is off
    seed: Tensor,  # i32[S, 2]
    stop_id: Tensor,  # i32[S, 8]  -1 unused
    min_position: Tensor,  # i32[S]
    rows: int,
) -> None:
    """Say what the kernel means."""
    row_slot = row_slot[:rows]
    live = (row_slot != PADDING).nonzero().flatten()
    slot = row_slot[live].long()
    new_position = computed[slot] + row_start[live + 1] - row_start[live]
    computed[slot] = new_position
    accepted[slot] = 1
    token[:rows] = _NO_TOKEN
    logprob[:rows] = 0
    draws = row_sample[live] == 1
    live, slot, new_position = live[draws], slot[draws], new_position[draws]
    if live.numel() == 0:
        return
    raw = logits[live].to(torch.promote_types(logits.dtype, torch.float32))
    clean = raw.nan_to_num(nan=-torch.inf, posinf=LARGEST.value, neginf=-torch.inf)
    _refuse_stops(clean, stop_id[slot], new_position < min_position[slot])
    drawn = clean.argmax(-1)
    hot = temperature[slot].view(torch.float32) > 0
    if hot.any():
        s = slot[hot]
        allowed, log_weight = allowed_tokens(
            clean[hot],
            temperature[s].view(torch.float32),
            top_k[s],
            top_p[s].view(torch.float32),
            min_p[s].view(torch.float32),
        )
        noise = log_exponential_ref(clean.shape[1], new_position[hot], seed[s])
        drawn[hot] = (log_weight - noise).masked_fill(~allowed, -torch.inf).argmax(1)
    token[live] = drawn.int()
    last_token[slot] = drawn.int()
    logprob[live] = raw.log_softmax(-1).gather(1, drawn[:, None])[:, 0].to(logprob.dtype)


def _refuse_stops(logit: Tensor, stop_id: Tensor, early: Tensor) -> None:
    """Write -inf at the stop ids of rows that are too early to stop."""
    refused = early[:, None] & (stop_id >= 0) & (stop_id < logit.shape[1])
    row, place = refused.nonzero(as_tuple=True)
    logit[row, stop_id[row, place].long()] = -torch.inf


@triton.jit
def _load_float(bits_ptr):
    return tl.load(bits_ptr).to(tl.float32, bitcast=True)


@triton.jit
def _word_tokens(tile, word: tl.constexpr, TILE: tl.constexpr):
    """Tokens whose noise is the `word`-th of the tile's counter blocks, in block order."""
    lane = tl.arange(0, TILE // 4)
    quarter: tl.constexpr = NOISE_SPAN // 4
    return tile * TILE + lane // quarter * NOISE_SPAN + word * quarter + lane % quarter


@triton.jit
def _best(score, token):
    """Largest score of a tile and the lowest token that has it."""
    largest = tl.max(score, 0)
    return largest, tl.min(tl.where(score == largest, token, 0x7FFFFFFF), 0)


@triton.jit
def _draw_tile(
    logits_row_ptr, tile, vocabulary, stop_ptr, early, position, seed_low, seed_high,
    inverse, peak, lowest_key, lowest_weight, TILE: tl.constexpr,
):  # fmt: skip
    """Best score of the allowed tokens, relative to the logit `peak`, and its token."""
    block = tile * (TILE // 4) + tl.arange(0, TILE // 4)
    words = philox_words(block, position, seed_low, seed_high)
    score = tl.full([TILE // 4], float("-inf"), tl.float32)
    token = _word_tokens(tile, 0, TILE)
    for word in tl.static_range(4):
        here = _word_tokens(tile, word, TILE)
        _, _, clean = load_logits(logits_row_ptr, here, vocabulary, stop_ptr, early)
        log_weight = (clean - peak) * inverse
        allowed = (ordered(clean) >= lowest_key) & (tl.exp(log_weight) >= lowest_weight)
        value = tl.where(allowed, log_weight - log_exponential(words[word]), float("-inf"))
        token = tl.where(value > score, here, token)
        score = tl.maximum(value, score)
    return _best(score, token)


@triton.jit
def _draw_filtered(
    logits_row_ptr, vocabulary, stop_ptr, early, position, seed_low, seed_high,
    inverse, peak, top_k, top_p, min_p,
    KEY_BITS: tl.constexpr, TILE: tl.constexpr, SEARCH_TILE: tl.constexpr,
):  # fmt: skip
    """Draw from the tokens that top_k, top_p and min_p allow; 0 where there is none."""
    lowest_key = lowest_allowed_key(
        logits_row_ptr, vocabulary, stop_ptr, early, inverse, peak, top_k, top_p,
        KEY_BITS, SEARCH_TILE,
    )  # fmt: skip
    score = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    for tile in range(tl.cdiv(vocabulary, TILE)):
        tile_score, tile_token = _draw_tile(
            logits_row_ptr, tile, vocabulary, stop_ptr, early, position, seed_low, seed_high,
            inverse, peak, lowest_key, tl.minimum(min_p, 1.0), TILE,
        )  # fmt: skip
        token = tl.where(tile_score > score, tile_token, token)
        score = tl.maximum(tile_score, score)
    return token


@triton.jit
def _scan_kernel(
    part_ptr,  # f32[4, R, TILES]  usable maximum, sum of raw weights, clean maximum, best score
    winner_ptr,  # i32[R, TILES]  token of the best score
    computed_ptr,  # i32[S]
    logits_ptr,  # [>=R, L]
    row_slot_ptr,  # i32[>=R]
    row_start_ptr,  # i32[>=R + 1]
    row_sample_ptr,  # i32[>=R]
    temperature_ptr,  # i32[S]  bits of float32
    seed_ptr,  # i32[S, 2]
    stop_id_ptr,  # i32[S, 8]
    min_position_ptr,  # i32[S]
    logits_stride,
    vocabulary,
    TILE: tl.constexpr,
):
    tile, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(row_slot_ptr + row)
    if (slot < 0) | (tl.load(row_sample_ptr + row) != 1):
        return
    length = tl.load(row_start_ptr + row + 1) - tl.load(row_start_ptr + row)
    position = tl.load(computed_ptr + slot) + length
    early = position < tl.load(min_position_ptr + slot)
    stop_ptr = stop_id_ptr + slot * STOP_IDS
    logits_row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    token = tile * TILE + tl.arange(0, TILE)
    raw, usable, clean = load_logits(logits_row_ptr, token, vocabulary, stop_ptr, early)
    usable_peak = tl.maximum(tl.max(usable, 0), -LARGEST)
    raw_sum = tl.sum(tl.exp(raw - usable_peak), 0)
    score, winner = _best(clean, token)
    peak = tl.maximum(score, -LARGEST)
    temperature = _load_float(temperature_ptr + slot)
    if temperature > 0.0:
        lowest_key = tl.full([], -(2**31), tl.int32)
        score, winner = _draw_tile(
            logits_row_ptr, tile, vocabulary, stop_ptr, early, position,
            tl.load(seed_ptr + slot * 2), tl.load(seed_ptr + slot * 2 + 1),
            inverse_temperature(temperature), peak, lowest_key, 0.0, TILE,
        )  # fmt: skip
    place = row * tl.num_programs(0) + tile
    plane = tl.num_programs(0) * tl.num_programs(1)
    tl.store(part_ptr + place, usable_peak)
    tl.store(part_ptr + plane + place, raw_sum)
    tl.store(part_ptr + 2 * plane + place, peak)
    tl.store(part_ptr + 3 * plane + place, score)
    tl.store(winner_ptr + place, winner)


@triton.jit
def _finish_kernel(
    token_ptr,  # i32[>=R]
    logprob_ptr,  # f32[>=R]
    last_token_ptr,  # i32[S]
    computed_ptr,  # i32[S]
    accepted_ptr,  # i32[S]
    part_ptr,  # f32[4, R, TILES]
    winner_ptr,  # i32[R, TILES]
    logits_ptr,  # [>=R, L]
    row_slot_ptr,  # i32[>=R]
    row_start_ptr,  # i32[>=R + 1]
    row_sample_ptr,  # i32[>=R]
    temperature_ptr,  # i32[S]  bits of float32
    top_k_ptr,  # i32[S]
    top_p_ptr,  # i32[S]  bits of float32
    min_p_ptr,  # i32[S]  bits of float32
    seed_ptr,  # i32[S, 2]
    stop_id_ptr,  # i32[S, 8]
    min_position_ptr,  # i32[S]
    logits_stride,
    vocabulary,
    tiles,
    TILES: tl.constexpr,  # power of two >= tiles
    KEY_BITS: tl.constexpr,  # leading bits of a float32 logit that can differ
    TILE: tl.constexpr,
    SEARCH_TILE: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(row_slot_ptr + row)
    tl.store(token_ptr + row, -1)
    tl.store(logprob_ptr + row, 0.0)
    if slot < 0:
        return
    length = tl.load(row_start_ptr + row + 1) - tl.load(row_start_ptr + row)
    position = tl.load(computed_ptr + slot) + length
    tl.debug_barrier()  # every warp has read the count before one of them writes it
    tl.store(computed_ptr + slot, position)
    tl.store(accepted_ptr + slot, 1)
    if tl.load(row_sample_ptr + row) != 1:
        return

    tile = tl.arange(0, TILES)
    place = row * tiles + tile
    plane = tl.num_programs(0) * tiles
    inside = tile < tiles
    usable_peaks = tl.load(part_ptr + place, mask=inside, other=-LARGEST)
    raw_sums = tl.load(part_ptr + plane + place, mask=inside, other=0.0)
    peaks = tl.load(part_ptr + 2 * plane + place, mask=inside, other=-LARGEST)
    scores = tl.load(part_ptr + 3 * plane + place, mask=inside, other=float("-inf"))
    winners = tl.load(winner_ptr + place, mask=inside, other=0x7FFFFFFF)
    usable_peak = tl.max(usable_peaks, 0)
    log_sum = usable_peak + tl.log(tl.sum(raw_sums * tl.exp(usable_peaks - usable_peak), 0))
    peak = tl.max(peaks, 0)

    logits_row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    temperature = _load_float(temperature_ptr + slot)
    if temperature > 0.0:
        inverse = inverse_temperature(temperature)
        top_k = tl.load(top_k_ptr + slot)
        top_p = _load_float(top_p_ptr + slot)
        min_p = _load_float(min_p_ptr + slot)
        if ((top_k > 0) & (top_k < vocabulary)) | (top_p < 1.0) | (min_p > 0.0):
            early = position < tl.load(min_position_ptr + slot)
            token = _draw_filtered(
                logits_row_ptr, vocabulary, stop_id_ptr + slot * STOP_IDS, early, position,
                tl.load(seed_ptr + slot * 2), tl.load(seed_ptr + slot * 2 + 1),
                inverse, peak, top_k, top_p, min_p, KEY_BITS, TILE, SEARCH_TILE,
            )  # fmt: skip
        else:
            _, token = _best(scores + (peaks - peak) * inverse, winners)
    else:
        _, token = _best(scores, winners)
    raw = tl.load(logits_row_ptr + token).to(tl.float32)
    tl.store(token_ptr + row, token)
    tl.store(last_token_ptr + slot, token)
    tl.store(logprob_ptr + row, raw - log_sum)


def _launch(
    token: Tensor,
    logprob: Tensor,
    last_token: Tensor,
    computed: Tensor,
    accepted: Tensor,
    logits: Tensor,
    row_slot: Tensor,
    row_start: Tensor,
    row_sample: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    stop_id: Tensor,
    min_position: Tensor,
    rows: int,
) -> None:
    if logits.dim() != 2 or logits.shape[0] < rows or logits.stride(1) != 1:
        raise ContractError(
            f"sample: logits have shape {tuple(logits.shape)} and strides {logits.stride()}, "
            f"expected [at least {rows} rows, vocabulary] with contiguous rows; pass the logits of "
            "each row's last token"
        )
    if stop_id.shape[1] != STOP_IDS.value or not (stop_id.is_contiguous() and seed.is_contiguous()):
        raise ContractError(
            f"sample: stop_id has shape {tuple(stop_id.shape)} and seed {tuple(seed.shape)}, "
            f"expected contiguous [slots, {STOP_IDS.value}] and [slots, 2]; pass the per-slot "
            "buffers whole"
        )
    if rows == 0:
        return
    vocabulary = logits.shape[1]
    tile = min(_TILE, max(NOISE_SPAN.value, triton.next_power_of_2(vocabulary)))
    tiles = triton.cdiv(vocabulary, tile)
    part = torch.empty((4, rows, tiles), dtype=torch.float32, device=logits.device)
    winner = torch.empty((rows, tiles), dtype=torch.int32, device=logits.device)
    _scan_kernel[(tiles, rows)](
        part, winner, computed, logits, row_slot, row_start, row_sample,
        temperature, seed, stop_id, min_position,
        logits_stride=logits.stride(0), vocabulary=vocabulary, TILE=tile, num_warps=4,
    )  # fmt: skip
    _finish_kernel[(rows,)](
        token, logprob, last_token, computed, accepted, part, winner, logits,
        row_slot, row_start, row_sample, temperature, top_k, top_p, min_p,
        seed, stop_id, min_position,
        logits_stride=logits.stride(0), vocabulary=vocabulary, tiles=tiles,
        TILES=triton.next_power_of_2(tiles),
        KEY_BITS=16 if logits.dtype == torch.bfloat16 else 32,
        TILE=tile, SEARCH_TILE=min(_SEARCH_TILE, triton.next_power_of_2(vocabulary)), num_warps=16,
    )  # fmt: skip


def _bits(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).view(torch.int32)


def _case(
    name: str,
    rows: int = 4,
    vocabulary: int = 300,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    spread: float = 3.0,
    early: bool = False,
    special: tuple[float, ...] = (),
) -> OpCase:
    """Rows: a padded one, one that does not sample, one greedy, the rest as the parameters say.

    `special` values replace the first logits.  `early`: stop ids are refused, among them the best.
    """

    def build(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Args:
        slots = rows + 2
        logits = (spread * torch.randn(rows + 1, vocabulary, generator=generator)).to(dtype)
        logits[:, : len(special)] = torch.tensor(special, dtype=dtype)
        row_slot = torch.randperm(slots, generator=generator)[: rows + 1].int()
        row_sample = torch.ones(rows + 1, dtype=torch.int32)
        row_slot[0] = PADDING
        row_sample[min(1, rows - 1)] = 0 if rows > 1 else 1
        heat = torch.full((slots,), temperature)
        heat[row_slot[2:3].long()] = 0.0
        lengths = torch.randint(1, 9, (rows + 1,), generator=generator)
        stop_id = torch.full((slots, 8), -1, dtype=torch.int32)
        stop_id[:, 3] = vocabulary - 1
        stop_id[row_slot[1:].long(), 0] = logits[1:].argmax(-1).int()
        index = {
            "row_slot": row_slot,
            "row_start": torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(),
            "row_sample": row_sample,
            "temperature": heat.view(torch.int32),
            "top_k": torch.full((slots,), top_k, dtype=torch.int32),
            "top_p": _bits([top_p] * slots),
            "min_p": _bits([min_p] * slots),
            "seed": torch.randint(-(2**31), 2**31, (slots, 2), generator=generator).int(),
            "stop_id": stop_id,
            "min_position": torch.full((slots,), 1000 if early else 0, dtype=torch.int32),
        }
        return {
            "token": torch.full((rows + 1,), -7, dtype=torch.int32, device=device),
            "logprob": torch.full((rows + 1,), torch.nan, device=device),
            "last_token": torch.full((slots,), -7, dtype=torch.int32, device=device),
            "computed": torch.arange(slots, dtype=torch.int32, device=device) * 3,
            "accepted": torch.full((slots,), -7, dtype=torch.int32, device=device),
            "logits": logits.to(device),
            **{key: tensor.to(device) for key, tensor in index.items()},
            "rows": rows,
        }

    return OpCase(f"R{rows}-L{vocabulary}-{name}", build)


def _traffic(args: Args) -> tuple[int, int]:
    logits = args["logits"]
    return args["rows"] * logits.shape[1] * logits.element_size(), 3 * args["rows"] * logits.shape[
        1
    ]


sample = define_op(
    "sample(Tensor(a!) token, Tensor(b!) logprob, Tensor(c!) last_token, Tensor(d!) computed, "
    "Tensor(e!) accepted, Tensor logits, Tensor row_slot, Tensor row_start, Tensor row_sample, "
    "Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, Tensor stop_id, "
    "Tensor min_position, SymInt rows) -> ()",
    cuda=_launch,
    cpu=sample_ref,
    cases=(
        _case("warm", rows=6),
        _case("greedy", temperature=0.0),
        _case("top_k", top_k=7),
        _case("top_k-below-zero", top_k=250, temperature=9.0, rows=6),
        _case("top_p", top_p=0.8),
        _case("min_p", min_p=0.1),
        _case("all-filters", temperature=1.7, top_k=20, top_p=0.9, min_p=0.05),
        _case("early-stop-refused", early=True, rows=6),
        _case("early-stop-refused-top_k", early=True, top_k=3),
        _case("warm-many-tiles", vocabulary=9001, rows=6),
        _case("many-tiles", vocabulary=9001, top_k=50, top_p=0.9),
        _case("aligned", vocabulary=8192, top_p=0.9),  # rows start on 16 bytes, as in real models
        _case("one-row-of-padding", rows=1),
        _case("flat", spread=0.0, top_k=5, top_p=0.5),  # all equal: all allowed
        _case("cold", temperature=1e-3),
        _case("infinite", special=(-torch.inf, -torch.inf, torch.inf), top_p=0.9),
        _case("nan", special=(torch.nan, 1.0, torch.nan), top_k=5),
        _case("tiny-vocabulary", vocabulary=3, top_k=9, top_p=0.0),
    ),
    tolerance=Tolerance(
        {torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6},
        "tokens and counts are integers, hence equal; the log-probability is computed in float32 "
        "from the same logits, relative to the largest of the step",
    ),
    traffic=_traffic,
    results=("token", "logprob"),
)
