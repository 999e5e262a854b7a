"""page_move: kernel against reference, moves within a page, and addresses beyond 32 bits."""

import pytest
import torch
import triton
import triton.language as tl

from midstream.errors import ContractError
from midstream.ops.page_move import page_move, wide_offset
from midstream.ops.registry import NULL_PAGE
from midstream.ops.testing import build_args, check_kernel, check_registration, op_cases

CPU = torch.device("cpu")
ids = [case.id for case in page_move.cases]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("spec", "case"), [*op_cases(page_move)], ids=ids)
def test_kernel_equals_reference_bit_for_bit(spec, case, dtype, device):
    check_kernel(spec, case, dtype, device)


def test_temporal_and_conv_pages_may_differ_in_dtype(device):
    case = page_move.cases[0]
    wide = build_args(case, torch.float32, device)
    narrow = build_args(case, torch.bfloat16, device)
    args = narrow | {"temporal": wide["temporal"]}
    want = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    page_move.reference(**want)
    page_move.launch(**args)
    for name in ("temporal", "conv"):
        assert torch.equal(args[name].view(torch.int16), want[name].view(torch.int16))


def test_is_a_well_formed_torch_operator():
    check_registration(page_move, page_move.cases[0])


@pytest.mark.parametrize(
    "run", [page_move.launch, page_move.reference], ids=["kernel", "reference"]
)
def test_a1_only_target_pages_change(run, device):
    args = build_args(page_move.cases[0], torch.float32, device)
    before = args["temporal"].view(torch.int32).clone(), args["conv"].view(torch.int32).clone()
    run(**args)
    targets = args["move_to"][: int(args["num_moves"])].tolist()
    others = [page for page in range(before[0].shape[0]) if page not in targets]
    assert NULL_PAGE in others
    assert torch.equal(args["temporal"].view(torch.int32)[others], before[0][others])
    assert torch.equal(args["conv"].view(torch.int32)[others], before[1][others])


def _shift_in_place(repeats: int, device: torch.device) -> None:
    """Window of 4 rows, 2 accepted, one page as source and target, against a copy through scratch."""
    rows, width = 4, 1100
    gen = torch.Generator().manual_seed(1)
    start = torch.randn(2, rows * width + 16, generator=gen).to(device)
    ints = {"dtype": torch.int32, "device": device}
    temporal = torch.zeros(2, 32, device=device)
    page = torch.tensor([1], **ints)
    for _ in range(repeats):
        conv = start.clone()
        scratch = conv[1, : rows * width].view(rows, width).clone()
        page_move.launch(
            temporal, conv, torch.tensor([[1], [1]], **ints), page, page, page,
            torch.tensor([0], dtype=torch.int64, device=device), torch.tensor([width], **ints),
            rows,
        )  # fmt: skip
        have = conv[1, : rows * width].view(rows, width)
        assert torch.equal(have[: rows - 1], scratch[1:])
        assert torch.equal(have[rows - 1], scratch[rows - 1])
        assert torch.equal(conv[:, rows * width :], start[:, rows * width :])


def test_f2_a_shift_within_one_page_equals_a_copy_through_scratch(device):
    _shift_in_place(10, device)


@pytest.mark.gpu
def test_f2_a_shift_within_one_page_never_races(device):
    _shift_in_place(1000, device)


@triton.jit
def _distance_kernel(out_ptr, page_ptr, stride):
    tl.store(out_ptr, wide_offset(tl.load(page_ptr), stride))


def test_c1_distances_beyond_32_bits_do_not_wrap(device):
    page = torch.tensor([513], dtype=torch.int32, device=device)
    out = torch.zeros(1, dtype=torch.int64, device=device)
    stride = 44_040_192 // 8  # words of a large model's page: 513 of them pass 2**31
    _distance_kernel[(1,)](out, page, stride)
    assert out.tolist() == [513 * stride]
    assert 513 * stride > 2**31


@pytest.mark.gpu
def test_c1_the_highest_page_of_a_large_arena_moves_to_itself_only(device):
    elements = 2**24  # of bf16, 32 MiB a page: page 150 starts beyond 2**31 elements
    temporal = torch.zeros(151, elements, dtype=torch.bfloat16, device=device)
    temporal[1] = 1
    ints = {"dtype": torch.int32, "device": device}
    page_move.launch(
        temporal, torch.zeros(151, 64, device=device), torch.tensor([[1], [1]], **ints),
        torch.tensor([150], **ints), torch.tensor([0], **ints), torch.tensor([1], **ints),
        torch.tensor([0], dtype=torch.int64, device=device), torch.tensor([16], **ints), 4,
    )  # fmt: skip
    sums = temporal.sum(1, dtype=torch.float32).tolist()
    assert [page for page, total in enumerate(sums) if total] == [1, 150]


def test_pages_that_128_bit_accesses_cannot_reach_are_refused(device):
    args = build_args(page_move.cases[0], torch.float32, device)
    odd = torch.zeros(12, 1234 + 1, device=device)
    with pytest.raises(ContractError, match=r"pages of temporal must be .* got 4940 bytes"):
        page_move.launch(**(args | {"temporal": odd}))
