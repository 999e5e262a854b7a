"""What only a GPU can show: graphs equal eager, nothing waits, bf16 stays close."""

import time
from typing import Any

import pytest
import torch
from oracles import Oracle, five_prompts, guarded_engine, serve
from tiny_models import FAMILIES, VOCAB, build, prompt
from torch.profiler import ProfilerActivity, profile

import midstream
from midstream.graphs.kernels import kernels_of
from midstream.graphs.table import decode_key

pytestmark = pytest.mark.gpu

SMALL = {
    "state_block": 16,
    "kv_block": 4,
    "max_rows": 8,
    "num_state_pages": 120,
    "num_kv_pages": 400,
}
EAGER = SMALL | {"compile": "eager"}  # tests of the runtime need no compiled layers


def tokens(model: Any, prompts: list[list[int]], count: int, **options: Any) -> list[list[int]]:
    with guarded_engine(model, **SMALL, **options) as engine:
        outputs = serve(engine, prompts, count)
        if options.get("graphs") == "full":
            assert engine.stats()["graph_replays"] > count // 2
        return [list(out.token_ids) for out in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_full_forwards_with_graphs_on_and_off(family: str) -> None:
    prompts, oracle = five_prompts(VOCAB), Oracle(build(family).cuda())
    want = [oracle.greedy(prompt, 40) for prompt in prompts]
    for options in (
        {"graphs": "full"},
        {"graphs": "off"},
        {"graphs": "full", "max_step_tokens": 16},
    ):
        with guarded_engine(build(family).cuda(), **EAGER, **options) as engine:
            alone = [serve(engine, [prompt], 40)[0] for prompt in prompts]
            together = serve(engine, prompts, 40)
        assert [list(out.token_ids) for out in alone] == want
        assert [list(out.token_ids) for out in together] == want
        assert all(out.num_cached_tokens >= 32 for out in alone[2:4])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_captured_step_of_one_compiled_row_runs_gemv_and_equals_full_forwards(
    family: str,
) -> None:
    prompts, oracle = five_prompts(VOCAB), Oracle(build(family).cuda())
    with guarded_engine(build(family).cuda(), **SMALL | {"max_rows": 1}) as engine:
        alone = [serve(engine, [prompt], 40)[0] for prompt in prompts]
        graphs = engine._parts.runner.graphs
        ran = kernels_of(lambda: graphs.replay(decode_key(1)))
    assert [list(out.token_ids) for out in alone] == [oracle.greedy(p, 40) for p in prompts]
    assert sum(kernel.name.startswith("_gemv_kernel") for kernel in ran) >= 6


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_long_prompts_replay_graphs_that_are_captured_late(family: str) -> None:
    oracle = Oracle(build(family).cuda())
    prompts = [prompt(length, seed) for seed, length in enumerate((700, 1000, 520))]
    room = {"num_kv_pages": 2000, "max_rows": 4, "max_len": 1200, "cache_mode": "none"}
    with guarded_engine(build(family).cuda(), **EAGER | room) as engine:
        alone = [serve(engine, [one], 6)[0] for one in prompts]
        together = serve(engine, prompts, 6)
        stats = engine.stats()
    want = [oracle.greedy(one, 6) for one in prompts]
    assert [list(out.token_ids) for out in alone] == want
    assert [list(out.token_ids) for out in together] == want
    assert stats["graph_replays"] == stats["steps"] and not stats["graph_fallbacks"]
    assert stats["graphs"]["captured_late"] == 3, "of 768, 1,024 and 2,560 tokens"


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_and_migration_paths_and_compilation_give_equal_tokens(family: str) -> None:
    prompts = five_prompts(VOCAB)
    runs = [
        tokens(
            build(family).cuda(), prompts, 60, graphs=graphs, migration=migration, compile=compile
        )
        for graphs, migration, compile in (
            ("full", "copyfree", "eager"),
            ("full", "precopy", "eager"),
            ("off", "copyfree", "eager"),
            ("full", "copyfree", "inductor"),
        )
    ]
    assert all(run == runs[0] for run in runs)


@pytest.mark.parametrize("compile", ["eager", "inductor"])
def test_a_replay_is_bit_equal_to_the_same_step_run_eagerly(compile: str) -> None:
    model = build("bamba", dtype=torch.bfloat16).cuda()
    with guarded_engine(model, compile=compile, **SMALL) as engine:
        for prompt in five_prompts(VOCAB):
            engine.add(
                prompt, midstream.SamplingParams(max_tokens=80, temperature=0, ignore_eos=True)
            )
        for _ in range(12):
            engine.step()
        runner, pools = engine._parts.runner, engine._parts.pools
        step, rows = runner.step, 8
        memory = [pools.temporal, pools.conv, pools.kv, step.slots.flat]
        saved = [tensor.clone() for tensor in memory]
        results = []
        for run in (
            lambda: runner.graphs.replay(decode_key(rows)),
            lambda: step.run(step.stage.decode_view(rows), rows),
        ):
            for tensor, copy in zip(memory, saved, strict=True):
                tensor.copy_(copy)
            run()
            torch.cuda.synchronize()
            results.append(
                [t.clone().view(torch.uint8) for t in (*memory, step.token, step.logprob)]
            )
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        for handle in list(engine._ledger.open):
            engine.abort(midstream.Handle(handle))
        for _ in range(3):
            engine.step()


def test_no_step_waits_for_work_of_the_same_step() -> None:
    with midstream.Engine(build("bamba").cuda(), **EAGER) as engine:
        params = midstream.SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)
        for prompt in five_prompts(VOCAB):
            engine.add(prompt, params)
        for _ in range(6):
            engine.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(10):
                engine.step()
            torch.cuda._sleep(int(1e8))  # about 50 ms in step n
            begin = time.perf_counter()
            plan = engine._parts.scheduler.next_step()
            assert plan is not None
            engine._turns.launch(plan)
            launched = time.perf_counter() - begin
        finally:
            torch.cuda.set_sync_debug_mode("default")
        print(f"launch behind a spinning kernel: {1e3 * launched:.2f} ms")
        assert not torch.cuda.current_stream().query(), "the spinning kernel is over: launch waited"
        while engine.num_unfinished:
            engine.step()


