"""Where each record lies in the flat slot memory, and what a new request writes there."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from midstream.runtime.sampling import MAX_STOP_IDS, SamplingParams
from midstream.runtime.slots import NO_COL, SlotLayout, SlotMemory, SlotSampling

LAYOUT = SlotLayout(num_slots=3, state_cols=5, kv_cols=7)


@pytest.fixture
def memory() -> SlotMemory:
    return SlotMemory.allocate(LAYOUT, torch.device("cpu"))


def fields(memory: SlotMemory) -> dict[str, Tensor]:
    return {name: getattr(memory, name) for name in LAYOUT.widths}


def sampling(*stop_ids: int, seed: int = 0, **params: Any) -> SlotSampling:
    return SlotSampling(SamplingParams(**params), seed, stop_ids, min_position=40)


def test_every_element_belongs_to_exactly_one_field_of_one_slot(memory: SlotMemory) -> None:
    places = [
        LAYOUT.index(name, slot, col)
        for name, width in LAYOUT.widths.items()
        for slot in range(3)
        for col in range(width)
    ]
    assert sorted(places) == list(range(LAYOUT.num_elements))
    assert memory.flat.shape == (LAYOUT.num_elements,) and memory.flat.dtype == torch.int32


def test_an_index_names_the_element_that_the_view_shows(memory: SlotMemory) -> None:
    memory.flat.copy_(torch.arange(LAYOUT.num_elements))
    for name, view in fields(memory).items():
        shape = (3, LAYOUT.widths[name])
        want = [[LAYOUT.index(name, s, c) for c in range(shape[1])] for s in range(3)]
        assert view.view(shape).tolist() == want
        assert view.data_ptr() == memory.flat.data_ptr() + 4 * LAYOUT.start[name]


def test_tables_have_columns_and_scalars_have_none(memory: SlotMemory) -> None:
    shapes = {name: tuple(view.shape) for name, view in fields(memory).items()}
    wide = {"seed": (3, 2), "stop_id": (3, MAX_STOP_IDS), "state_table": (3, 5), "kv_table": (3, 7)}
    assert shapes == dict.fromkeys(shapes, (3,)) | wide


def test_a_table_of_one_column_is_still_a_table() -> None:
    memory = SlotMemory.allocate(SlotLayout(4, 1, 1), torch.device("cpu"))
    assert memory.state_table.shape == memory.kv_table.shape == (4, 1)
    assert not memory.flat.any()


def test_admission_resets_the_record_of_its_slot_and_leaves_the_others(memory: SlotMemory) -> None:
    memory.flat.fill_(77)
    params = sampling(2, 9, seed=2**63 + 5, temperature=0.5, top_k=4, top_p=0.25, min_p=0.125)
    deltas = LAYOUT.admission(1, computed=12, resume_page=8, sampling=params)
    assert all(0 <= index < LAYOUT.num_elements for index in deltas)
    assert all(-(2**31) <= value < 2**31 for value in deltas.values())
    memory.flat[list(deltas)] = torch.tensor(list(deltas.values()), dtype=torch.int32)
    kept = ("last_token", "state_table", "kv_table")  # written when they mean something
    for name, view in fields(memory).items():
        assert (view[[0, 2]] == 77).all(), name
        assert (view[1] == 77).all() == (name in kept), name
    whole = {name: int(view[1]) for name, view in fields(memory).items() if view.dim() == 1}
    assert (whole["computed"], whole["resume_page"], whole["accepted"]) == (12, 8, 1)
    assert (whole["state_col"], whole["src_col"], whole["src_off"]) == (NO_COL, NO_COL, 0)
    assert (whole["top_k"], whole["min_position"]) == (4, 40)
    floats = [
        getattr(memory, n)[1:2].view(torch.float32).item()
        for n in ("temperature", "top_p", "min_p")
    ]
    assert floats == [0.5, 0.25, 0.125]
    assert memory.seed[1].numpy().view(np.uint64).item() == 2**63 + 5
    assert memory.stop_id[1].tolist() == [2, 9] + [-1] * (MAX_STOP_IDS - 2)


def test_all_stop_ids_fit() -> None:
    ids = tuple(range(100, 100 + MAX_STOP_IDS))
    deltas = LAYOUT.admission(2, 0, 0, sampling(*ids))
    assert tuple(deltas[LAYOUT.index("stop_id", 2, col)] for col in range(MAX_STOP_IDS)) == ids
