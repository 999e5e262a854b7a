"""Sizes that no machine can hold are refused before any memory is taken."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import build

import midstream
from midstream.compiler.host_memory import host_memory
from midstream.errors import CapacityError
from midstream.runtime.footprint import Share, check_room

OPTIONS: dict[str, Any] = {
    "state_block": 16,
    "kv_block": 4,
    "max_rows": 8,
    "num_state_pages": 60,
    "num_kv_pages": 200,
}
PLANNED = {"num_state_pages": None, "num_kv_pages": None}


@pytest.mark.parametrize(
    ("options", "what", "advice"),
    [
        ({"max_rows": 10**9}, "max_rows=1000000000 requests", "lower max_rows or max_len"),
        ({"max_rows": 10**9} | PLANNED, "max_rows=1000000000 requests", "lower max_rows"),
        ({"max_step_tokens": 10**9}, "max_step_tokens=1000000000", "lower max_step_tokens"),
        ({"num_kv_pages": 10**9}, "1000000000 KV pages of kv_block=4", "lower num_kv_pages"),
        ({"num_state_pages": 10**9}, "1000000000 state pages", "lower num_state_pages"),
        ({"kv_block": 2**30, "state_block": 2**30}, "200 KV pages of kv_block=1073741824", "kv_block"),
        ({"memory": "100TiB", "max_rows": 10**4} | PLANNED, "state pages", "memory"),
    ],
)  # fmt: skip
def test_a_size_that_no_machine_holds_is_refused_with_need_and_room_and_the_model_is_untouched(
    options: dict[str, Any], what: str, advice: str
) -> None:
    model = build("bamba")
    before = dict(vars(model))
    started = time.perf_counter()
    with pytest.raises(CapacityError) as refused:
        midstream.Engine(model, **(OPTIONS | options))
    message = str(refused.value)
    assert message.startswith("Engine: ") and what in message
    assert "GiB that the engine needs on this machine; expected at most" in message
    assert advice in message.rpartition("; ")[2]
    assert dict(vars(model)) == before
    assert time.perf_counter() - started < 30  # nothing was filled with zeros


@pytest.mark.parametrize("size", [{"state_block": 2**30}, {"graph_tokens": 2**30}])
def test_the_largest_numbers_work_where_they_take_no_memory(size: dict[str, int]) -> None:
    params = midstream.SamplingParams(max_tokens=4, temperature=0)
    answers = []
    for options in ({}, size):
        with midstream.Engine(build("bamba"), **(OPTIONS | options)) as engine:
            answers.append(next(iter(engine.generate([[5, 6, 7] * 9], params))).token_ids)
    assert answers[0] == answers[1]


def test_what_is_counted_is_what_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"max_rows": 2000, "max_len": 700, "max_step_tokens": 4096}
    counted: list[Share] = []
    monkeypatch.setattr(
        "midstream.runtime.assembly.check_room", lambda parts, device: counted.extend(parts)
    )
    engine = midstream.Engine(build("bamba"), **(OPTIONS | sizes))
    parts = engine._parts
    records, step, kv, state = counted
    live = vars(parts.scheduler.live).values()
    on_host = sum(array.nbytes for array in live if isinstance(array, np.ndarray))
    assert records.device == parts.runner.step.slots.flat.nbytes
    assert records.host == pytest.approx(on_host, rel=0.1)
    assert step.device == parts.runner.step.stage._flat.nbytes
    assert step.host == sum(area.flat.nbytes for area in parts.runner.step.stage._areas)
    assert kv.device == parts.pools.kv.nbytes
    assert state.device == parts.pools.temporal.nbytes + parts.pools.conv.nbytes
    engine.close()


def test_the_host_and_the_device_of_a_cpu_model_are_one_memory() -> None:
    room = host_memory()
    check_room([Share("one", room // 3, room // 3, "")], torch.device("cpu"))
    with pytest.raises(CapacityError, match=r"Engine: all of it take .* lower something"):
        check_room(
            [Share("a part", 9, 9, ""), Share("all of it", room, room, "lower something")],
            torch.device("cpu"),
        )


@pytest.mark.gpu
def test_a_gpu_is_asked_for_its_own_memory() -> None:
    room = torch.cuda.mem_get_info()[1]
    check_room([Share("pages", room // 2, 9, "")], torch.device("cuda"))
    with pytest.raises(CapacityError, match=r"on cuda; expected at most .*; lower num_kv_pages"):
        check_room([Share("pages", room + 1, 9, "lower num_kv_pages")], torch.device("cuda"))
