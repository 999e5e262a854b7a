"""device_limits: launchers choose by the device's shared memory, and both choices give the same."""

from dataclasses import replace

import pytest
import torch

from midstream.ops.device_limits import (
    LARGE_SHARED_BYTES,
    SMALL_SHARED_BYTES,
    assumed_shared_limit,
    fitting_stages,
    shared_limit,
)
from midstream.ops.gated_delta_chunk import gated_delta_chunk, launch_chunks
from midstream.ops.paged_attention_chunk import paged_attention_chunk
from midstream.ops.testing import check_kernel

CPU = torch.device("cpu")
CASES = [case for case in gated_delta_chunk.cases if "K128" not in case.id][:5]


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_gated_delta_chunk_on_a_small_device_equals_float64_reference(case, device):
    spec = replace(gated_delta_chunk, launch=launch_chunks)  # fp32 is launched token by token else
    with assumed_shared_limit(SMALL_SHARED_BYTES):
        check_kernel(spec, case, torch.float32, device)


@pytest.mark.gpu
def test_the_limit_of_a_device_is_what_it_offers_to_a_block():
    device = torch.device("cuda")
    offered = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    assert SMALL_SHARED_BYTES <= shared_limit(device) == offered


def test_an_assumed_limit_ends_with_its_block():
    with pytest.raises(KeyError), assumed_shared_limit(SMALL_SHARED_BYTES):
        assert shared_limit(CPU) == SMALL_SHARED_BYTES
        raise KeyError
    assert shared_limit(CPU) == LARGE_SHARED_BYTES


def test_stages_fill_the_shared_memory_but_are_never_one():
    with assumed_shared_limit(100):
        stages = [fitting_stages(CPU, stage_bytes, wanted=5) for stage_bytes in (10, 30, 60, 200)]
    assert stages == [5, 3, 2, 2]


WIDE_HEADS = [case for case in paged_attention_chunk.cases if "D256" in case.id]


@pytest.mark.gpu
@pytest.mark.parametrize("case", WIDE_HEADS, ids=[case.id for case in WIDE_HEADS])
def test_paged_attention_chunk_on_a_small_device_equals_float64_reference(case, device):
    with assumed_shared_limit(SMALL_SHARED_BYTES):
        check_kernel(paged_attention_chunk, case, torch.bfloat16, device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", gated_delta_chunk.cases, ids=[c.id for c in gated_delta_chunk.cases]
)
def test_gated_delta_chunk_in_bf16_on_a_small_device_equals_float64_reference(case, device):
    with assumed_shared_limit(SMALL_SHARED_BYTES):
        check_kernel(gated_delta_chunk, case, torch.bfloat16, device)
