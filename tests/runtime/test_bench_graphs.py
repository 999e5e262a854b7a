"""`midstream bench graphs` measures what runs here, says why the rest does not, and writes both down."""

import itertools
import json
import sys
from pathlib import Path

import pytest
import tiny_models
import torch
from transformers import BambaConfig

from midstream.graphs.kernels import kernels_of
from midstream.runtime import bench_graphs, bench_steps, cli

SIZES = {
    "model_type": "bamba", "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2,
    "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "attn_layer_indices": [1],
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
}  # fmt: skip
FEW = ("--calls", "3", "--device", "cpu")


@pytest.fixture
def sizes_file(tmp_path: Path) -> Path:
    path = tmp_path / "sizes.json"
    path.write_text(json.dumps(SIZES))
    return path


def bench(model: Path, *words: str) -> int:
    return cli.main(["bench", "graphs", "--model", str(model), *FEW, *words])


def test_every_path_has_a_line_for_each_number_of_rows(sizes_file, capsys):
    assert bench(sizes_file, "--rows", "3", "1") == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["rows", "path"]
    assert [line.split()[:2] for line in lines] == [
        [str(rows), path] for rows in (1, 3) for path in bench_steps.PATHS
    ]
    timed = [line for line in lines if "needs a GPU" not in line]
    assert [line.split()[1] for line in timed] == ["eager", "midstream"] * 2
    assert all(float(line.split()[6]) > 0 for line in timed)


def test_a_path_that_refuses_the_model_says_why_and_the_others_are_measured(tmp_path, capsys):
    path = tmp_path / "sizes.json"
    path.write_text(json.dumps(SIZES | {"attn_layer_indices": []}))
    assert bench(path, "--rows", "1") == 0
    lines = {line.split()[1]: line for line in capsys.readouterr().out.splitlines()[1:]}
    assert "ttention" in lines["eager"]
    assert float(lines["midstream"].split()[6]) > 0


