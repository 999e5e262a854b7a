"""Who computes what in which step, who owns which page, and when others may see it.

Blocks here: 4 tokens of a KV page, 8 between checkpoints.
"""

import pytest
from hash_model import answer
from host_rig import Case, Rig
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from midstream.runtime.plan import StepPlan
from midstream.runtime.request import Phase, Request


def text(length: int, seed: int = 0) -> list[int]:
    return [3 + (i * i + 5 * seed) % 29 for i in range(length)]


def planned(rig: Rig) -> StepPlan:
    plan = rig.schedule()
    assert plan is not None
    return plan


# -- chunks and checkpoints -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "exports", "published"),
    [
        (1, [], None),
        (3, [], None),  # no full KV block
        (4, [], 4),  # one block: the running page stays behind, in the middle of a state block
        (5, [4], None),
        (8, [4], 8),
        (9, [8], None),
        (11, [8], None),
        (12, [8], 12),
        (16, [8, 12], 16),
        (21, [8, 16, 20], None),
        (24, [8, 16, 20], 24),
    ],
)
def test_a_prompt_leaves_checkpoints_on_boundaries_and_at_its_last_grid_positions(
    length: int, exports: list[int], published: int | None
) -> None:
    rig = Rig(Case(max_step_tokens=64))
    request = rig.add(text(length), 3)
    (chunk,) = (plan := planned(rig)).chunks
    assert (chunk.begin, chunk.end, chunk.samples) == (0, length, True)
    assert chunk.export_position == exports
    assert len({*chunk.export_page, rig.running_page(request)} - {0}) == len(exports) + 1
    positions = [item.position for item in plan.publications]
    assert positions == ([] if published is None else [published])
    assert all(item.page == rig.running_page(request) for item in plan.publications)
    assert rig.live.relocate[request.slot] == (published is not None and published % 8 != 0)
    rig.launch(plan)
    rig.run()
    for position in range(4, length + 1, 4):
        assert rig.has_state(text(length), position) == (position in [*exports, published])


@pytest.mark.parametrize(
    ("budget", "bounds", "exports", "published"),
    [
        (6, [(0, 6), (6, 12), (12, 18), (18, 22)], [[], [8], [16], [20]], [None] * 4),
        (8, [(0, 8), (8, 16), (16, 22)], [[], [], [20]], [8, 16, None]),
        (10, [(0, 10), (10, 20), (20, 22)], [[8], [16], []], [None, 20, None]),
        (21, [(0, 21), (21, 22)], [[8, 16, 20], []], [None, None]),
    ],
)
def test_a_prompt_in_pieces_leaves_the_same_checkpoints(
    budget: int,
    bounds: list[tuple[int, int]],
    exports: list[list[int]],
    published: list[int | None],
) -> None:
    rig = Rig(Case(max_step_tokens=budget))
    rig.add(text(22), 2)
    for bound, exported, position in zip(bounds, exports, published, strict=True):
        plan = planned(rig)
        (chunk,) = plan.chunks
        assert (chunk.begin, chunk.end) == bound
        assert chunk.samples == (chunk.end == 22) == bool(plan.samples[0])
        assert chunk.export_position == exported
        assert [item.position for item in plan.publications] == (
            [] if position is None else [position]
        )
        rig.launch(plan)
        if len(rig.flights) > 1:
            rig.commit()
    rig.run()
    assert rig.done[0] == answer(text(22), 2)


def test_a_running_page_published_inside_a_block_is_left_at_the_next_step() -> None:
    rig = Rig()
    request = rig.add(text(12), 4)
    rig.launch(planned(rig))
    page, slot = rig.running_page(request), request.slot
    plan = planned(rig)
    assert plan.kind == "decode" and plan.released == [page]
    assert rig.running_page(request) not in (0, page)
    index, deltas = rig.ownership.layout.index, dict(rig.live.deltas.items())
    assert deltas[index("resume_page", slot)] == page
    assert deltas[index("state_table", slot, 1)] == rig.running_page(request)
    assert not rig.live.relocate[slot]
    rig.launch(plan)
    rig.commit()
    assert rig.has_state(text(12), 12) and rig.state_pool.refcount(page) == 1
    rig.commit()
    assert rig.state_pool.refcount(page) == 0 and rig.state_pool.is_published(page)


