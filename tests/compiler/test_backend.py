"""The contract with torch.compile, on the CPU with emulated recordings."""

import copy
import pickle
import threading

import pytest
import torch
from backend_rig import EMULATED, Recurrent, Watched, check_steps, decay, drawn
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

from midstream.compiler import backend_graph
from midstream.compiler.backend import midstream_backend
from midstream.compiler.backend_options import BackendOptions
from midstream.errors import ContractError


@pytest.fixture(autouse=True)
def _as_new():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _compiled(function, **options):
    return torch.compile(function, backend=midstream_backend, options={**EMULATED, **options})


def _steps(num, *shape):
    return [(drawn(*shape, seed=n),) for n in range(num)]


@pytest.mark.parametrize("make", [lambda: decay, Recurrent], ids=["function", "module"])
def test_replays_equal_eager_and_write_the_callers_own_state(make):
    plain = make()
    watched = Watched(copy.deepcopy(plain))
    state = drawn(2, 4)
    address = state.data_ptr()
    check_steps(watched, plain, [state], _steps(4, 2, 4))
    assert state.data_ptr() == address
    assert (watched.num_recordings, watched.num_replays, watched.num_eager) == (1, 4, 0)


def test_a_state_of_a_new_owner_is_written_and_the_former_one_left_alone():
    watched = Watched(decay)
    for seed in range(3):
        before = drawn(4, seed=9)
        state = drawn(4, seed=seed)
        check_steps(watched, decay, [state], _steps(3, 4))
        kept = state.clone()
        check_steps(watched, decay, [before], _steps(2, 4))
        assert torch.equal(state, kept)
    assert len(watched.graphs) == 1


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_sizes_are_numbers_and_each_is_one_recording(dynamic):
    watched = Watched(decay, dynamic=dynamic)
    for rows in (2, 3, 5, 3, 2):
        check_steps(watched, decay, [drawn(rows, 4)], _steps(2, rows, 4))
    assert len(watched.graphs) == {None: 2, True: 1, False: 3}[dynamic]
    assert watched.num_recordings == {None: 4, True: 3, False: 3}[dynamic]  # None: 2 rows twice
    assert watched.num_eager == 0


@pytest.mark.parametrize("shape", [(1, 4), (0, 4), (1, 1)], ids=str)
def test_sizes_0_and_1_are_calls_like_others(shape):
    check_steps(Watched(decay, dynamic=True), decay, [drawn(*shape)], _steps(3, *shape))


def test_layers_are_analysed_with_sizes_that_are_symbols():
    layer = nn.Linear(4, 3)
    watched = Watched(copy.deepcopy(layer), dynamic=True)
    check_steps(watched, layer, [], [(drawn(3, rows, 4),) for rows in (2, 5, 2)])
    assert (len(watched.graphs), watched.num_recordings, watched.num_replays) == (1, 2, 3)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_calls_without_gradients_are_recorded(guard):
    layer = Recurrent()
    compiled = _compiled(layer)
    with guard():
        for _ in range(3):
            compiled(drawn(1, 4), torch.zeros(1, 4))
    assert counters["midstream"]["recordings"] >= 1
    assert "cudagraph_skips" not in counters["inductor"]


def test_a_function_that_needs_no_gradients_is_recorded_in_any_mode():
    watched = Watched(decay)
    for x in _steps(3, 4):
        watched._compiled(*x, torch.zeros(4))
    assert watched.num_replays == 3


def test_weights_that_could_have_gradients_but_get_none_are_no_training_call():
    layer = Recurrent()

    def quiet(x, state):
        with torch.no_grad():
            return layer(x, state)

    watched = Watched(quiet)
    for _ in range(3):
        watched._compiled(drawn(1, 4), torch.zeros(1, 4))
    assert (watched.num_replays, watched.num_eager) == (3, 0)


