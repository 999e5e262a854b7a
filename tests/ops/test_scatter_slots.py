"""scatter_slots: kernel against reference; entries behind the count are never followed."""

import pytest
import torch

from midstream.errors import ContractError
from midstream.ops.scatter_slots import scatter_slots
from midstream.ops.testing import op_suite


@pytest.mark.parametrize("check", op_suite(scatter_slots), ids=str)
def test_obeys_its_declaration(check):
    check.run()


def test_lists_of_different_length_are_refused(device):
    words = torch.zeros(8, dtype=torch.int32, device=device)
    with pytest.raises(ContractError, match=r"one length, got \(4,\) and \(3,\)"):
        scatter_slots.launch(words, words[:4], words[:3], words[:1])
