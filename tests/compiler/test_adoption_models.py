"""
Unmodified models through torch.compile(backend="midstream"), recorded by the emulator on the CPU.

transformers makes a new cache in each `generate`; its tensors are adopted.  Decoding is compiled on the
CPU only if a private flag of CompileConfig says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rewrite_rig import Rewritten
from tiny_models import VOCAB, build
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import CompileConfig, StaticCache

from midstream.compiler.backend_inner import fuse_few_tokens
from midstream.compiler.backend_memory import _recorded

OPTIONS = {"inner": "eager", "emulate": True, "on_unsupported": "error"}

_TWO_LAYERS: dict[str, dict[str, Any]] = {  # one of each kind: tracing takes most of the time
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
}


_earlier: set[int] = set()  # ids of what other tests have left behind


@pytest.fixture(autouse=True)
def fresh_counters() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    left = list(_recorded)  # kept alive, so that no id is used again
    _earlier.clear()
    _earlier.update(map(id, left))
    yield
    torch._dynamo.reset()


class Counts:
    """What compilation and recording have done since the counters were cleared."""

    def __init__(self) -> None:
        events = [recorded._events for recorded in _recorded if id(recorded) not in _earlier]
        self.graphs = counters["midstream"]["graphs_compiled"]
        self.breaks = sum(counters["graph_break"].values())
        self.recordings = sum(one.num_recordings for one in events)
        self.replays = sum(one.num_replays for one in events)
        self.adoptions = sum(one.num_adoptions for one in events)
        self.eager = sum(one.num_eager for one in events)


def tiny(family: str) -> Any:
    return build(family, num_hidden_layers=2, **_TWO_LAYERS[family])


def prompts(rows: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rows + length)
    return torch.randint(3, VOCAB, (rows, length), generator=generator)


def generate(
    model: Any,
    ids: Tensor,
    num_tokens: int,
    options: Any = OPTIONS,
    cache: StaticCache | None = None,
    backend: Any = "midstream",
) -> Tensor:
    config = CompileConfig(backend=backend, mode=None, options=options)
    config._compile_all_devices = True
    given = {"cache_implementation": "static"} if cache is None else {"past_key_values": cache}
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        compile_config=config,
        **given,
    )


@torch.no_grad()
def recomputed(model: Any, ids: Tensor, num_tokens: int) -> Tensor:
    """The same tokens, each from a full forward."""
    for _ in range(num_tokens):
        position = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        logits = model(ids, position_ids=position, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids


def check_tokens(model: Any, ids: Tensor, num_tokens: int) -> None:
    assert torch.equal(generate(model, ids, num_tokens), recomputed(model, ids, num_tokens))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in ("lfm2", "mamba2") else pytest.mark.slow)
        for family in sorted(_TWO_LAYERS)
    ],
)
def test_o4_generate_compiles_and_records_once_and_then_only_replays(family: str) -> None:
    model = tiny(family)
    check_tokens(model, prompts(2, 9), 8)
    before = Counts()
    assert (before.graphs, before.recordings, before.adoptions) == (1, 1, 0)
    for length, num_tokens in ((6, 11), (12, 5), (3, 14)):
        check_tokens(model, prompts(2, length), num_tokens)
    after = Counts()
    assert (after.graphs, after.recordings, after.adoptions) == (1, 1, 3)
    assert after.breaks == after.eager == 0
    # the first token of each answer comes from the prompt, which transformers does not compile
    assert after.replays - before.replays == 10 + 4 + 13


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in ("bamba", "lfm2") else pytest.mark.slow)
        for family in sorted(_TWO_LAYERS)
    ],
)
def test_a_single_row_generates_the_same_tokens_after_all_rewriting_passes(family: str) -> None:
    model, ids = tiny(family), prompts(1, 9)
    rewritten = Rewritten(model, fuse_few_tokens)
    # a function: transformers copies the configuration, and what a method belongs to with it
    output = generate(model, ids, 8, None, backend=lambda *args: rewritten.backend(*args))
    assert torch.equal(output, recomputed(model, ids, 8))
    assert rewritten.num_rewritten >= 6, "products, a state or a convolution, and attention"
    assert len(rewritten.graphs) == 1


@pytest.mark.slow
def test_o4_after_the_longest_cache_and_both_batches_only_a_longer_cache_is_new() -> None:
    model = tiny("lfm2")
    for rows in (2, 3, 2):
        check_tokens(model, prompts(rows, 9), 7)
    warm = Counts()
    # torch makes a size dynamic when it changes; releases differ in which code the first size then uses
    assert warm.graphs == 2 and warm.recordings <= 3
    for rows, length, num_tokens in ((2, 5, 8), (3, 8, 5), (2, 10, 6), (3, 4, 10)):
        check_tokens(model, prompts(rows, length), num_tokens)
    after = Counts()
    assert (after.graphs, after.recordings) == (2, warm.recordings)
    for length in (12, 15):
        check_tokens(model, prompts(2, length), 8)
    longer = Counts()
    assert longer.graphs == 3
    assert longer.recordings == warm.recordings + 2, "one for each length of the cache"
    assert after.adoptions == longer.adoptions == warm.adoptions + 4
    assert longer.breaks == longer.eager == 0


def test_two_conversations_with_caches_of_their_own_take_turns() -> None:
    model = tiny("lfm2")
    ids = [prompts(2, 5), prompts(2, 7)]
    caches = [StaticCache(config=model.config, max_cache_len=32) for _ in ids]
    for turn in range(3):
        for place, cache in enumerate(caches):
            output = generate(model, ids[place], 4, cache=cache)
            assert torch.equal(output, recomputed(model, ids[place], 4))
            question = prompts(2, 3 + turn)
            ids[place] = torch.cat([output, question], dim=1)
    counts = Counts()
    assert (counts.graphs, counts.recordings, counts.adoptions) == (1, 2, 1)


@pytest.mark.gpu
@pytest.mark.slow
def test_generate_on_a_gpu_records_once_and_then_only_replays() -> None:
    model = tiny("bamba").to("cuda")
    options = {"inner": "eager", "on_unsupported": "error"}
    for length, num_tokens in ((9, 7), (6, 10), (3, 13)):
        ids = prompts(2, length).to("cuda")
        output = generate(model, ids, num_tokens, options)
        assert torch.equal(output, recomputed(model, ids, num_tokens))
    counts = Counts()
    assert (counts.graphs, counts.recordings, counts.adoptions) == (1, 1, 2)
    assert counts.replays == 6 + 9 + 12
    assert counts.breaks == counts.eager == 0


class _Recurrent(nn.Module):
    """A layer of somebody else, whose state is a buffer."""

    state: Tensor

    def __init__(self, seed: int, rows: int = 2) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(4, 4, generator=generator), requires_grad=False)
        self.register_buffer("state", torch.zeros(rows, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.state.mul_(0.5).add_(x @ self.weight)
        return self.state.tanh() + x


def test_a_module_with_its_state_in_a_buffer_is_replayed() -> None:
    compiled, eager = _Recurrent(0), _Recurrent(0)
    step = torch.compile(compiled, backend="midstream", options=OPTIONS, fullgraph=True)
    with torch.no_grad():
        for seed in range(10):
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
            assert torch.equal(step(x), eager(x))
            assert torch.equal(compiled.state, eager.state)
            if seed == 5:
                compiled.state.zero_()
                eager.state.zero_()
    counts = Counts()
    assert (counts.graphs, counts.recordings, counts.replays) == (1, 1, 10)


def test_a_buffer_that_is_replaced_is_adopted() -> None:
    compiled, eager = _Recurrent(0), _Recurrent(0)
    step = torch.compile(compiled, backend="midstream", options=OPTIONS, fullgraph=True)
    with torch.no_grad():
        for seed in range(9):
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
            if seed % 3 == 0:
                compiled.state, eager.state = torch.ones(2, 4), torch.ones(2, 4)
            assert torch.equal(step(x), eager(x))
            assert torch.equal(compiled.state, eager.state)
    counts = Counts()
    assert (counts.graphs, counts.recordings, counts.adoptions) == (1, 1, 2)


def test_h1_a_state_that_is_returned_and_fed_back_through_two_compiled_functions() -> None:
    def first(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        state = state * 0.5 + x
        return state.sum(-1), state

    def second(state: Tensor, y: Tensor) -> Tensor:
        return state + y[:, None]

    one, other = (
        torch.compile(function, backend="midstream", options=OPTIONS)
        for function in (first, second)
    )
    state, expected = torch.zeros(2, 3), torch.zeros(2, 3)
    history = []
    with torch.no_grad():
        for seed in range(10):
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
            y, state = one(state, x)
            state = other(state, y)
            wanted, expected = first(expected, x)
            expected = second(expected, wanted)
            history.append((state, expected))
    assert all(torch.equal(*pair) for pair in history)
    assert Counts().recordings == 2