def test_decoding_over_a_boundary_leaves_a_checkpoint_there() -> None:
    rig = Rig()
    rig.serve(text(5), 16)
    whole = text(5) + answer(text(5), 16)
    assert [p for p in range(4, 21, 4) if rig.has_state(whole, p)] == [4, 8, 16, 20]  # 20: its end


def test_a_checkpoint_that_exists_is_not_made_again() -> None:
    rig = Rig(Case(max_step_tokens=64))
    rig.serve(text(21), 1)
    request = rig.add(text(21) + text(11, seed=1), 1)
    plan = planned(rig)
    assert request.lookup is not None and request.lookup.reused == 21
    assert plan.chunks[0].export_position == [24, 28] and plan.publications[0].position == 32


def test_a_checkpoint_that_another_request_made_meanwhile_is_not_made_again() -> None:
    rig = Rig(Case(max_step_tokens=20, waits=False))
    for _ in range(2):
        rig.add(text(33), 1)
    rig.launch(planned(rig))
    plan = planned(rig)  # the rest of the first, and the beginning of its twin
    assert [(c.begin, c.end, c.export_position) for c in plan.chunks] == [
        (20, 33, [24, 32]),
        (0, 7, []),
    ]
    rig.launch(plan)
    rig.commit()  # the first now has left 8, 16 and 20
    assert [(c.begin, c.end, c.export_position) for c in planned(rig).chunks] == [(7, 27, [24])]


def test_exports_leave_a_page_for_each_running_request() -> None:
    rig = Rig(Case(num_state_pages=7, max_step_tokens=64))  # 6 pages: 2 run, 2 are spare
    rig.add(text(17), 30)
    rig.add(text(17, seed=1), 30)
    plan = planned(rig)
    assert [len(chunk.export_page) for chunk in plan.chunks] == [2, 0]
    assert rig.state_pool.available == 2


def test_requests_of_different_roots_share_nothing() -> None:
    rig = Rig(Case(max_step_tokens=64))
    reused = []
    for root in (b"a", b"b", b"a", b""):
        request = rig.add(text(17), 1, root=root)
        rig.run()
        assert request.lookup is not None
        reused.append(request.lookup.reused)
    assert reused == [0, 0, 16, 0]


@pytest.mark.parametrize("length", [4, 8, 12, 16])
def test_a_prompt_of_whole_blocks_computes_at_least_one_token_the_second_time(length: int) -> None:
    rig = Rig()
    rig.serve(text(length), 5)
    again = rig.serve(text(length), 5)
    assert again.lookup is not None and again.lookup.reused == length - 4
    longer = rig.serve([*text(length), 9], 5)
    assert longer.lookup is not None and longer.lookup.reused == length


# -- the shape of a step ----------------------------------------------------------------------------


def test_a_one_token_chunk_is_a_chunk_and_reads_no_state() -> None:
    rig = Rig(Case(max_step_tokens=3))
    rig.add(text(1), 20)
    rig.add(text(9, seed=1), 1)
    rig.run()
    # 1, then 2 of 9 beside a decoding row, and so on: never a decode step while a chunk is in it
    assert rig.device.kinds[:6] == ["chunk"] * 5 + ["decode"]
    assert rig.done == {0: answer(text(1), 20), 1: answer(text(9, seed=1), 1)}


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_the_last_token_of_an_answer_is_not_computed(max_tokens: int) -> None:
    rig = Rig()
    rig.serve(text(8), max_tokens)
    assert rig.device.kinds == ["chunk"] + ["decode"] * (max_tokens - 1)


def test_decoding_rows_go_first_then_prompts_in_progress_then_waiting_requests() -> None:
    rig = Rig(Case(max_step_tokens=6))
    first, second, third = (rig.add(text(n, seed=n), 9) for n in (4, 7, 2))
    steps = []
    for _ in range(4):
        plan = planned(rig)
        owners = [rig.live.request[slot] for slot in plan.slot.tolist()]
        steps.append(list(zip(owners, plan.num_new.tolist(), strict=True)))
        rig.launch(plan)
        if len(rig.flights) > 1:
            rig.commit()
    assert steps == [
        [(first, 4), (second, 2)],
        [(second, 5), (first, 1)],
        [(third, 2), (first, 1), (second, 1)],
        [(first, 1), (second, 1), (third, 1)],
    ]


