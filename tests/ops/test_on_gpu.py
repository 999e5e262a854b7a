"""Every op on the GPU, in fp32 and bf16, against its float64 reference; and its replay against itself."""

import importlib
import pkgutil

import pytest
import torch

import midstream.ops
from midstream.ops.registry import OPS, OpCase, OpSpec
from midstream.ops.testing import build_args, check_kernel, op_cases, written_args

for _module in pkgutil.iter_modules(midstream.ops.__path__):
    if _module.name not in ("gates", "testing"):
        importlib.import_module(f"midstream.ops.{_module.name}")

pytestmark = pytest.mark.gpu
ALL = list(op_cases(*OPS.values()))
IDS = [f"{spec.name}-{case.id}" for spec, case in ALL]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("spec", "case"), ALL, ids=IDS)
def test_kernel_equals_float64_reference(spec: OpSpec, case: OpCase, dtype: torch.dtype) -> None:
    if spec.tolerance.relative and dtype not in spec.tolerance.relative:
        pytest.skip(f"{spec.name} declares no tolerance for {dtype}")
    check_kernel(spec, case, dtype, torch.device("cuda"))


@pytest.mark.parametrize(("spec", "case"), ALL, ids=IDS)
def test_two_runs_and_a_captured_one_are_bit_equal(spec: OpSpec, case: OpCase) -> None:
    device, results = torch.device("cuda"), []
    for way in ("eager", "eager", "graph"):
        args = build_args(case, torch.bfloat16, device)
        if way == "graph":
            saved = {name: args[name].clone() for name in written_args(spec)}
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                spec(**args)
            for name, tensor in saved.items():
                args[name].copy_(tensor)
            graph.replay()
        else:
            spec(**args)
        torch.cuda.synchronize()
        results.append([args[name].contiguous().view(torch.uint8) for name in written_args(spec)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
