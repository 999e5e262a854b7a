"""The training forward against the model's own, and the books of the training script."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "models"))

import fast_forward  # noqa: E402
import source_text  # noqa: E402
import train_bytes  # noqa: E402


def tiny_model(**changes: Any) -> Any:
    config = train_bytes.model_config()
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "attn_layer_indices": [1],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
    }
    config = transformers.BambaConfig.from_dict(config.to_dict() | sizes | changes)
    torch.manual_seed(0)
    model = transformers.BambaForCausalLM(config)
    train_bytes.initialise(model)
    return model


def long_memory(model: Any) -> None:
    """Decays near one, so that the state crosses every chunk."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.fill_(-3.0)


@pytest.mark.parametrize(
    "prepare, chunks",
    [
        pytest.param(lambda model: None, 4, id="T256-fresh"),
        pytest.param(long_memory, 4, id="T256-decay_near_one"),
        pytest.param(long_memory, 1, id="T64-decay_near_one"),  # nothing is carried
    ],
)
def test_training_forward_equals_the_models_own_forward(prepare: Any, chunks: int) -> None:
    model = tiny_model().eval()
    prepare(model)
    token = torch.randint(257, (2, chunks * fast_forward.CHUNK))
    with torch.no_grad():
        stock = model(input_ids=token).logits
        fast = fast_forward.FastForward(model, torch.float32, compiled=False).logits(token)
    # float32, sums of up to 256 terms in another order: measured 3e-6 at logits up to 4
    torch.testing.assert_close(fast, stock, atol=1e-4, rtol=0)


def test_every_used_weight_gets_a_finite_gradient() -> None:
    model = tiny_model()
    with torch.no_grad():  # decays that underflow inside one chunk
        model.model.layers[0].mamba.dt_bias.fill_(20.0)
    token = torch.randint(257, (2, 129))
    forward = fast_forward.FastForward(model, torch.float32, compiled=False)
    forward.loss(token[:, :-1], token[:, 1:], 0.1).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all(), name
        assert weight.grad.any(), name


def test_script_learns_and_saves_what_transformers_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = b"def name(value):\n    return value\n"
    text = source_text.pack([line * 40] * 4)
    corpus = source_text.Corpus(text, text, 4, 4)
    model, batch = tiny_model(), train_bytes.Batch(2, 128)
    progress = train_bytes.Progress()
    budget = train_bytes.Budget(seconds=60.0, steps=60)
    train_bytes.train(model, corpus, batch, budget, progress)
    facts = train_bytes.save(model, corpus, batch, progress, tmp_path)
    assert progress.steps == 60
    assert progress.bits < 6.5  # log2(264) = 8.04 before training
    assert abs(facts["held_out_bits_per_byte_bfloat16"] - progress.bits) < 0.05
    assert facts == json.loads((tmp_path / "training.json").read_text())
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "training.json"
    }  # fmt: skip
    assert "60" in capsys.readouterr().out


def test_files_are_split_by_their_bytes_and_odd_ones_left_out(tmp_path: Path) -> None:
    (tmp_path / "encodings").mkdir()
    (tmp_path / "encodings" / "table.py").write_bytes(b"table = 1\n")
    (tmp_path / "latin.py").write_bytes(b"name = '\xe9'\n")
    (tmp_path / "empty.py").write_bytes(b"")
    for name in ("one.py", "copy_of_one.py"):
        (tmp_path / name).write_bytes(b"one = 1\n")
    (tmp_path / "two.py").write_bytes(b"two = 2\n")
    assert sorted(source_text.read_files(tmp_path).values()) == [b"one = 1\n", b"two = 2\n"]
