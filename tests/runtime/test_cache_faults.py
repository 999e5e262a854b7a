"""
Faults of prefix caches that others shipped, each as small as it can be; ids as in the list of cases.

Every free page holds NaN before every step, and the device checks what it reads: a wrong state is an error,
not a wrong token.  Faults of drafts are left out: a step has none here.
"""

import pytest
from hash_model import answer
from host_rig import Case, Rig

from midstream.runtime.request import Phase


def text(length: int, seed: int = 0) -> list[int]:
    return [3 + (i * i * 7 + i * (seed + 3) + 11 * seed) % 29 for i in range(length)]


def reused(rig: Rig, prompt: list[int], count: int = 2) -> int:
    request = rig.serve(prompt, count)
    assert request.lookup is not None
    return request.lookup.reused


@pytest.mark.parametrize("length", [1, 2])
def test_b1_a_first_chunk_as_short_as_a_decode_step_reads_no_state(length: int) -> None:
    rig = Rig(Case(max_rows=8, max_step_tokens=8, num_kv_pages=120))
    for seed in range(7):
        rig.add(text(3, seed), 30)
    for _ in range(8):
        rig.step()
    late = rig.add(text(9, seed=9)[:length], 6)  # its first token comes beside seven decoding rows
    rig.run()
    assert rig.done[late.request_id] == answer(text(9, seed=9)[:length], 6)


def test_b2_pages_of_an_old_owner_are_never_read() -> None:
    rig = Rig(Case(num_state_pages=6, num_kv_pages=17, max_step_tokens=6))
    requests = []
    for i in range(12):
        prompt = text(5 + 3 * (i % 4), seed=i % 3)
        requests.append((rig.add(prompt, 3 + i % 9), prompt))
        for _ in range(i % 4):
            rig.step()
        if i % 5 == 4:
            rig.scheduler.drop(requests.pop()[0])
    rig.run()
    for request, prompt in requests:
        assert rig.done[request.request_id] == answer(prompt, request.max_tokens)


def test_d1_a_fully_cached_prompt_leaves_a_token_to_compute() -> None:
    rig = Rig()
    rig.serve(text(16), 1)
    assert reused(rig, text(16)) == 12


def test_d2_d3_a_chunk_that_ends_inside_a_block_never_names_the_boundary() -> None:
    rig = Rig(Case(max_step_tokens=7))
    first, second = rig.add(text(12), 2), rig.add(text(20, seed=1), 9)
    rig.run()
    assert rig.done[first.request_id] == answer(text(12), 2)
    assert rig.done[second.request_id] == answer(text(20, seed=1), 9)
    assert (
        reused(rig, text(8) + text(9, seed=2)) == 8
    )  # the device checks that it is the state after 8
    assert reused(rig, text(20, seed=1) + answer(text(20, seed=1), 9)) >= 24  # crossed in decode


@pytest.mark.parametrize("waits", [True, False])
def test_d4_a_twin_that_arrives_at_the_same_time_never_reads_what_is_not_written(
    waits: bool,
) -> None:
    rig = Rig(Case(kv_block=1, state_block=1, num_kv_pages=100, num_state_pages=60, waits=waits))
    a, b = rig.add([3, 4, 5, 6], 3), rig.add([3, 4, 5, 7], 3)
    rig.run()
    assert rig.done == {0: answer([3, 4, 5, 6], 3), 1: answer([3, 4, 5, 7], 3)}
    assert a.lookup is not None and b.lookup is not None
    assert (a.lookup.reused, b.lookup.reused) == (0, 3 if waits else 0)


def test_d5_a_prompt_aborted_while_its_step_runs_leaves_nothing_to_its_retry() -> None:
    rig = Rig(Case(max_step_tokens=64))
    first = rig.add(text(40), 3)
    rig.step()
    rig.scheduler.drop(first)  # its step is in flight
    retry = rig.add(text(40), 3)
    plan = rig.schedule()
    assert plan is not None and [(c.begin, c.end) for c in plan.chunks] == [(0, 40)]
    assert retry.lookup is not None and retry.lookup.kv_match == 0
    rig.launch(plan)
    rig.run()
    assert rig.done == {1: answer(text(40), 3)}


