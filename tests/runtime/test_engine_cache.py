"""Modes, marks, explanations, counters and events through the engine, over the model of exact hashes."""

from collections.abc import Sequence
from typing import Any

import pytest
from hash_engine import hash_engine, settle
from hash_model import HashRow, answer

import midstream
from midstream.runtime.events import Cleared, Removed, Stored
from midstream.runtime.hashing import BlockHasher, as_keys


def text(length: int, seed: int = 0) -> list[int]:
    return [3 + (i * i * 7 + i * (seed + 3) + 11 * seed) % 29 for i in range(length)]


def greedy(max_tokens: int, **options: Any) -> midstream.SamplingParams:
    return midstream.SamplingParams(max_tokens=max_tokens, temperature=0.0, **options)


def serve(
    engine: midstream.Engine, prompt: Sequence[int], count: int = 4, **options: Any
) -> midstream.Output:
    """One request to its end, with the right answer."""
    engine.add(prompt, greedy(count), **options)
    (output,) = settle(engine)
    assert list(output.token_ids) == answer(prompt, count)
    return output


@pytest.mark.parametrize("retention", ["auto", 0, 8, 12, None])
@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_all_modes_and_retentions_bring_the_same_tokens(mode: str, retention: Any) -> None:
    prompts = [text(n, seed=n % 2) for n in (30, 31, 9, 1, 40, 30)]
    with hash_engine(cache_mode=mode, retention=retention) as engine:
        for _ in range(2):
            outputs = list(engine.generate(prompts, greedy(20)))
            assert [list(out.token_ids) for out in outputs] == [answer(p, 20) for p in prompts]
        assert (engine.stats()["cache"]["reused"] > 0) == (mode != "none")


@pytest.mark.parametrize("mode", ["align", "all"])
@pytest.mark.parametrize("length", [1, 3, 11, 16])
def test_an_answer_that_ended_at_a_stop_token_is_reused_at_its_exact_length(
    mode: str, length: int
) -> None:
    """The step in flight feeds the stop token; what asks at once finds what that step leaves."""
    prompt = text(21)
    whole = answer(prompt, 40)
    place = next(n for n in range(length - 1, 40) if whole[n] not in whole[:n])
    with hash_engine(cache_mode=mode) as engine:
        params = greedy(40, stop_token_ids=[whole[place]])
        (output,) = engine.generate([prompt], params)
        assert (output.finish_reason, list(output.token_ids)) == ("stop", whole[: place + 1])
        turn = prompt + whole[: place + 1] + text(9, seed=2)
        (following,) = engine.generate([turn], greedy(5))
        assert list(following.token_ids) == answer(turn, 5)
        assert following.num_cached_tokens == len(prompt) + place + 1


def test_a_turn_that_comes_while_others_decode_waits_for_the_end_of_the_answer() -> None:
    prompt, whole = text(21), answer(text(21), 40)
    place = next(n for n in range(15, 40) if whole[n] not in whole[:n])
    turn = prompt + whole[: place + 1] + text(9, seed=2)
    with hash_engine() as engine:
        other = engine.add(text(13, seed=1), greedy(45))
        first = engine.add(prompt, greedy(40, stop_token_ids=[whole[place]]))
        second, outputs = None, {}
        while engine.num_unfinished:
            for update in engine.step():
                if update.output is not None:
                    outputs[update.handle] = update.output
                    if update.handle == first:
                        second = engine.add(turn, greedy(5))
        assert second is not None
        assert outputs[second].num_cached_tokens == len(prompt) + place + 1
        assert engine.stats()["cache"]["waits"] == 1
        assert list(outputs[second].token_ids) == answer(turn, 5)
        assert list(outputs[other].token_ids) == answer(text(13, seed=1), 45)