def test_the_host_waits_for_events_only() -> None:
    """A profile of 100 steps: no stream or device synchronisation, no blocking copy."""
    with midstream.Engine(build("bamba").cuda(), **EAGER) as engine:
        params = midstream.SamplingParams(max_tokens=150, temperature=0, ignore_eos=True)
        for prompt in five_prompts(VOCAB):
            engine.add(prompt, params)
        for _ in range(6):
            engine.step()
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=activities) as prof:
            for _ in range(100):
                engine.step()
            calls = {"launched": engine.stats()["graph_replays"]}
        names = {event.name for event in prof.events()}
        assert calls["launched"] >= 100 and "cudaGraphLaunch" in names
        # the profiler itself ends with one cudaDeviceSynchronize
        counts = {n: sum(e.name == n for e in prof.events()) for n in names if "ynchronize" in n}
        assert counts.pop("cudaDeviceSynchronize", 0) <= 1
        assert set(counts) <= {"cudaEventSynchronize"}, counts
        assert "cudaMemcpy" not in names
        while engine.num_unfinished:
            engine.step()


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_error_is_at_most_one_and_a_half_times_that_of_transformers(family: str) -> None:
    exact, half = build(family).cuda(), build(family, dtype=torch.bfloat16).cuda()
    # the same weights: bf16 values in float32
    exact.load_state_dict({k: v.float() for k, v in half.state_dict().items()})
    reference = build(family, dtype=torch.bfloat16).cuda()
    reference.load_state_dict(half.state_dict())
    ours, theirs = [], []
    with guarded_engine(half, max_step_tokens=16, **EAGER) as engine:
        outputs = serve(engine, five_prompts(VOCAB) * 3, 40, logprobs=20)
    for out in outputs:
        ids = torch.tensor([[*out.prompt_token_ids, *out.token_ids]], device="cuda")
        assert out.logprobs is not None
        best = torch.tensor([[i for i, _ in p.best] for p in out.logprobs], device="cuda")
        found = torch.tensor([[v for _, v in p.best] for p in out.logprobs], device="cuda")
        want, hf = (
            full_logprobs(m, ids)[len(out.prompt_token_ids) - 1 : -1].gather(1, best)
            for m in (exact, reference)
        )
        ours.append((found - want).abs().mean().item())
        theirs.append((hf - want).abs().mean().item())
    mine, other = sum(ours) / len(ours), sum(theirs) / len(theirs)
    print(
        f"{family}: mean error of the 20 best log-probabilities {mine:.5f}, transformers {other:.5f}"
    )
    assert mine <= 1.5 * other


def full_logprobs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    position = torch.arange(ids.shape[1], device=ids.device)[None]
    with torch.no_grad():
        logits = model(ids, position_ids=position, use_cache=False).logits
    return logits[0].float().log_softmax(-1)
