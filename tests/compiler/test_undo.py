"""`lower` refuses what it cannot serve before it changes anything, and `undo` restores every change."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from compiler_rig import PagedRig
from tiny_models import FAMILIES, build, prompt

import midstream
from midstream.compiler import Pools, lower, lowering
from midstream.errors import ConfigError, ContractError, UnsupportedError


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def attributes(model: Any) -> dict[str, dict[str, Any]]:
    """Instance attributes of all modules and of the config, without parameters' values."""
    found = {path: dict(vars(module)) for path, module in model.named_modules()}
    return found | {"config": dict(vars(model.config))}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(prompt(12)[None], use_cache=False).logits
    return result


@pytest.mark.parametrize(
    "compile_mode", ["eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_undo_restores_every_attribute_and_every_bit_of_the_output(
    family: str, compile_mode: Any
) -> None:
    model = build(family)
    before, keys, output = attributes(model), list(model.state_dict()), logits(model)
    lowered = lower(model, compile_mode=compile_mode, backend="eager")
    assert list(model.state_dict()) == keys
    rig = PagedRig(lowered)
    rig.chunk([(rig.start(), prompt(5))])
    lowered.undo()
    lowered.undo()
    assert attributes(model) == before
    assert torch.equal(logits(model), output)
    with pytest.raises(ContractError, match="after undo"):
        rig.chunk([(rig.start(), prompt(5))])


def test_a_lowered_model_is_not_lowered_again_until_undone() -> None:
    model = build("bamba")
    first = lower(model)
    with pytest.raises(ContractError, match="lowered already"):
        lower(model)
    first.undo()
    lower(model).undo()


def compile_it(model: Any) -> None:
    midstream.compile(model, max_len=64)


def compile_and_run(model: Any) -> None:
    midstream.compile(model, max_len=64).generate(prompt(5)[None], max_new_tokens=2)


@pytest.mark.parametrize("change", [lower, compile_it, compile_and_run])
def test_a_model_whose_handle_is_lost_is_restored(family: str, change: Any) -> None:
    model = build(family)
    before, output = attributes(model), logits(model)
    change(model)
    gc.collect()
    with pytest.raises(ContractError, match=r"midstream\.restore"):
        lower(model)
    midstream.restore(model)
    midstream.restore(model)
    assert attributes(model) == before
    assert torch.equal(logits(model), output)
    lower(model).undo()


def test_a_restored_model_leaves_its_handles_undone() -> None:
    model = build("bamba")
    compiled = midstream.compile(model, max_len=64)
    midstream.restore(model)
    with pytest.raises(ContractError, match="after undo"):
        compiled.generate(prompt(5)[None])
    again = midstream.compile(model, max_len=64)
    compiled.undo()
    again.generate(prompt(5)[None], max_new_tokens=2)


def test_only_models_are_restored() -> None:
    with midstream.compile(build("bamba"), max_len=64) as compiled:
        with pytest.raises(ConfigError, match=r"a handle of theirs has undo\(\)"):
            midstream.restore(compiled)
        assert not compiled._undone


@pytest.mark.parametrize("change", [lower, compile_it])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
def test_a_changed_model_says_that_it_cannot_be_copied(change: Any, copied: Any) -> None:
    model = build("bamba")
    change(model)
    for part in (model, model.model.layers[0], model.model.layers[2]):
        with pytest.raises(ContractError, match=r"copied or pickled .*copy it before, or after"):
            copied(part)
    midstream.restore(model)
    assert torch.equal(logits(copy.deepcopy(model)), logits(model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temporal_dtype": "float32"}, "temporal_dtype='float32'; expected a floating dtype"),
        ({"compile_mode": "indcutor"}, "compile_mode='indcutor'; expected 'eager' or"),
        ({"kv_block": 1.5}, r"kv_block=1\.5; expected a whole number"),
        ({"drafts": -1}, "drafts=-1; expected a whole number"),
        ({"experts": 4}, "experts=4; expected a name"),
    ],
)
def test_an_option_of_lower_that_can_never_work_is_refused(
    options: dict[str, Any], message: str
) -> None:
    model = build("bamba")
    with pytest.raises(ConfigError, match=f"lower: {message}"):
        lower(model, **options)
    lower(model).undo()


def test_a_failure_halfway_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("bamba")
    before = attributes(model)

    def fail(*args: Any) -> None:
        raise RuntimeError("late")

    monkeypatch.setattr(lowering, "compile_pieces", fail)
    with pytest.raises(RuntimeError, match="late"):
        lower(model, compile_mode="inductor")
    assert attributes(model) == before


def test_a_lowered_model_does_not_run_by_itself() -> None:
    model = build("bamba")
    lowered = lower(model)
    with pytest.raises(ContractError, match="called while it is lowered"):
        logits(model)
    lowered.undo()
    logits(model)


def test_a_step_without_pools_is_refused() -> None:
    rig, other = PagedRig(lower(build("bamba"))), lower(build("bamba"))
    rig.lowered = other
    with pytest.raises(ContractError, match="has no pools"):
        rig.chunk([(rig.start(), prompt(3))])


def test_pools_of_another_layout_are_refused() -> None:
    lowered = lower(build("bamba"))
    temporal, conv = lowered.layout.allocate(3, "cpu")
    kv, table = lowered.kv_layout.allocate(3, "cpu"), torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(ContractError, match="the temporal arena has pages"):
        lowered.bind(Pools(temporal.bfloat16(), conv, kv, table, 16))
    with pytest.raises(ContractError, match="kv_block 32, expected 16"):
        lowered.bind(Pools(temporal, conv, kv, table, 32))


def test_what_has_no_lowering_is_refused_by_name() -> None:
    with pytest.raises(
        UnsupportedError, match=r"Linear is not a supported family.*BambaForCausalLM"
    ):
        lower(torch.nn.Linear(2, 2))
    model = build("bamba")
    model.model.layers[1].mamba = torch.nn.Identity()
    with pytest.raises(UnsupportedError, match=r"layer 1 .BambaDecoderLayer"):
        lower(model)


def test_models_that_cannot_run_as_they_stand_are_refused() -> None:
    with pytest.raises(ConfigError, match="training mode"):
        lower(build("bamba").train())
    mixed = build("bamba")
    mixed.lm_head.to(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"bfloat16.*float32"):
        lower(mixed)
    with pytest.raises(ConfigError, match="on meta, which holds shapes only"):
        lower(build("bamba").to("meta"))
    with pytest.raises(ConfigError, match=r"pass model\._orig_mod"):
        lower(torch.compile(build("bamba")))
    with pytest.raises(ConfigError, match="pass its first entry"):
        lower((build("bamba"), None))


def test_options_that_the_lowered_layers_lack_are_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}
    with pytest.raises(UnsupportedError, match="rope_type is 'dynamic'"):
        lower(build("bamba", rope_parameters=rope))
    with pytest.raises(UnsupportedError, match="applies 'relu'"):
        lower(build("bamba", hidden_act="relu"))
    window = build("qwen3_next")
    window.model.layers[2].self_attn.sliding_window = 8
    with pytest.raises(UnsupportedError, match=r"layer 2 .* sliding window of 8"):
        lower(window)
    hooked = build("bamba")
    hooked.model.layers[0].forward = hooked.model.layers[0].forward
    with pytest.raises(UnsupportedError, match=r"model\.layers\.0 .BambaDecoderLayer. has been"):
        lower(hooked)
