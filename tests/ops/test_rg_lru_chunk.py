"""rg_lru_chunk: its declaration, continuation, exports, packing, lengths, resets, extreme decays."""

import pytest
import torch
from paged_scan import PagedScan, run_programs_backwards
from paged_step import START, PagedStep

from midstream.errors import ContractError
from midstream.ops.rg_lru_chunk import rg_lru_chunk
from midstream.ops.rg_lru_step import RgLruShape, draw_rg_lru, rg_lru_step
from midstream.ops.testing import build_args, op_suite

CHANNELS = 13
TOKENS = ("x", "input_gate", "recurrent_gate", "position")


def layer(device, first=1, **changes):
    """140 tokens of a small layer from position `first`: inputs per token, and all others."""
    args = draw_rg_lru(torch.Generator().manual_seed(3), 140, torch.float32, RgLruShape(CHANNELS))
    args |= {"position": torch.arange(first, first + 140, dtype=torch.int32)} | changes
    del args["out"]
    args = {name: value.to(device) for name, value in args.items()}
    return {name: args.pop(name) for name in TOKENS}, args


def make_scan(call, device, **changes):
    def with_whole_positions(position, **others):
        # PagedScan puts NaN behind the tokens; as a position that is 0, a reset
        call(position=position.nan_to_num(0).int(), **others)

    return PagedScan(with_whole_positions, *layer(device, **changes), CHANNELS)


def assert_close(have, want):
    torch.testing.assert_close(have, want, rtol=0.0, atol=2e-6 * want.abs().max().item())


@pytest.mark.parametrize("check", op_suite(rg_lru_chunk), ids=str)
def test_obeys_its_declaration(check):
    check.run()


def test_ten_tokens_and_five_equal_fifteen(device):
    scan = make_scan(rg_lru_chunk.launch, device)
    whole = scan.run([slice(0, 15)])
    first = scan.run([slice(0, 10)])
    second = scan.run([slice(10, 15)], states=[first.end()])
    assert_close(torch.cat([first.out[0], second.out[0]]), whole.out[0])
    assert_close(second.end(), whole.end())


def test_exports_inside_a_row_equal_the_state_of_a_run_that_ends_there(device):
    scan = make_scan(rg_lru_chunk.launch, device)
    ends = [1, 2, 37, 64, 66]
    cut = scan.run([slice(0, 70)], exports=[(0, at) for at in ends])
    alone = scan.run([slice(0, at) for at in ends])
    for row, at in enumerate(ends):
        assert_close(cut.states[0, at], alone.end(row))


def test_an_export_does_not_see_the_tokens_after_it(device):
    scan = make_scan(rg_lru_chunk.launch, device)
    want = scan.run([slice(0, 3)]).end()
    for name in TOKENS[:3]:
        scan.tokens[name][3:] = float("nan")
    assert torch.equal(scan.run([slice(0, 6)], exports=[(0, 3)]).states[0, 3], want)


def test_packed_rows_equal_single_runs_bit_for_bit(device):
    scan = make_scan(rg_lru_chunk.launch, device)
    rows = [slice(5, 6), slice(6, 9), slice(20, 84), slice(0, 65), slice(90, 97)]
    packed = scan.run(rows)
    for row, tokens in enumerate(rows):
        alone = scan.run([tokens])
        assert torch.equal(packed.out[row], alone.out[0])
        assert torch.equal(packed.end(row), alone.end())


@pytest.mark.parametrize("length", [*range(1, 10), 63, 64, 65, 129])
def test_every_length_before_nan_equals_a_token_loop(length, device):
    rows = [slice(0, length)]
    have = make_scan(rg_lru_chunk.launch, device).run(rows)
    want = make_scan(rg_lru_chunk.reference, "cpu").run(rows)
    assert_close(have.out[0].cpu(), want.out[0])
    assert_close(have.end().cpu(), want.end())


def test_prefill_then_decode_equals_decode_only(device):
    scan = make_scan(rg_lru_chunk.launch, device, first=0)
    prefix, total = 11, 14
    tokens, params = layer(device, first=0)
    steps = [
        PagedStep(
            rg_lru_step.launch,
            {name: value[at : at + 1] for name, value in tokens.items()},
            params,
            CHANNELS,
        )
        for at in range(total)
    ]
    only, after = steps[0].arena(live=[]), steps[0].arena(live=[])
    first = scan.run([slice(0, prefix)])
    after[1, START : START + CHANNELS] = first.end()
    want = [step.run(only, [1], [1]) for step in steps]  # from a page of NaN: position 0 resets
    have = [*first.out[0].split(1), *(step.run(after, [1], [1]) for step in steps[prefix:])]
    assert_close(torch.cat(have), torch.cat(want))
    assert_close(steps[0].region(after, 1), steps[0].region(only, 1))


