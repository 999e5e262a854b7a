"""causal_conv_chunk: kernel against float64 and conv1d; continuation, exports, packing."""

import pytest
import torch
import torch.nn.functional as F
from grid_recorder import GridRecorder
from paged_scan import PagedScan, run_programs_backwards

from midstream.errors import ContractError
from midstream.ops import causal_conv_chunk as op_file
from midstream.ops.causal_conv_chunk import causal_conv_chunk
from midstream.ops.causal_conv_step import causal_conv_step
from midstream.ops.chunk_table import cut_chunks
from midstream.ops.testing import (
    build_args,
    check_kernel,
    check_reference,
    check_registration,
    op_cases,
)

ids = [case.id for case in causal_conv_chunk.cases]
CHANNELS, TAPS = 20, 4


@pytest.fixture
def scan(device):
    """140 tokens of a small layer."""
    generator = torch.Generator().manual_seed(3)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(device)
        for shape in ((140, CHANNELS), (CHANNELS, TAPS), (CHANNELS,))
    )
    params = {"weight": weight, "bias": bias, "silu": True}
    return PagedScan(causal_conv_chunk.launch, {"x": x}, params, (TAPS - 1) * CHANNELS)


@pytest.fixture
def window(device):
    generator = torch.Generator().manual_seed(4)
    return torch.randn((TAPS - 1) * CHANNELS, generator=generator).to(device)


def conv1d(scan, tokens):
    """torch's own convolution of a row that starts fresh."""
    x = F.pad(scan.tokens["x"][tokens].T, (TAPS - 1, 0))
    weight, bias = scan.params["weight"], scan.params["bias"]
    return F.silu(F.conv1d(x, weight[:, None], bias, groups=CHANNELS)).T


@pytest.mark.parametrize(("spec", "case"), list(op_cases(causal_conv_chunk)), ids=ids)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_equals_float64_reference(spec, case, dtype, device):
    check_kernel(spec, case, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("spec", "case"), list(op_cases(causal_conv_chunk)), ids=ids)
def test_bf16_kernel_equals_float64_reference(spec, case, device):
    check_kernel(spec, case, torch.bfloat16, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("spec", "case"), list(op_cases(causal_conv_chunk)), ids=ids)
def test_cpu_implementation_equals_float64_reference(spec, case, dtype):
    check_reference(spec, case, dtype)


def test_is_a_well_formed_torch_operator():
    check_registration(causal_conv_chunk, causal_conv_chunk.cases[1])


def test_every_length_equals_conv1d(scan):
    rows = [slice(0, length) for length in (*range(1, 10), 63, 64, 65, 127, 128, 129)]
    result = scan.run(rows)
    for row, tokens in enumerate(rows):
        torch.testing.assert_close(result.out[row], conv1d(scan, tokens), rtol=0.0, atol=2e-6)


def test_ten_tokens_and_five_equal_fifteen_bit_for_bit(scan):
    whole = scan.run([slice(0, 15)])
    first = scan.run([slice(0, 10)])
    second = scan.run([slice(10, 15)], states=[first.end()])
    assert torch.equal(torch.cat([first.out[0], second.out[0]]), whole.out[0])
    assert torch.equal(second.end(), whole.end())


def test_single_tokens_equal_one_run_bit_for_bit(scan, window):
    whole = scan.run([slice(0, 6)], states=[window])
    state = window
    for token in range(6):
        one = scan.run([slice(token, token + 1)], states=[state])
        assert torch.equal(one.out[0], whole.out[0][token : token + 1])
        state = one.end()
    assert torch.equal(state, whole.end())


def test_exports_inside_a_row_equal_the_state_of_a_run_that_ends_there(scan, window):
    ends = [1, 2, 3, 4, 37, 64, 66]
    cut = scan.run([slice(0, 70)], exports=[(0, at) for at in ends], states=[window])
    alone = scan.run([slice(0, at) for at in ends], states=[window] * len(ends))
    for row, at in enumerate(ends):
        assert torch.equal(cut.states[0, at], alone.end(row))


def test_packed_rows_equal_single_runs_bit_for_bit(scan, window):
    rows = [slice(5, 6), slice(6, 9), slice(20, 84), slice(0, 65), slice(90, 97)]
    states = [window, None, window, None, window]
    packed = scan.run(rows, states=states)
    for row, tokens in enumerate(rows):
        alone = scan.run([tokens], states=[states[row]])
        assert torch.equal(packed.out[row], alone.out[0])
        assert torch.equal(packed.end(row), alone.end())


@pytest.mark.parametrize("length", [1, 2, 3, 70])
def test_a_row_may_end_in_the_page_that_it_read(scan, window, length):
    exports = [(0, at) for at in (1, 2) if at < length]
    apart = scan.run([slice(0, length)], exports, states=[window])
    same = scan.run([slice(0, length)], exports, states=[window], in_place=True)
    assert torch.equal(apart.out[0], same.out[0])
    for key, state in apart.states.items():
        assert torch.equal(state, same.states[key])


@pytest.mark.parametrize("length", [3, 70])
def test_the_order_of_programs_does_not_matter(scan, window, length, monkeypatch):
    exports = [(0, at) for at in (1, 2)]
    forwards = scan.run([slice(0, length)], exports, states=[window], in_place=True)
    run_programs_backwards(monkeypatch)
    backwards = scan.run([slice(0, length)], exports, states=[window], in_place=True)
    assert torch.equal(forwards.out[0], backwards.out[0])
    for key, state in forwards.states.items():
        assert torch.equal(state, backwards.states[key])


