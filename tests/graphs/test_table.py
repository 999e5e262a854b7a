"""Which graph a step replays, and the count of steps that run without one.  No GPU: capture is injected."""

import logging
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream import ContractError
from midstream.graphs.capture import Replay, check_addresses
from midstream.graphs.table import GraphKey, GraphTable, decode_key, padded_rows, smallest_fit

KEYS = [decode_key(4), GraphKey(64, 8, 18), decode_key(1), decode_key(2), GraphKey(64, 4, 18)]


class Recorder:
    """In place of capture: writes down what is captured and what is replayed."""

    def __init__(self) -> None:
        self.captured: list[GraphKey] = []
        self.replayed: list[GraphKey] = []

    def capture(self, key: GraphKey) -> Replay:
        self.captured.append(key)
        return lambda: self.replayed.append(key)


def warm(keys: list[GraphKey]) -> tuple[GraphTable, Recorder]:
    recorder = Recorder()
    table = GraphTable(recorder.capture)
    table.warm_up(keys, lambda key: None)
    return table, recorder


def test_capture_goes_from_the_largest_to_the_smallest_and_reports_each() -> None:
    recorder, reported = Recorder(), list[GraphKey]()
    table = GraphTable(recorder.capture)
    table.warm_up(KEYS, reported.append)
    assert recorder.captured == reported == sorted(KEYS, reverse=True)
    assert [key.tokens for key in reported] == [64, 64, 4, 2, 1]
    assert table.keys == sorted(KEYS) and recorder.replayed == []


def test_each_key_replays_its_own_graph_and_is_counted() -> None:
    table, recorder = warm(KEYS)
    for key in KEYS * 2:
        assert table.replay(key)
    assert recorder.replayed == KEYS * 2
    assert table.num_replays == 10 and not table.fallbacks
    assert len(recorder.captured) == 5  # nothing is captured while serving


def test_a_chunk_step_never_replays_a_decode_graph_of_the_same_size() -> None:
    table, recorder = warm([decode_key(4)])
    assert not table.replay(GraphKey(tokens=4, rows=4, chunks=4))
    assert table.replay(GraphKey(4, 4, 0)) and recorder.replayed == [decode_key(4)]


def test_fallbacks_are_counted_by_reason_and_the_first_of_each_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table, recorder = warm(KEYS)
    with caplog.at_level(logging.INFO, "midstream.graphs"):
        for _ in range(3):
            assert not table.replay(decode_key(3))
        assert not table.replay(GraphKey(9, 2, 4))
        table.count_fallback("graphs are off")
    assert table.fallbacks == {
        "no graph for 3 rows and 3 tokens": 3,
        "no graph for 2 rows and 9 tokens": 1,
        "graphs are off": 1,
    }
    assert len(caplog.records) == 3
    assert table.num_replays == 0 and recorder.replayed == []


def test_a_key_is_captured_once_until_the_table_is_cleared() -> None:
    table, recorder = warm(KEYS)
    with pytest.raises(ContractError, match=r"rows=2.* is captured already; clear\(\) first"):
        table.warm_up([decode_key(2)], lambda key: None)
    table.clear()
    assert table.keys == [] and not table.replay(decode_key(2))
    table.warm_up([decode_key(2)], lambda key: None)
    assert table.replay(decode_key(2)) and recorder.captured[5:] == [decode_key(2)]


def test_a_capture_that_fails_leaves_no_graph_of_its_key() -> None:
    recorder = Recorder()

    def capture(key: GraphKey) -> Replay:
        if key == decode_key(2):
            raise RuntimeError("out of memory")
        return recorder.capture(key)

    table = GraphTable(capture)
    with pytest.raises(RuntimeError, match="out of memory"):
        table.warm_up(KEYS, lambda key: None)
    assert decode_key(2) not in table.keys and not table.replay(decode_key(2))
    assert table.replay(decode_key(4))


@given(st.integers(1, 70), st.sets(st.integers(1, 64), min_size=1))
def test_rows_are_padded_to_the_next_size_that_holds_them(rows: int, sizes: set[int]) -> None:
    fitting = [size for size in sizes if size >= rows]
    assert padded_rows(rows, sorted(sizes)) == min(fitting, default=None)
    assert padded_rows(rows, ()) is None


SHAPES = st.builds(GraphKey, st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))


@given(SHAPES, st.sets(SHAPES))
def test_the_smallest_fit_holds_the_step_in_every_dimension(
    needed: GraphKey, keys: set[GraphKey]
) -> None:
    found = smallest_fit(needed, sorted(keys))
    fitting = [
        key
        for key in keys
        if key.tokens >= needed.tokens and key.rows >= needed.rows and key.chunks >= needed.chunks
    ]
    assert found == min(fitting, default=None)


@pytest.mark.parametrize("short", ["tokens", "rows", "chunks"])
def test_a_graph_that_is_one_too_small_in_one_dimension_does_not_fit(short: str) -> None:
    needed = GraphKey(64, 8, 18)
    assert smallest_fit(needed, [needed]) == needed
    assert smallest_fit(needed, [replace(needed, **{short: getattr(needed, short) - 1})]) is None


def test_keys_are_ordered_by_tokens_first() -> None:
    assert sorted([GraphKey(2, 1, 9), GraphKey(1, 9, 0), GraphKey(2, 1, 3)])[0].tokens == 1
    assert decode_key(5) == GraphKey(tokens=5, rows=5, chunks=0)


def test_a_moved_buffer_is_named_and_others_are_not() -> None:
    before = {"token": 100, "stage.row_slot": 200, "slots": 300}
    check_addresses(before, dict(reversed(before.items())), "step")
    with pytest.raises(
        ContractError, match=r"^step: the buffers slots moved since.*; expected fixed"
    ):
        check_addresses(before, before | {"slots": 301}, "step")
    with pytest.raises(ContractError, match="the buffers new moved"):
        check_addresses(before, before | {"new": 1}, "step")