def test_no_more_requests_decode_than_a_step_has_tokens() -> None:
    rig = Rig(Case(max_step_tokens=2))
    for i in range(4):
        rig.add(text(1, seed=i), 6)
    rig.run()
    assert list(rig.done) == [0, 1, 2, 3]
    assert rig.done == {i: answer(text(1, seed=i), 6) for i in range(4)}


def test_priority_then_arrival_orders_the_queue() -> None:
    rig = Rig(Case(max_rows=1))
    for i, priority in enumerate((1, 0, 1, -5)):
        rig.add(text(3, seed=i), 2, priority=priority)
    rig.run()
    assert list(rig.done) == [3, 1, 0, 2]


def test_a_request_that_does_not_fit_lets_smaller_ones_pass() -> None:
    rig = Rig(Case(num_kv_pages=12, max_step_tokens=64))  # 44 tokens
    rig.add(text(20), 20)
    large, small = rig.add(text(30, seed=1), 2), rig.add(text(6, seed=2), 2)
    rig.step()
    assert (large.phase, small.phase) == (Phase.WAITING, Phase.DECODE)
    rig.run()
    assert list(rig.done) == [2, 0, 1]


@pytest.mark.parametrize(
    ("num_state_pages", "num_kv_pages", "fits"), [(4, 4, True), (3, 4, False), (4, 3, False)]
)
def test_admission_needs_two_state_pages_and_a_place_for_the_next_token(
    num_state_pages: int, num_kv_pages: int, fits: bool
) -> None:
    rig = Rig(Case(num_state_pages=num_state_pages, num_kv_pages=num_kv_pages))
    rig.state_pool.take(1)
    rig.add(text(8), 1)
    assert (rig.schedule() is not None) == fits


def test_held_pages_of_a_hit_are_not_counted_as_room() -> None:
    rig = Rig(Case(num_kv_pages=9))
    rig.serve(text(16), 1)
    rig.kv_pool.take(4)  # what is left is cached, and the prompt needs it and one page more
    request = rig.add([*text(16), 9], 1)
    assert rig.schedule() is None and request.phase is Phase.WAITING


@pytest.mark.parametrize(("spare", "fits"), [(2, False), (3, True)])
def test_a_held_state_of_a_hit_is_not_counted_as_room(spare: int, fits: bool) -> None:
    rig = Rig(Case(max_step_tokens=64))
    rig.serve(text(9), 1)  # leaves its states at 8 and 9
    assert rig.state_pool.num_cached == 2
    taken = rig.state_pool.take(rig.state_pool.available)
    rig.state_pool.release(taken)  # none is left
    rig.add(text(9), 1)
    rig.run()
    rig.state_pool.take(rig.state_pool.available - spare)
    rig.add(text(9), 1)
    assert rig.has_state(text(9), 8) and (rig.schedule() is not None) == fits


# -- preemption -------------------------------------------------------------------------------------


def crowded() -> tuple[Rig, list[Request]]:
    """Three requests whose answers need more KV pages than there are."""
    rig = Rig(Case(num_kv_pages=14))
    return rig, [rig.add(text(8, seed=i), 20) for i in range(3)]


def test_the_last_in_order_is_preempted_and_starts_again_from_its_checkpoints() -> None:
    rig, requests = crowded()
    while not rig.scheduler.num_preemptions:
        rig.step()
    assert rig.scheduler.waiting == [requests[2]]
    assert requests[2].slot == -1
    rig.check_owners()
    rig.run()
    assert list(rig.done) == [0, 1, 2]
    assert all(rig.done[i] == answer(text(8, seed=i), 20) for i in range(3))
    assert requests[2].lookup is not None and requests[2].lookup.reused == 0  # of its first start