def test_a_folder_is_measured_and_json_and_plot_hold_the_figures(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    folder, out = tmp_path / "model", tmp_path / "deep" / "out"
    tiny_models.build("qwen3_next").save_pretrained(folder)
    assert bench(folder, "--rows", "2", "--out", str(out)) == 0
    found = json.loads((out / "graphs.json").read_text())
    assert found["setup"]["class"] == "Qwen3NextForCausalLM"
    timed = {p["path"]: p["timing"] for p in found["points"] if p["timing"] is not None}
    assert list(timed) == ["eager", "midstream"]
    p20, p50, p80 = timed["midstream"]["device_us"]
    assert 0 < p20 <= p50 <= p80
    assert (out / "graphs.png").stat().st_size > 1000


def test_without_matplotlib_the_figures_are_written_and_the_plot_is_missed(
    sizes_file, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(bench_graphs, "find_spec", lambda name: None)
    assert bench(sizes_file, "--rows", "1", "--out", str(tmp_path)) == 0
    assert "no plot: matplotlib is not installed" in capsys.readouterr().err
    assert (tmp_path / "graphs.json").exists()
    assert not (tmp_path / "graphs.png").exists()


def test_the_model_is_given_back_as_it_was(sizes_file):
    model = bench_graphs.load(str(sizes_file), "float32", "cpu")
    before = dict(vars(model))
    bench_graphs.bench(model, [1], [], calls=3)
    assert dict(vars(model)) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "holds a list, an object with model_type and sizes expected"),
        ('{"model_type": "llama"}', "has model_type 'llama', expected one of"),
        (json.dumps(SIZES | {"mamba_n_heads": 7}), "no model can be built from"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path, capsys, text, message):
    path = tmp_path / "sizes.json"
    path.write_text(text)
    assert bench(path) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("model", ["/nope.json", "/nope", ""])
def test_a_model_that_is_not_there_is_refused_with_both_kinds_that_could_be(capsys, model):
    assert cli.main(["bench", "graphs", "--model", model]) == 2
    assert (
        f"midstream: bench: nothing at --model '{model}'; expected a folder of transformers, or"
        in (capsys.readouterr().err)
    )


def test_rows_that_the_host_has_no_memory_for_are_told_and_the_others_measured(
    sizes_file, capsys, monkeypatch
):
    measure = bench_graphs.measure

    def small(step, calls):
        if not measured:
            measured.append(calls)
            torch.empty(2**60)
        return measure(step, calls)

    measured: list[int] = []
    monkeypatch.setattr(bench_graphs, "measure", small)
    assert bench(sizes_file, "--rows", "1") == 0
    lines = {line.split()[1]: line for line in capsys.readouterr().out.splitlines()[1:]}
    assert lines["eager"].endswith("out of memory")
    assert float(lines["midstream"].split()[6]) > 0


def test_rows_that_cannot_be_measured_are_refused_before_the_model_is_built(sizes_file, capsys):
    assert bench(sizes_file, "--rows", "0") == 2
    assert "--rows [0]; expected numbers >= 1" in capsys.readouterr().err
    assert bench(sizes_file, "--calls", "0") == 2  # the last of a flag counts
    assert "--calls 0; expected a number >= 1" in capsys.readouterr().err
    assert bench(sizes_file, "--dtype", "float8") == 2
    assert "--dtype 'float8'; expected 'auto' or one of" in capsys.readouterr().err


def test_the_most_calls_are_what_the_measured_caches_hold(sizes_file, capsys):
    most, num_steps = bench_steps.MOST_CALLS, itertools.count(bench_steps._PROMPT)
    bench_steps.measure(lambda: torch.tensor(next(num_steps)), most)
    profiled = 0 if torch.cuda.is_available() else bench_steps._PROFILED  # not on a CPU
    assert next(num_steps) + profiled == bench_steps.MAX_LEN
    assert bench(sizes_file, "--calls", str(most + 1)) == 2
    assert f"--calls {most + 1}; expected a number >= 1 and up to {most}" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(
    sizes_file, capsys, monkeypatch
):
    monkeypatch.setattr(bench_graphs, "bench", None)
    assert bench(sizes_file, "--out", str(sizes_file / "results")) == 2
    assert "cannot be made" in capsys.readouterr().err


def test_a_file_that_transformers_wrote_is_read_as_it_is(tmp_path):
    config = BambaConfig(**{name: size for name, size in SIZES.items() if name != "model_type"})
    config.save_pretrained(tmp_path)  # infinity is written as an object
    model = bench_graphs.load(str(tmp_path / "config.json"), "float32", "cpu")
    assert model.config.time_step_limit[1] == float("inf")


@pytest.mark.parametrize(
    ("name", "meant"), [("hiden_size", "hidden_size"), ("num_hidden_layer", "num_hidden_layers")]
)
def test_a_misspelt_size_is_refused_with_the_one_that_is_meant(tmp_path, capsys, name, meant):
    path = tmp_path / "sizes.json"
    path.write_text(json.dumps(SIZES | {name: 64}))
    assert bench(path) == 2
    assert f"bench: BambaConfig has no {name!r}; expected names" in (err := capsys.readouterr().err)
    assert f"did you mean {meant!r}?" in err


def test_a_name_like_no_other_is_reported_and_one_of_older_releases_is_not(tmp_path, caplog):
    path = tmp_path / "sizes.json"
    path.write_text(json.dumps(SIZES | {"flavour": 3, "torch_dtype": "bfloat16"}))
    bench_graphs.load(str(path), "float32", "cpu")
    assert "BambaConfig does not know 'flavour': it may change nothing" in caplog.text
    assert "torch_dtype" not in caplog.text


def test_gaps_between_percentiles_come_from_the_samples():
    assert bench_steps._percentiles([float(n) for n in range(1, 12)]) == (3.0, 6.0, 9.0)


@pytest.mark.gpu
def test_on_a_gpu_the_graph_its_kernels_and_compilation_are_counted(tmp_path):
    path = tmp_path / "sizes.json"
    path.write_text(json.dumps(SIZES))
    model = bench_graphs.load(str(path), "float32", "cuda")
    points = bench_graphs.bench(model, [1, 2], slow_rows=[], calls=15)
    ours = {point.rows: point for point in points if point.path == "midstream"}
    for rows in (1, 2):
        graph, timing = ours[rows].graph, ours[rows].timing
        assert graph is not None
        assert graph.num_nodes >= 10
        assert timing.num_kernels >= 10
        assert 0 <= timing.idle_share < 1
        assert timing.num_recompilations == 0
    assert {p.why_not for p in points if p.path == "compile"} == {"left out (--slow-rows)"}


@pytest.mark.gpu
def test_kernels_come_in_the_order_in_which_they_began():
    data = torch.zeros(1 << 20, device="cuda")
    kernels = kernels_of(lambda: [data.add_(1), data.mul_(2)])
    assert len(kernels) == 2
    assert kernels[0].end_us <= kernels[1].begin_us
    assert all(kernel.end_us > kernel.begin_us for kernel in kernels)
