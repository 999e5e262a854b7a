"""Faults that users met with other graph backends: the model of each, on the CPU with emulated recordings."""

import copy

import pytest
import torch
from backend_rig import EMULATED, Recurrent, TwoLayers, Watched, check_steps, drawn
from torch._dynamo.utils import counters

from midstream.compiler.backend import midstream_backend


@pytest.fixture(autouse=True)
def _as_new():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def test_h1_a_state_that_is_returned_and_fed_back_is_never_overwritten():
    model = TwoLayers()
    watched = Watched(model)
    found = expected = [torch.zeros(1, 4), torch.zeros(1, 4)]
    kept = []
    for seed in range(10):
        x = drawn(1, 4, seed=seed)
        y, found = watched(x, found)
        with torch.inference_mode():
            z, expected = model(x, expected)
        kept.append((y, z))
        assert torch.equal(y, z) and all(map(torch.equal, found, expected))
    assert all(torch.equal(y, z) for y, z in kept)  # also those of earlier steps
    assert watched.num_replays >= 9


def test_h1_two_compiled_functions_may_be_chained():
    first, second = Watched(TwoLayers()), Watched(Recurrent())
    plain = [copy.deepcopy(watched._compiled._orig_mod) for watched in (first, second)]
    states, expected = ([torch.zeros(1, 4) for _ in range(3)] for _ in range(2))
    for seed in range(10):
        x = drawn(1, 4, seed=seed)
        y, states[:2] = first(x, states[:2])
        y = second(y, states[2])
        with torch.inference_mode():
            z, expected[:2] = plain[0](x, expected[:2])
            z = plain[1](z, expected[2])
        assert torch.equal(y, z) and all(map(torch.equal, states, expected))
    assert first.num_replays >= 9 and second.num_replays >= 9


def test_h3_a_written_view_of_a_pool_copies_nothing_of_it():
    def write_layer(pool, x, layer):
        pool[layer].mul_(0.5).add_(x)
        return pool[layer].sum()

    watched = Watched(write_layer)
    pool = drawn(3, 2, 4)
    expected, address = pool.clone(), pool.data_ptr()
    for seed in range(4):
        x = drawn(2, 4, seed=seed)
        watched(pool, x, 1)
        write_layer(expected, x, 1)
        assert torch.equal(pool, expected) and pool.data_ptr() == address
    (graph,) = watched.graphs
    assert [a.role.value for a in graph.arguments if a.num_bytes == pool.nbytes] == ["state"]
    assert graph.recorded.memory_bytes < pool.nbytes
    assert counters["midstream"]["adoptions"] == 0


def test_h4_two_hundred_sizes_make_a_bounded_number_of_recordings():
    def step(x, state):
        state.add_(x.sum(0))
        return x * state

    watched = Watched(step, {**EMULATED, "max_recordings": 4}, dynamic=True)
    sizes = torch.randint(2, 40, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    check_steps(watched, step, [drawn(4)], [(drawn(size, 4),) for size in sizes])
    assert len(watched.graphs) == 1
    assert watched.graphs[0].recorded.num_recordings <= 4
    assert watched.num_replays + watched.num_eager == 200
    assert any("recordings are in use" in reason for reason in watched.graphs[0].events.eager)


def test_h5_layers_that_are_compiled_one_by_one_share_one_compilation():
    layers = [Recurrent(seed=seed) for seed in range(4)]
    compiled = [
        torch.compile(layer, backend=midstream_backend, options=dict(EMULATED)) for layer in layers
    ]
    states = [torch.zeros(1, 4) for _ in layers]
    expected = [torch.zeros(1, 4) for _ in layers]
    with torch.inference_mode():
        for seed in range(3):
            for one, layer, state, other in zip(compiled, layers, states, expected, strict=True):
                x = drawn(1, 4, seed=seed)
                assert torch.equal(one(x, state), layer(x, other))
                assert torch.equal(state, other)
    assert counters["midstream"]["graphs_compiled"] == 1
    assert counters["midstream"]["recordings"] == 4
    assert counters["midstream"]["adoptions"] == 0


def test_h5_views_that_overlap_later_see_each_others_writes():
    def shift(target, source):
        target.copy_(source * 2)
        return source + 1

    watched = Watched(shift)
    for pages in (
        (slice(0, 4), slice(4, 8)),
        (slice(0, 4), slice(2, 6)),
        (slice(0, 4), slice(4, 8)),
    ):
        pool, expected = drawn(8), drawn(8)
        for _ in range(2):
            found = watched(pool[pages[0]], pool[pages[1]])
            wanted = shift(expected[pages[0]], expected[pages[1]])
            assert torch.equal(found, wanted) and torch.equal(pool, expected)
    assert len(watched.graphs) == 1
