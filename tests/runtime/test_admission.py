"""Who may start: nobody starves, nobody stops those behind it, and who waits costs nothing."""

import pytest
from hash_model import answer
from host_rig import Case, Rig

from midstream.runtime.request import Phase


def text(length: int, seed: int = 0) -> list[int]:
    return [3 + (i * i * 7 + i * (seed + 3) + 11 * seed) % 29 for i in range(length)]


def stream_of_small_requests(patience: int) -> tuple[int, int]:
    """Small requests arrive for ever; in which step the large one starts, and how many passed it by."""
    rig = Rig(Case(num_kv_pages=15, max_step_tokens=64, patience=patience))  # 56 tokens
    rig.add(text(20), 12)
    rig.step()
    large = rig.add(text(44, seed=1), 4)
    for step in range(400):
        if step % 3 == 0:
            rig.add(text(6, seed=step), 6)
        rig.step()
        if large.phase is not Phase.WAITING:
            passed = large.passed_by
            break
    else:
        return 400, large.passed_by
    rig.run()
    assert rig.done[large.request_id] == answer(text(44, seed=1), 4)
    return step, passed


def test_a_large_request_starts_although_small_ones_keep_coming() -> None:
    step, passed = stream_of_small_requests(patience=5)
    assert passed == 5 and step < 60


def test_without_patience_running_out_it_would_wait_for_ever() -> None:
    assert stream_of_small_requests(patience=10**9)[0] == 400


def test_small_requests_pass_a_large_one_meanwhile() -> None:
    rig = Rig(Case(num_kv_pages=15, max_step_tokens=64))
    rig.add(text(20), 12)
    large, small = rig.add(text(44, seed=1), 4), rig.add(text(6, seed=2), 2)
    rig.step()
    assert (large.phase, small.phase, large.passed_by) == (Phase.WAITING, Phase.DECODE, 1)
    rig.run()


def test_refused_requests_are_asked_again_when_room_comes_or_someone_joins() -> None:
    rig = Rig(Case(num_kv_pages=15, max_step_tokens=64))
    first = rig.add(text(30), 12)
    for _ in range(3):
        rig.step()
    blocked = rig.add(text(30, seed=1), 2)
    rig.step()
    assert rig.admission._refusal is not None
    small = rig.add(text(3, seed=2), 1)
    rig.step()
    assert small.phase is not Phase.WAITING and blocked.phase is Phase.WAITING
    while first.phase is not Phase.FINISHED:
        rig.step()
    for _ in range(2):
        rig.step()
    assert blocked.phase is not Phase.WAITING
    rig.run()


def test_a_request_scheduled_earlier_in_the_pass_may_lose_its_room_to_one_that_comes_before_it() -> (
    None
):
    rig = Rig(Case(num_kv_pages=10, max_step_tokens=64, retention=None))
    later = rig.add(text(9, seed=1), 20, priority=1)
    for _ in range(2):
        rig.step()
    first = rig.add(text(7), 25)
    for _ in range(30):
        rig.step()
        rig.check_owners()
    assert rig.scheduler.num_preemptions > 0
    rig.run()
    assert rig.done == {
        later.request_id: answer(text(9, seed=1), 20),
        first.request_id: answer(text(7), 25),
    }


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_l2_a_prompt_that_needs_nearly_all_pages_completes_beside_a_checkpoint(spare: int) -> None:
    rig = Rig(Case(num_kv_pages=17, max_len=64, num_state_pages=4, max_step_tokens=16))
    rig.serve(text(20, seed=1), 3)  # leaves checkpoints
    prompt = text(63 - 4 * spare)
    request = rig.add(prompt, 4)
    other = rig.add(text(20, seed=1), 2)
    rig.run()
    assert rig.done[request.request_id] == answer(prompt, request.max_tokens)
    assert rig.done[other.request_id] == answer(text(20, seed=1), 2)
    assert rig.scheduler.num_preemptions == 0


def test_a_hit_inside_a_block_that_leaves_no_page_for_its_copy_is_given_up() -> None:
    """The original is held while it is copied: in the smallest pool there is no page for both."""
    rig = Rig(Case(num_kv_pages=6, max_len=20, max_step_tokens=32))
    rig.serve(text(9), 2)
    prompt = [*text(9), answer(text(9), 1)[0], *text(9, seed=1)]
    request = rig.serve(prompt, 1)
    assert request.lookup is not None and request.lookup.reused == 8
