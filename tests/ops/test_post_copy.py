"""post_copy: kernel against reference, and whole trajectories of steps around block boundaries."""

import random

import pytest
import torch
from migration_rig import KERNEL, REFERENCE, TAPS, Rig

from midstream.errors import ContractError
from midstream.ops.advance import running_col
from midstream.ops.page_move import check_unordered
from midstream.ops.post_copy import post_copy
from midstream.ops.testing import build_args, check_kernel, check_registration, op_cases

CPU = torch.device("cpu")
ids = [case.id for case in post_copy.cases]
paths = pytest.mark.parametrize("path", [REFERENCE, KERNEL])
migrations = pytest.mark.parametrize("precopy", [True, False], ids=["precopy", "copyfree"])


@pytest.mark.parametrize(("spec", "case"), [*op_cases(post_copy)], ids=ids)
def test_kernel_equals_reference(spec, case, device):
    check_kernel(spec, case, torch.float32, device)


def test_is_a_well_formed_torch_operator():
    check_registration(post_copy, post_copy.cases[0])


def test_cases_hold_moves_and_rows_that_do_not_move():
    args = build_args(post_copy.cases[0], torch.float32, CPU)
    post_copy.reference(**args)
    live = int((args["row_slot"] >= 0).sum())
    assert 2 < int(args["num_moves"]) < live


# (tokens of the step, accepted or 0 for a chunk, pre-copy, read column, computed, post-copy, kept)
# a move is (temporal source, target) in columns
TRAJECTORIES = {
    "d4": [
        (60, 0, None, 0, 60, None, 1),
        (4, 4, None, 0, 64, (3, 0), 1),
        (4, 4, (0, 1), 1, 68, None, 4),
        (4, 4, None, 4, 72, None, 4),
    ],
    "d5": [
        (59, 0, None, 0, 59, None, 1),
        (4, 2, None, 0, 61, None, 2),
        (4, 2, (1, 1), 1, 63, None, 2),
        (4, 2, None, 2, 65, (1, 0), 2),
        (4, 2, None, 2, 67, None, 2),
    ],
    "d6": [
        (57, 0, None, 0, 57, None, 1),
        (4, 3, None, 0, 60, None, 3),
        (4, 3, None, 2, 63, None, 3),
        (4, 3, (2, 1), 1, 66, (1, 0), 3),
        (4, 3, None, 3, 69, None, 3),
    ],
    "d7-prompt61": [(61, 0, None, 0, 61, None, 1), (4, 3, (0, 1), 1, 64, (3, 0), 3)],
    "d7-prompt62": [(62, 0, None, 0, 62, None, 1), (4, 2, (0, 1), 1, 64, (2, 0), 2)],
    "d7-prompt64": [(64, 0, None, 0, 64, None, 1), (4, 4, (0, 1), 1, 68, None, 4)],
    "d8": [
        (128, 0, None, 1, 128, None, 1),
        (64, 0, (1, 2), 2, 192, None, 1),
        (8, 0, (2, 3), 3, 200, None, 1),
        (4, 1, None, 3, 201, None, 1),
    ],
    "d9": [
        (63, 0, None, 0, 63, None, 1),
        (1, 1, None, 0, 64, None, 1),
        (1, 1, (0, 1), 1, 65, None, 1),
        (1, 1, None, 1, 66, None, 1),
    ],
}


def history(tokens: int) -> list[float]:
    return [float(p) for p in range(tokens - TAPS + 1, tokens)]


@paths
@migrations
@pytest.mark.parametrize("name", TRAJECTORIES)
def test_d4_to_d9_trajectories_equal_the_reference_vectors(name, path, precopy, device):
    rig = Rig(path, device, block=64, drafts=0 if name == "d9" else 3, precopy=precopy)
    for length, accepted, pre, read_col, computed, post, kept in TRAJECTORIES[name]:
        moves, before = rig.advance({0: length}), int(rig.computed[0])
        assert [(m[0], m[2]) for m in moves.listed] == ([pre] if pre and precopy else [])
        assert int(rig.state_col[0] + rig.accepted[0]) - 1 == read_col
        if before and not precopy:  # the state is read where a move would have taken it from
            assert rig.read_page.tolist() == [1 + (pre[0] if pre else read_col)]
        rig.page_move()
        assert rig.forward(0, 0, length) == (before, history(before))
        rig.accept(0, length, accepted)
        moves = rig.post_copy()
        assert [(m[0], m[2]) for m in moves.listed] == ([post] if post else [])
        rig.page_move()
        assert (int(rig.computed[0]), int(rig.accepted[0])) == (computed, kept)


