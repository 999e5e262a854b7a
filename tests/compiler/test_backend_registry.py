"""How torch finds the backend, in processes of their own: a user's first lines."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

_CALL = """
import sys
import torch
from torch._dynamo.utils import counters
torch.cuda.is_available = lambda: False
def call(**backend):
    torch._dynamo.reset()
    counters.clear()
    with torch.inference_mode():
        compiled = torch.compile(lambda x: x + 1, options={"inner": "eager"}, **backend)
        assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    return counters["midstream"]["graphs_compiled"]
"""

_BY_NAME = """
import json
found = {"names": [torch._dynamo.list_backends(), torch.compiler.list_backends()]}
found["loaded by listing"] = [name for name in sys.modules if name.startswith("midstream")]
try:
    torch.compile(lambda x: x, backend="midstraem")
except Exception as error:
    found["wrong name"] = f"{type(error).__name__}: {error}"
found["compiled"] = [call(backend="midstream"), call(backend="midstream")]
found["loaded by use"] = [
    name for name in ("transformers", "torch._inductor.compile_fx") if name in sys.modules
]
found["initialized"] = torch.cuda.is_initialized()
from torch._dynamo.backends import registry
if hasattr(registry, "set_default_backend"):  # torch 2.13
    registry.set_default_backend("midstream")
    found["compiled"].append(call())
from midstream.compiler.backend import midstream_backend
found["compiled"].append(call(backend=midstream_backend))
print(json.dumps(found))
"""

_IMPORTED_FIRST = (
    "import midstream.compiler.backend\n" + _CALL + "assert call(backend='midstream') == 1\n"
)


class _Done(NamedTuple):
    found: dict
    said: str
    trace: str


def _run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT / "src"))))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module", autouse=True)
def _installed():
    if "midstream" not in entry_points(group="torch_dynamo_backends").names:
        pytest.skip("midstream is not installed: pip install -e .")


@pytest.fixture(scope="module")
def by_name(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    done = _run(_CALL + _BY_NAME, TORCH_TRACE=str(folder))
    trace = "".join(path.read_text() for path in folder.glob("*.log"))
    return _Done(json.loads(done.stdout), done.stderr, trace)


def test_listing_backends_shows_the_name_and_loads_nothing(by_name):
    assert all("midstream" in names for names in by_name.found["names"])
    assert by_name.found["loaded by listing"] == []


def test_the_name_alone_is_enough_and_loads_neither_transformers_nor_inductor(by_name):
    assert set(by_name.found["compiled"]) == {1}  # by name, again, as the default, by the function
    assert by_name.found["loaded by use"] == []
    assert not by_name.found["initialized"]


def test_a_wrong_name_gives_invalid_backend(by_name):
    assert by_name.found["wrong name"].startswith("InvalidBackend: Invalid backend: 'midstraem'")


def test_a_machine_without_gpu_is_mentioned_once_and_nothing_else(by_name):
    (line,) = by_name.said.strip().splitlines()
    assert "skipping cudagraphs due to no GPU" in line


def test_reasons_and_plans_are_structured_artifacts(by_name):
    for name in ("midstream_graph", "midstream_state_plan", "midstream_skip_reason"):
        assert f'"name": "{name}"' in by_name.trace


def test_an_import_before_torch_changes_nothing_and_torch_logs_takes_names():
    said = _run(_IMPORTED_FIRST, TORCH_LOGS="+midstream.compiler.backend,cudagraphs").stderr
    assert "arguments: {'input': 1}" in said
    assert "skip_reason: graph 0/0: skipping cudagraphs due to no GPU" in said
