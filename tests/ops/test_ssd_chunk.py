"""ssd_chunk: kernel against float64, padding, and who may write what."""

import pytest
import torch

from midstream.ops.ssd_chunk import ssd_chunk
from midstream.ops.testing import (
    build_args,
    check_kernel,
    check_reference,
    check_registration,
    op_cases,
)

CPU = torch.device("cpu")
ids = [case.id for case in ssd_chunk.cases]


@pytest.mark.parametrize(("spec", "case"), [*op_cases(ssd_chunk)], ids=ids)
def test_kernel_equals_float64_reference(spec, case, device):
    check_kernel(spec, case, torch.float32, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("spec", "case"), [*op_cases(ssd_chunk)], ids=ids)
def test_bf16_kernel_equals_float64_reference(spec, case, device):
    check_kernel(spec, case, torch.bfloat16, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("spec", "case"), [*op_cases(ssd_chunk)], ids=ids)
def test_cpu_implementation_equals_float64_reference(spec, case, dtype):
    check_reference(spec, case, dtype)


def test_is_a_well_formed_torch_operator():
    check_registration(ssd_chunk, ssd_chunk.cases[0])
