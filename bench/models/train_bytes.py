"""
Train a small byte-level `BambaForCausalLM` on the source text of the Python standard library.

Prints a line about the text, one per report (bits per byte, speed), then one JSON line.
Writes config.json, generation_config.json, model.safetensors (bfloat16) and training.json to
--out; the weights are those of the report with the best held-out figure.

    python bench/models/train_bytes.py --minutes 6 --out /tmp/model
    python bench/models/train_bytes.py --minutes 6 --out /tmp/model --device cpu --steps 20
"""

import argparse
import json
import math
import platform
import sysconfig
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from fast_forward import FastForward
from source_text import END_OF_TEXT, LICENCE, Corpus, load_corpus, windows
from torch import Tensor
from transformers import AutoModelForCausalLM, BambaConfig, BambaForCausalLM

PAD = 257
VOCAB = 264  # 256 bytes, two marks, the rest unused: a multiple of 8

PEAK_RATE = 2e-3
LAST_RATE = 2e-5
WARM_UP_STEPS = 200
DROPOUT = 0.1  # the text is short: it is read dozens of times
WEIGHT_DECAY = 0.1
REPORT_SECONDS = 10.0
MAX_HELD_OUT_BATCHES = 8
LOGIT_BOUND = 2e-2  # two float32 forwards with other orders of summation; measured 1e-5 untrained


@dataclass(frozen=True, slots=True)
class Batch:
    rows: int
    length: int  # bytes of a row; positions past it are never trained


BATCHES = {"cuda": Batch(16, 8192), "cpu": Batch(2, 512)}


@dataclass(slots=True)
class Progress:
    """What training has reached, and the weights of the best report."""

    steps: int = 0
    seconds: float = 0.0
    bits: float = math.inf  # held-out bits per byte of `weights`
    best_step: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Budget:
    """Training ends when either is used up."""

    seconds: float
    steps: int | None  # None: the time alone decides

    def share(self, progress: Progress) -> float:
        """Share of the budget that is used."""
        in_steps = progress.steps / self.steps if self.steps else 0.0
        return max(progress.seconds / self.seconds, in_steps)


def model_config() -> BambaConfig:
    """3.8 million parameters; two of six layers attend, the others keep 128 KiB of state."""
    return BambaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=352,
        num_hidden_layers=6,
        attn_layer_indices=[2, 5],
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_d_state=64,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=64,
        tie_word_embeddings=True,
        max_position_embeddings=BATCHES["cuda"].length,
        bos_token_id=END_OF_TEXT,
        eos_token_id=END_OF_TEXT,
        pad_token_id=PAD,
        tokenizer_class="bytes",  # no tokenizer files: ids 0 to 255 are bytes
    )


