"""The engine's tokens equal those of un-cached full forwards, whatever is cached, batched or cut."""

import pytest
import torch
from oracles import Oracle, five_prompts, guarded_engine, serve
from tiny_models import FAMILIES, VOCAB, build

NEW_TOKENS = 40
SMALL = {
    "state_block": 16,
    "kv_block": 4,
    "max_rows": 8,
    "num_state_pages": 120,
    "num_kv_pages": 400,
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[str, Oracle]:
    return request.param, Oracle(build(request.param))


@pytest.fixture
def model(family: tuple[str, Oracle], device: torch.device) -> torch.nn.Module:
    return build(family[0]).to(device)


@pytest.mark.parametrize("budget", [5, 16, 64])
def test_tokens_equal_full_forwards_one_after_the_other_then_all_at_once(
    family: tuple[str, Oracle], model: torch.nn.Module, budget: int
) -> None:
    prompts = five_prompts(VOCAB)
    want = [family[1].greedy(prompt, NEW_TOKENS) for prompt in prompts]
    with guarded_engine(model, max_step_tokens=budget, **SMALL) as engine:
        alone = [serve(engine, [prompt], NEW_TOKENS)[0] for prompt in prompts]
        assert [list(out.token_ids) for out in alone] == want
        assert all(out.num_cached_tokens >= 32 for out in alone[2:4])
        assert alone[1].num_cached_tokens == 0
        together = serve(engine, prompts, NEW_TOKENS)
        assert [list(out.token_ids) for out in together] == want
    with guarded_engine(model, max_step_tokens=budget, cache_mode="none", **SMALL) as engine:
        uncached = serve(engine, prompts, NEW_TOKENS)
        assert [list(out.token_ids) for out in uncached] == want
        assert all(out.num_cached_tokens == 0 for out in uncached)
