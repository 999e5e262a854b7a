"""launch_recorder: a replay sees new contents, and nothing else that is new."""

import pytest
import torch
import triton
import triton.language as tl

from midstream.errors import ContractError
from midstream.ops.launch_recorder import record


@triton.jit
def _scale_kernel(out_ptr, x_ptr, factor):
    at = tl.program_id(0)
    tl.store(out_ptr + at, tl.load(x_ptr + at) * factor)


@pytest.fixture
def x(device):
    return torch.tensor([1.0, 2.0], device=device)


def replayed(work, device):
    work()
    return record(work, device)


def test_a_replay_reads_new_contents_and_keeps_numbers_and_grid(x, device):
    out, host = torch.zeros_like(x), {"factor": 3.0, "rows": 2}
    work = lambda: _scale_kernel[(host["rows"],)](out, x, host["factor"])  # noqa: E731
    replay = replayed(work, device)
    x.fill_(5.0)
    host |= {"factor": 7.0, "rows": 1}
    replay()
    assert out.tolist() == [15.0, 15.0]


def test_a_replay_runs_torch_operations_into_the_memory_of_the_recording(x, device):
    out = torch.zeros_like(x)

    def work():
        double = (2 * x).view(2)
        workspace = torch.empty_like(x)
        _scale_kernel[(2,)](workspace, double, 10.0)
        out.copy_(workspace)
        out.add_(1)

    replay = replayed(work, device)
    x.fill_(4.0)
    replay()
    assert out.tolist() == [81.0, 81.0]


@pytest.mark.parametrize("read", [lambda x: x[0].item(), lambda x: bool(x[0] > 0), torch.nonzero])
def test_a_launcher_that_reads_a_value_is_refused(x, device, read):
    with pytest.raises((ContractError, RuntimeError), match=r"reads a value|synchronizing"):
        record(lambda: read(x), device)