def test_a_preempted_request_keeps_its_token_in_flight_and_is_not_started_in_the_same_pass() -> (
    None
):
    rig, requests = crowded()
    while requests[2].phase is not Phase.DECODE or len(rig.flights) != 1:
        rig.step()
    arrived = len(rig.live.outputs(requests[2].slot))
    assert rig.live.num_outputs[requests[2].slot] == arrived
    rig.preempt(requests[2])
    assert len(requests[2].outputs) == arrived and list(rig.scheduler.preempted.values()) == [
        requests[2]
    ]
    rig.scheduler._pass -= 1  # as if still in the pass that took the slot away
    plan = planned(rig)
    assert requests[2].slot not in plan.slot.tolist() and requests[2].phase is Phase.WAITING
    rig.launch(plan)
    rig.commit()
    assert len(requests[2].outputs) == arrived + 1
    assert not rig.scheduler.preempted
    rig.run()
    assert all(rig.done[i] == answer(text(8, seed=i), 20) for i in range(3))


def test_an_earlier_prompt_takes_pages_from_later_answers() -> None:
    rig = Rig(Case(num_kv_pages=14, max_step_tokens=8))
    later = rig.add(text(8), 30, priority=1)
    for _ in range(3):
        rig.step()
    first = rig.add(text(33, seed=1), 2)
    while first.phase is not Phase.FINISHED:
        rig.step()
    assert rig.scheduler.num_preemptions >= 1
    rig.run()
    assert rig.done == {
        later.request_id: answer(text(8), 30),
        first.request_id: answer(text(33, 1), 2),
    }


@pytest.mark.parametrize(
    ("max_tokens", "stop", "ends"), [(3, None, True), (4, None, False), (9, 2, True), (9, 3, False)]
)
def test_the_last_token_of_an_answer_may_arrive_after_its_slot_was_lost(
    max_tokens: int, stop: int | None, ends: bool
) -> None:
    want = answer(text(5), 9)
    rig = Rig()
    request = rig.add(text(5), max_tokens, stop=None if stop is None else want[stop])
    for _ in range(3):
        rig.launch(planned(rig))
        if len(rig.flights) > 1:
            rig.commit()
    rig.preempt(request)
    assert request.outputs == want[:2]
    rig.commit()
    assert request.outputs == want[:3] and (request.phase is Phase.FINISHED) == ends
    rig.run()
    assert rig.done[0] == want[: (stop or max_tokens - 1) + 1]


def test_a_request_aborted_after_it_lost_its_slot_gets_nothing_more() -> None:
    rig = Rig()
    request = rig.add(text(5), 9)
    rig.launch(planned(rig))
    rig.preempt(request)
    rig.scheduler.drop(request)
    rig.commit()
    assert request.outputs == [] and not rig.done and request.first_token_at is None


def test_the_first_lookup_and_the_first_times_of_a_request_are_kept() -> None:
    rig = Rig(Case(max_step_tokens=64))
    request = rig.add(text(17), 9)
    for _ in range(3):
        rig.step()
    first = (request.lookup, request.admitted_at, request.first_token_at)
    rig.preempt(request)
    rig.commit()
    chunk = planned(rig).chunks[0]
    assert chunk.begin == 19 and first[0] is not None and first[0].reused == 0
    assert (request.lookup, request.admitted_at, request.first_token_at) == first


def test_a_pass_that_comes_to_nothing_keeps_no_page() -> None:
    rig = Rig(Case(max_step_tokens=40))
    later = rig.add(text(7), 9, priority=1)
    rig.step()
    first = rig.add(text(60, seed=1), 2)
    rig.step()
    held = rig.kv_pool.take(rig.kv_pool.available - 1)
    while rig.flights:
        rig.commit()
    # the later one takes a page and loses it to the first, which still has too few
    assert rig.schedule() is None and later.phase is Phase.WAITING and first.slot >= 0
    assert rig.state_pool.num_owned == 1
    rig.kv_pool.release(held)
    rig.run()
    assert rig.done == {0: answer(text(7), 9), 1: answer(text(60, seed=1), 2)}


