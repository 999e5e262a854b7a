"""Recordings of compiled functions as CUDA graphs."""

import copy

import pytest
import torch
import triton
import triton.language as tl
from backend_rig import Recurrent, TwoLayers, Watched, check_steps, decay, drawn
from torch import nn
from torch._dynamo.utils import counters

from midstream.compiler.backend import midstream_backend

pytestmark = pytest.mark.gpu

EAGER = {"inner": "eager"}
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _as_new():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _drawn(*shape, seed=0):
    return drawn(*shape, seed=seed).to(CUDA)


def _steps(num, *shape):
    return [(_drawn(*shape, seed=n),) for n in range(num)]


@pytest.mark.parametrize("make", [lambda: decay, Recurrent], ids=["function", "module"])
def test_a_replay_equals_eager_bit_for_bit_and_writes_the_state_in_place(make):
    plain = make()
    plain = plain.to(CUDA) if isinstance(plain, nn.Module) else plain
    watched = Watched(copy.deepcopy(plain), EAGER)
    state = _drawn(2, 4)
    address = state.data_ptr()
    check_steps(watched, plain, [state], _steps(5, 2, 4))
    assert state.data_ptr() == address
    assert (watched.num_recordings, watched.num_replays, watched.num_eager) == (1, 5, 0)
    assert "cudagraph_skips" not in counters["inductor"]


def test_a_new_owner_is_adopted_and_the_former_one_keeps_its_state():
    watched = Watched(decay, EAGER)
    first, second = _drawn(4, seed=1), _drawn(4, seed=2)
    check_steps(watched, decay, [first], _steps(3, 4))
    kept = first.clone()
    check_steps(watched, decay, [second], _steps(3, 4))
    assert torch.equal(first, kept)
    check_steps(watched, decay, [first], _steps(3, 4))
    assert len(watched.graphs) == 1
    assert counters["midstream"]["adoptions"] >= 1
    assert watched.num_eager == 0


def test_h1_a_state_that_is_returned_and_fed_back_is_never_overwritten():
    model = TwoLayers().to(CUDA)
    watched = Watched(model, EAGER)
    found = expected = [torch.zeros(1, 4, device=CUDA) for _ in range(2)]
    kept = []
    for seed in range(10):
        x = _drawn(1, 4, seed=seed)
        y, found = watched(x, found)
        with torch.inference_mode():
            z, expected = model(x, expected)
        kept.append((y, z, *found, *expected))
    for y, z, one, two, three, four in kept:
        assert torch.equal(y, z) and torch.equal(one, three) and torch.equal(two, four)
    assert watched.num_replays >= 9


def test_h1_two_compiled_functions_may_be_chained():
    model, layer = TwoLayers().to(CUDA), Recurrent(seed=3).to(CUDA)
    first, second = Watched(model, EAGER), Watched(layer, EAGER)
    states = [torch.zeros(1, 4, device=CUDA) for _ in range(3)]
    expected = [state.clone() for state in states]
    for seed in range(10):
        x = _drawn(1, 4, seed=seed)
        y, states[:2] = first(x, states[:2])
        y = second(y, states[2])
        with torch.inference_mode():
            z, expected[:2] = model(x, expected[:2])
            z = layer(z, expected[2])
        assert torch.equal(y, z) and all(map(torch.equal, states, expected))
    assert second.num_replays >= 9


