"""paged_attention_decode: kernel against float64; padding, strides, splits and what may be read."""

import pytest
import torch

from midstream.errors import ContractError
from midstream.ops import paged_attention_decode as module
from midstream.ops.paged_attention_decode import num_splits, paged_attention_decode
from midstream.ops.paged_kv import kv_region
from midstream.ops.testing import (
    build_args,
    check_kernel,
    check_reference,
    check_registration,
    op_cases,
)

CPU = torch.device("cpu")
CASES = {case.id: case for case in paged_attention_decode.cases}
BASE = paged_attention_decode.cases[0]
PATHS = [paged_attention_decode.reference, paged_attention_decode.launch]
path_ids = ["cpu", "kernel"]


@pytest.mark.parametrize(("spec", "case"), [*op_cases(paged_attention_decode)], ids=[*CASES])
def test_kernel_equals_float64_reference(spec, case, device):
    check_kernel(spec, case, torch.float32, device)


@pytest.mark.gpu  # the interpreter has no bf16 dot
@pytest.mark.parametrize(("spec", "case"), [*op_cases(paged_attention_decode)], ids=[*CASES])
def test_bf16_kernel_equals_float64_reference(spec, case, device):
    check_kernel(spec, case, torch.bfloat16, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("spec", "case"), [*op_cases(paged_attention_decode)], ids=[*CASES])
def test_cpu_implementation_equals_float64_reference(spec, case, dtype):
    check_reference(spec, case, dtype)


def test_is_a_well_formed_torch_operator():
    check_registration(paged_attention_decode, BASE)


@pytest.mark.parametrize("attend", PATHS, ids=path_ids)
def test_equals_torch_attention_over_the_gathered_sequence(attend, device):
    args = build_args(BASE, torch.float32, device)
    attend(**args)
    kv_heads, width = args["kv_heads"], args["q"].shape[2]
    region = kv_region(args["arena"], args["offset"], args["kv_block"], kv_heads, width)
    for row, slot in enumerate(args["row_slot"].tolist()):
        if slot < 0:
            continue
        length = int(args["position"][row]) + 1
        columns = -(-length // args["kv_block"])
        pages = region[args["kv_table"][slot, :columns].long()].transpose(0, 1)
        key, value = pages.flatten(1, 2)[:, :length].transpose(1, 2)[:, None]
        want = torch.nn.functional.scaled_dot_product_attention(
            args["q"][row][None, :, None], key, value, scale=args["scale"], enable_gqa=True
        )
        torch.testing.assert_close(args["out"][row], want[0, :, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attend", PATHS, ids=path_ids)
@pytest.mark.parametrize("split", [False, True], ids=["single", "split"])
def test_padded_rows_are_zero_though_every_page_is_nan(attend, split, monkeypatch, device):
    monkeypatch.setattr(module, "num_splits", lambda *shapes, **more: 4 if split else 1)
    args = build_args(BASE, torch.float32, device)
    args["row_slot"].fill_(-1)
    args["arena"].fill_(torch.nan)
    attend(**args)
    assert torch.equal(args["out"], torch.zeros_like(args["out"]))


@pytest.mark.parametrize("attend", PATHS, ids=path_ids)
def test_columns_beyond_the_position_are_not_followed(attend, device):
    """A page id far outside the pool faults, or reads NaN, as soon as it is followed."""
    args = build_args(BASE, torch.float32, device)
    attend(**args)
    want = args["out"].clone()
    for row, slot in enumerate(args["row_slot"].tolist()):
        if slot >= 0:
            args["kv_table"][slot, int(args["position"][row]) // args["kv_block"] + 1 :] = 2**30
    attend(**args)
    assert torch.equal(args["out"], want)


def test_any_number_of_splits_gives_the_same_result(monkeypatch, device):
    args = build_args(CASES["R3-H4-G2-D16-block4-split"], torch.float32, device)
    results = []
    for splits in (1, 2, 8):
        monkeypatch.setattr(module, "num_splits", lambda *shapes, n=splits: n)
        paged_attention_decode.launch(**args)
        results.append(args["out"].clone())
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[2], results[0], rtol=1e-5, atol=1e-6)


def test_number_of_splits_fills_the_device_and_stays_useful():
    assert num_splits(1, kv_heads=8, capacity=131072, processors=132) == 64
    assert num_splits(256, kv_heads=8, capacity=131072, processors=132) == 1
    assert num_splits(1, kv_heads=8, capacity=16, processors=132) == 1
    assert num_splits(0, kv_heads=8, capacity=16, processors=132) == 1


@pytest.mark.parametrize("attend", PATHS, ids=path_ids)
def test_output_may_be_a_slice_of_a_wider_buffer(attend, device):
    args = build_args(BASE, torch.float32, device)
    attend(**args)
    want = args["out"].clone()
    wide = torch.full((*want.shape[:2], want.shape[2] + 3), 7.0, device=device)
    args["out"] = wide[:, :, : want.shape[2]]
    attend(**args)
    assert torch.equal(args["out"], want)
    assert (wide[:, :, want.shape[2] :] == 7).all()


@pytest.mark.gpu
def test_page_beyond_2_31_elements_equals_a_low_page(device):
    """After a wrap at 2**31 elements, page 2049 of 2**20 elements each would be page 1."""
    args = build_args(BASE, torch.bfloat16, device)
    small, page_size = args["arena"], args["arena"].shape[1]
    paged_attention_decode.launch(**args)
    want = args["out"].clone()
    args["arena"] = torch.full((2050, 2**20), torch.nan, dtype=torch.bfloat16, device=device)
    top = 2050 - len(small)
    args["arena"][top:, :page_size] = small
    args["kv_table"] += top
    paged_attention_decode.launch(**args)
    assert torch.equal(args["out"], want)


def test_refuses_heads_that_cannot_be_shared_evenly():
    args = build_args(BASE, torch.float32, CPU)
    with pytest.raises(ContractError, match="4 query heads and 3 KV heads"):
        paged_attention_decode.launch(**{**args, "kv_heads": 3})
