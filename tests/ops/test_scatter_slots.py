"""scatter_slots: kernel against reference; entries behind the count are never followed."""

import pytest
import torch

from midstream.errors import ContractError
from midstream.ops.scatter_slots import scatter_slots
from midstream.ops.testing import check_kernel, check_registration, op_cases

ids = [case.id for case in scatter_slots.cases]


@pytest.mark.parametrize(("spec", "case"), [*op_cases(scatter_slots)], ids=ids)
def test_kernel_equals_reference(spec, case, device):
    check_kernel(spec, case, torch.float32, device)


def test_is_a_well_formed_torch_operator():
    check_registration(scatter_slots, scatter_slots.cases[0])


def test_lists_of_different_length_are_refused(device):
    words = torch.zeros(8, dtype=torch.int32, device=device)
    with pytest.raises(ContractError, match=r"one length, got \(4,\) and \(3,\)"):
        scatter_slots.launch(words, words[:4], words[:3], words[:1])
