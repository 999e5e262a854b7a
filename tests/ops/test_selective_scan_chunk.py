"""selective_scan_chunk: its declaration, continuation, exports, packing, lengths, extreme decays."""

import pytest
import torch
from paged_scan import PagedScan, run_programs_backwards
from paged_step import START, PagedStep

from midstream.errors import ContractError
from midstream.ops.selective_scan_chunk import selective_scan_chunk
from midstream.ops.selective_scan_step import SelectiveShape, draw_selective, selective_scan_step
from midstream.ops.testing import build_args, op_suite

CHANNELS = 5
SHAPE = SelectiveShape(channels=CHANNELS, size=12)
TOKENS = ("x", "dt", "B", "C")


def layer(device, **changes):
    """140 tokens of a small layer: inputs per token, and all others."""
    args = draw_selective(torch.Generator().manual_seed(3), 140, torch.float32, SHAPE) | changes
    del args["out"]
    args = {name: value.to(device) for name, value in args.items()}
    return {name: args.pop(name) for name in TOKENS}, args


def make_scan(call, device, **changes):
    return PagedScan(call, *layer(device, **changes), SHAPE.elements)


def assert_close(have, want):
    torch.testing.assert_close(have, want, rtol=0.0, atol=2e-6 * want.abs().max().item())


@pytest.mark.parametrize("check", op_suite(selective_scan_chunk), ids=str)
def test_obeys_its_declaration(check):
    check.run()


def test_ten_tokens_and_five_equal_fifteen_bit_for_bit(device):
    """The state is carried into the scan; the scan of transformers starts from zeros."""
    scan = make_scan(selective_scan_chunk.launch, device)
    whole = scan.run([slice(0, 15)])
    first = scan.run([slice(0, 10)])
    second = scan.run([slice(10, 15)], states=[first.end()])
    assert torch.equal(torch.cat([first.out[0], second.out[0]]), whole.out[0])
    assert torch.equal(second.end(), whole.end())


def test_exports_equal_the_state_of_a_run_that_ends_there_bit_for_bit(device):
    scan = make_scan(selective_scan_chunk.launch, device)
    ends = [1, 2, 11, 16]
    cut = scan.run([slice(0, 18)], exports=[(0, at) for at in ends])
    alone = scan.run([slice(0, at) for at in ends])
    for row, at in enumerate(ends):
        assert torch.equal(cut.states[0, at], alone.end(row))


def test_where_chunks_are_cut_does_not_change_a_bit(device):
    scan = make_scan(selective_scan_chunk.launch, device)
    whole = scan.run([slice(0, 18)])
    cut = scan.run([slice(0, 18)], exports=[(0, at) for at in (1, 2, 11)])
    assert torch.equal(cut.out[0], whole.out[0])
    assert torch.equal(cut.end(), whole.end())


def test_an_export_does_not_see_the_tokens_after_it(device):
    scan = make_scan(selective_scan_chunk.launch, device)
    want = scan.run([slice(0, 3)]).end()
    for name in TOKENS:
        scan.tokens[name][3:] = float("nan")
    assert torch.equal(scan.run([slice(0, 6)], exports=[(0, 3)]).states[0, 3], want)


def test_packed_rows_equal_single_runs_bit_for_bit(device):
    scan = make_scan(selective_scan_chunk.launch, device)
    rows = [slice(5, 6), slice(6, 9), slice(20, 84), slice(0, 65), slice(90, 97)]
    packed = scan.run(rows)
    for row, tokens in enumerate(rows):
        alone = scan.run([tokens])
        assert torch.equal(packed.out[row], alone.out[0])
        assert torch.equal(packed.end(row), alone.end())


@pytest.mark.parametrize("length", [*range(1, 10), 63, 64, 65])
def test_every_length_before_nan_equals_a_token_loop(length, device):
    rows = [slice(0, length)]
    have = make_scan(selective_scan_chunk.launch, device).run(rows)
    want = make_scan(selective_scan_chunk.reference, "cpu").run(rows)
    assert_close(have.out[0].cpu(), want.out[0])
    assert_close(have.end().cpu(), want.end())


def test_prefill_then_decode_equals_decode_only(device):
    scan = make_scan(selective_scan_chunk.launch, device)
    prefix, total = 11, 14
    tokens, params = layer(device)
    steps = [
        PagedStep(
            selective_scan_step.launch,
            {name: value[at : at + 1] for name, value in tokens.items()},
            params,
            SHAPE.elements,
        )
        for at in range(total)
    ]
    only, after = steps[0].arena(live=[]), steps[0].arena(live=[])
    first = scan.run([slice(0, prefix)])
    after[1, START : START + SHAPE.elements] = first.end()
    want = [step.run(only, [1 if at else 0], [1]) for at, step in enumerate(steps)]
    have = [*first.out[0].split(1), *(step.run(after, [1], [1]) for step in steps[prefix:])]
    assert_close(torch.cat(have), torch.cat(want))
    assert_close(steps[0].region(after, 1), steps[0].region(only, 1))


