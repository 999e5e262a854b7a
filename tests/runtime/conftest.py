"""The model that the tests of the engine serve, unless they have one of their own, and what it must say."""

from typing import Any

import pytest
import torch
from oracles import Oracle
from tiny_models import build


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(build("bamba"))


@pytest.fixture
def model(device: torch.device) -> Any:
    return build("bamba").to(device)
