"""What a failed capture says: no GPU is needed to read an error."""

import traceback

import pytest
import torch

from midstream import ContractError
from midstream.graphs.capture import named_error

PLACE = traceback.FrameSummary("model.py", 12, "forward", line="n = x.sum().item()")


def test_an_error_of_capture_names_the_line_that_cannot_be_recorded() -> None:
    error = RuntimeError(
        "CUDA error: operation not permitted when stream is capturing\nCUDA kernel..."
    )
    named = named_error(error, "step of 4 tokens", PLACE)
    assert isinstance(named, ContractError)
    text = str(named)
    assert text.startswith("step of 4 tokens: capture failed in `n = x.sum().item()` (model.py:12)")
    assert "operation not permitted when stream is capturing; expected work" in text
    assert "CUDA kernel" not in text  # advice of CUDA's own


@pytest.mark.parametrize(
    "error",
    [
        ValueError("capturing is fun"),  # of the step itself
        torch.OutOfMemoryError("CUDA out of memory while capturing"),
        ContractError("step: the buffers slots moved, or capture again"),  # says enough
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_stay_what_they_are(error: BaseException) -> None:
    assert named_error(error, "step", PLACE) is None