@pytest.mark.parametrize(("mode", "pages"), [("none", 4), ("align", 4), ("all", 11)])
def test_the_smallest_pools_serve_many_long_answers(mode: str, pages: int) -> None:
    rig = Rig(Case(num_state_pages=pages, num_kv_pages=17, max_step_tokens=5, mode=mode))
    for i in range(6):
        rig.add(text(1 + 7 * i, seed=i), 40, stop=answer(text(1 + 7 * i, seed=i), 20)[19])
    rig.run()
    for i in range(6):
        want = answer(text(1 + 7 * i, seed=i), min(40, 63 - 7 * i))
        assert rig.done[i] == want[: want.index(answer(text(1 + 7 * i, seed=i), 20)[19]) + 1]


# -- publication ------------------------------------------------------------------------------------


def test_a_key_is_visible_when_its_step_is_committed_and_not_before() -> None:
    rig = Rig(Case(max_step_tokens=64, waits=False))
    rig.add(text(21), 3)
    rig.launch(planned(rig))
    twin = rig.add(text(21), 3)  # starts while the step that writes its prefix is in flight
    rig.launch(planned(rig))
    assert twin.lookup is not None and twin.lookup.reused == twin.lookup.kv_match == 0
    assert not rig.has_state(text(21), 20)
    rig.commit()
    assert rig.has_state(text(21), 20)
    rig.run()
    assert rig.done == {i: answer(text(21), 3) for i in range(2)}


@pytest.mark.parametrize("ending", ["abort", "failed step"])
def test_a_request_that_ends_in_flight_publishes_nothing(ending: str) -> None:
    rig = Rig(Case(max_step_tokens=64))
    request = rig.add(text(24), 3)
    plan = planned(rig)
    assert len(plan.chunks[0].export_page) == 3 and len(plan.publications) == 1
    rig.launch(plan)
    if ending == "abort":
        rig.scheduler.drop(request)
        assert rig.index.status(request.hashes[1]) is None
        rig.commit()
    else:
        rig.flights.clear()
        rig.break_step(plan)
    assert rig.index.status(request.hashes[1]) is None
    assert rig.state_pool.num_cached == rig.kv_pool.num_cached == 0
    rig.run()
    rig.serve(text(24), 3)


def test_a_preempted_request_leaves_its_last_state_once_the_step_that_wrote_it_is_committed() -> (
    None
):
    rig = Rig(Case(max_step_tokens=64))
    request = rig.add(text(23), 3)
    rig.launch(planned(rig))
    assert rig.index.status(request.hashes[1]) == "expected"
    rig.preempt(request)
    assert rig.index.status(request.hashes[1]) is None
    assert rig.state_pool.num_cached == rig.kv_pool.num_cached == 0
    rig.commit()
    (chunk,) = planned(rig).chunks
    assert (chunk.begin, chunk.end) == (23, 24)


def test_a_slot_taken_over_in_flight_keeps_the_old_owners_results_out() -> None:
    rig = Rig(Case(max_rows=1))
    old = rig.add(text(16), 5)
    rig.launch(planned(rig))
    rig.scheduler.drop(old)
    new = rig.add(text(3, seed=1), 5)
    rig.launch(planned(rig))
    rig.commit()
    assert rig.live.num_outputs[new.slot] == 0 and rig.kv_pool.num_cached == 0
    rig.run()
    assert rig.done == {1: answer(text(3, seed=1), 5)}


def test_a_step_in_flight_keeps_its_rows_however_many_launches_fail_behind_it() -> None:
    rig = Rig(Case(max_step_tokens=64))
    rig.add(text(5), 1)
    first = planned(rig)
    rows = first.rows.copy()
    rig.launch(first)
    for number in range(9):
        rig.add(text(3, seed=number), 1)
        rig.break_step(planned(rig))
        assert (first.rows == rows).all()
    rig.run()
    assert rig.done == {0: answer(text(5), 1)}


