"""One compilation serves all layers of a kind, at every token count from two on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiler_rig import PagedRig
from tiny_models import FAMILIES, build, prompt
from torch._dynamo.testing import CompileCounterWithBackend

from midstream.compiler import lower

# Bamba: SSD layer, attention layer.  Qwen3-Next: gated delta layer, attention layer.
_LAYER_KINDS = 2
_OTHER = 2  # rotary embedding, final norm


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("family", ["bamba", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_compilations_follow_kinds_not_layers_or_lengths(family: str) -> None:
    counter = CompileCounterWithBackend("eager")
    rig = PagedRig(lower(build(family), compile_mode="inductor", backend=counter))
    lives = [rig.start() for _ in range(5)]
    for length in (17, 24, 70):
        rig.spare += 1  # tables and row buffers change their length too
        rig.chunk([(lives[0], prompt(length))], padding=1 + length % 3)
    assert counter.frame_count == _LAYER_KINDS + _OTHER
    for rows in (4, 5, 2, 3):
        rig.spare += 1
        rig.decode([(live, 7) for live in lives[:rows]])
    assert counter.frame_count == 2 * _LAYER_KINDS + _OTHER


@pytest.mark.slow
def test_a_single_token_is_compiled_once_more(family: str) -> None:
    counter = CompileCounterWithBackend("eager")
    rig = PagedRig(lower(build(family), compile_mode="inductor", backend=counter))
    live = rig.start()
    for length in (1, 9, 1, 2):
        rig.chunk([(live, prompt(length))], padding=1)
        assert counter.frame_count == (1 if live.length == 1 else 2) * (_LAYER_KINDS + _OTHER)


def test_equal_sizes_at_the_first_call_do_not_bind_later_calls() -> None:
    counter = CompileCounterWithBackend("eager")
    rig = PagedRig(lower(build("bamba"), compile_mode="inductor", backend=counter), spare=0)
    lives = [rig.start() for _ in range(4)]
    rig.decode([(live, 7) for live in lives])  # 4 tokens in row buffers of length 4
    rig.spare = 4
    rig.decode([(live, 7) for live in lives[:3]])
    assert counter.frame_count == _LAYER_KINDS + _OTHER


def test_tracing_has_no_symbolic_widths_no_floats_and_keeps_no_results_of_operators() -> None:
    widths: list[int | torch.SymInt] = []
    methods: set[Any] = set()

    def look(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        methods.update(node.target for node in gm.graph.nodes if node.op == "call_method")
        values = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
        widths.extend(v.shape[2] for v in values if isinstance(v, torch.Tensor) and v.dim() == 3)
        return gm.forward

    rig = PagedRig(lower(build("bamba"), compile_mode="inductor", backend=look))
    kept = _num_kept_results()
    rig.chunk([(rig.start(), prompt(17))])
    assert len(widths) > _LAYER_KINDS
    assert {type(width) for width in widths} == {int}
    assert "item" not in methods
    assert _num_kept_results() == kept


def _num_kept_results() -> int:
    """Results of operators on fake tensors that torch holds for the next time."""
    return int(torch._subclasses.FakeTensorMode.cache_info().size)


@pytest.mark.slow
def test_more_layers_and_a_second_model_compile_apart() -> None:
    counter = CompileCounterWithBackend("eager")
    for layers in (4, 12):
        model = build("bamba", num_hidden_layers=layers)
        rig = PagedRig(lower(model, compile_mode="inductor", backend=counter))
        rig.chunk([(rig.start(), prompt(9))])
    assert counter.frame_count == 2 * (_LAYER_KINDS + _OTHER)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bamba"])  # the C++ compiler takes minutes for a second one
def test_inductor_equals_eager(family: str) -> None:
    ids = prompt(20)
    logits = []
    for mode in ("eager", "inductor"):
        rig = PagedRig(lower(build(family), compile_mode=mode))  # type: ignore[arg-type]
        live, other = rig.start(), rig.start()
        steps = [rig.chunk([(live, ids[:13]), (other, ids)], padding=1, padding_tokens=2)]
        steps += [rig.decode([(live, int(ids[13])), (other, 9)], padding=1)]
        logits.append(torch.cat(steps))
    scale = logits[0].abs().max().item()
    torch.testing.assert_close(logits[1], logits[0], rtol=0.0, atol=1e-4 * scale)
