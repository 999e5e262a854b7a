"""`midstream explain` says what was lowered and captured, and finds an owner for all bound memory."""

import json
from pathlib import Path

import pytest
import tiny_models
import torch

import midstream
from midstream.runtime import cli
from midstream.runtime.explain_dot import dot_text
from midstream.runtime.explain_model import FLOOR_LENGTH, explain_model, owners_of

SMALL = {"memory": "16MiB", "max_rows": 2, "max_step_tokens": 64, "max_len": 128}
FLAGS = ("--memory", "16MiB", "--max-rows", "2", "--max-step-tokens", "64", "--max-len", "128")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTREAM_EMULATE", "late")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_models.build("bamba").save_pretrained(path)
    return path


def explain(folder: Path, *words: str) -> int:
    return cli.main(["explain", "--model", str(folder), "--device", "cpu", *FLAGS, *words])


def test_layers_are_reported_by_kind_with_their_ops_and_bytes():
    with midstream.Engine(tiny_models.build("qwen3_next"), **SMALL) as engine:
        report = explain_model(engine, gb_per_s=100.0)
        layout = engine._parts.lowered.layout
    kinds = [layer.kind for layer in report.layers]
    assert kinds == ["gated_delta", "gated_delta", "attention", "gated_delta"]
    assert "gated_delta_step" in report.layers[0].ops
    assert "causal_conv_chunk" in report.layers[0].ops
    assert "paged_attention_decode" in report.layers[2].ops
    of_layers = sum(layer.state_bytes for layer in report.layers)
    assert of_layers <= layout.page_bytes < of_layers + 128 * 2 * len(report.layers)
    assert any("experts" in text for text in report.unlowered)


def test_the_floor_counts_weights_once_and_states_twice():
    model = tiny_models.build("bamba")
    with midstream.Engine(model, **SMALL) as engine:
        report = explain_model(engine, gb_per_s=100.0)
        page = engine._parts.lowered.layout.page_bytes
    weights = sum(p.numel() * 4 for p in model.parameters()) - 128 * 64 * 4  # the table of tokens
    one, two = report.floors
    assert (one.weight_bytes, one.state_bytes) == (weights, 2 * page)
    assert one.length == SMALL["max_len"] < FLOOR_LENGTH
    assert one.kv_bytes == one.length * 2 * 2 * 16 * 4  # one layer, two heads of 16
    assert (two.weight_bytes, two.state_bytes) == (weights, 4 * page)
    total = one.weight_bytes + one.state_bytes + one.kv_bytes
    assert one.micros == pytest.approx(1e6 * total / 100e9)


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_every_buffer_of_every_captured_step_has_an_owner(family, emulated):
    with midstream.Engine(tiny_models.build(family), **SMALL) as engine:
        report = explain_model(engine, gb_per_s=1.0)
    assert len(report.graphs) >= 3
    assert report.num_unowned == 0
    for graph in report.graphs:
        refreshed = set(graph.by_refresh)
        assert {"staged every step", "arena, written by steps", "weight"} <= refreshed


def test_a_buffer_that_the_engine_does_not_know_is_reported(emulated, monkeypatch):
    monkeypatch.setattr(
        "midstream.runtime.explain_model.owners_of",
        lambda parts: (o for o in owners_of(parts) if o.name != "pools.conv"),
    )
    with midstream.Engine(tiny_models.build("bamba"), **SMALL) as engine:
        report = explain_model(engine, gb_per_s=1.0)
        conv = engine._parts.pools.conv
        assert {one.first for graph in report.graphs for one in graph.unowned} == {conv.data_ptr()}


def test_the_command_prints_everything_and_writes_json_and_dot(folder, tmp_path, capsys, emulated):
    assert explain(folder, "--out", str(tmp_path / "out"), "--gb-per-s", "4200", "--buffers") == 0
    text = capsys.readouterr().out
    for part in ("layers:", "pools: ", "captured steps: ", "floor of a decode step at 4,200 GB/s"):
        assert part in text
    assert "staged every step: stage.decode_position" in text
    assert "UNOWNED" not in text
    data = json.loads((tmp_path / "out" / "explain.json").read_text())
    assert data["family"] == "bamba"
    assert len(data["graphs"]) >= 3
    dot = (tmp_path / "out" / "explain.dot").read_text()
    assert dot.count("{") == dot.count("}")
    assert "layer0 -> layer1 -> layer2 -> layer3" in dot
    assert "layer2 -> pool_kv" in dot


def test_without_a_gpu_it_says_that_nothing_is_captured(folder, capsys):
    assert explain(folder) == 0
    text = capsys.readouterr().out
    assert "captured steps: 0" in text
    assert "without a graph: all: no CUDA device" in text
    assert "(measured now)" in text


def test_odd_values_are_refused(folder, capsys):
    for rate in ("0", "-1", "nan", "inf"):
        assert explain(folder, "--gb-per-s", rate) == 2
        assert f"(--gb-per-s) is {float(rate)}; expected a finite" in capsys.readouterr().err
    assert explain(folder, "--out", str(folder / "config.json" / "results")) == 2
    assert "cannot be made" in capsys.readouterr().err
    assert explain(folder, "--out", "") == 2
    assert "--out '' cannot be made (it is empty)" in capsys.readouterr().err
    assert explain(folder, "--graphs", "half") == 2


def test_a_model_without_attention_is_drawn_without_a_kv_pool():
    text = dot_text('a "model"', [(0, "Mixer", "ssd")], [])
    assert "pool_kv" not in text
    assert "captured steps:\\lnone" in text
    assert text.startswith("digraph \"a 'model'\"")


@pytest.mark.gpu
def test_on_a_gpu_every_address_in_the_graphs_has_an_owner_or_lies_in_their_own_memory():
    model = tiny_models.build("bamba", dtype=torch.bfloat16).cuda()
    options = SMALL | {"memory": "64MiB", "compile": "eager"}
    with midstream.Engine(model, **options) as engine:
        report = explain_model(engine)
    assert report.gb_per_s > 100
    assert {"decode" in graph.name for graph in report.graphs} == {True, False}
    for graph in report.graphs:
        assert graph.by_refresh["weight"][0] > 10
        # matrix kernels of libraries have a workspace of their own; kernels of torch take structures by
        # value, whose unused words hold what lay there before
        library = ("gemm", "gemv2", "gemvx", "gemvnsp", "nvjet", "cublas", "cutlass", "at::native")
        ours = [u for u in graph.unowned if not any(n in u.operation.lower() for n in library)]
        assert ours == [], graph.lines()
