"""One copy brings a step to the device: every field, its padding, and nothing that was there before.

Blocks here: 4 tokens of a KV page, 8 of a state column.  Letters: R rows, T tokens, Q chunks.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hash_engine import hash_engine
from hash_model import answer
from host_rig import Case, Rig

import midstream
from midstream.compiler.context import StepView
from midstream.graphs.table import GraphKey
from midstream.ops.registry import NULL_PAGE, PADDING
from midstream.runtime import assembly
from midstream.runtime.deltas import Deltas
from midstream.runtime.plan import StepPlan
from midstream.runtime.stage import CHUNK, Stage, StageLimits, stage_limits

CPU = torch.device("cpu")
GARBAGE = -99


def text(length: int, seed: int = 0) -> list[int]:
    return [3 + (i * i + 5 * seed) % 29 for i in range(length)]


class Bench:
    """A stage full of garbage, behind the plans of a rig."""

    def __init__(self, max_step_tokens: int = 128, state_block: int = 8) -> None:
        self.block = state_block
        case = Case(5, max_step_tokens, 4, state_block, num_state_pages=60, max_len=256)
        self.rig = Rig(case)
        self.stage = Stage(stage_limits(5, max_step_tokens, state_block), CPU)
        for flat in (self.stage._flat, *(area.flat for area in self.stage._areas)):
            flat.fill_(GARBAGE)
        self.sent: dict[int, int] = {}  # deltas of the step staged last

    def plan(self) -> StepPlan:
        plan = self.rig.schedule()
        assert plan is not None
        return plan

    def decode(self, plan: StepPlan, rows: int) -> StepView:
        self.sent = dict(self.rig.live.deltas.items())
        self.stage.write_decode(plan, self.rig.live.deltas, rows)
        return self.stage.decode_view(rows)

    def chunks(
        self, plan: StepPlan, pad: Callable[[GraphKey], GraphKey] = lambda key: key
    ) -> StepView:
        self.sent = dict(self.rig.live.deltas.items())
        shape = self.stage.write_chunks(plan, self.rig.live, 4, pad)
        return self.stage.chunk_view(shape)

    def settle(self, plan: StepPlan) -> None:
        """Run a plan that was staged: the rig's device moves no mirror, and needs the deltas too."""
        self.rig.live.deltas.put(self.sent)
        self.rig.launch(plan)
        self.rig.commit()


def fields(view: StepView) -> dict[str, Any]:
    """Lists of all fields, but for `kind` and what the device writes."""
    names = set(StepView.__dataclass_fields__) - {"kind", "read_page"}
    values = {name: getattr(view, name) for name in names}
    return {name: None if value is None else value.tolist() for name, value in values.items()}