def test_mode_all_keeps_every_boundary_while_its_request_lives() -> None:
    options = {"cache_mode": "all", "num_state_pages": 16, "max_len": 60, "num_kv_pages": 40}
    with hash_engine(**options) as engine:
        engine.add(text(20), greedy(30))
        for _ in range(25):
            engine.step()
        index = engine._parts.ownership.index
        keys = index_keys(engine, text(20) + answer(text(20), 30))
        state = index.state_pool
        assert state is not None
        held = state.take(state.available)  # whatever could be evicted is gone
        assert [n for n in (8, 16, 24, 32, 40) if index.has_state(keys[n // 4 - 1])] == [
            8,
            16,
            24,
            32,
            40,
        ]
        state.release(held)
        assert list(settle(engine)[0].token_ids) == answer(text(20), 30)


def index_keys(engine: midstream.Engine, tokens: list[int]) -> list[int]:
    hasher = engine._parts.scheduler.checkpoints.chains.hasher
    assert hasher is not None
    import numpy as np

    return as_keys(hasher.extend(None, np.array(tokens, np.int32)))


def test_a_marked_position_is_resumed_from_on_no_grid() -> None:
    with hash_engine(retention=0) as engine:
        serve(engine, text(30) + text(9, seed=1), checkpoint_at=[13, 30])
        assert serve(engine, text(30) + text(9, seed=2)).num_cached_tokens == 30
        assert serve(engine, text(13) + text(20, seed=3)).num_cached_tokens == 13


@pytest.mark.parametrize("marks", [[0], [-1], [40], [1.5], [True], ["1"]])
def test_a_mark_outside_of_the_prompt_is_refused(marks: Any) -> None:
    with hash_engine() as engine:
        with pytest.raises(midstream.ConfigError, match="whole numbers from 1 to 39"):
            engine.add(text(39), checkpoint_at=marks)
        assert engine.num_unfinished == 0


def test_more_marks_than_a_step_can_cut_are_kept_as_far_as_they_go() -> None:
    with hash_engine(retention=0, max_step_tokens=64, num_state_pages=64) as engine:
        serve(engine, text(60), 2, checkpoint_at=range(1, 60))
        assert serve(engine, text(60), 2).num_cached_tokens >= 56


def test_b14_a_checkpoint_adds_a_cut_to_the_scan() -> None:
    with hash_engine(retention=0, max_len=300, max_step_tokens=300, num_kv_pages=90) as engine:
        lowered: Any = engine._parts.lowered
        rows: list[HashRow] = []
        run = lowered.memory.run
        lowered.memory.run = lambda each: (rows.extend(each), run(each))[1]
        serve(engine, text(270), 1, checkpoint_at=[147])
        assert [end for end, _ in rows[0].cuts] == [64, 128, 147, 211, 264, 268, 270]
        assert [end for end, page in rows[0].cuts if page] == [147, 264, 268, 270]


def test_three_turns_that_each_change_their_last_tokens_compute_only_what_is_new() -> None:  # P1
    with hash_engine(
        max_len=400, num_kv_pages=220, num_state_pages=60, max_step_tokens=64
    ) as engine:
        prompt = text(120)
        for turn in range(3):
            output = serve(engine, prompt, 40)
            if turn:
                # the last 3 tokens differ: at most a state block and what follows is computed
                assert output.num_cached_tokens >= len(prompt) - 20 - 3 - 8
            prompt = [*prompt, *output.token_ids][:-3] + text(20, seed=turn + 1)


def test_an_answer_that_ends_at_a_stop_token_is_resumed_behind_it() -> None:
    want = answer(text(20), 12)
    with hash_engine() as engine:
        engine.add(text(20), greedy(30, stop_token_ids=(want[9],)))
        (first,) = settle(engine)
        got = list(first.token_ids)
        assert got == want[: want.index(want[9]) + 1]
        turn = [*text(20), *got, *text(8, seed=2)]
        # the step in flight consumed the stop token
        assert serve(engine, turn).num_cached_tokens == 20 + len(got)


def test_why_a_request_reused_no_more_is_said_and_counted() -> None:
    with hash_engine(retention=0, num_state_pages=12) as engine:
        shared = text(20)
        for seed in (1, 2, 3):
            handle = engine.add(shared + text(9, seed), greedy(2))
            settle(engine)
        assert engine.explain(handle) == (
            "reused 20 of 28 tokens; attention matches 20, the longest saved state is at 20; no more of this "
            "beginning was ever computed here"
        )
        cache = engine.stats()["cache"]
        assert cache["requests"] == 3 and cache["asked"] == 3 * 28 and cache["reused"] == 20
        assert cache["reasons"] == {"unknown": 1, "no state": 1, "longest": 1}
        assert cache["lost_for_state"] == 20
        # the next turn resumes inside of a block, where the answer ended: no other place is better
        before = shared + text(9, seed=3)
        handle = engine.add([*before, *answer(before, 1), 5, 6, 7, 8, 9], greedy(2))
        settle(engine)
        assert engine.explain(handle).startswith("reused 30 of 34 tokens; attention matches 30")
        assert engine.stats()["cache"]["reasons"]["longest"] == 2
        state = engine._parts.ownership.state_pool
        state.release(state.take(state.available))
        handle = engine.add(shared + text(9, seed=3), greedy(2))
        settle(engine)
        assert "had to make room" in engine.explain(handle)
    with hash_engine(cache_mode="none") as engine:
        handle = engine.add(text(9), greedy(2))
        settle(engine)
        assert engine.explain(handle) == "nothing reused: cache_mode is 'none'"
        assert engine.stats()["cache"]["reasons"] == {"off": 1}


def test_the_metrics_are_what_prometheus_reads() -> None:
    with hash_engine() as engine:
        serve(engine, text(20))
        serve(engine, text(20))
        text_of_metrics = engine.metrics()
    lines = dict(line.rsplit(" ", 1) for line in text_of_metrics.splitlines() if line[0] != "#")
    assert (
        lines["midstream_cache_asked_total"] == "38"
        and lines["midstream_cache_reused_total"] == "16"
    )
    assert lines['midstream_cache_reasons_total{reason="all"}'] == "1"
    assert lines['midstream_pages{pool="kv",place="owned"}'] == "0"
    assert text_of_metrics.count("# TYPE midstream_pages gauge") == 1
    parser = pytest.importorskip("prometheus_client.parser")
    assert len(list(parser.text_string_to_metric_families(text_of_metrics))) > 10


def test_a_router_follows_what_the_engine_has_saved_with_keys_of_its_own() -> None:
    import numpy as np

    with hash_engine(hash_key="ab" * 16) as engine:
        log = engine.watch_cache()
        serve(engine, text(20))
        events = log.take()
        hasher = BlockHasher(block=4, key=bytes.fromhex("ab" * 16))
        keys = as_keys(hasher.extend(None, np.array(text(20), np.int32)))
        stored = {
            e.key: e for e in events if isinstance(e, Stored) and e.group == "kv" and not e.tail
        }
        assert set(keys) <= set(stored) and stored[keys[2]].parent == keys[1]
        engine._parts.ownership.kv_pool.release(engine._parts.ownership.kv_pool.take(79))
        assert {e.key for e in log.take() if isinstance(e, Removed)} >= set(keys)
        engine.weights_changed()
        assert log.take() == [Cleared()]