@pytest.mark.parametrize("silu", [True, False], ids=["silu", "linear"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("taps", range(2, 9))
def test_every_width_continues_itself_and_equals_conv1d(taps, bias, silu, device):
    """Rows shorter and longer than the window; the second run starts from what the first one left."""
    gen = torch.Generator().manual_seed(taps)
    x = torch.randn(21, CHANNELS, generator=gen).to(device)
    weight = torch.randn(CHANNELS, taps, generator=gen).to(device)
    shift = torch.randn(CHANNELS, generator=gen).to(device) if bias else None
    want = F.conv1d(F.pad(x.T, (taps - 1, 0)), weight[:, None], shift, groups=CHANNELS).T
    want = F.silu(want) if silu else want
    params = {"weight": weight, "bias": shift, "silu": silu}
    wide = PagedScan(causal_conv_chunk.launch, {"x": x}, params, (taps - 1) * CHANNELS)
    cuts = (1, 5, 13)
    first = wide.run([slice(0, n) for n in cuts], exports=[(2, 3)])
    rest = wide.run([slice(n, 21) for n in cuts], states=[first.end(r) for r in range(3)])
    for row, n in enumerate(cuts):
        torch.testing.assert_close(first.out[row], want[:n], rtol=0.0, atol=4e-6)
        torch.testing.assert_close(rest.out[row], want[n:], rtol=0.0, atol=4e-6)
        assert torch.equal(rest.end(row).view(taps - 1, -1), x[22 - taps :])


def test_c3_chunks_and_channels_beyond_65535_fit_the_grid(monkeypatch):
    recorder, chunks, channels = GridRecorder(), 70_000, 70_000
    monkeypatch.setattr(op_file, "_causal_conv_chunk_kernel", recorder)
    x = torch.zeros(1, channels).expand(chunks, channels)
    pages = torch.zeros(1, dtype=torch.int32).expand(chunks)
    for taps in (4, 8):
        causal_conv_chunk.launch(
            torch.zeros(1, 64), x, x, torch.zeros(channels, taps), None, None, None, None, pages,
            None, None, True,
        )  # fmt: skip
    assert all(
        grid[0] == chunks for grid in recorder.grids
    )  # only this axis may be longer than 65,535
    assert max(max(grid[1:]) for grid in recorder.grids) <= 65_535


@pytest.mark.gpu
def test_c3_three_thousand_sequences_of_one_token_equal_a_decode_step(device):
    rows, channels = 3000, 32 * 64
    gen = torch.Generator().manual_seed(6)
    x = torch.randn(rows, channels, generator=gen).to(device)
    weight = torch.randn(channels, TAPS, generator=gen).to(device)
    arena = torch.randn(1 + 2 * rows, 3 * channels, generator=gen).to(device)
    read = torch.arange(1, rows + 1, dtype=torch.int32, device=device)
    table = cut_chunks([1] * rows, (read + rows).tolist())
    offset = torch.zeros(1, dtype=torch.int64, device=device)
    one, many, stepped = torch.empty_like(x), torch.empty_like(x), arena.clone()
    causal_conv_step.launch(stepped, one, x, weight, None, offset, read, read + rows, True)
    causal_conv_chunk.launch(
        arena, many, x, weight, None, offset, read,
        *(t.to(device) for t in (table.chunk_start, table.chunk_row, table.chunk_page)),
        table.row_chunk.to(device), True,
    )  # fmt: skip
    torch.testing.assert_close(many, one, rtol=0.0, atol=4e-6)
    assert torch.equal(arena, stepped)


@pytest.mark.gpu
def test_f2_a_row_that_ends_in_the_page_it_read_never_races(device):
    """Lengths around the window, many channels, one thousand runs: equal to a run that moves."""
    lengths, channels = (1, 2, 3, 4, 70), 4352
    gen = torch.Generator().manual_seed(9)
    x = torch.randn(sum(lengths), channels, generator=gen).to(device)
    weight = torch.randn(channels, TAPS, generator=gen).to(device)
    arena = torch.randn(11, 3 * channels, generator=gen).to(device)
    offset = torch.zeros(1, dtype=torch.int64, device=device)
    read = torch.arange(1, 6, dtype=torch.int32, device=device)

    def run(arena, write):
        table, out = cut_chunks(lengths, write), torch.empty_like(x)
        causal_conv_chunk.launch(
            arena, out, x, weight, None, offset, read,
            *(t.to(device) for t in (table.chunk_start, table.chunk_row, table.chunk_page)),
            table.row_chunk.to(device), True,
        )  # fmt: skip
        return out

    moved = arena.clone()
    want = run(moved, [6, 7, 8, 9, 10])
    for _ in range(1000):
        same = arena.clone()
        assert torch.equal(run(same, [1, 2, 3, 4, 5]), want)
        assert torch.equal(same[1:6], moved[6:])


def test_weights_with_distant_taps_are_refused():
    args = build_args(causal_conv_chunk.cases[0], torch.float32, torch.device("cpu"))
    distant = args["weight"].T.contiguous().T
    with pytest.raises(ContractError, match="adjacent taps"):
        causal_conv_chunk.launch(**args | {"weight": distant})
