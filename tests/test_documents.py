"""What the documents say is so: their code runs, their tables are those of the code, their links lead on."""

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from midstream.runtime.flags import default_text
from midstream.runtime.options import EngineConfig, meaning_of
from midstream.runtime.sampling import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/architecture.md",
    "docs/usage.md",
    "docs/ops.md",
    "docs/backend.md",
)


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def run_examples(page: str) -> list[str]:
    """Run the blocks of a page one after the other; returns the lines that they print."""
    blocks = re.findall(r"```python\n(.*?)```", read(page), re.DOTALL)
    assert blocks
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_example_of_the_readme_reuses_prompt_tokens():
    reused = [int(line.split()[0]) for line in run_examples("README.md")]
    assert reused[0] == 0
    assert all(num_tokens > 0 for num_tokens in reused[1:])


def test_the_examples_of_the_usage_page_run():
    lines = run_examples("docs/usage.md")
    assert lines[0].startswith("512 ")
    assert {"True length", "False abort"} <= set(lines)


@pytest.mark.parametrize("config", [EngineConfig, SamplingParams])
def test_the_usage_page_lists_every_option_as_help_does(config):
    page = read("docs/usage.md")
    rows = [f"| `{f.name}` | {default_text(f)} | {meaning_of(f)} |" for f in fields(config)]
    assert "\n".join(rows) in page


@pytest.mark.parametrize("page", PAGES)
def test_links_between_the_documents_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#:]+)\)", read(page))
    assert [t for t in targets if not (ROOT / page).parent.joinpath(t).exists()] == []
