"""The simulator of eviction policies: its books, its determinism, and the bound that no policy passes."""

import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import simulate
import traces
from traces import Call, PoolSize

SMALL = {
    "chat": lambda: traces.chat(conversations=8),
    "agents": lambda: traces.agents(tasks=4),
    "documents": lambda: traces.documents(count=6),
    "system": lambda: traces.system(questions=30, applications=6),
}
SIZES = simulate.Sizes(max_rows=4)


def call(at: int, *parts: tuple[int, int], answer: int = 4) -> Call:
    """`parts`: seed and number of the prompt's tokens."""
    drawn = [traces.Draw(seed).tokens(count) for seed, count in parts]
    return Call(at, np.concatenate(drawn), traces.Draw(1000 + at).tokens(answer))


def points_of(trace: str) -> list[simulate.Point]:
    calls = SMALL[trace]()
    pools = simulate.pools_of(calls, "each", 25, SIZES)
    return simulate.simulate(trace, calls, "each", 25, pools, simulate.POLICIES, SIZES)


@pytest.mark.parametrize("trace", SMALL)
def test_no_policy_passes_the_bound_and_the_same_seed_gives_the_same_result(trace: str) -> None:
    points = points_of(trace)  # each run ends with checked books
    *online, bound = points
    assert [p.policy for p in points] == ["value", "lru", "offline"]
    assert all(0 < p.reused <= bound.reused <= p.asked == bound.asked for p in online)
    assert any(p.evictions for p in online)
    if trace == "system":
        assert points_of(trace) == points


def test_another_seed_gives_another_trace() -> None:
    for make in (traces.chat, traces.agents, traces.documents, traces.system):
        first, again, other = make(1), make(1), make(2)
        assert [c.at for c in first] == [c.at for c in again] == sorted(c.at for c in first)
        assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(first, again, strict=True))
        assert [len(c.prompt) for c in first] != [len(c.prompt) for c in other]


def test_hit_tokens_of_three_calls_are_those_computed_by_hand() -> None:
    shared = (1, 160)
    calls = [
        call(0, shared, (2, 40)),  # nothing is known
        call(100, shared, (3, 40)),  # 10 blocks are known; states at 64, 128, 192: resumes at 128
        call(200, shared, (4, 40)),  # the junction at 160 has a state now
    ]
    run = simulate.Simulation(calls, PoolSize(100, 60), "value", SIZES)
    run.run()
    assert [r.lookup.reused for r in run.requests if r.lookup] == [0, 128, 160]
    assert run.scheduler.admission.counters.asked == 3 * 199
    assert simulate.most_reusable(calls, run.spans(), 100, SIZES) == 2 * 160
    assert run.index.evictions == 0
    assert simulate.working_set_of(calls, SIZES) == PoolSize(kv=10, state=1)


def test_the_next_turn_resumes_behind_the_answer_inside_a_block() -> None:
    first = call(0, (1, 50), answer=9)
    second = Call(100, np.concatenate([first.tokens, traces.Draw(5).tokens(20)]), first.answer)
    run = simulate.Simulation([first, second], PoolSize(50, 30), "lru", SIZES)
    run.run()
    assert [r.lookup.reused for r in run.requests if r.lookup] == [
        0,
        58,
    ]  # the 59th is not fed back
    assert simulate.most_reusable([first, second], run.spans(), 50, SIZES) == 58


def test_farthest_next_use_keeps_as_many_intervals_as_any_choice() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        begins = rng.integers(0, 12, 8)
        intervals = [
            (int(b), int(b + n)) for b, n in zip(begins, rng.integers(1, 8, 8), strict=True)
        ]
        for room in (0, 1, 2, 3):
            assert simulate._kept(intervals, room) == most(intervals, room)


def most(intervals: list[tuple[int, int]], room: int) -> int:
    """By trying all choices."""
    for count in range(len(intervals), 0, -1):
        for chosen in combinations(intervals, count):
            if all(sum(b <= t < e for b, e in chosen) <= room for t in range(20)):
                return count
    return 0


def test_a_pool_without_room_for_the_longest_call_is_refused() -> None:
    run = simulate.Simulation([call(0, (1, 400))], PoolSize(10, 8), "value", SIZES)
    with pytest.raises(simulate.ConfigError, match="can never start"):
        run.run()


def test_without_matplotlib_there_is_a_message_and_no_plot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    simulate.write_plot([], tmp_path / "plot.png")
    assert "matplotlib is not installed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