def test_rows_may_share_the_page_that_they_read(device):
    args = build_args(selective_scan_chunk.cases[0], torch.float32, device)
    shared = args["read_page"][1].item()
    args["read_page"][0] = (
        shared  # both rows read the page of the second, which moves to another page
    )
    before = args["arena"].clone()
    selective_scan_chunk.launch(**args)
    assert torch.equal(args["arena"][shared].view(torch.int32), before[shared].view(torch.int32))
    assert args["out"][:10].isfinite().all()


def test_a_row_may_end_in_the_page_that_it_read(device):
    scan = make_scan(selective_scan_chunk.launch, device)
    state = torch.randn(scan.size, generator=torch.Generator().manual_seed(1)).to(device)
    apart = scan.run([slice(0, 18)], states=[state])
    same = scan.run([slice(0, 18)], states=[state], in_place=True)
    assert torch.equal(apart.out[0], same.out[0])
    assert torch.equal(apart.end(), same.end())


def test_the_order_of_programs_does_not_matter(device, monkeypatch):
    scan = make_scan(selective_scan_chunk.launch, device)
    rows, exports = [slice(0, 12), slice(0, 9)], [(0, 4), (1, 2)]
    state = torch.ones(scan.size, device=device)
    forwards = scan.run(rows, exports, states=[state, state], in_place=True)
    run_programs_backwards(monkeypatch)
    backwards = scan.run(rows, exports, states=[state, state], in_place=True)
    for key, want in forwards.states.items():
        assert torch.equal(backwards.states[key], want)
    assert torch.equal(torch.cat(forwards.out), torch.cat(backwards.out))


def test_a_decay_of_1e_12_per_token_stays_exact_and_finite(device):
    # softplus(27.6) * exp(0) = 27.6 = -log(1e-12)
    extreme = {
        "A_log": torch.zeros(CHANNELS, 12),
        "dt": torch.zeros(140, CHANNELS),
        "dt_bias": torch.full((CHANNELS,), 27.6),
    }
    rows = [slice(0, 64)]
    have = make_scan(selective_scan_chunk.launch, device, **extreme).run(rows)
    want = make_scan(selective_scan_chunk.reference, "cpu", **extreme).run(rows)
    assert have.out[0].isfinite().all()
    assert_close(have.out[0].cpu(), want.out[0])
    assert_close(have.end().cpu(), want.end())


def test_a_step_of_zero_leaves_the_state_as_it_was_bit_for_bit(device):
    scan = make_scan(selective_scan_chunk.launch, device, dt_bias=torch.full((CHANNELS,), -200.0))
    state = torch.randn(scan.size, generator=torch.Generator().manual_seed(1)).to(device)
    assert torch.equal(scan.run([slice(0, 9)], states=[state]).end(), state)


def test_equals_the_scan_of_transformers(device):
    mamba = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    scan = getattr(mamba, "mamba_selective_scan", None)
    if scan is None:
        pytest.skip("this release of transformers has the scan inside its mixer")
    tokens, params = layer("cpu")
    x, dt, B, C = (tokens[name][None, :20] for name in TOKENS)
    A_log, skip, bias = (params[name] for name in ("A_log", "skip", "dt_bias"))
    want, state = scan(
        x.mT, dt.mT, -A_log.exp(), B[:, :, 0].mT, C[:, :, 0].mT, skip,
        delta_bias=bias, delta_softplus=True, return_last_state=True,
    )  # fmt: skip
    have = make_scan(selective_scan_chunk.launch, device).run([slice(0, 20)])
    assert_close(have.out[0].cpu(), want[0].T)
    assert_close(have.end().cpu(), state.flatten())


def test_other_state_types_are_refused():
    args = build_args(selective_scan_chunk.cases[0], torch.float32, torch.device("cpu"))
    with pytest.raises(ContractError, match="keeps its state in float32, bfloat16, float16"):
        selective_scan_chunk.launch(**args | {"arena": args["arena"].double()})


def test_arguments_that_do_not_agree_are_refused():
    args = build_args(selective_scan_chunk.cases[0], torch.float32, torch.device("cpu"))
    with pytest.raises(ContractError, match="multiple of G"):
        selective_scan_chunk.launch(**args | {"B": args["B"].repeat(1, 4, 1)})
