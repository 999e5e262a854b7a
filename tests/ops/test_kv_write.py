"""kv_write: bit-equal to its definition, and padding writes nothing."""

import pytest
import torch

from midstream.errors import ContractError
from midstream.ops import kv_write as module
from midstream.ops.kv_write import kv_write
from midstream.ops.paged_kv import kv_region
from midstream.ops.testing import build_args, check_kernel, check_registration, op_cases

CPU = torch.device("cpu")
ids = [case.id for case in kv_write.cases]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("spec", "case"), [*op_cases(kv_write)], ids=ids)
def test_kernel_equals_reference_bit_for_bit(spec, case, dtype, device):
    check_kernel(spec, case, dtype, device)


def test_is_a_well_formed_torch_operator():
    check_registration(kv_write, kv_write.cases[0])


@pytest.mark.parametrize("write", [kv_write.reference, kv_write.launch], ids=["cpu", "kernel"])
def test_padding_writes_nothing(write, device):
    args = build_args(kv_write.cases[0], torch.float32, device)
    args["kv_slot"].fill_(-1)
    before = args["arena"].clone()
    write(**args)
    assert torch.equal(args["arena"].view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("write", [kv_write.reference, kv_write.launch], ids=["cpu", "kernel"])
def test_takes_the_views_that_attention_makes(write, device):
    """transformers hands over (1, G, T, D), transposed to (T, G, D)."""
    args = build_args(kv_write.cases[0], torch.float32, device)
    tokens, kv_heads, width = args["key"].shape
    for name in ("key", "value"):
        heads_first = args[name].transpose(0, 1).contiguous()[None]
        args[name] = heads_first.squeeze(0).transpose(0, 1)
    write(**args)
    region = kv_region(args["arena"], args["offset"], args["kv_block"], kv_heads, width)
    for token, slot in enumerate(args["kv_slot"][:tokens].tolist()):
        if slot >= 0:
            page, place = divmod(slot, args["kv_block"])
            assert torch.equal(region[page, 0, place], args["key"][token])
            assert torch.equal(region[page, 1, place], args["value"][token])


@pytest.mark.gpu
@pytest.mark.parametrize("pitch", [(2**30, 16), (64, 2**30)], ids=["tokens", "heads"])
@pytest.mark.parametrize("name", ["key", "value"])
def test_c2_tokens_and_heads_beyond_2_31_elements_are_read(name, pitch, device):
    """After a wrap, element 3 * 2**30 would lie 2**30 before the first: the view starts there."""
    key, value = torch.randn(2, 4, 4, 16, device=device).half()
    slot = torch.tensor([7, 4, 5, 6], dtype=torch.int32, device=device)
    args = {"key": key, "value": value, "offset": torch.tensor([64], device=device)}
    args |= {"kv_slot": slot, "kv_block": 4}
    want = torch.zeros(2, 1024, dtype=torch.float16, device=device)
    got = want.clone()
    kv_write.launch(want, **args)
    wide = torch.zeros(2**32 + 2**10, dtype=torch.float16, device=device)
    args[name] = wide.as_strided(key.shape, (*pitch, 1), 2**30).copy_(args[name])
    kv_write.launch(got, **args)
    assert torch.equal(got, want) and want.count_nonzero() > 400


def test_c3_any_number_of_tokens_lies_on_the_first_grid_axis(monkeypatch):
    grids = []

    class Recorder:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr(module, "_kv_write_kernel", Recorder())
    args = build_args(kv_write.cases[0], torch.float32, CPU)
    for tokens in (100, 200_000):
        args["kv_slot"] = torch.full((tokens,), -1, dtype=torch.int32)
        args["key"] = args["value"] = torch.zeros(1, 2, 16).expand(tokens, 2, 16)
        kv_write.launch(**args)
    assert all(len(grid) == 1 and grid[0] < 2**31 for grid in grids) and len(grids) == 2


@pytest.mark.gpu
def test_c1_page_beyond_2_31_elements_is_written_and_its_alias_is_not(device):
    """After a wrap at 2**31 elements, page 2049 of 2**20 elements each would be page 1."""
    arena = torch.zeros(2050, 2**20, dtype=torch.bfloat16, device=device)
    key, value = torch.ones(2, 1, 2, 16, dtype=torch.bfloat16, device=device)
    slot = torch.tensor([2049 * 4 + 3], dtype=torch.int32, device=device)
    kv_write.launch(arena, key, value, torch.tensor([64], device=device), slot, 4)
    assert arena[1].count_nonzero() == 0
    assert arena[2049].count_nonzero() == 64


def test_refuses_pages_that_do_not_start_on_128_bytes():
    args = build_args(kv_write.cases[0], torch.float32, CPU)
    args["arena"] = args["arena"][:, :-1].contiguous()
    with pytest.raises(
        ContractError, match=r"kv_write: pages lie \d+ bytes apart, expected a multiple of 128"
    ):
        kv_write.launch(**args)
