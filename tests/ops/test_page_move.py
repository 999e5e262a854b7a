"""page_move: kernel against reference, moves within a page, and addresses beyond 32 bits."""

import pytest
import torch
import triton
import triton.language as tl
from migration_rig import KERNEL, REFERENCE, Rig

from midstream.errors import ContractError
from midstream.ops.page_move import page_move
from midstream.ops.page_words import wide_offset
from midstream.ops.registry import NULL_PAGE
from midstream.ops.testing import build_args, check_kernel, check_registration, op_cases

CPU = torch.device("cpu")
ids = [case.id for case in page_move.cases]
paths = pytest.mark.parametrize("path", [REFERENCE, KERNEL])


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


@paths
@pytest.mark.parametrize(
    ("src_col", "off", "dst_col", "temporal", "window"),
    [
        (1, 2, 2, 4, [22, 23, 24, 25, 34, 35]),  # the last two rows are kept
        (0, 0, 1, 1, [10, 11, 12, 13, 14, 15]),
        (0, 3, 1, 4, [13, 14, 15, 23, 24, 25]),
        (-1, 0, 0, 1, [10, 11, 12, 13, 14, 15]),  # fresh: nothing moves
        (2, 1, 2, 3, [30, 31, 32, 33, 34, 35]),  # the column did not change: nothing moves
    ],
)
def test_d3_windows_shift_and_temporal_states_come_whole(
    path, src_col, off, dst_col, temporal, window, device
):
    """Page p holds p as its state and rows 10 p, 10 p + 1, ... as its window of six rows."""
    rig = Rig(path, device, block=4, drafts=3)
    pages = torch.arange(rig.temporal.shape[0], dtype=torch.float32, device=device)
    rig.temporal[:] = pages[:, None]
    rows = 10 * pages[:, None] + torch.arange(6, device=device)
    rig.conv[:] = rows.repeat_interleave(rig.conv.shape[1] // 6, 1)
    rig.state_col[0], rig.accepted[0] = src_col, off + 1
    rig.computed[0] = 4 * dst_col
    before = rig.temporal.clone(), rig.conv.clone()
    rig.advance({0: 1})
    rig.page_move()
    target = 1 + dst_col
    assert rig.temporal[target].unique().tolist() == [temporal]
    assert rig.window(target) == window
    for arena, old in zip((rig.temporal, rig.conv), before, strict=True):
        others = [page for page in range(len(old)) if page != target]
        assert torch.equal(arena[others], old[others])


def _moves(pairs, device, **more):
    """Arguments that move page a to page b for each pair (a, b), temporal and conv alike."""
    args = build_args(page_move.cases[0], torch.float32, device)
    source, target = torch.tensor(pairs, dtype=torch.int32, device=device).T.contiguous()
    listed = {"move_from": torch.stack([source, source]), "move_to": target}
    listed |= {"move_shift": torch.zeros_like(target)}
    listed |= {"num_moves": torch.tensor([len(pairs)], dtype=torch.int32, device=device)}
    return args | listed | more


@pytest.mark.parametrize(
    "pairs",
    [[(1, 2), (2, 3)], [(2, 3), (1, 2)], [(1, 2), (2, 1)], [(1, 2), (3, 2)], [(5, 5), (5, 6)]],
    ids=["chain", "chain-backwards", "cycle", "same-destination", "in-place-and-read"],
)
def test_f2_moves_whose_order_would_matter_are_refused(pairs):
    with pytest.raises(ContractError, match=r"page \d is in move .* moves have no order"):
        page_move(**_moves(pairs, CPU))


def test_f2_a_source_may_be_read_by_many_moves_and_a_page_may_move_to_itself(device):
    args = _moves([(1, 2), (1, 3), (4, 4), (1, 5)], device)
    page_move(**args)
    bits = args["temporal"].view(torch.int32)
    assert all(torch.equal(bits[page], bits[1]) for page in (2, 3, 5))


def test_a4_entries_behind_the_count_are_stale(device):
    """A page of a parked request stands behind the list, and page numbers of no page at all."""
    args = _moves([(1, 2), (3, 4), (2**30, -5)], device)
    args["num_moves"].fill_(1)
    before = args["temporal"].view(torch.int32).clone()
    page_move.launch(**args)
    changed = (args["temporal"].view(torch.int32) != before).any(1).nonzero().flatten()
    assert changed.tolist() == [2]


@pytest.mark.gpu
def test_many_turns_of_every_program_move_every_piece(device):
    gen = torch.Generator(device).manual_seed(2)
    temporal = torch.randint(0, 2**31, (12, 2**21), generator=gen, device=device, dtype=torch.int32)
    args = _moves([(1 + m, 6 + m) for m in range(5)], device) | {"temporal": temporal}
    for _ in range(50):
        temporal[6:11] = -1
        page_move.launch(**args)
        assert torch.equal(temporal[6:11], temporal[1:6])


def _shift_in_place(repeats: int, width: int, device: torch.device) -> None:
    """Window of 4 rows, 2 accepted, one page as source and target, against a copy through scratch."""
    rows = 4
    gen = torch.Generator().manual_seed(1)
    start = torch.randn(2, rows * width // 32 * 32 + 64, generator=gen).to(device)
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


@pytest.mark.parametrize("width", [1100, 1101], ids=["words", "channels"])
def test_f2_a_shift_within_one_page_equals_a_copy_through_scratch(width, device):
    _shift_in_place(3, width, device)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1100, 1101], ids=["words", "channels"])
def test_f2_a_shift_within_one_page_never_races(width, device):
    _shift_in_place(1000, width, device)


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
