"""A model and its tokenizer from a local directory in the format of transformers."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Never

import torch

from midstream.compiler.families import FAMILIES
from midstream.errors import ConfigError, check_known
from midstream.runtime.text import ByteTokenizer

log = logging.getLogger("midstream")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BYTES = "bytes"  # "tokenizer_class" in config.json: ids 0 to 255 are bytes
BYTE_VOCABULARY = range(256, 301)  # vocabulary sizes that bytes and a few markers may have

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # whole, or sharded: the name + .index.json
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def load_model(
    directory: str | PathLike[str], dtype: str = "auto", device: str = "auto", **unknown: Never
) -> tuple[Any, Any]:
    """The model in eval mode on `device`, and its tokenizer; nothing is downloaded.

    `dtype` "auto" is the one in config.json, `device` "auto" a GPU if there is one.  Without
    tokenizer files the tokenizer is the byte tokenizer if config.json says "tokenizer_class":
    "bytes" or, with a warning, if the vocabulary has the size for it; else None.

    Raises:
        ConfigError: no directory, no config.json, no weights, an unknown family, damaged files.
    """
    check_known("load_model", unknown, ("dtype", "device"))
    if not isinstance(directory, str | PathLike) or directory == "":
        raise ConfigError(
            f"load_model: the directory is {repr(directory)[:60]}; expected a path; pass the folder that "
            "holds config.json and the weights"
        )
    directory = Path(directory)
    config = read_config(directory)
    check_family(directory, config)
    check_weights(directory)
    model = _load_weights(directory, _dtype(dtype)).to(find_device(device)).eval()
    model.requires_grad_(False)
    return model, load_tokenizer(directory, config)


def read_config(directory: Path) -> dict[str, Any]:
    """The contents of config.json."""
    if not directory.is_dir():
        found = "a file" if directory.exists() else "nothing"
        raise ConfigError(
            f"load_model: {found} at '{directory}', a directory expected; pass the folder that "
            "holds config.json and the weights (models are not downloaded)"
        )
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"load_model: no config.json in '{directory}', found {_listing(directory)}; "
            "write the folder with model.save_pretrained(...)"
        )
    return read_object(path, "load_model", "an object", "copy the file again")


def read_object(path: Path, who: str, expected: str, remedy: str) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ConfigError: the file holds something else; `who`, `expected` and `remedy` are said.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{who}: '{path}' cannot be read ({error}), {expected} expected; {remedy}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{who}: '{path}' is not JSON ({error}); {remedy}") from error
    if not isinstance(found, dict):
        raise ConfigError(
            f"{who}: '{path}' holds a {type(found).__name__}, {expected} expected; {remedy}"
        )
    return found


def check_family(directory: Path, config: dict[str, Any]) -> None:
    """Raise ConfigError unless the compiler can lower models of this type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = config.get("model_type")
    if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) not in FAMILIES:
        known = ", ".join(sorted(family.name for family in FAMILIES.values()))
        raise ConfigError(
            f"load_model: '{directory}' has model_type {model_type!r}, expected one of {known}; "
            "run this model with transformers itself"
        )


def check_weights(directory: Path) -> None:
    """Raise ConfigError unless all weight files are there; names what is missing."""
    for name in _WEIGHTS:
        if (directory / name).is_file():
            return
        index = directory / f"{name}.index.json"
        if index.is_file():
            _check_shards(index)
            return
    raise ConfigError(
        f"load_model: no weights in '{directory}', found {_listing(directory)}; expected "
        f"{' or '.join(_WEIGHTS)}, whole or with an .index.json; copy them into the folder"
    )


def load_tokenizer(directory: Path, config: dict[str, Any]) -> Any:
    """The tokenizer in `directory`, the byte tokenizer, or None.  `config` is its config.json.

    Raises:
        ConfigError: when tokenizer files are there and cannot be read.
    """
    if not any((directory / name).is_file() for name in _TOKENIZER):
        return _byte_tokenizer(directory, config)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ConfigError(
            f"load_model: the tokenizer in '{directory}' cannot be read ({first_line(error)}); "
            "save it again with tokenizer.save_pretrained(...), or give token ids"
        ) from error


def _byte_tokenizer(directory: Path, config: dict[str, Any]) -> ByteTokenizer | None:
    """What stands in for tokenizer files."""
    if config.get("tokenizer_class") == BYTES:
        return ByteTokenizer()
    if config.get("vocab_size") not in BYTE_VOCABULARY:
        return None
    log.warning("no tokenizer files in %s: taking bytes (ids 0-255)", directory)
    return ByteTokenizer()


@contextmanager
def _progress_on_terminals_only() -> Iterator[None]:
    """The progress bar of transformers would fill a log file."""
    from transformers.utils import logging as transformers_logging

    silenced = transformers_logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    if silenced:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if silenced:
            transformers_logging.enable_progress_bar()


def _load_weights(directory: Path, dtype: torch.dtype | str) -> Any:
    """The model on the CPU, with every parameter read from the files."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        with _progress_on_terminals_only():
            model, report = AutoModelForCausalLM.from_pretrained(
                directory, dtype=dtype, local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"load_model: '{directory}' cannot be loaded ({first_line(error)}); "
            "config.json and the weights must belong together: copy both again"
        ) from error
    # transformers only warns here and draws the parameters at random
    if report["missing_keys"]:
        raise ConfigError(
            f"load_model: the weights in '{directory}' lack {_some(report['missing_keys'])}, "
            "all parameters of the model expected; copy the weights again"
        )
    if report["unexpected_keys"]:
        log.warning("%s: unused weights: %s", directory, _some(report["unexpected_keys"]))
    return model


def _check_shards(index: Path) -> None:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"load_model: '{index}' has no readable weight_map; copy the file again"
        ) from error
    absent = sorted(name for name in names if not (index.parent / name).is_file())
    if absent:
        raise ConfigError(
            f"load_model: {len(absent)} of {len(names)} weight files named in '{index}' are not "
            f"there: {_some(absent)}; copy them into the folder"
        )


def _dtype(name: str) -> torch.dtype | str:
    if not isinstance(name, str) or (name != "auto" and name not in DTYPES):
        raise ConfigError(
            f"load_model: dtype={name!r}; expected 'auto' or one of {', '.join(DTYPES)}"
        )
    return DTYPES.get(name, "auto")


def find_device(name: str) -> torch.device:
    """The device of that name; "auto" is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise _no_device(name, "`midstream info` says what is available") from error
    if device.type not in ("cpu", "cuda"):
        raise _no_device(name, "for another one, load the model with transformers itself")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"load_model: device={name!r}, but torch {torch.__version__} finds no GPU here; "
            "use device='cpu' (`midstream info` says what is available)"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise _no_device(
            name, f"torch finds {torch.cuda.device_count()} GPUs here, counted from cuda:0"
        )
    return device


def _no_device(name: object, remedy: str) -> ConfigError:
    return ConfigError(
        f"load_model: device={name!r}; expected 'auto', 'cpu', 'cuda' or 'cuda:1'; {remedy}"
    )


def _listing(directory: Path) -> str:
    return _some(sorted(path.name for path in directory.iterdir())) or "an empty folder"


def _some(names: Any, most: int = 6) -> str:
    """The first names, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(":. ")