def test_a_training_call_says_so_once_and_gives_the_gradients():
    layer = Recurrent()
    plain = copy.deepcopy(layer)
    compiled = _compiled(layer)
    for _ in range(2):
        compiled(drawn(1, 4), torch.zeros(1, 4)).sum().backward()
        plain(drawn(1, 4), torch.zeros(1, 4)).sum().backward()
    assert torch.equal(layer.weight.grad, plain.weight.grad)
    assert counters["inductor"]["cudagraph_skips"] == 1
    (reason,) = [key for key in counters["midstream"] if key.startswith("skipping cudagraphs")]
    assert "gradients" in reason and "inference_mode" in reason


def test_fullgraph_and_graph_breaks_both_work():
    def broken(x, state):
        state.add_(x)
        torch._dynamo.graph_break()
        return state * 2

    check_steps(Watched(decay, fullgraph=True), decay, [drawn(4)], _steps(3, 4))
    watched = Watched(broken)
    check_steps(watched, broken, [drawn(4)], _steps(3, 4))
    assert len(watched.graphs) == 2
    assert watched.num_replays == 6


def test_reset_drops_all_recordings_and_calls_record_again():
    watched = Watched(decay)
    state = drawn(4)
    compiled = _compiled(decay)
    check_steps(watched, decay, [state], _steps(2, 4))
    compiled(drawn(4), state)  # torch resets the backends that it compiled with
    held = [graph.recorded for graph in watched.graphs]
    assert [calls.num_recordings for calls in held] == [1]
    torch._dynamo.reset()
    assert [calls.num_recordings for calls in held] == [0]
    check_steps(watched, decay, [state], _steps(2, 4))
    assert len(watched.graphs) == 2


def test_a_function_that_is_dropped_gives_back_its_recordings():
    watched = Watched(decay)
    watched(drawn(4), drawn(4))
    capturer = watched.graphs[0].recorded._capturer
    before = len(capturer._graphs)
    watched.graphs.clear()
    torch._dynamo.reset()
    assert len(capturer._graphs) < before


def test_two_threads_may_compile_and_call_at_once():
    compiled = _compiled(decay)
    failures = []

    def work(seed):
        state = drawn(4, seed=seed)
        expected = state.clone()
        for (x,) in _steps(20, 4):
            with torch.inference_mode():
                if not torch.equal(compiled(x, state), decay(x, expected)):
                    failures.append(seed)
        if not torch.equal(state, expected):
            failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize(
    "mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
)
def test_each_mode_gives_the_same_results_and_records_as_it_says(mode):
    with torch.inference_mode():
        graph = _graph_of(decay, BackendOptions(mode=mode, **EMULATED))
    assert (graph.recorded is not None) == (mode != "max-autotune-no-cudagraphs")
    check_steps(lambda x, s: graph.call(s, x)[0], decay, [drawn(4)], _steps(3, 4))
    assert "cudagraph_skips" not in counters["inductor"]


def _graph_of(function, settings):
    """The one graph of a call, compiled but not called."""
    found = []

    def backend(gm, inputs):
        found.append((gm, backend_graph.compile_graph(gm, inputs, settings)))
        return gm.forward

    torch.compile(function, backend=backend)(drawn(4), drawn(4))
    ((gm, graph),) = found
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    assert names == ["l_state_", "l_x_"]
    return graph


def test_the_mode_of_torch_compile_arrives():
    torch.compile(decay, backend=midstream_backend, mode="reduce-overhead")  # nothing compiled yet
    with pytest.raises(BackendCompilerFailed, match="mode is 'fast', expected one of default"):
        torch.compile(decay, backend=midstream_backend, mode="fast")(drawn(4), drawn(4))


def test_bad_options_fail_with_our_message_first():
    compiled = torch.compile(decay, backend=midstream_backend, options={"iner": "eager"})
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(drawn(4), drawn(4))
    head = str(caught.value).splitlines()[1]
    assert "ConfigError: backend midstream: 'iner' is not an option" in head
    assert "did you mean 'inner'?" in head