def test_calls_on_a_second_stream_wait_for_each_other():
    watched = Watched(decay, EAGER)
    state = torch.zeros(1 << 22, device=CUDA)
    expected = state.clone()
    inputs = [_drawn(1, seed=n).expand(1 << 22).contiguous() for n in range(8)]
    streams = [torch.cuda.Stream(CUDA), torch.cuda.Stream(CUDA)]
    torch.cuda.synchronize(CUDA)
    found = []
    for n, x in enumerate(inputs):
        with torch.cuda.stream(streams[n % 2]):
            found.append(watched(x, state))
    torch.cuda.synchronize(CUDA)
    with torch.inference_mode():
        wanted = [decay(x, expected) for x in inputs]
    assert torch.equal(state, expected)
    assert all(map(torch.equal, found, wanted))
    assert watched.num_replays >= 7


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_what_inductor_made_is_recorded_too(mode):
    layer = Recurrent(64).to(CUDA)
    recorded = torch.compile(layer, backend=midstream_backend, mode=mode)
    state = _drawn(2, 64, seed=7)
    expected = state.clone()
    with torch.inference_mode():
        for seed in range(5):
            x = _drawn(2, 64, seed=seed)
            found = recorded(x, state)
            wanted = layer(x, expected)
            torch.testing.assert_close(found, wanted)
            torch.testing.assert_close(state, expected)
    assert counters["midstream"]["recordings"] >= 1
    assert "cudagraph_skips" not in counters["inductor"]


def test_a_mode_without_graphs_records_nothing():
    layer = Recurrent(64).to(CUDA)
    compiled = torch.compile(
        layer,
        backend=midstream_backend,
        options={"mode": "max-autotune-no-cudagraphs", "inner": "eager"},
    )
    with torch.inference_mode():
        compiled(_drawn(2, 64), _drawn(2, 64))
    assert counters["midstream"]["graphs_compiled"] == 1
    assert "recordings" not in counters["midstream"]


def test_a_tensor_on_the_cpu_is_named_as_the_reason():
    def mixed(x, y):
        return x + (y * 2).sum().to(x.device)

    watched = Watched(mixed, EAGER)
    check_steps(watched, mixed, [], [(_drawn(4), drawn(4, seed=n)) for n in range(2)])
    assert "skipping cudagraphs due to cpu device (found aten." in str(watched.graphs[0].skipped)
    assert counters["inductor"]["cudagraph_skips"] == 1


def test_a_capture_that_fails_leaves_the_device_usable_and_the_result_right():
    library = torch.library.Library("test_backend_gpu", "FRAGMENT")
    library.define("waits(Tensor x) -> Tensor")
    library.impl("waits", lambda x: x * float(x.sum()), "CUDA")
    torch.library.register_fake("test_backend_gpu::waits", torch.empty_like, lib=library)

    def waits(x, state):
        state.add_(x)
        return torch.ops.test_backend_gpu.waits(state)

    watched = Watched(waits, EAGER)
    state = _drawn(4)
    check_steps(watched, waits, [state], _steps(3, 4))
    assert (watched.num_recordings, watched.num_eager) == (0, 3)
    other = Watched(decay, EAGER)
    check_steps(other, decay, [_drawn(4)], _steps(3, 4))
    assert other.num_replays == 3


@triton.jit
def _accumulate_kernel(state_ptr, x_ptr, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(state_ptr + place, tl.load(state_ptr + place) + tl.load(x_ptr + place))


def test_a_state_that_only_a_triton_kernel_writes_is_state():
    def accumulates(x, state):
        _accumulate_kernel[(1,)](state, x, 16)
        return state * 2

    def plain(x, state):
        state.add_(x)
        return state * 2

    watched = Watched(accumulates, EAGER)
    check_steps(watched, plain, [_drawn(16)], _steps(4, 16))
    (graph,) = watched.graphs
    roles = {argument.name: argument.role.value for argument in graph.arguments}
    assert roles == {"l_state_": "state", "l_x_": "input"}
    assert watched.num_replays == 4


def test_random_numbers_go_on_from_call_to_call():
    watched = Watched(lambda x: x + torch.rand_like(x), EAGER)
    one, two = (watched(torch.zeros(64, device=CUDA)) for _ in range(2))
    assert not torch.equal(one, two)


def test_reset_gives_back_the_memory_of_recordings():
    def wide(x, state):
        state.add_(x)
        return (state[:, None] * x[None, :]).sum(0)  # 64 MB between

    compiled = torch.compile(wide, backend=midstream_backend, options=EAGER)
    x, state = _drawn(4096), _drawn(4096)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(CUDA)
    with torch.inference_mode():
        compiled(x, state)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(CUDA) >= before + (64 << 20)
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(CUDA) <= before + (2 << 20)
