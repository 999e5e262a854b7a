"""causal_conv_chunk: kernel against float64, padding, and who may write what."""

import pytest
import torch

from midstream.ops.causal_conv_chunk import causal_conv_chunk
from midstream.ops.testing import (
    build_args,
    check_kernel,
    check_reference,
    check_registration,
    op_cases,
)

CPU = torch.device("cpu")
ids = [case.id for case in causal_conv_chunk.cases]


@pytest.mark.parametrize(("spec", "case"), [*op_cases(causal_conv_chunk)], ids=ids)
def test_kernel_equals_float64_reference(spec, case, device):
    check_kernel(spec, case, torch.float32, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("spec", "case"), [*op_cases(causal_conv_chunk)], ids=ids)
def test_bf16_kernel_equals_float64_reference(spec, case, device):
    check_kernel(spec, case, torch.bfloat16, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("spec", "case"), [*op_cases(causal_conv_chunk)], ids=ids)
def test_cpu_implementation_equals_float64_reference(spec, case, dtype):
    check_reference(spec, case, dtype)


def test_is_a_well_formed_torch_operator():
    check_registration(causal_conv_chunk, causal_conv_chunk.cases[0])