def test_equal_options_share_compiled_code_and_pickled_ones_are_equal():
    options = BackendOptions(**EMULATED)
    for given in (options, pickle.loads(pickle.dumps(options)), copy.copy(options)):
        torch.compile(decay, backend=midstream_backend, options=given)(drawn(4), drawn(4))
    assert counters["midstream"]["graphs_compiled"] == 1
    torch.compile(
        decay, backend=midstream_backend, options=BackendOptions(max_recordings=2, **EMULATED)
    )(drawn(4), drawn(4))
    assert counters["midstream"]["graphs_compiled"] == 2


@torch._dynamo.config.patch(suppress_errors=True)
def test_suppressed_errors_leave_an_eager_result_and_an_untouched_state():
    compiled = torch.compile(decay, backend=midstream_backend, options={"iner": "eager"})
    check_steps(compiled, decay, [drawn(4)], _steps(2, 4))
    assert "recordings" not in counters["midstream"]


class _FailingCapturer:
    def capture(self, step, addresses, name):
        step()
        raise ContractError(f"{name}: nothing can be captured here")

    def release(self):
        pass


def test_a_capture_that_fails_is_counted_once_per_call_and_the_call_runs_right(monkeypatch):
    monkeypatch.setattr(backend_graph, "capturer_of", lambda device: _FailingCapturer())
    watched = Watched(decay)
    check_steps(watched, decay, [drawn(4)], _steps(3, 4))
    assert (watched.num_recordings, watched.num_eager) == (0, 3)
    (reason,) = watched.graphs[0].events.eager
    assert "nothing can be captured here" in reason
    assert counters["inductor"]["cudagraph_skips"] == 3


def test_strict_mode_raises_where_a_capture_fails(monkeypatch):
    monkeypatch.setattr(backend_graph, "capturer_of", lambda device: _FailingCapturer())
    watched = Watched(decay, {**EMULATED, "on_unsupported": "error"})
    state = drawn(4)
    with pytest.raises(ContractError, match="nothing can be captured here"):
        watched(drawn(4), state)
    assert torch.equal(state, drawn(4))


def test_calls_run_eagerly_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    watched = Watched(decay, {"inner": "eager"})
    check_steps(watched, decay, [drawn(4)], _steps(2, 4))
    assert watched.graphs[0].recorded is None
    assert counters["inductor"]["cudagraph_skips"] == 1


def test_strict_mode_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendCompilerFailed, match="skipping cudagraphs due to no GPU"):
        Watched(decay, {"inner": "eager", "on_unsupported": "error"})(drawn(4), drawn(4))


def test_buffers_of_a_module_are_state_and_a_new_weight_is_a_new_recording():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            self.count.add_(1)
            return x * self.weight * self.count

    model = Counting()
    plain = copy.deepcopy(model)
    watched = Watched(model)
    check_steps(watched, plain, [], _steps(3, 4))
    assert torch.equal(model.count, torch.full((1,), 3.0))
    for module in (model, plain):
        module.weight.data = torch.full((4,), 2.0)
    check_steps(watched, plain, [], _steps(3, 4))
    assert watched.num_recordings == 2


def test_tensors_that_a_graph_holds_itself_are_bound_and_watched_too():
    class Traced(Recurrent):
        def forward(self, x, state):
            return (super().forward(x, state),)

    gm = torch.fx.symbolic_trace(Traced().requires_grad_(False))
    call = midstream_backend(gm, [drawn(1, 4), drawn(1, 4)], options=EMULATED)
    plain = Recurrent()
    layer = gm
    for weight in (layer.weight.data, torch.eye(4)):
        for module in (gm, plain):
            module.weight.data = weight
        check_steps(lambda *args: call(*args)[0], plain, [drawn(1, 4)], _steps(3, 1, 4))
    assert counters["midstream"]["recordings"] == 2


def test_what_lies_before_a_host_read_is_still_recorded():
    def reads(x, state):
        state.add_(x)
        return state.sum().item()

    watched = Watched(reads)
    check_steps(watched, reads, [drawn(4)], _steps(2, 4))
    assert watched.num_replays == 2
