"""
What this installation can run, and what is missing for the rest.

Imports torch late: the command line reads its own version from here.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

TESTED_TRANSFORMERS = ("5.17.0", "5.24.0")

_NOT_INSTALLED = "source tree, not installed"
_PACKAGES = ("midstream", "torch", "triton", "numba", "numpy", "transformers")


@dataclass(frozen=True, slots=True)
class Installation:
    """What was found on this machine."""

    python: str
    packages: dict[str, str | None]  # version by name, None where absent
    torch_cuda: str | None  # CUDA release that torch was built for, None in a CPU build
    device_name: str | None  # the first GPU, None where there is none
    interprets_triton: bool  # TRITON_INTERPRET=1
    has_fla: bool


def own_version() -> str:
    """The version of midstream."""
    return _version("midstream") or _NOT_INSTALLED


def find_installation() -> Installation:
    """Look at this machine.  Starts a CUDA context where there is a GPU, to read its name."""
    import torch

    has_gpu = torch.cuda.is_available()
    return Installation(
        python=platform.python_version(),
        packages={name: _version(name) for name in _PACKAGES},
        torch_cuda=torch.version.cuda,
        device_name=torch.cuda.get_device_name() if has_gpu else None,
        interprets_triton=os.environ.get("TRITON_INTERPRET") == "1",
        has_fla=find_spec("fla") is not None,
    )


def describe(found: Installation) -> list[str]:
    """The report, one line per fact: what is there, or what is not and why."""
    from midstream.compiler.families import FAMILIES

    packages = {name: text or "not installed" for name, text in found.packages.items()}
    packages["midstream"] = found.packages["midstream"] or _NOT_INSTALLED
    packages["transformers"] = _transformers(found.packages["transformers"])
    rows = {
        "python": found.python,
        **packages,
        "device": _device(found),
        "kernels": _kernels(found),
        "graphs": "CUDA graphs" if found.device_name else "no CUDA graphs: they need a GPU",
        "fla": _fla(found),
        "families": ", ".join(sorted(family.name for family in FAMILIES.values())),
    }
    return _table(rows.items())


def _transformers(found: str | None) -> str:
    tested = " and ".join(TESTED_TRANSFORMERS)
    if found is None:
        return "not installed: pip install 'midstream[hf]'"
    return f"{found} (tested)" if found in TESTED_TRANSFORMERS else f"{found} (tested: {tested})"


def _device(found: Installation) -> str:
    if found.device_name:
        return f"cuda: {found.device_name}, torch built for CUDA {found.torch_cuda}"
    if found.torch_cuda is None:
        return "cpu: this build of torch has no CUDA"
    return f"cpu: torch is built for CUDA {found.torch_cuda} but finds no GPU or no driver"


def _kernels(found: Installation) -> str:
    if not found.device_name:
        return "the references in plain torch: Triton kernels need a GPU"
    if found.interprets_triton:
        return "Triton's interpreter (TRITON_INTERPRET=1 is set): very slow, unset it"
    return "Triton"


def _fla(found: Installation) -> str:
    if not found.has_fla:
        return "not installed (optional)"
    if found.device_name:
        return "installed"
    return "installed, without a GPU: transformers' own delta-rule layers fail here, uninstall it"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _table(rows: Iterable[tuple[str, str]]) -> list[str]:
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}" for name, text in rows]
