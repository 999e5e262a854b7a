"""Which graph a step replays, when it is captured, and the count of steps that run without one."""

import logging

import pytest
import torch

from midstream import ContractError
from midstream.graphs.addresses import check_addresses
from midstream.graphs.dispatch import GraphKey, decode_key
from midstream.graphs.table import GraphTable

KEYS = [decode_key(4), GraphKey(64, 8, 18), decode_key(1), decode_key(2), GraphKey(64, 4, 18)]
LONG = [GraphKey(tokens, 8, 40, in_pieces=True) for tokens in (768, 1024, 1280)]


class FakeGraph:
    """Writes down its replays; growth of the pool: a byte per token beyond the largest so far."""

    def __init__(self, key: GraphKey, owner: "Recorder", memory_bytes: int) -> None:
        self.name, self.memory_bytes, self.seconds, self.num_nodes = str(key), memory_bytes, 0.5, 7
        self.key, self.owner = key, owner

    def replay(self) -> None:
        assert self.key not in self.owner.released
        self.owner.replayed.append(self.key)

    def release(self) -> None:
        self.owner.released.append(self.key)


class Recorder:
    """In place of capture: writes down what is captured and what is replayed."""

    def __init__(self) -> None:
        self.captured: list[GraphKey] = []
        self.replayed: list[GraphKey] = []
        self.released: list[GraphKey] = []
        self.pool_bytes = 0

    def capture(self, key: GraphKey) -> FakeGraph:
        grown = max(0, key.tokens - self.pool_bytes)
        self.pool_bytes += grown
        self.captured.append(key)
        if key in self.released:
            self.released.remove(key)
        return FakeGraph(key, self, grown)


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


def test_verifying_drafts_never_replays_plain_decode_of_as_many_tokens() -> None:
    """Fault G9: alternating shapes of equal tokens."""
    plain, verify = decode_key(16), decode_key(4, drafts=3)
    table, recorder = warm([plain, verify])
    for _ in range(100):
        assert table.replay(plain) and table.replay(verify)
    assert recorder.replayed == [plain, verify] * 100 and len(recorder.captured) == 2


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
    with pytest.raises(ContractError, match=r"2 rows.* is captured already; clear\(\) first"):
        table.warm_up([decode_key(2)], lambda key: None)
    table.clear()
    assert table.keys == [] and not table.replay(decode_key(2))
    assert sorted(recorder.released) == sorted(KEYS)
    table.warm_up([decode_key(2)], lambda key: None)
    assert table.replay(decode_key(2)) and recorder.captured[5:] == [decode_key(2)]


def test_a_capture_that_fails_leaves_no_graph_of_its_key() -> None:
    recorder = Recorder()

    def capture(key: GraphKey) -> FakeGraph:
        if key == decode_key(2):
            raise RuntimeError("out of memory")
        return recorder.capture(key)

    table = GraphTable(capture)
    with pytest.raises(RuntimeError, match="out of memory"):
        table.warm_up(KEYS, lambda key: None)
    assert decode_key(2) not in table.keys and not table.replay(decode_key(2))
    assert table.replay(decode_key(4))


# -- memory -----------------------------------------------------------------------------------------


def test_the_memory_of_the_ladder_is_predicted_from_its_largest_graph_and_then_measured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "midstream.graphs"):
        table, _ = warm(KEYS)
    assert table.memory_bytes == 64 and table.predicted_bytes == 76  # 1.2 times the largest
    assert table.stats() == {
        "live": 5, "captured_late": 0, "evicted": 0, "memory_bytes": 64, "predicted_bytes": 76,
        "capture_seconds": 2.5,
    }  # fmt: skip
    assert "captured 5 graphs" in caplog.text and "predicted after the largest" in caplog.text


# -- graphs that are captured when a step needs them ---------------------------------------------------


def late_table(max_late: int = 2) -> tuple[GraphTable, Recorder]:
    recorder = Recorder()
    table = GraphTable(recorder.capture, late=LONG, max_late=max_late)
    table.warm_up(KEYS, lambda key: None)
    return table, recorder


def test_a_late_graph_is_captured_by_the_first_step_that_needs_it() -> None:
    table, recorder = late_table()
    assert LONG[0] not in table.keys
    assert table.replay(LONG[0]) and table.replay(LONG[0])
    assert recorder.captured[5:] == [LONG[0]] and recorder.replayed == [LONG[0]] * 2
    assert table.num_captured_late == 1 and not table.fallbacks


def test_of_late_graphs_the_last_used_are_kept_and_the_others_released() -> None:
    """Fault H4: the number of graphs is bounded whatever sizes are asked for."""
    table, recorder = late_table()
    a, b, c = LONG
    for key in (a, b, a, c):  # b is the longest unused when c comes
        assert table.replay(key)
    assert recorder.released == [b] and table.num_evicted == 1
    assert table.replay(b) and recorder.released == [a]
    assert len(table.keys) == len(KEYS) + 2


def test_no_late_graph_is_captured_where_none_may_be_kept() -> None:
    table, recorder = late_table(max_late=0)
    assert not table.replay(LONG[0]) and len(recorder.captured) == 5


def test_without_memory_a_late_graph_is_a_counted_fallback_and_is_not_tried_again() -> None:
    tried: list[GraphKey] = []

    def capture(key: GraphKey) -> FakeGraph:
        tried.append(key)
        raise torch.OutOfMemoryError("CUDA out of memory")

    table = GraphTable(capture, late=LONG)
    for _ in range(3):
        assert not table.replay(LONG[0])
    assert tried == [LONG[0]]
    assert table.fallbacks == {"no graph for 8 rows and 768 tokens": 3}


def test_another_failure_of_a_late_capture_reaches_the_caller() -> None:
    def capture(key: GraphKey) -> FakeGraph:
        raise ContractError("the buffers slots moved")

    table = GraphTable(capture, late=LONG)
    with pytest.raises(ContractError, match="slots moved"):
        table.replay(LONG[0])
    assert table.keys == []


def test_released_graphs_are_captured_again_by_the_steps_that_need_them() -> None:
    table, recorder = late_table()
    table.replay(LONG[0])
    table.release()
    assert table.keys == [] and table.memory_bytes == 0
    assert sorted(recorder.released) == sorted([*KEYS, LONG[0]])
    table.release()  # changes nothing
    assert table.replay(decode_key(2)) and table.replay(LONG[0])
    assert table.keys == [decode_key(2), LONG[0]]
    assert not table.replay(decode_key(3))  # never was captured


def test_released_graphs_are_captured_again_by_a_call() -> None:
    table, recorder = warm(KEYS)
    table.release()
    table.warm_up(KEYS, lambda key: None)
    assert table.keys == sorted(KEYS) and recorder.captured == 2 * sorted(KEYS, reverse=True)
    assert table.num_captured_late == 0


# -- addresses ----------------------------------------------------------------------------------------


def test_a_moved_buffer_is_named_and_others_are_not() -> None:
    before = {"token": 100, "stage.row_slot": 200, "slots": 300}
    check_addresses(before, dict(reversed(before.items())), "step")
    with pytest.raises(
        ContractError, match=r"^step: the buffers slots moved since.*; expected fixed"
    ):
        check_addresses(before, before | {"slots": 301}, "step")
    with pytest.raises(ContractError, match="the buffers new moved"):
        check_addresses(before, before | {"new": 1}, "step")
