"""advance: kernel against reference, reference vectors, and who may read which page."""

import pytest
import torch
from migration_rig import KERNEL, REFERENCE, Rig

from midstream.errors import ContractError
from midstream.ops.advance import LAST_TOKEN, advance, running_col
from midstream.ops.page_move import check_unordered
from midstream.ops.testing import build_args, check_kernel, check_registration, op_cases

CPU = torch.device("cpu")
ids = [case.id for case in advance.cases]
paths = pytest.mark.parametrize("path", [REFERENCE, KERNEL])


@pytest.mark.parametrize(("spec", "case"), [*op_cases(advance)], ids=ids)
def test_kernel_equals_reference(spec, case, device):
    check_kernel(spec, case, torch.float32, device)


def test_is_a_well_formed_torch_operator():
    check_registration(advance, advance.cases[0])


def test_cases_hold_moves_and_rows_that_do_not_move():
    args = build_args(advance.cases[0], torch.float32, CPU)
    advance.reference(**args)
    live = int((args["row_slot"] >= 0).sum())
    assert 2 < int(args["num_moves"]) < live


@paths
def test_d1_columns_and_offsets_follow_the_accepted_counts(path, device):
    rig = Rig(path, device, block=4, slots=4)
    rig.state_col[:] = rig.ints([-1, 1, 0, 0])
    rig.computed[:] = rig.ints([0, 5, 8, 4])
    rig.accepted[:] = rig.ints([1, 1, 3, 2])
    rig.advance({0: 6, 1: 1, 2: 1, 3: 4})
    assert rig.src_col.tolist() == [-1, 1, 0, 0]
    assert rig.src_off.tolist() == [0, 0, 2, 1]
    assert rig.state_col.tolist() == [1, 1, 2, 1]
    assert rig.accepted.tolist() == [1, 1, 1, 1]


def test_d2_running_column_of_an_admitted_request():
    assert [running_col(n, 560) for n in (0, 560, 561, 1120)] == [-1, 0, 1, 1]


@paths
def test_d3_moves_name_temporal_page_conv_page_and_shift(path, device):
    rig = Rig(path, device, block=4, slots=5)
    rig.state_col[:] = rig.ints([1, 0, 0, -1, 2])
    rig.accepted[:] = rig.ints([3, 1, 4, 1, 2])
    rig.computed[:] = rig.ints([8, 4, 4, 0, 9])
    moves = rig.advance({0: 1, 1: 1, 2: 1, 3: 1, 4: 1})
    assert moves.listed == [(3, 1, 2, 2), (0, 0, 1, 0), (3, 0, 1, 3)]


@paths
@pytest.mark.parametrize("group", [100, 500])
def test_d10_a_row_runs_in_the_column_of_its_length_and_drafts_in_those_behind_it(
    path, group, device
):
    drafts, lengths = 2, [1, 64, 65, 0, 200]
    rig = Rig(path, device, block=64, drafts=drafts, slots=5, rows=6)
    rig.state_table[:] = group + 8 * rig.ints(range(5))[:, None] + rig.ints(range(8))
    rig.rows = 5  # of the buffers' six
    rig.advance(dict(enumerate(lengths)))
    pages = [  # of a row and of its drafts; a row without tokens has no page
        rig.state_table[slot, col : col + 1 + drafts].tolist() if col >= 0 else [0]
        for slot, col in enumerate(rig.state_col.tolist())
    ]
    first = {0: 100, 1: 108, 2: 117, 4: 135}
    for row, page in first.items():
        assert pages[row] == [page - 100 + group + j for j in range(1 + drafts)]
    assert rig.write_page.tolist() == [*(p[0] for p in pages), -7]  # the last row is untouched
    assert pages[3] == [0]


@paths
@pytest.mark.parametrize(("tokens", "cols"), [(5, 4), (64, 4), (65, 5)])
def test_d11_a_warm_up_request_needs_its_running_column_and_one_per_draft(
    path, tokens, cols, device
):
    drafts = 3
    assert running_col(tokens, 64) + 1 + drafts == cols
    rig = Rig(path, device, block=64, drafts=drafts, cols=cols)
    rig.advance({0: tokens})
    assert int(rig.state_col[0]) + drafts == cols - 1  # the last draft has the last page
    assert rig.write_page.tolist() == [cols - drafts]


def test_d11_pages_of_other_kinds_hold_the_look_ahead_as_well():
    lookahead, max_len = 3, 4096
    seen = {n: min(n + lookahead, max_len) for n in (5, 15, 20)}
    assert running_col(seen[5], max_len) + 1 + 3 == 4  # one running page and three drafts
    assert [running_col(n, 16) + 1 for n in seen.values()] == [1, 2, 2]  # KV


@paths
def test_d5_a_window_moves_even_if_the_temporal_state_is_in_place(path, device):
    rig = Rig(path, device, block=64, drafts=3)
    rig.state_col[0], rig.computed[0], rig.accepted[0] = 0, 61, 2
    assert rig.advance({0: 4}).listed == [(1, 0, 1, 1)]


@paths
@pytest.mark.parametrize("precopy", [True, False])
def test_a1_a_null_column_is_no_history_and_never_moves(path, precopy, device):
    rig = Rig(path, device, block=4, slots=3, precopy=precopy)
    rig.state_table[0] = 0  # every column
    rig.state_table[1, 0] = 0  # the source column
    rig.state_table[2, 1] = 0  # the target column
    rig.state_col[:] = 0
    rig.computed[:] = 4
    assert rig.advance({0: 1, 1: 1, 2: 1}).listed == []
    assert rig.read_page.tolist()[:2] == [0, 0]
    assert rig.write_page.tolist() == [0, 1 + rig.cols + 1, 0]