@torch.no_grad()
def initialise(model: Any) -> None:
    """Unit-variance projections, quiet branches, time steps from 0.001 to 0.1 as in Mamba-2."""
    quiet = (2 * model.config.num_hidden_layers) ** -0.5
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.uniform_(1, 16).log_()
        elif name.endswith("dt_bias"):
            step = weight.uniform_(math.log(1e-3), math.log(1e-1)).exp()
            weight.copy_(step + torch.log(-torch.expm1(-step)))  # inverse of softplus
        elif name.endswith("conv1d.weight"):
            weight.uniform_(-(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)
        elif weight.ndim == 2:
            last = name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight"))
            weight.normal_(std=weight.shape[1] ** -0.5 * (quiet if last else 1.0))


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    """AdamW; matrices decay, everything else (norms, biases, A_log, dt_bias, D, taps) does not."""
    weights = list(model.parameters())
    groups = [
        {"params": [w for w in weights if w.ndim == 2], "weight_decay": WEIGHT_DECAY},
        {"params": [w for w in weights if w.ndim != 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)


def rate(step: int, done: float) -> float:
    """Learning rate: linear warm-up in steps, then a cosine over the share of the budget used.

    >>> rate(WARM_UP_STEPS, 0.0) == PEAK_RATE, rate(WARM_UP_STEPS, 1.0) == LAST_RATE
    (True, True)
    """
    cosine = LAST_RATE + (PEAK_RATE - LAST_RATE) * (1 + math.cos(math.pi * min(done, 1.0))) / 2
    return cosine * min(1.0, (step + 1) / WARM_UP_STEPS)


@torch.no_grad()
def held_out_bits(forward: FastForward, text: Tensor, batch: Batch) -> float:
    """Bits per byte of windows spread evenly over the text, in whole batches."""
    to_cover = math.ceil(len(text) / (batch.length * batch.rows))
    num_batches = min(to_cover, MAX_HELD_OUT_BATCHES)
    starts = torch.linspace(0, len(text) - batch.length - 1, num_batches * batch.rows).long()
    losses = [
        forward.loss(*windows(text, start, batch.length))
        for start in starts.to(text.device).chunk(num_batches)
    ]
    return torch.stack(losses).mean().item() / math.log(2)


def make_forward(model: Any, corpus: Corpus, batch: Batch) -> FastForward:
    """Compiled in bfloat16 on a card, eager where that fails and on the CPU."""
    device = corpus.train.device
    if device.type == "cpu":
        return FastForward(model, torch.float32, compiled=False)
    forward = FastForward(model, torch.bfloat16, compiled=True)
    try:
        start = torch.zeros(batch.rows, dtype=torch.int64, device=device)
        forward.loss(*windows(corpus.train, start, batch.length), DROPOUT).backward()
        held_out_bits(forward, corpus.held_out, batch)
    except RuntimeError as error:  # the base of the errors of dynamo, inductor and triton's driver
        print(f"compile failed, so eager: {type(error).__name__}: {error}", flush=True)
        forward = FastForward(model, torch.bfloat16, compiled=False)
    model.zero_grad(set_to_none=True)
    return forward


class Reporter:
    """Prints a line per report and keeps the weights of the best one in `progress`."""

    def __init__(self, model: Any, corpus: Corpus, batch: Batch, progress: Progress) -> None:
        self._model, self._corpus, self._batch, self._progress = model, corpus, batch, progress
        self._loss_sum = torch.zeros((), device=corpus.train.device)
        self._first_step, self._begin = 0, time.monotonic()

    def add(self, loss: Tensor) -> None:
        self._loss_sum += loss.detach()

    def is_due(self) -> bool:
        return time.monotonic() - self._begin > REPORT_SECONDS

    def report(self, forward: FastForward, learning_rate: float) -> None:
        """Measure the held-out text.  Raises: FloatingPointError when the loss is no number."""
        progress, steps = self._progress, self._progress.steps - self._first_step
        train_bits = self._loss_sum.item() / steps / math.log(2)
        speed = steps * self._batch.rows * self._batch.length / (time.monotonic() - self._begin)
        bits = held_out_bits(forward, self._corpus.held_out, self._batch)
        print(
            f"step {progress.steps:6d} {progress.seconds:6.1f} s  bits per byte: train "
            f"{train_bits:.4f} held out {bits:.4f} rate {learning_rate:.1e} {speed / 1e6:.2f} MB/s",
            flush=True,
        )
        if not math.isfinite(train_bits + bits):
            raise FloatingPointError(
                f"train_bytes: loss {train_bits} at step {progress.steps}, expected a finite "
                "number; lower PEAK_RATE (the weights of the best report are saved)"
            )
        if bits < progress.bits:
            progress.bits, progress.best_step = bits, progress.steps
            progress.weights = {k: w.detach().clone() for k, w in self._model.state_dict().items()}
        self._loss_sum.zero_()
        self._first_step, self._begin = progress.steps, time.monotonic()


def train(model: Any, corpus: Corpus, batch: Batch, budget: Budget, progress: Progress) -> None:
    """Train until the budget is used up, compile time included; `progress` is valid at any exit."""
    begin = time.monotonic()
    forward = make_forward(model, corpus, batch)
    optimizer = make_optimizer(model)
    print(f"ready after {time.monotonic() - begin:.1f} s", flush=True)
    reporter = Reporter(model, corpus, batch, progress)
    done = 0.0
    while done < 1.0:
        learning_rate = rate(progress.steps, done)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        train_step(model, forward, optimizer, corpus.train, batch, reporter)
        progress.steps += 1
        progress.seconds = time.monotonic() - begin
        done = budget.share(progress)
        if done >= 1.0 or reporter.is_due():
            reporter.report(forward, learning_rate)


def train_step(
    model: Any, forward: FastForward, optimizer: Any, text: Tensor, batch: Batch, reporter: Reporter
) -> None:
    start = torch.randint(len(text) - batch.length, (batch.rows,), device=text.device)
    loss = forward.loss(*windows(text, start, batch.length), DROPOUT)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    reporter.add(loss)


@torch.no_grad()
def logit_difference(stock: Any, text: Tensor) -> float:
    """Largest difference between the model's own forward and the training forward, on the CPU."""
    token = text[: 2 * 512].cpu().long().view(2, 512)
    fast = FastForward(stock, torch.float32, compiled=False).logits(token)
    difference: float = (stock(input_ids=token).logits - fast).abs().max().item()
    return difference


def save(
    model: Any, corpus: Corpus, batch: Batch, progress: Progress, folder: Path
) -> dict[str, Any]:
    """Write the best weights in bfloat16, check what a user would load, return the facts."""
    if progress.weights:
        model.load_state_dict(progress.weights)
    device = corpus.train.device
    model.to(torch.bfloat16).save_pretrained(folder)
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    difference = logit_difference(saved, corpus.held_out)
    compute = torch.float32 if device.type == "cpu" else torch.bfloat16
    forward = FastForward(saved.to(device), compute, compiled=False)
    facts = {
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "text": f"{LICENCE}; of Python {platform.python_version()}",
        "train_files": corpus.num_files,
        "train_bytes": len(corpus.train),
        "held_out_files": corpus.num_held_out_files,
        "held_out_bytes": len(corpus.held_out),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "batch": asdict(batch),
        "steps": progress.steps,
        "seconds": round(progress.seconds, 1),
        "bytes_read": progress.steps * batch.rows * batch.length,
        "best_step": progress.best_step,
        "held_out_bits_per_byte": progress.bits,
        "held_out_bits_per_byte_bfloat16": held_out_bits(forward, corpus.held_out, batch),
        "max_logit_difference": difference,
    }
    (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, required=True, help="time of training")
    parser.add_argument(
        "--steps", type=int, default=None, help="end earlier, after this many steps"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=sorted(BATCHES), default="cuda")
    options = parser.parse_args()

    torch.manual_seed(0)
    corpus = load_corpus(Path(sysconfig.get_paths()["stdlib"]), torch.device(options.device))
    print(
        f"{LICENCE}: {corpus.num_files} files, {len(corpus.train)} bytes; held out "
        f"{corpus.num_held_out_files} files, {len(corpus.held_out)} bytes",
        flush=True,
    )
    model = BambaForCausalLM(model_config())
    initialise(model)
    model.to(options.device)
    batch, progress = BATCHES[options.device], Progress()
    try:
        train(model, corpus, batch, Budget(60 * options.minutes, options.steps), progress)
    finally:
        facts = save(model, corpus, batch, progress, options.out)
        print(json.dumps(facts), flush=True)
    if facts["max_logit_difference"] > LOGIT_BOUND:
        raise SystemExit(
            f"train_bytes: logits differ by {facts['max_logit_difference']} between transformers and "
            f"FastForward, expected at most {LOGIT_BOUND}; compare bench/models/fast_forward.py"
        )


if __name__ == "__main__":
    main()