def test_d6_a_request_that_resumed_inside_a_block_leaves_right_states() -> None:
    rig = Rig(Case(kv_block=4, state_block=16, max_step_tokens=64, retention=0))
    a, b = text(22), text(20) + text(7, seed=1)
    assert [reused(rig, prompt) for prompt in (a, b, b, a)] == [0, 20, 24, 20]


@pytest.mark.parametrize(("budget", "state_block"), [(10, 8), (64, 12), (5, 4)])
def test_d7_state_blocks_and_chunks_of_any_size_fit_together(budget: int, state_block: int) -> None:
    rig = Rig(Case(state_block=state_block, max_step_tokens=budget))
    for shared in (40, 37, 32, 24, 17, 9, 8, 3):
        rig.serve(text(shared) + text(6, seed=shared), 4)


@pytest.mark.parametrize("length", [7, 8, 9])
def test_d8_a_prompt_of_exactly_one_block_decodes_over_the_next_boundaries(length: int) -> None:
    rig = Rig()
    rig.serve(text(length), 20)


def test_d11_two_writers_of_a_shared_tail_own_it_each() -> None:
    rig = Rig(Case(kv_block=8, state_block=8, retention=0, num_kv_pages=40))
    rig.serve(text(10), 1)  # ends inside a block: both resume there and go on differently
    a, b = text(10) + text(5, seed=1), text(10) + text(9, seed=2)
    first, second = rig.add(a, 12), rig.add(b, 20)
    plan = rig.schedule()
    assert plan is not None and len(plan.kv_copies) == 2
    sources, targets = zip(*plan.kv_copies, strict=True)
    assert len(set(sources)) == 1 and len({*sources, *targets}) == 3
    rig.launch(plan)
    rig.run()
    assert rig.done[first.request_id] == answer(a, 12)
    assert rig.done[second.request_id] == answer(b, 20)


@pytest.mark.parametrize(("retention", "want"), [(0, [0, 12, 15]), ("auto", [0, 12, 15])])
def test_e3_prompts_that_share_much_reuse_it(retention: str | int, want: list[int]) -> None:
    rig = Rig(Case(kv_block=1, state_block=4, num_kv_pages=120, max_len=40, retention=retention))
    found = [reused(rig, text(15) + text(7, seed=i)) for i in range(1, 7)]
    assert found[2:] == [15] * 4  # from the third sighting on, whatever is kept
    assert (found[1] > 0) == (retention == "auto")
    again = Rig(Case(kv_block=8, state_block=8, retention=retention))
    assert [reused(again, text(16)) for _ in range(2)] == [0, 8]


def test_j3_a_budget_below_a_block_makes_progress_in_every_step() -> None:
    rig = Rig(Case(kv_block=16, state_block=16, max_step_tokens=3, exports=None, max_len=64))
    request = rig.add(text(50), 2)
    before = 0
    while before < 50:
        rig.step()
        computed = int(rig.live.computed[request.slot])
        assert before < computed <= before + 3
        before = computed
    rig.run()


@pytest.mark.parametrize("stage", range(12))
def test_l1_aborted_at_every_stage_with_all_checkpoints_held_nothing_leaks(stage: int) -> None:
    rig = Rig(Case(num_state_pages=7, max_step_tokens=6))
    rig.serve(text(17), 3)
    held = rig.state_pool.take(rig.state_pool.available - 3)
    request = rig.add(text(17) + text(9, seed=1), 9)
    for _ in range(stage):
        rig.step()
    if request.phase is not Phase.FINISHED:
        rig.scheduler.drop(request)
    rig.state_pool.release(held)
    rig.run()


@pytest.mark.parametrize("calls", range(6))
@pytest.mark.parametrize("pool", ["kv_pool", "state_pool"])
def test_l1_an_allocation_that_fails_with_any_error_leaks_nothing(
    calls: int, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(Case(max_step_tokens=24))
    rig.serve([*text(18), 9], 1)
    target, left = getattr(rig, pool), [calls]
    take = target.take

    def failing(count: int) -> list[int]:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("injected")
        return take(count)  # type: ignore[no-any-return]

    for seed in range(3):
        rig.add([*text(18), 9, *text(5, seed)], 9)
    monkeypatch.setattr(target, "take", failing)
    for _ in range(8):
        try:
            rig.step()
        except RuntimeError:
            for request in list(rig.scheduler.running):
                rig.scheduler.drop(request)
        rig.check_owners()
    monkeypatch.undo()
    rig.run()
