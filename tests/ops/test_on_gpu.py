"""Every op on the GPU: the whole suite of its declaration, in all dtypes that it declares."""

import importlib
import pkgutil

import pytest
import torch

import midstream.ops
from midstream.ops.registry import OPS
from midstream.ops.testing import Check, op_suite

for _module in pkgutil.iter_modules(midstream.ops.__path__):
    if _module.name not in ("gates", "testing"):
        importlib.import_module(f"midstream.ops.{_module.name}")

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


@pytest.mark.parametrize("check", [c for op in OPS.values() for c in op_suite(op, GPU)], ids=str)
def test_every_op_obeys_its_declaration(check: Check) -> None:
    check.run()