@migrations
@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_f1_every_step_reads_the_state_of_its_accepted_tokens(drafts, precopy, device):
    """Random accepted counts, two slots; the state at every boundary stays behind for the cache."""
    rng, block = random.Random(drafts), 8
    rig = Rig(REFERENCE, device, block=block, drafts=drafts, slots=2, cols=12, precopy=precopy)
    for step in range(20):
        lengths = {slot: 1 + drafts if step else rng.randint(2, 11) for slot in (1, 0)}
        rig.advance(lengths)
        rig.page_move()
        for row, (slot, length) in enumerate(lengths.items()):
            before = int(rig.computed[slot])
            assert rig.forward(row, slot, length) == (before, history(before))
            if step == 0:
                rig.computed[slot], rig.accepted[slot] = length, 1
            else:
                rig.accept(slot, length, rng.randint(1, 1 + drafts))
        rig.post_copy()
        rig.page_move()
        for slot in (0, 1):
            boundary = int(rig.computed[slot]) // block * block
            reached = boundary > int(rig.computed[slot]) - int(rig.accepted[slot])
            if boundary and reached and step:
                page = 1 + slot * rig.cols + boundary // block - 1
                assert rig.temporal[page, 0].item() == boundary
                assert rig.window(page)[: TAPS - 1] == history(boundary)


@paths
@migrations
@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
def test_f1_seven_tokens_to_beyond_the_boundary_of_eight(path, precopy, accepted, device):
    rig = Rig(path, device, block=8, drafts=3, precopy=precopy)
    for length, kept in ((7, 0), (4, accepted), (4, 4)):
        rig.advance({0: length})
        rig.page_move()
        before = int(rig.computed[0])
        assert rig.forward(0, 0, length) == (before, history(before))
        rig.accept(0, length, kept)
        rig.post_copy()
        rig.page_move()


@paths
def test_f2_a_length_that_lands_on_a_boundary_moves_forward_only(path, device):
    """Seven tokens and the first of four: the boundary state lies one draft behind, in order."""
    rig = Rig(path, device, block=8, drafts=3)
    rig.advance({0: 7})
    rig.forward(0, 0, 7)
    rig.accept(0, 7, 0)
    rig.advance({0: 4})  # columns 1 to 4 hold the states after 8, 9, 10 and 11 tokens
    rig.page_move()
    rig.forward(0, 0, 4)
    rig.accept(0, 4, 1)
    assert rig.post_copy().listed == [(1, 1, 0, 0)]
    rig.page_move()
    assert rig.temporal[1, 0].item() == 8
    assert rig.window(1)[: TAPS - 1] == history(8)
    assert rig.advance({0: 4}).listed == []  # the running column keeps its own copy
    assert rig.forward(0, 0, 4) == (8, history(8))


@paths
def test_f2_listed_moves_never_form_chains(path, device):
    gen = torch.Generator().manual_seed(5)
    rig = Rig(path, device, block=4, drafts=3, slots=40, cols=12)
    rig.accepted[:] = torch.randint(1, 5, (40,), generator=gen).to(device)
    before = torch.randint(1, 28, (40,), generator=gen).to(device)
    rig.computed[:] = before + rig.accepted
    rig.state_col[:] = rig.ints([running_col(n + 4, 4) for n in before.tolist()])
    rig.row_slot[:] = torch.randperm(40, generator=gen).to(device)
    rig.post_copy()
    count = int(rig.num_moves)
    assert count > 5
    check_unordered(rig.move_from[:, :count], rig.move_to[:count])


@paths
def test_without_drafts_nothing_ever_moves(path, device):
    rig = Rig(path, device, block=4)
    for _ in range(13):
        rig.advance({0: 1})
        rig.accept(0, 1, 1)
        assert rig.post_copy().listed == []


@paths
def test_f3_counts_belong_to_the_request_not_to_the_row(path, device):
    rig = Rig(path, device, block=64, drafts=3, slots=4)
    rig.computed[:] = 20
    rig.state_col[:] = 0
    rig.accepted[:] = rig.ints([4, 1, 3, 2])
    rig.advance({3: 4, 1: 4, 2: 4})  # request 0 ended; rows are compacted and reordered
    assert rig.src_off.tolist()[1:] == [0, 2, 1]
    first = [1 + slot * rig.cols for slot in (3, 1, 2)]
    assert rig.read_page.tolist()[:3] == [first[0] + 1, first[1], first[2] + 2]


@paths
def test_a2_a4_padding_and_rows_behind_the_step_change_no_record(path, device):
    """All slots have a state behind a boundary, but only one is in the step."""
    rig = Rig(path, device, block=8, drafts=3, slots=4)
    rig.computed[:], rig.state_col[:], rig.accepted[:] = 8, 0, 4
    rig.row_slot[:] = rig.ints([-1, 2, 0, 3])
    rig.rows = 2  # the other entries are left from a larger step
    assert rig.post_copy().listed == [(3, 0, 0, 3)]
    assert rig.accepted.tolist() == [4, 4, 1, 4]


@paths
def test_a1_null_columns_are_never_moved(path, device):
    rig = Rig(path, device, block=8, drafts=3, slots=2)
    rig.computed[:], rig.state_col[:], rig.accepted[:] = 10, 1, 4  # boundary 8 lies one draft back
    rig.state_table[0, 0] = 0  # no page to move to
    rig.state_table[1, 2] = 0  # no page to move from
    rig.row_slot[:] = rig.ints([0, 1])
    assert rig.post_copy().listed == []


def test_too_small_buffers_are_refused(device):
    args = build_args(post_copy.cases[0], torch.float32, device)
    with pytest.raises(ContractError, match=r"23 rows need .* got 23 and 5"):
        post_copy.launch(**(args | {"move_to": args["move_to"][:5]}))
