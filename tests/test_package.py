import os
import subprocess
import sys
from pathlib import Path

import pytest

import midstream

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("compiler", "graphs", "ops", "runtime")


def run_python(code: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process of its own, as in a checkout that is not installed."""
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_public_names_are_listed_sorted_and_there():
    assert midstream.__all__ == sorted(midstream.__all__, key=str.casefold)
    for name in midstream.__all__:
        assert getattr(midstream, name).__name__ == name


def test_the_command_line_parses_without_torch(tmp_path):
    done = run_python(
        "import sys\n"
        "from midstream.runtime.cli import build_parser\n"
        "build_parser()\n"
        "assert 'torch' not in sys.modules",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_import_starts_no_cuda_context_and_loads_no_transformers(tmp_path):
    done = run_python(
        "import sys, torch, midstream\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'transformers' not in sys.modules",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_is_an_attribute_that_is_imported_on_first_use(name, tmp_path):
    done = run_python(
        "import sys, midstream\n"
        f"assert 'midstream.{name}' not in sys.modules and 'torch' not in sys.modules\n"
        f"assert {name!r} in dir(midstream)\n"
        f"assert midstream.{name}.__name__ == 'midstream.{name}'",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_what_the_package_lacks_is_no_attribute():
    for name in ("EngineConfig", "nothing", "tests"):
        with pytest.raises(AttributeError, match=f"module 'midstream' has no attribute '{name}'"):
            getattr(midstream, name)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_folder_is_importable_under_its_package_name_only(name):
    done = run_python(f"import {name}")
    assert done.returncode == 1
    assert f"ImportError: import midstream.{name}, not {name}" in done.stderr


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_is_a_relative_link_to_its_folder(name):
    link = ROOT / "src" / "midstream" / name
    assert link.is_symlink()
    assert Path(os.readlink(link)) == Path("..", "..", name)
    assert link.resolve() == ROOT / name


def test_setuptools_finds_every_package(tmp_path):
    setuptools = pytest.importorskip("setuptools")
    found = set(setuptools.find_packages(str(ROOT / "src")))
    folders = {path.parent for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    named = {".".join(("midstream", *path.relative_to(ROOT).parts)) for path in folders}
    assert found == {"midstream", *named}


def test_an_interrupt_while_the_command_line_loads_leaves_no_traceback(tmp_path):
    done = run_python(
        "import sys\n"
        "from midstream.__main__ import main\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'midstream.runtime.cli':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "sys.exit(main())",
        tmp_path,
    )
    assert done.returncode == 130
    assert done.stderr == "\nmidstream: interrupted\n"
