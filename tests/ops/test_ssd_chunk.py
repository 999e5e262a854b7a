"""ssd_chunk: kernel against float64 and a token loop; continuation, exports, packing."""

import pytest
import torch
from paged_scan import PagedScan, run_programs_backwards

from midstream.errors import ContractError
from midstream.ops.ssd_chunk import ssd_chunk
from midstream.ops.ssd_step import SsdShape, draw_ssd
from midstream.ops.testing import (
    build_args,
    check_kernel,
    check_reference,
    check_registration,
    op_cases,
)

ids = [case.id for case in ssd_chunk.cases]
HEADS = 2


def make_scan(call, device, step=(0.0, float("inf")), **changes):
    """140 tokens of a small layer."""
    shape = SsdShape(heads=HEADS, step=step)
    args = draw_ssd(torch.Generator().manual_seed(3), 140, torch.float32, shape)
    args |= changes
    del args["out"]
    args = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    tokens = {name: args.pop(name) for name in ("x", "dt", "B", "C")}
    return PagedScan(call, tokens, args, shape.elements)


def assert_close(have, want):
    torch.testing.assert_close(have, want, rtol=0.0, atol=2e-6 * want.abs().max().item())


@pytest.mark.parametrize(("spec", "case"), list(op_cases(ssd_chunk)), ids=ids)
def test_kernel_equals_float64_reference(spec, case, device):
    check_kernel(spec, case, torch.float32, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("spec", "case"), list(op_cases(ssd_chunk)), ids=ids)
def test_bf16_kernel_equals_float64_reference(spec, case, device):
    check_kernel(spec, case, torch.bfloat16, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("spec", "case"), list(op_cases(ssd_chunk)), ids=ids)
def test_cpu_implementation_equals_float64_reference(spec, case, dtype):
    check_reference(spec, case, dtype)


def test_is_a_well_formed_torch_operator():
    check_registration(ssd_chunk, ssd_chunk.cases[2])


def test_ten_tokens_and_five_equal_fifteen(device):
    scan = make_scan(ssd_chunk.launch, device)
    whole = scan.run([slice(0, 15)])
    first = scan.run([slice(0, 10)])
    second = scan.run([slice(10, 15)], states=[first.end()])
    assert_close(torch.cat([first.out[0], second.out[0]]), whole.out[0])
    assert_close(second.end(), whole.end())


def test_exports_inside_a_row_equal_the_state_of_a_run_that_ends_there(device):
    scan = make_scan(ssd_chunk.launch, device)
    ends = [1, 2, 37, 64, 66]
    cut = scan.run([slice(0, 70)], exports=[(0, at) for at in ends])
    alone = scan.run([slice(0, at) for at in ends])
    for row, at in enumerate(ends):
        assert_close(cut.states[0, at], alone.end(row))


def test_packed_rows_equal_single_runs_bit_for_bit(device):
    scan = make_scan(ssd_chunk.launch, device)
    rows = [slice(5, 6), slice(6, 9), slice(20, 84), slice(0, 65), slice(90, 97)]
    packed = scan.run(rows)
    for row, tokens in enumerate(rows):
        alone = scan.run([tokens])
        assert torch.equal(packed.out[row], alone.out[0])
        assert torch.equal(packed.end(row), alone.end())


def test_every_length_equals_a_token_loop(device):
    lengths = [*range(1, 10), 63, 64, 65, 127, 128, 129]
    rows = [slice(0, length) for length in lengths]
    have = make_scan(ssd_chunk.launch, device).run(rows)
    want = make_scan(ssd_chunk.reference, "cpu").run(rows)
    for row in range(len(rows)):
        assert_close(have.out[row].cpu(), want.out[row])
        assert_close(have.end(row).cpu(), want.end(row))


def test_a_row_may_end_in_the_page_that_it_read(device):
    scan = make_scan(ssd_chunk.launch, device)
    state = torch.randn(scan.size, generator=torch.Generator().manual_seed(1)).to(device)
    apart = scan.run([slice(0, 70)], states=[state])
    same = scan.run([slice(0, 70)], states=[state], in_place=True)
    assert torch.equal(apart.out[0], same.out[0])
    assert torch.equal(apart.end(), same.end())


def test_the_order_of_programs_does_not_matter(device, monkeypatch):
    scan = make_scan(ssd_chunk.launch, device)
    rows, exports = [slice(0, 40), slice(0, 9)], [(0, 4), (1, 2)]
    state = torch.ones(scan.size, device=device)
    forwards = scan.run(rows, exports, states=[state, state], in_place=True)
    run_programs_backwards(monkeypatch)
    backwards = scan.run(rows, exports, states=[state, state], in_place=True)
    for key, want in forwards.states.items():
        assert torch.equal(backwards.states[key], want)
    assert torch.equal(torch.cat(forwards.out), torch.cat(backwards.out))


def test_steps_below_the_clamp_are_raised_to_it(device):
    low = make_scan(ssd_chunk.launch, device, step=(0.01, 0.5), dt_bias=torch.full((HEADS,), -12.0))
    flat = make_scan(ssd_chunk.launch, device, step=(0.01, 0.01))
    assert_close(low.run([slice(0, 20)]).out[0], flat.run([slice(0, 20)]).out[0])


def test_a_decay_of_1e_12_per_token_stays_exact_and_finite(device):
    # softplus(27.6) * exp(0) = 27.6 = -log(1e-12)
    extreme = {"A_log": torch.zeros(HEADS), "dt_bias": torch.full((HEADS,), 27.6)}
    rows = [slice(0, 64)]
    have = make_scan(ssd_chunk.launch, device, **extreme).run(rows)
    want = make_scan(ssd_chunk.reference, "cpu", **extreme).run(rows)
    assert have.out[0].isfinite().all()
    assert_close(have.out[0].cpu(), want.out[0])
    assert_close(have.end().cpu(), want.end())


def test_weak_decays_after_strong_ones_lose_nothing(device):
    # the running sum reaches -2000 before a pair of tokens that hardly decays
    scan = make_scan(ssd_chunk.launch, device, A_log=torch.zeros(HEADS))
    scan.tokens["dt"][:40] = 50.0
    scan.tokens["dt"][40:] = -8.0
    want = make_scan(ssd_chunk.reference, "cpu", A_log=torch.zeros(HEADS))
    want.tokens["dt"].copy_(scan.tokens["dt"])
    rows = [slice(0, 60)]
    assert_close(scan.run(rows).out[0].cpu()[41:], want.run(rows).out[0][41:])


def test_arguments_that_do_not_agree_are_refused():
    args = build_args(ssd_chunk.cases[0], torch.float32, torch.device("cpu"))
    with pytest.raises(ContractError, match="multiple of G"):
        ssd_chunk.launch(**args | {"B": args["B"].repeat(1, 3, 1)})
