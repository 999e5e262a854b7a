"""What the backend finds out about a graph, and the words in which it says what it cannot record."""

import pytest
import torch
from backend_rig import EMULATED, Watched, check_steps, drawn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode

from midstream.compiler.backend_analysis import analyse
from midstream.compiler.backend_graph import compile_graph
from midstream.compiler.backend_options import BackendOptions

_library = torch.library.Library("test_backend_analysis", "DEF")
_library.define("write_first(Tensor(a!) x, Tensor y) -> ()")
_library.define("unsafe(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
_ops = torch.ops.test_backend_analysis


@torch.library.impl(_library, "write_first", "CompositeExplicitAutograd")
def _write_first(x, y):
    x.copy_(y)


@torch.library.impl(_library, "unsafe", "CompositeExplicitAutograd")
def _unsafe(x):
    return x.clone()


torch.library.register_fake("test_backend_analysis::write_first", lambda x, y: None, lib=_library)
torch.library.register_fake(
    "test_backend_analysis::unsafe", lambda x: torch.empty_like(x), lib=_library
)


@pytest.fixture(autouse=True)
def _as_new():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _roles(function, *args, **options):
    watched = Watched(function, **options)
    watched(*args)
    (graph,) = watched.graphs
    return {argument.name: argument.role.value for argument in graph.arguments}


def test_a_write_is_found_through_views_functions_and_operators_of_others():
    def writes(a, b, c, d, e, f):
        a[1:].view(-1).add_(1)
        torch.nn.functional.relu(b, inplace=True)
        _ops.write_first(c, d)
        e += 1
        d.clone().add_(1)
        return a.sum() + d.sum() + f.sum()

    roles = _roles(writes, *(drawn(2, 2, seed=n) for n in range(6)))
    assert roles == {f"l_{name}_": "input" if name in "df" else "state" for name in "abcdef"}


def test_what_shares_memory_with_a_written_argument_is_state_too():
    pool = drawn(4, 4)
    roles = _roles(lambda a, b: (a.add_(1), b * 2)[1], pool[0], pool[1])
    assert set(roles.values()) == {"state"}


def test_weights_and_marked_tensors_are_bound_where_they_lie():
    weight = torch.nn.Parameter(drawn(4))
    marked = drawn(4)
    torch._dynamo.mark_static_address(marked, guard=False)
    roles = _roles(lambda x, w, m, n: x * w * m * n, drawn(4), weight, marked, 3.5)
    assert roles["l_w_"] == roles["l_m_"] == "parameter"
    assert roles["l_x_"] == "input"


def test_sizes_that_change_are_numbers():
    roles = _roles(lambda x: x * x.shape[0], drawn(3, 4), dynamic=True)
    assert sorted(roles.values())[:1] == ["input"]
    assert "number" in roles.values()


def test_a_graph_is_analysed_without_running_anything():
    def noisy(x, state):
        state.add_(torch.randn_like(x))
        return state

    seen = []

    def backend(gm, inputs):
        before = [value.clone() for value in inputs]
        generator = torch.get_rng_state()
        seen.append(analyse(gm, inputs, []))
        assert all(map(torch.equal, before, inputs))
        assert torch.equal(torch.get_rng_state(), generator)
        return gm.forward

    torch.compile(noisy, backend=backend)(drawn(4), drawn(4))
    assert seen[0].written and seen[0].num_ops >= 2


@torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)
@pytest.mark.parametrize(
    ("function", "what", "op"),
    [
        (lambda x: x * x.sum().item(), "a device value that the host reads", "_local_scalar_dense"),
        (lambda x: x.nonzero(), "a result whose shape depends on data", "aten.nonzero"),
        (lambda x: x[x > 0], "a result whose shape depends on data", "aten.index"),
        (lambda x: _ops.unsafe(x), "marked unsafe for graphs", "unsafe"),
    ],
    ids=["item", "nonzero", "mask", "unsafe"],
)
def test_what_cannot_be_recorded_is_named_with_op_and_line(function, what, op):
    watched = Watched(function, fullgraph=True)
    check_steps(watched, function, [], [(drawn(2, 2, seed=n),) for n in range(2)])
    (graph,) = watched.graphs
    assert graph.recorded is None
    reason = str(graph.skipped)
    assert reason.startswith("skipping cudagraphs due to ") and what in reason
    line = function.__code__.co_firstlineno
    assert op in reason and f"test_backend_analysis.py:{line}" in reason
    assert counters["inductor"]["cudagraph_skips"] == 1
    assert counters["midstream"][reason] == 1


