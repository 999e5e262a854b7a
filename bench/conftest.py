"""Options and the model of the suites."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import gate
import measure
import pytest
import reference_models
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("midstream")
    group.addoption("--model", default="B2" if torch.cuda.is_available() else "tiny")
    group.addoption("--rows", default="1,32,256" if torch.cuda.is_available() else "1,3")
    group.addoption("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    group.addoption("--state-dtype", default="float32")
    group.addoption("--graphs", default="full")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "rows" in metafunc.fixturenames:
        metafunc.parametrize("rows", _rows(metafunc.config))


def _rows(config: pytest.Config) -> list[int]:
    return [int(n) for n in config.getoption("--rows").split(",")]


@pytest.fixture(autouse=True)
def shown_at_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each median is printed when it is known: a run that is killed has shown those before."""
    yield
    benchmark = request.node.funcargs.get("benchmark")
    if benchmark is None or benchmark.stats is None:
        return
    found = {"name": request.node.name, "median_ms": round(1e3 * benchmark.stats.stats.median, 4)}
    numbers = {k: v for k, v in benchmark.extra_info.items() if isinstance(v, int | float | dict)}
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\n" + json.dumps(found | numbers), flush=True)


@pytest.fixture(scope="session")
def row_counts(pytestconfig: pytest.Config) -> list[int]:
    return _rows(pytestconfig)


@pytest.fixture(scope="session")
def model_name(pytestconfig: pytest.Config) -> str:
    return str(pytestconfig.getoption("--model"))


@pytest.fixture(scope="session")
def state_dtype(pytestconfig: pytest.Config) -> str:
    return str(pytestconfig.getoption("--state-dtype"))


@pytest.fixture(scope="session")
def right_tokens() -> None:
    """The gate of the suites that serve a model."""
    gate.check_engine(measure.device())


@pytest.fixture(scope="module")
def model(pytestconfig: pytest.Config, model_name: str, right_tokens: None) -> Any:
    dtype = getattr(torch, pytestconfig.getoption("--dtype"))
    return reference_models.build(model_name, dtype, measure.device())