def test_pages_that_a_step_reads_come_back_when_it_is_committed() -> None:
    rig = Rig()
    rig.serve(text(17), 1)
    before = rig.state_pool.num_owned
    request = rig.add(text(17), 20)
    plan = planned(rig)
    (resumed,) = plan.released
    assert request.lookup is not None and request.lookup.reused == 16 and request.resume_page == 0
    rig.launch(plan)
    rig.scheduler.drop(request)
    assert rig.state_pool.refcount(resumed) == 1
    rig.commit()
    assert rig.state_pool.refcount(resumed) == 0 and rig.state_pool.num_owned == before


def test_what_a_plan_holds_is_given_back_once_however_often_it_is_asked() -> None:
    rig = Rig(Case(max_step_tokens=64))
    rig.serve(text(17), 1)
    request = rig.add([*text(17), *text(9, seed=1)], 5)
    plan = planned(rig)
    assert plan.released and plan.chunks[0].export_page
    rig.scheduler.drop(request)
    for _ in range(2):
        rig.ownership.give_back(plan)
        rig.check_idle()


# -- anything may happen ----------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small sizes, often the smallest that are allowed."""
    kv_block, max_len = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((9, 24, 40)))
    mode = draw(st.sampled_from(("align", "align", "all", "none")))
    state_block = kv_block * draw(st.sampled_from((2, 1, 3)))
    columns = -(-max_len // state_block) if mode == "all" else 0
    return Case(
        max_rows=draw(st.sampled_from((5, 3, 2, 1))),
        max_step_tokens=draw(st.sampled_from((16, 8, 6, 3, 1, 40))),
        kv_block=kv_block,
        state_block=state_block,
        num_state_pages=columns + draw(st.sampled_from((9, 6, 5, 4, 20))),
        num_kv_pages=-(-max_len // kv_block) + 1 + draw(st.sampled_from((8, 3, 1, 0, 12))),
        max_len=max_len,
        mode=mode,
        retention=draw(st.sampled_from((None, "auto", 0, kv_block, 3 * kv_block))),
        exports=draw(st.sampled_from((1, 1, None, 3))),
        waits=draw(st.booleans()),
        eviction=draw(st.sampled_from(("value", "value", "lru"))),
        patience=draw(st.sampled_from((64, 0, 2))),
    )


BOOKS = [text(40), text(40, seed=3)]
ADD = st.tuples(
    st.just("add"),
    st.integers(0, 1),  # book
    st.integers(0, 30),  # tokens of it
    st.integers(0, 6),  # other tokens
    st.integers(1, 30),  # of the answer
    st.integers(0, 2),  # priority
    st.sampled_from((None, None, 5, 11)),  # stop
)
ACTION = st.one_of(
    ADD,
    st.tuples(st.just("step"), st.integers(1, 9)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.sampled_from(("launch fails", "step is lost"))),
)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(), st.lists(ADD, min_size=2, max_size=6), st.lists(ACTION, max_size=20))
def test_every_answer_is_right_whatever_is_added_aborted_preempted_or_lost(
    case: Case, first: list[tuple], then: list[tuple]
) -> None:
    rig, wanted = Rig(case), []
    for name, *args in first + then:
        if name == "add":
            wanted.append(add(rig, *args))
        elif name == "step":
            for _ in range(args[0]):
                rig.step()
                rig.index.check_books()
        elif name == "abort" and args[0] < len(rig.requests):
            rig.scheduler.drop(rig.requests[args[0]])
        elif name == "launch fails" and (plan := rig.schedule()):
            rig.break_step(plan)
        elif name == "step is lost" and rig.flights:
            rig.break_step(rig.flights.popleft()[0])
        rig.index.check_books()
    rig.run()
    for request, want in zip(rig.requests, wanted, strict=True):
        assert request.phase is Phase.FINISHED
        if request.request_id in rig.done:
            assert request.outputs == want
        assert request.outputs == want[: len(request.outputs)]


def add(
    rig: Rig, book: int, shared: int, own: int, max_tokens: int, priority: int, stop: int | None
) -> list[int]:
    prompt = BOOKS[book][:shared] + text(own, seed=own) or [7]
    prompt = prompt[: rig.case.max_len - 1]
    request = rig.add(prompt, max_tokens, priority=priority, stop=stop)
    return answer(prompt, request.max_tokens, () if stop is None else (stop,))