@pytest.mark.parametrize(
    "cut", [lambda base: base[4:], lambda base: base[:4], lambda base: base[::2]]
)
def test_a_view_by_address_that_may_leave_its_argument_is_a_reason(cut):
    def reaching(x):
        return torch.as_strided(x, (5,), (1,), 0) + 1

    watched = Watched(reaching)
    check_steps(watched, reaching, [], [(cut(drawn(8, seed=n)),) for n in range(3)])
    (graph,) = watched.graphs
    assert "as_strided that may reach beside its argument" in str(graph.skipped)


def test_a_number_that_the_graph_holds_itself_is_not_written_by_the_analysis():
    parameter = drawn(3).requires_grad_()
    parameter.grad = drawn(3, seed=1)
    optimizer = torch.optim.Adam([parameter])
    watched = Watched(optimizer.step)
    for steps in (1, 2, 3):
        watched._compiled()
        assert optimizer.state[parameter]["step"] == steps


def test_a_view_by_address_inside_of_its_argument_is_recorded():
    def staying(x):
        return torch.as_strided(x, (2, 3), (1, 2), 1) + 1

    watched = Watched(staying)
    check_steps(watched, staying, [], [(drawn(8, seed=n),) for n in range(3)])
    assert (watched.num_recordings, watched.num_replays) == (1, 3)


def test_a_float_that_changes_runs_as_compiled_and_is_named():
    def scaled(x, factor, state):
        return state.mul_(factor).add_(x)

    watched = Watched(scaled, fullgraph=True)
    check_steps(watched, scaled, [drawn(3)], [(drawn(3), 0.5 + n) for n in range(4)])
    first, second = watched.graphs
    assert first.skipped is None and "the host reads" in str(second.skipped)


def test_gradients_that_a_function_turns_on_itself_are_noticed():
    def differentiable(x, weight):
        with torch.enable_grad():
            return x * weight

    watched = Watched(differentiable)
    with torch.no_grad():
        result = watched._compiled(drawn(3), drawn(3, seed=1).requires_grad_())
    assert result.requires_grad
    assert "gradients that a backward may need" in str(watched.graphs[0].skipped)


def test_an_input_that_changes_shape_in_place_is_a_reason():
    class Transposing(torch.nn.Module):  # torch.compile breaks the graph there, others may not
        def forward(self, x):
            return (x.t_(),)

    gm = torch.fx.symbolic_trace(Transposing())
    traced = FakeTensorMode().from_tensor(drawn(2, 3))
    gm.graph.find_nodes(op="placeholder")[0].meta["example_value"] = traced
    graph = compile_graph(gm, [drawn(2, 3)], BackendOptions(**EMULATED))
    assert "an input whose shape changes in place" in str(graph.skipped)
    assert graph.call(drawn(2, 3))[0].shape == (3, 2)
    assert traced.shape == (2, 3)  # what other compilers still rely on


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_strict_mode_turns_a_reason_into_an_error():
    watched = Watched(lambda x: x * x.sum().item(), {**EMULATED, "on_unsupported": "error"})
    with pytest.raises(BackendCompilerFailed, match="a device value that the host reads"):
        watched(drawn(2))


@torch._dynamo.config.patch(capture_scalar_outputs=True, suppress_errors=True)
def test_a_suppressed_strict_error_leaves_the_eager_result():
    def reads(x, state):
        state.add_(x)
        return x * state.sum().item()

    watched = Watched(reads, {**EMULATED, "on_unsupported": "error"})
    check_steps(watched, reads, [drawn(2)], [(drawn(2, seed=n),) for n in range(2)])
    assert not watched.graphs
