"""Races between the warps of a program: rare, so every op runs many times on equal inputs."""

import importlib
import pkgutil

import pytest
import torch
from torch import Tensor

import midstream.ops
from midstream.ops.registry import OPS, OpCase, OpSpec
from midstream.ops.testing import build_args, op_cases, written_args

for _module in pkgutil.iter_modules(midstream.ops.__path__):
    if _module.name not in ("gates", "testing"):
        importlib.import_module(f"midstream.ops.{_module.name}")

pytestmark = pytest.mark.gpu
ALL = list(op_cases(*OPS.values()))
REPLAYS = 400


@pytest.mark.parametrize(
    ("spec", "case"), ALL, ids=[f"{spec.name}-{case.id}" for spec, case in ALL]
)
def test_many_replays_give_the_bits_of_one_run(spec: OpSpec, case: OpCase) -> None:
    device = torch.device("cuda")
    args = build_args(case, torch.bfloat16, device)
    before = {name: args[name].clone() for name in written_args(spec, args)}
    spec(**args)
    wanted = {name: args[name].clone() for name in before}
    differs = torch.zeros((), dtype=torch.int64, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for name, tensor in before.items():
            args[name].copy_(tensor)
        spec(**args)
        for name, tensor in wanted.items():
            differs += (_bits(args[name]) != _bits(tensor)).sum()
    for _ in range(REPLAYS):
        graph.replay()
    assert differs.item() == 0


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
