import json
import shutil
from pathlib import Path

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from midstream.errors import ConfigError
from midstream.runtime.loading import load_model
from midstream.runtime.text import ByteTokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A checkpoint whose vocabulary has the size for bytes; not to be changed."""
    folder = tmp_path_factory.mktemp("models") / "bamba"
    tiny_models.build("bamba", vocab_size=260).save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(saved, tmp_path) -> Path:
    """A copy of it to break."""
    return Path(shutil.copytree(saved, tmp_path / "bamba"))


def test_the_loaded_model_has_the_saved_weights_and_the_byte_tokenizer(saved):
    model, tokenizer = load_model(saved, device="cpu")
    expected = tiny_models.build("bamba", vocab_size=260)
    assert all(map(torch.equal, model.state_dict().values(), expected.state_dict().values()))
    assert isinstance(tokenizer, ByteTokenizer)
    assert not model.training


def test_bytes_are_taken_for_want_of_a_tokenizer_with_a_warning(saved, caplog):
    load_model(saved, device="cpu")
    assert caplog.messages == [f"no tokenizer files in {saved}: taking bytes (ids 0-255)"]


def test_a_folder_that_says_bytes_needs_no_warning(checkpoint, caplog):
    config = json.loads((checkpoint / "config.json").read_text())
    text = json.dumps(config | {"tokenizer_class": "bytes"})
    (checkpoint / "config.json").write_text(text)
    assert isinstance(load_model(checkpoint, device="cpu")[1], ByteTokenizer)
    assert caplog.messages == []


def test_the_progress_bar_is_off_where_stderr_is_no_terminal(saved, capsys):
    was_enabled = transformers_logging.is_progress_bar_enabled()
    load_model(saved, device="cpu")
    assert "Loading weights" not in capsys.readouterr().err
    assert transformers_logging.is_progress_bar_enabled() == was_enabled


def test_dtype_is_as_asked(saved):
    assert load_model(saved, dtype="bfloat16", device="cpu")[0].dtype is torch.bfloat16


def test_a_vocabulary_of_another_size_has_no_tokenizer(tmp_path):
    tiny_models.build("qwen3_next").save_pretrained(tmp_path)
    assert load_model(tmp_path, device="cpu")[1] is None


def _no_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def _a_file_instead(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _list_config(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def _other_family(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))


def _no_family(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _missing_shard(folder: Path) -> None:
    shards = {"a.weight": "model-1-of-2.safetensors", "b.weight": "model-2-of-2.safetensors"}
    (folder / "model.safetensors").rename(folder / "model-1-of-2.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def _broken_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")


def _truncated_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])


def _missing_parameter(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mamba.A_log"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _other_sizes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 100}))


def _broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "found", "fix"),
    [
        (_no_folder, "nothing at", "pass the folder"),
        (_a_file_instead, "a file at", "pass the folder"),
        (_no_config, "found generation_config.json, model.safetensors", "save_pretrained"),
        (_broken_config, "is not JSON", "copy the file again"),
        (_list_config, "holds a list", "copy the file again"),
        (_other_family, "'llama', expected one of bamba, qwen3_next", "transformers itself"),
        (_no_family, "model_type None", "transformers itself"),
        (_no_weights, "no weights in", "expected model.safetensors or pytorch_model.bin"),
        (_missing_shard, "1 of 2 weight files", "model-2-of-2.safetensors"),
        (_broken_index, "no readable weight_map", "copy the file again"),
        (_truncated_weights, "cannot be loaded", "copy both again"),
        (_missing_parameter, "lack model.layers.0.mamba.A_log", "copy the weights again"),
        (_other_sizes, "cannot be loaded", "copy both again"),
        (_broken_tokenizer, "the tokenizer in", "give token ids"),
    ],
    ids=lambda value: getattr(value, "__name__", "").strip("_"),
)
def test_what_is_wrong_with_a_checkpoint_is_named_with_the_fix(checkpoint, damage, found, fix):
    damage(checkpoint)
    with pytest.raises(ConfigError) as caught:
        load_model(checkpoint, device="cpu")
    assert found in str(caught.value)
    assert fix in str(caught.value)


@pytest.mark.parametrize("directory", [None, 5, b"model", ["model"], ""], ids=repr)
def test_what_is_no_path_is_refused(directory):
    with pytest.raises(ConfigError, match=r"the directory is .*; expected a path; pass the folder"):
        load_model(directory)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "int8"},
        {"dtype": []},
        *({"device": device} for device in ("gpu", None, 1.5, "meta", "mps", "xpu:0")),
    ],
    ids=str,
)
def test_an_unknown_dtype_or_device_is_refused(saved, options):
    with pytest.raises(ConfigError, match="expected 'auto'"):
        load_model(saved, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(saved):
    with pytest.raises(ConfigError, match="finds no GPU here"):
        load_model(saved, device="cuda")


def test_a_gpu_beyond_those_that_are_there_is_refused(saved, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"device='cuda:2'; expected .*; torch finds 2 GPUs here"):
        load_model(saved, device="cuda:2")


def test_a_misspelt_option_is_refused_with_its_neighbour(saved):
    with pytest.raises(ConfigError, match="unknown option 'devic'; did you mean 'device'"):
        load_model(saved, devic="cpu")


def test_a_config_that_cannot_be_read_is_refused(saved, monkeypatch):
    def read_text(path, encoding):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", read_text)
    with pytest.raises(ConfigError, match=r"config.json' cannot be read .*Permission denied"):
        load_model(saved, device="cpu")
