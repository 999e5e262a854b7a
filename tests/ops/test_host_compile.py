"""Host kernels compile safely beside other processes, and run as plain Python without Numba."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from numba.core.errors import NumbaError

from midstream.ops import host_compile
from midstream.ops.host_compile import compiled

MODULE = """
from midstream.ops.host_compile import compiled

@compiled
def double(number):
    return number + number
"""

MEETING_SAVES = """
import os, sys, time
import numba
from numba.core.caching import IndexDataCacheFile

numba.njit(lambda: 0)()  # the compiler is ready
numba.config.CACHE_DIR, save = sys.argv[1], IndexDataCacheFile._save_index
meeting = sys.argv[1] + ".meeting"
def save_beside_the_other(self, overloads):
    with open(meeting, "a") as file:
        file.write("x")
    until = time.monotonic() + 3  # in vain where the other has to wait for this one
    while os.path.getsize(meeting) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    save(self, overloads)
IndexDataCacheFile._save_index = save_beside_the_other
from shared import double

if os.fork():
    assert double(3) == 6
    assert os.wait()[1] == 0
else:
    assert double(1.25) == 2.5
    os._exit(0)
"""

HITS = """
import sys
import numba
numba.config.CACHE_DIR = sys.argv[1]
from shared import double
assert (double(3), double(1.25)) == (6, 2.5)
print(sum(double.stats.cache_hits.values()))
"""

# processes that have a compiler ready, so that all of them compile at the same time
MANY = """
import os, sys
import numba, numpy as np, torch
numba.njit(lambda: 0)()

def run(names):
    from midstream.ops import host_decode, host_rows
    start = np.arange(len(host_rows.FIELDS) + 1) * 80
    plan = np.ones((host_decode.ROW_FIELDS, 4), np.int32)
    plan[host_decode.SLOT], plan[host_decode.COMPUTED] = range(4), [0, 5, 64, 70]
    zero, table = np.zeros(9, np.int32), np.ones((4, 99), np.int32)
    calls = {
        "pad_step": lambda area: (*area, 1, 1, 1, 4, 4, 4),
        "fill_token_rows": lambda area: (plan, 4, table, 2, table, *area, 16),
        "fill_decode_step": lambda area: (plan, 4, table, zero[:1], 0, *area, 4),
        "fill_chunks": lambda area: (plan, 4, zero[:5], zero, zero, *area, 64),
    }
    for name in names:
        results = []
        for form in (name, name + "_py"):
            words = np.zeros(start[-1], np.int32)
            result = getattr(host_rows, form)(*calls[name]((words, start)))
            results.append((result, words.tolist()))
        assert results[0] == results[1], name

root, rounds, names = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
for turn in range(rounds):
    numba.config.CACHE_DIR = f"{root}/{turn}"
    children = []
    for _ in range(8):
        child = os.fork()
        if not child:
            try:
                run(names)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8, f"round {turn}"
"""


def python(code: str, *arguments: object, **environment: str) -> str:
    """What a fresh interpreter prints."""
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_q1_an_entry_saved_beside_another_process_is_not_lost(tmp_path: Path) -> None:
    """Two processes add an entry each; then both entries are found, each with its own code."""
    (tmp_path / "shared.py").write_text(MODULE)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    python(MEETING_SAVES, tmp_path / "cache", PYTHONPATH=path)
    assert python(HITS, tmp_path / "cache", PYTHONPATH=path) == "2\n"


def test_q1_eight_processes_share_an_empty_cache(tmp_path: Path) -> None:
    """With MIDSTREAM_LONG_TESTS=1: 20 times, and with all kernels."""
    if os.environ.get("MIDSTREAM_LONG_TESTS") == "1":
        names = ("fill_decode_step", "fill_token_rows", "fill_chunks", "pad_step")
        python(MANY, tmp_path, 20, *names)
    else:
        python(MANY, tmp_path, 1, "fill_token_rows")


PLAIN = """
import sys
if sys.argv[1] == "missing":
    sys.modules["numba"] = None
from midstream.ops import host_compile, host_rows
from midstream.runtime.hashing import BlockHasher, as_keys
import numpy as np
assert not host_compile.COMPILES
assert host_rows.fill_chunks is host_rows.fill_chunks_py
parent = int.from_bytes(bytes(range(16)), "little")
hashes = BlockHasher(block=1, key=bytes(range(16))).extend(parent, np.array([0x13121110], np.int32))
print(as_keys(hashes)[0].to_bytes(16, "little").hex())
"""


@pytest.mark.parametrize(("how", "disable"), [("missing", "0"), ("disabled", "1")])
def test_q1_without_numba_everything_is_plain_python(how: str, disable: str) -> None:
    vectors = Path(__file__).parents[1] / "runtime" / "siphash_vectors.txt"
    assert python(PLAIN, how, NUMBA_DISABLE_JIT=disable).split() == [
        vectors.read_text().split()[20]
    ]


def test_a_compiled_function_cannot_allocate() -> None:
    def copy(numbers):
        return [number for number in numbers]  # noqa: C416

    with pytest.raises(NumbaError, match="NRT required"):
        compiled(copy)((1, 2))


def test_without_a_directory_for_the_cache_it_compiles_in_memory(monkeypatch, caplog) -> None:
    def no_place(function):
        raise RuntimeError("no locator available")

    monkeypatch.setattr(host_compile, "SharedCache", no_place)
    with caplog.at_level("INFO"):
        triple = compiled(lambda number: 3 * number)
    assert triple(2) == 6 and "compiled anew in every process: no locator" in caplog.text


def _double(number: int) -> int:
    return number + number


@pytest.mark.skipif(not host_compile.COMPILES, reason="needs Numba")
def test_code_is_stale_once_any_file_of_the_kernels_changed(tmp_path, monkeypatch) -> None:
    """Numba itself looks at the function's own file only, and helpers and constants come from others."""

    def hits() -> int:
        function = compiled(_double)
        assert function(3) == 6
        return sum(function.stats.cache_hits.values())

    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path / "cache"))
    assert [hits(), hits()] == [0, 1]
    (tmp_path / "host_other.py").write_text("LIMIT = 1\n")
    stamp = host_compile.sources_stamp.__wrapped__
    monkeypatch.setattr(host_compile, "sources_stamp", lambda folder: stamp(tmp_path))
    assert [hits(), hits()] == [0, 1]
    (tmp_path / "host_other.py").write_text("LIMIT = 2\n")
    assert [hits(), hits()] == [0, 1]