def kv_slots(bench: Bench, slot: int, begin: int, end: int) -> list[int]:
    table = bench.rig.live.kv_table[slot]
    return [int(table[p // 4]) * 4 + p % 4 for p in range(begin, end)]


# -- what is sent -----------------------------------------------------------------------------------


def test_a_chunk_step_is_sent_with_its_padding_and_nothing_else() -> None:
    bench = Bench()
    first, second = bench.rig.add(text(70), 3), bench.rig.add(text(5, 1), 3)
    plan = bench.plan()
    pad = GraphKey(tokens=88, rows=4, chunks=20)
    needed: list[GraphKey] = []
    view = bench.chunks(plan, lambda key: needed.append(key) or pad)
    # 70 tokens: cut at 8, 16, ... 64 and 68; 5 tokens: cut at 4
    bounds = [*range(0, 65, 8), 68, 70, 74, 75]
    exports = [*plan.chunks[0].export_page, bench.rig.running_page(first)]
    exports += [*plan.chunks[1].export_page, bench.rig.running_page(second)]
    assert needed == [GraphKey(75, 2, 12)] and view.kind == "chunk"
    tokens = text(70) + text(5, 1)
    assert fields(view) == {
        "token_id": tokens + [0] * 13,
        "position": [*range(70), *range(5)] + [0] * 13,
        "kv_slot": kv_slots(bench, first.slot, 0, 70)
        + kv_slots(bench, second.slot, 0, 5)
        + [PADDING] * 13,
        "row_slot": [first.slot, second.slot, PADDING, PADDING],
        "row_start": [0, 70, 75, 75, 75],
        "write_page": [*map(bench.rig.running_page, (first, second)), NULL_PAGE, NULL_PAGE],
        "sample_token": [69, 74, 0, 0],
        "chunk_start": bounds + [75] * 8,
        "chunk_row": [0] * 10 + [1] * 2 + [PADDING] * 8,
        "chunk_page": exports + [NULL_PAGE] * 8,
        "row_chunk": [0, 10, 12, 12, 12],
    }
    assert bench.stage.device["row_sample"][:4].tolist() == [1, 1, 0, 0]


def test_rows_are_cut_at_the_tile_as_well_as_at_exports() -> None:
    bench = Bench(max_step_tokens=127, state_block=1024)
    bench.rig.add(text(200), 2)
    view = bench.chunks(bench.plan())
    assert view.chunk_start is not None
    assert view.chunk_start.tolist() == [0, CHUNK, 127]


def test_decoding_rows_beside_a_chunk_take_their_token_from_the_device() -> None:
    bench = Bench()
    old = bench.rig.add(text(16), 9)
    plan = bench.plan()
    bench.chunks(plan)
    bench.settle(plan)
    page = bench.rig.running_page(old)
    new = bench.rig.add(text(3, 1), 2)
    view = bench.chunks(plan := bench.plan())
    assert plan.slot.tolist() == [new.slot, old.slot]
    got = fields(view)
    assert got["token_id"] == [*text(3, 1), -1] and got["position"] == [0, 1, 2, 16]
    assert got["kv_slot"] == kv_slots(bench, new.slot, 0, 3) + kv_slots(bench, old.slot, 16, 17)
    assert got["sample_token"] == [2, 3] and got["row_chunk"] == [0, 1, 2]
    pages = [bench.rig.running_page(new), bench.rig.running_page(old)]
    assert got["chunk_page"] == got["write_page"] == pages
    assert page not in (0, bench.rig.running_page(old))  # the answer begins a new block


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_a_decode_step_is_sent_with_its_padding(rows: int) -> None:
    bench = Bench()
    requests = [bench.rig.add(text(n, n), 9) for n in (8, 5)]
    plan = bench.plan()
    bench.chunks(plan)
    bench.settle(plan)
    view = bench.decode(bench.plan(), rows)
    more = rows - 2
    places = [kv_slots(bench, r.slot, len(r.prompt), len(r.prompt) + 1)[0] for r in requests]
    assert fields(view) == {
        "token_id": [-1, -1] + [0] * more,
        "position": [8, 5] + [0] * more,
        "kv_slot": places + [PADDING] * more,
        "row_slot": [r.slot for r in requests] + [PADDING] * more,
        "row_start": [0, 1] + [2] * (more + 1),
        "write_page": [*map(bench.rig.running_page, requests), *[NULL_PAGE] * more],
        "sample_token": list(range(rows)),
        "chunk_start": None,
        "chunk_row": None,
        "chunk_page": None,
        "row_chunk": None,
    }
    assert bench.stage.device["row_sample"][:rows].tolist() == [1, 1] + [0] * more


def test_a_prompt_in_the_middle_samples_nothing() -> None:
    bench = Bench(max_step_tokens=6)
    bench.rig.add(text(9), 3)
    bench.chunks(bench.plan())
    assert bench.stage.device["row_sample"][0] == 0


def test_deltas_are_sent_with_their_count() -> None:
    bench = Bench()
    bench.rig.add(text(9), 3)
    plan, device, deltas = bench.plan(), bench.stage.device, bench.rig.live.deltas
    changes = dict(deltas.items())
    bench.chunks(plan)
    assert device["delta_count"].tolist() == [len(changes)] and not deltas
    assert device["delta_index"][: len(changes)].tolist() == list(changes)
    assert device["delta_value"][: len(changes)].tolist() == list(changes.values())
    bench.settle(plan)
    bench.decode(bench.plan(), 1)
    assert device["delta_count"].tolist() == [len(bench.sent)] != [len(changes)]
    assert not deltas


def test_a_decode_step_sends_nothing_of_a_chunk_step_and_deltas_only_where_there_are_any() -> None:
    bench, untouched = Bench(), list[set[str]]()
    bench.rig.add(text(8), 3)
    plan = bench.plan()
    bench.chunks(plan)
    bench.settle(plan)
    for has_deltas in (True, False):
        plan = bench.plan()
        assert has_deltas == bool(bench.rig.live.deltas)
        for tensor in bench.stage.device.values():
            tensor.fill_(GARBAGE - 1)  # no area has this
        bench.decode(plan, 1)
        fields = bench.stage.device.items()
        untouched.append({name for name, field in fields if (field == GARBAGE - 1).all()})
        assert bench.stage.device["delta_count"].tolist() == [len(bench.sent)]
        bench.settle(plan)
    of_chunks = {
        "sample_token", "token_id", "position", "kv_slot", "chunk_start", "chunk_row", "chunk_page",
        "row_chunk", "read_page",
    }  # fmt: skip
    assert untouched == [of_chunks, of_chunks | {"delta_index", "delta_value"}]


def test_a_row_outside_of_the_tables_is_a_bug_that_shows() -> None:
    bench = Bench()
    bench.rig.add(text(9), 3)
    plan = bench.plan()
    bench.chunks(plan)
    plan.num_computed[:] += 1000
    with pytest.raises(AssertionError, match="outside of the slots' tables"):
        bench.chunks(plan)
    with pytest.raises(AssertionError, match="more rows than the step has"):
        bench.decode(plan, 0)


# -- the buffers ------------------------------------------------------------------------------------


def test_views_keep_their_addresses_and_fields_do_not_overlap() -> None:
    bench = Bench()
    before = bench.stage.addresses()
    bench.rig.add(text(9), 3)
    bench.chunks(bench.plan())
    assert bench.stage.addresses() == before
    spans = sorted((t.data_ptr(), t.data_ptr() + 4 * len(t)) for t in bench.stage.device.values())
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert all((begin - spans[0][0]) % 128 == 0 for begin, _ in spans)
    assert bench.stage.decode_view(2).row_slot.data_ptr() == before["row_slot"]
    shape = GraphKey(8, 2, 2)
    assert bench.stage.chunk_view(shape).chunk_page.data_ptr() == before["chunk_page"]  # type: ignore[union-attr]


class _Event:
    """Stands for the event behind the copy of an area."""

    def __init__(self, log: list[str], area: int) -> None:
        self.log, self.area = log, area

    def synchronize(self) -> None:
        self.log.append(f"wait {self.area}")

    def record(self) -> None:
        self.log.append(f"sent {self.area}")


def test_an_area_is_written_again_only_after_its_last_copy() -> None:
    bench, log = Bench(), list[str]()
    for number, area in enumerate(bench.stage._areas):
        area.sent = _Event(log, number)  # type: ignore[assignment]
    for request in (bench.rig.add(text(9), 30), bench.rig.add(text(2, 1), 30)):
        assert request.slot < 0
    plan = bench.plan()
    bench.chunks(plan)
    bench.settle(plan)
    for _ in range(4):
        plan = bench.plan()
        bench.decode(plan, 2)
        bench.settle(plan)
    many = Deltas(4096)
    many.put_row(0, range(bench.stage.limits.max_deltas + 1))
    assert bench.stage.send_excess(many) and not bench.stage.send_excess(many)
    turns = [1, 2, 0, 1, 2, 0]
    assert log == [word for area in turns for word in (f"wait {area}", f"sent {area}")]


@pytest.mark.parametrize(
    ("max_rows", "max_step_tokens", "block"), [(1, 1, 4), (7, 100, 4), (3, 300, 8192)]
)
def test_the_limits_hold_for_the_step_with_the_most_cuts(
    max_rows: int, max_step_tokens: int, block: int
) -> None:
    limits = stage_limits(max_rows, max_step_tokens, block)
    assert limits.max_step_tokens % 8 == 0 and limits.max_step_tokens >= max(8, max_step_tokens)
    lengths = np.full(max_rows, max(1, max_step_tokens // max_rows))
    # every row may begin just before a boundary, and end with two exports and a rest
    cuts = sum(-(-int(n) // block) + int(n) // CHUNK + 3 for n in lengths)
    assert limits.max_chunks >= max(cuts, 2) and limits.max_rows >= max(max_rows, 2)


# -- more deltas than one copy holds ----------------------------------------------------------------


@pytest.mark.parametrize("max_deltas", [1, 5, 27])
def test_more_deltas_than_fit_are_sent_ahead_of_the_step(
    max_deltas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def few(*args: Any) -> StageLimits:
        return replace(stage_limits(*args), max_deltas=max_deltas)

    sent: list[int] = []
    send = Stage.send_excess

    def counted(stage: Stage, deltas: Deltas) -> bool:
        before = len(deltas)
        is_sent = send(stage, deltas)
        sent.extend([before - len(deltas)] * is_sent)
        return is_sent

    monkeypatch.setattr(assembly, "stage_limits", few)
    monkeypatch.setattr(Stage, "send_excess", counted)
    prompts = [text(n, n) for n in (9, 30, 17)]
    with hash_engine(max_step_tokens=64) as engine:
        params = midstream.SamplingParams(max_tokens=12, temperature=0.0)
        outputs = list(engine.generate(prompts * 2, params))
    assert [list(out.token_ids) for out in outputs] == [
        answer(prompt, 12) for prompt in prompts * 2
    ]
    assert sent and set(sent) == {max_deltas}
