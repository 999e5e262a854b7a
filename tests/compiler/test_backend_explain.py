import math

import numpy as np
import pytest
import torch
from backend_rig import EMULATED, drawn

from midstream.compiler.backend_explain import explain_backend
from midstream.compiler.backend_options import BackendOptions
from midstream.errors import ConfigError


@pytest.fixture(autouse=True)
def _as_new():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class _Broken(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(drawn(4))

    def forward(self, x, state):
        state.add_(x * self.weight)
        torch._dynamo.graph_break()
        return state * 2


def _explain(**options):
    model, state = _Broken(), torch.zeros(4)
    with torch.inference_mode():
        report = explain_backend(
            torch.compile(model) if options.pop("compiled", False) else model,
            drawn(4),
            state,
            options=BackendOptions(**{**EMULATED, **options}),
            bytes_per_second=1e9,
        )
        assert torch.equal(state, drawn(4) * model.weight)
    return report


@pytest.mark.parametrize("compiled", [False, True])
def test_a_report_names_graphs_breaks_weights_states_and_the_floor(compiled):
    report = _explain(compiled=compiled)
    first, second = report.graphs
    assert len(report.breaks) == 1
    assert [len(first.parameters), len(first.states), len(first.inputs)] == [1, 1, 1]
    assert [len(second.parameters), len(second.states), len(second.inputs)] == [0, 0, 1]
    assert (first.parameter_bytes, first.state_bytes, first.input_bytes) == (16, 16, 16)
    assert first.num_recordings == second.num_recordings == 1
    assert report.floor_seconds == (16 + 2 * 16) / 1e9


def test_a_report_reads_well():
    text = str(_explain())
    assert "2 graphs, 1 kinds of graph breaks" in text
    assert "1 weights of 16 bytes, 1 states of 16 bytes, 1 inputs of 16 bytes" in text
    assert "state: l_state_" in text
    assert "a call at 1 GB/s" in text


def test_a_report_says_why_nothing_is_recorded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = _explain(emulate=False)
    assert all("no GPU" in graph.reasons[0] for graph in report.graphs)
    assert "skipping cudagraphs due to no GPU" in str(report)


def test_options_may_be_all_that_torch_compile_takes():
    model, options = _Broken(), BackendOptions(**EMULATED)
    for given in (options, dict(EMULATED), {**EMULATED, "mode": "reduce-overhead"}):
        with torch.inference_mode():
            report = explain_backend(model, drawn(4), torch.zeros(4), options=given)
        assert [graph.num_recordings for graph in report.graphs] == [1, 1]
        torch._dynamo.reset()
    with pytest.raises(ConfigError, match=r"'iner' is not an option, .* did you mean 'inner'"):
        explain_backend(model, drawn(4), torch.zeros(4), options={"iner": "eager"})
    with pytest.raises(ConfigError, match="expected a dict or BackendOptions"):
        explain_backend(model, drawn(4), torch.zeros(4), options="eager")


@pytest.mark.parametrize("rate", [0, -1.0, math.nan, math.inf, "1e9", True], ids=repr)
def test_a_bandwidth_that_gives_no_time_is_refused_before_anything_runs(rate):
    state = torch.zeros(4)
    with pytest.raises(
        ConfigError, match=r"bytes_per_second=.*, expected a finite number above 0; pass"
    ):
        explain_backend(_Broken(), drawn(4), state, options=EMULATED, bytes_per_second=rate)
    assert not state.any()


@pytest.mark.parametrize("rate", [1, np.float32(2)], ids=repr)
def test_a_bandwidth_is_any_number(rate):
    with torch.inference_mode():
        report = explain_backend(
            _Broken(), drawn(4), torch.zeros(4), options=EMULATED, bytes_per_second=rate
        )
    assert report.floor_seconds == 48 / rate


def test_what_cannot_be_called_is_refused():
    with pytest.raises(ConfigError, match="the function is 3, expected a function or a module"):
        explain_backend(3, drawn(4))
