"""`generate` of transformers with this backend and a static cache."""

import pytest
import tiny_models
import torch
import transformers
from backend_rig import EMULATED
from torch._dynamo.utils import counters


@pytest.fixture(autouse=True)
def _as_new():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _generate(model, length, rows, **options):
    prompts = torch.stack([tiny_models.prompt(length, seed) for seed in range(rows)])
    return model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_length=24,
        do_sample=False,
        cache_implementation="static",
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_generate_replays_decode_steps_and_a_new_cache_is_adopted(family):
    model = tiny_models.build(family)
    config = transformers.CompileConfig(
        backend="midstream", mode=None, options=EMULATED, fullgraph=True
    )
    config._compile_all_devices = True  # transformers compiles on GPUs only
    for length, rows in ((20, 1), (17, 1), (20, 2), (15, 2)):
        expected = _generate(model, length, rows, disable_compile=True)
        found = _generate(model, length, rows, compile_config=config)
        assert torch.equal(found, expected)
    counted = counters["midstream"]
    assert not counters["graph_break"]
    assert counted["graphs_compiled"] == counted["recordings"] == 2  # one row, several rows
    assert counted["adoptions"] == 2  # generate makes a cache for each call
    assert "cudagraph_skips" not in counters["inductor"]
