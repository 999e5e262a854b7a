"""gates: every op's kernels compile for the target GPU, and what is wrong makes the exit status 1."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from midstream.errors import ConfigError
from midstream.ops.gates import MAX_SHARED_BYTES, Compiled, import_all_ops, selected, telling_cases
from midstream.ops.registry import OPS

SOUND = Compiled(
    "op", "_kernel", "R4", 4, registers=255, spill_bytes=0, shared_bytes=0, seconds=0.1
)


@pytest.mark.slow
def test_all_kernels_compile_for_sm90_without_spills():
    import_all_ops()
    done = run_gates(interpret=None)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line.split()[0] for line in done.stdout.splitlines() if line}
    assert set(OPS) <= lines


def test_the_interpreter_is_refused():
    done = run_gates(interpret="1")
    assert done.returncode == 2
    assert "TRITON_INTERPRET is set" in done.stderr


def test_spills_and_too_much_shared_memory_are_faults():
    assert SOUND.faults() == []
    assert "spills 8 bytes" in replace(SOUND, spill_bytes=8).faults()[0]
    assert "shared memory" in replace(SOUND, shared_bytes=MAX_SHARED_BYTES + 1).faults()[0]


def test_an_unknown_op_is_refused_with_the_known_ones():
    import_all_ops()
    with pytest.raises(ConfigError, match=r"kv_wrote.*kv_write"):
        selected(["kv_wrote"])


def test_the_first_and_the_largest_cases_are_compiled():
    import_all_ops()
    cases = [case.id for case in telling_cases(OPS["gated_delta_step"])]
    assert (len(cases), cases[0], cases[-1]) == (3, "R4-H4-G2-K16-V32", "R3-H4-G2-K128-V128")


def run_gates(interpret: str | None) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_INTERPRET": interpret} if interpret else {}
    command = [sys.executable, "-m", "midstream.ops.gates"]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)
