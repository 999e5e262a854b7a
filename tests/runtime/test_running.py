"""The running requests and their slots: the same order in both, and nothing left of an owner before."""

import random

import numpy as np

from midstream.runtime.live import LiveTable
from midstream.runtime.request import Request
from midstream.runtime.running import Running
from midstream.runtime.sampling import SamplingParams
from midstream.runtime.slots import SlotLayout, SlotSampling


def request(number: int, priority: int, slot: int) -> Request:
    params = SamplingParams()
    return Request(
        request_id=number, prompt=np.zeros(1, np.int32), params=params,
        sampling=SlotSampling(params, 0, (), 0), max_tokens=1, priority=priority, root=b"",
        streamed=False, watched=False, slot=slot,
    )  # fmt: skip


def test_requests_and_slots_stay_in_order() -> None:
    rng, running = random.Random(3), Running(6)
    free = list(range(6))
    for number in range(300):
        if free and rng.random() < 0.6:
            running.add(request(number, rng.randrange(3), free.pop(rng.randrange(len(free)))))
        elif running.requests:
            gone = rng.choice(running.requests)
            running.remove(gone)
            free.append(gone.slot)
        requests = running.requests
        assert requests == sorted(requests, key=lambda r: r.order)
        assert running.slots[: len(requests)].tolist() == [r.slot for r in requests]


def test_the_next_owner_of_a_slot_is_looked_into_at_once() -> None:
    """From 0 on: what the owner before it needed next says nothing about it."""
    live = LiveTable(SlotLayout(1, state_cols=2, kv_cols=2), max_len=8)
    for number in range(2):
        owner = request(number, 0, -1)
        slot = live.take(owner, np.array([3], np.int32), 0)
        assert live.look_at[slot] == live.heed_at[slot] == live.relocate[slot] == 0
        assert live.epoch[slot] == owner.epoch == number
        live.look_at[slot] = live.heed_at[slot] = live.relocate[slot] = 7
        live.release(owner)
