"""What lies behind a fused projection is a slice of it: every op of ours takes such rows as they are."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch

import midstream.ops
from midstream.ops.registry import OPS
from midstream.ops.testing import build_args, compare_written, expected, launch_sliced

for _module in pkgutil.iter_modules(midstream.ops.__path__):
    if _module.name not in ("gates", "testing"):
        importlib.import_module(f"midstream.ops.{_module.name}")

CPU = torch.device("cpu")
REFUSED = {
    "selective_scan_step": {"A_log"},  # parameters, which are stored once
    "selective_scan_chunk": {"A_log"},
    "skinny_linear": {"out"},  # a result, which is made for it
}


@pytest.mark.parametrize(
    "name", [n for n, op in OPS.items() if op.tolerance.relative] + ["kv_write"]
)
def test_activations_may_be_slices_of_wider_tensors(name: str, device: torch.device) -> None:
    spec = OPS[name]
    case, dtype = spec.cases[0], torch.float32
    args, refused = launch_sliced(spec, case, dtype, device)
    compare_written(spec, args, expected(spec, build_args(case, dtype, CPU)), dtype)
    assert refused == REFUSED.get(name, set())
