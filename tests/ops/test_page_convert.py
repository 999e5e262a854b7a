"""page_convert: bit-equal to torch's rounding, within the declared error, and only listed pages change."""

import pytest
import torch

from midstream.errors import ContractError
from midstream.ops.page_convert import page_convert
from midstream.ops.testing import build_args, check_kernel, check_registration, op_cases

ids = [case.id for case in page_convert.cases]
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # relative, as the docstring declares
runs = pytest.mark.parametrize(
    "run", [page_convert.launch, page_convert.reference], ids=["kernel", "reference"]
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("spec", "case"), [*op_cases(page_convert)], ids=ids)
def test_kernel_equals_reference_bit_for_bit(spec, case, dtype, device):
    check_kernel(spec, case, dtype, device)


def test_is_a_well_formed_torch_operator():
    check_registration(page_convert, page_convert.cases[0])


def convert(run, values, dtype):
    """One page of `values` as a page of `dtype`."""
    device = values.device
    out = torch.zeros(2, values.numel(), dtype=dtype, device=device)
    conv = torch.zeros(2, 64, device=device)
    one = torch.ones(1, dtype=torch.int32, device=device)
    run(out, conv.clone(), torch.stack([values, values]), conv, one, one, one)
    return out[1]


def spread(device):
    """Normal numbers of all sizes that float16 has too, and the hardest ones to round."""
    gen = torch.Generator().manual_seed(7)
    sizes = 2.0 ** torch.randint(-13, 14, (4096,), generator=gen)
    ties = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, -(1 + 2.0**-8)])
    values = torch.cat([torch.randn(4096, generator=gen).clamp(-3, 3) * sizes, ties.repeat(16)])
    return values[values.abs() > 2.0**-13][:3072].to(device)


@runs
@pytest.mark.parametrize("dtype", HALF_ULP)
def test_k1_a_checkpoint_in_fewer_bits_is_off_by_half_a_unit_in_the_last_place_at_most(
    run, dtype, device
):
    values = torch.cat([spread(device), torch.full((64,), 1 + 2.0**-8, device=device)])
    back = convert(run, convert(run, values, dtype), torch.float32)
    error = ((back - values).abs() / values.abs()).max().item()
    assert HALF_ULP[dtype] / 2 < error <= HALF_ULP[dtype]


@runs
@pytest.mark.parametrize("dtype", HALF_ULP)
def test_k1_a_state_that_was_narrow_comes_back_bit_for_bit(run, dtype, device):
    narrow = spread(device).to(dtype)
    back = convert(run, convert(run, narrow, torch.float32), dtype)
    assert torch.equal(back.view(torch.int16), narrow.view(torch.int16))


@runs
def test_infinities_zeros_and_nans_stay_what_they_are(run, device):
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([float("inf"), -float("inf"), 0.0, -0.0, largest, 1e-40], device=device)
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, 0x7FC00000], dtype=torch.int32, device=device)
    padding = torch.zeros(54, device=device)
    got = convert(run, torch.cat([values, bits.view(torch.float32), padding]), torch.bfloat16)
    want = values.to(torch.bfloat16)
    assert torch.equal(got[:6].view(torch.int16), want.view(torch.int16))
    assert got[6:10].isnan().all()


@runs
def test_a1_only_listed_pages_of_the_other_pool_change(run, device):
    args = build_args(page_convert.cases[0], torch.float32, device)
    before = {name: value.clone() for name, value in args.items()}
    run(**args)
    others = [0, 3, 4, 5, 7]
    for name in ("to_temporal", "to_conv"):
        bits = args[name].view(torch.int16)[others], before[name].view(torch.int16)[others]
        assert torch.equal(*bits)
    for name in ("temporal", "conv"):
        assert torch.equal(args[name], before[name])


def test_pools_of_different_models_are_refused(device):
    args = build_args(page_convert.cases[0], torch.float32, device)
    with pytest.raises(ContractError, match="got 3136 and 64 temporal"):
        page_convert.launch(**args | {"to_temporal": args["to_temporal"][:, :64]})
    with pytest.raises(ContractError, match=r"windows are copied, got torch\.float32"):
        page_convert.launch(**args | {"to_conv": args["to_conv"].half()})