def test_rows_may_share_the_page_that_they_read(device):
    args = build_args(rg_lru_chunk.cases[0], torch.float32, device)
    shared = args["read_page"][0].item()
    args["read_page"][1] = shared  # the first row no longer ends in place
    args["position"][:] = 5
    last = (args["chunk_row"] == 0).nonzero().max().item()
    args["chunk_page"][last] = args["arena"].shape[0] - 1
    other = (args["chunk_row"] == 1).nonzero().max().item()
    args["chunk_page"][other] = 3
    before = args["arena"].clone()
    rg_lru_chunk.launch(**args)
    assert torch.equal(args["arena"][shared].view(torch.int32), before[shared].view(torch.int32))
    assert args["out"][:10].isfinite().all()


def test_a_row_may_end_in_the_page_that_it_read(device):
    scan = make_scan(rg_lru_chunk.launch, device)
    state = torch.randn(scan.size, generator=torch.Generator().manual_seed(1)).to(device)
    apart = scan.run([slice(0, 70)], states=[state])
    same = scan.run([slice(0, 70)], states=[state], in_place=True)
    assert torch.equal(apart.out[0], same.out[0])
    assert torch.equal(apart.end(), same.end())


def test_the_order_of_programs_does_not_matter(device, monkeypatch):
    scan = make_scan(rg_lru_chunk.launch, device)
    rows, exports = [slice(0, 12), slice(0, 9)], [(0, 4), (1, 2)]
    state = torch.ones(scan.size, device=device)
    forwards = scan.run(rows, exports, states=[state, state], in_place=True)
    run_programs_backwards(monkeypatch)
    backwards = scan.run(rows, exports, states=[state, state], in_place=True)
    for key, want in forwards.states.items():
        assert torch.equal(backwards.states[key], want)
    assert torch.equal(torch.cat(forwards.out), torch.cat(backwards.out))


def test_a_sequence_that_begins_inside_a_row_forgets_what_came_before(device):
    scan = make_scan(rg_lru_chunk.launch, device)
    scan.tokens["position"][:] = torch.arange(140) % 5
    cut = scan.run([slice(0, 12)])
    alone = scan.run([slice(10, 12)])
    assert_close(cut.out[0][10:], alone.out[0])
    assert_close(cut.end(), alone.end())


def test_a_decay_of_1e_12_per_token_stays_exact_and_finite(device):
    # 8 * softplus(3.42) * sigmoid(30) = 27.6 = -log(1e-12)
    extreme = {
        "recurrent_param": torch.full((CHANNELS,), 3.42),
        "recurrent_gate": torch.full((140, CHANNELS), 30.0),
    }
    rows = [slice(0, 64)]
    have = make_scan(rg_lru_chunk.launch, device, **extreme).run(rows)
    want = make_scan(rg_lru_chunk.reference, "cpu", **extreme).run(rows)
    assert have.out[0].isfinite().all()
    assert_close(have.out[0].cpu(), want.out[0])
    assert_close(have.end().cpu(), want.end())


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_a_closed_gate_leaves_the_state_as_it_was_bit_for_bit(device):
    scan = make_scan(
        rg_lru_chunk.launch, device, recurrent_gate=torch.full((140, CHANNELS), -200.0)
    )
    state = torch.randn(scan.size, generator=torch.Generator().manual_seed(1)).to(device)
    assert torch.equal(scan.run([slice(0, 70)], states=[state]).end(), state)


def test_equals_the_unit_of_transformers(device):
    gemma = pytest.importorskip("transformers.models.recurrent_gemma.modeling_recurrent_gemma")
    config = gemma.RecurrentGemmaConfig(lru_width=12, num_attention_heads=3, hidden_size=12)
    unit = gemma.RecurrentGemmaRglru(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in unit.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    x, position = torch.randn(1, 70, 12, generator=generator), torch.arange(70)[None]
    with torch.no_grad():
        want = unit(x, position)[0]
        gates = [
            (torch.einsum("thi,hij->thj", x[0].unflatten(1, (3, 4)), weight) + bias).flatten(1)
            for weight, bias in (
                (unit.input_gate_weight, unit.input_gate_bias),
                (unit.recurrent_gate_weight, unit.recurrent_gate_bias),
            )
        ]
    tokens = {
        "x": x[0],
        "input_gate": gates[0],
        "recurrent_gate": gates[1],
        "position": position[0],
    }
    tokens = {name: value.to(device) for name, value in tokens.items()}
    scan = make_scan(rg_lru_chunk.launch, device)
    params = {"recurrent_param": unit.recurrent_param.detach().to(device)}
    have = PagedScan(scan.call, tokens, params, 12).run([slice(0, 70)])
    assert_close(have.out[0].cpu(), want)


def test_other_state_types_are_refused():
    args = build_args(rg_lru_chunk.cases[0], torch.float32, torch.device("cpu"))
    with pytest.raises(ContractError, match="keeps its state in float32, bfloat16, float16"):
        rg_lru_chunk.launch(**args | {"arena": args["arena"].double()})


def test_arguments_that_do_not_agree_are_refused():
    args = build_args(rg_lru_chunk.cases[0], torch.float32, torch.device("cpu"))
    with pytest.raises(ContractError, match="recurrent_gate is"):
        rg_lru_chunk.launch(**args | {"recurrent_gate": args["x"][:, :4]})