@paths
def test_a_fresh_row_without_tokens_stays_fresh(path, device):
    rig = Rig(path, device, block=4)
    rig.advance({0: 0})
    assert (rig.state_col.tolist(), rig.write_page.tolist()) == ([-1], [0])
    assert rig.token_id[0] == 5


@paths
def test_a2_padding_rows_touch_neither_the_first_nor_the_last_slot(path, device):
    rig = Rig(path, device, block=4, slots=3, rows=4)
    rig.computed[:] = 4
    rig.state_col[:] = 0
    fields = ("state_col", "src_col", "src_off", "accepted", "resume_page", "token_id")
    before = {name: getattr(rig, name).clone() for name in fields}
    rig.token_id.fill_(LAST_TOKEN)
    rig.advance({})
    rig.token_id.copy_(before["token_id"])
    assert all(torch.equal(getattr(rig, name), value) for name, value in before.items())
    assert rig.read_page.tolist() == rig.write_page.tolist() == [0, 0, 0, 0]
    assert int(rig.num_moves) == 0


@paths
def test_a5_rows_and_slots_are_different_numbers(path, device):
    rig = Rig(path, device, block=4, slots=8, rows=3)
    rig.computed[2], rig.state_col[2] = 4, 0
    rig.computed[7], rig.state_col[7] = 8, 1
    moves = rig.advance({7: 1, 2: 1}, padding=(1,))
    assert moves.listed == [(1, 1, 2, 0), (0, 0, 1, 0)]
    assert rig.write_page.tolist() == [1 + 7 * rig.cols + 2, 0, 1 + 2 * rig.cols + 1]
    assert rig.state_col.tolist() == [-1, -1, 1, -1, -1, -1, -1, 2]


@paths
@pytest.mark.parametrize("precopy", [True, False])
def test_b1_one_token_of_a_fresh_request_reads_no_page(path, precopy, device):
    rig = Rig(path, device, block=4, precopy=precopy)
    assert rig.advance({0: 1}).listed == []
    assert (rig.read_page.tolist(), rig.write_page.tolist()) == ([0], [1])


@paths
@pytest.mark.parametrize("resumed", [True, False])
def test_b3_a_request_does_not_inherit_the_accepted_count_of_its_slot(path, resumed, device):
    rig = Rig(path, device, block=8, drafts=3)
    rig.accepted[0] = 4  # left by the slot's last request
    checkpoint = 1 + rig.cols + 2
    if resumed:
        rig.computed[0], rig.state_col[0], rig.resume_page[0] = 10, 1, checkpoint
    rig.advance({0: 4})
    assert (rig.src_off.tolist(), rig.accepted.tolist()) == ([0], [1])
    assert rig.move_shift[: int(rig.num_moves)].tolist() == [0] * resumed


@paths
@pytest.mark.parametrize("computed", [16, 19])
def test_a_resumed_row_takes_the_checkpoint_once_also_inside_a_block(path, computed, device):
    rig = Rig(path, device, block=8)
    checkpoint = 1 + rig.cols + 2
    rig.computed[0], rig.state_col[0] = computed, running_col(computed, 8)
    rig.resume_page[0] = checkpoint
    rig.advance({0: 1})
    assert rig.move_from[:, 0].tolist() == [checkpoint, checkpoint]
    assert (int(rig.num_moves), int(rig.resume_page[0])) == (1, 0)
    assert rig.read_page.tolist() == rig.write_page.tolist() == rig.move_to.tolist() == [3]
    rig.accept(0, 1, 1)
    assert rig.advance({0: 1}).listed == []


@paths
def test_copyfree_reads_the_source_page_and_lists_nothing(path, device):
    rig = Rig(path, device, block=8, slots=2, precopy=False)
    rig.computed[:] = rig.ints([8, 11])
    rig.state_col[:] = rig.ints([0, 1])
    assert rig.advance({0: 1, 1: 1}).listed == []
    assert rig.read_page.tolist() == [1, 1 + rig.cols + 1]
    assert rig.write_page.tolist() == [2, 1 + rig.cols + 1]


@paths
def test_last_token_replaces_the_placeholder_only(path, device):
    rig = Rig(path, device, block=8, slots=2)
    rig.last_token[:] = rig.ints([70, 71])
    rig.token_id[0], rig.token_id[3] = LAST_TOKEN, 9
    rig.advance({1: 3, 0: 1})
    assert rig.token_id[:5].tolist() == [71, 5, 5, 9, 5]


@paths
def test_f2_listed_moves_never_form_chains(path, device):
    gen = torch.Generator().manual_seed(3)
    rig = Rig(path, device, block=4, drafts=3, slots=40, cols=12)
    rig.computed[:] = torch.randint(1, 28, (40,), generator=gen).to(device)
    rig.state_col[:] = rig.ints([running_col(n, 4) for n in rig.computed.tolist()])
    rig.accepted[:] = torch.randint(1, 5, (40,), generator=gen).to(device)
    rig.resume_page[::4] = 1 + 40 * rig.cols + 2  # one checkpoint for many
    rig.advance(dict.fromkeys(torch.randperm(40, generator=gen).tolist(), 4))
    count = int(rig.num_moves)
    assert count > 15
    check_unordered(rig.move_from[:, :count], rig.move_to[:count])


def test_too_small_buffers_are_refused(device):
    args = build_args(advance.cases[0], torch.float32, device)
    with pytest.raises(ContractError, match=r"23 rows need .* got 3, 26 and 24"):
        advance.launch(**(args | {"row_slot": args["row_slot"][:3]}))
