"""gates: every op's kernels compile for the target GPUs, and what is wrong makes the exit status 1."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton

from midstream.errors import ConfigError
from midstream.ops import gates
from midstream.ops.device_limits import SMALL_SHARED_BYTES
from midstream.ops.gate_rows import SM_90, SM_100, aligned_cases, builds, telling_cases
from midstream.ops.gate_rules import MAX_REGISTERS, MAX_STREAMING_REGISTERS, GateRow, is_streaming
from midstream.ops.kernel_facts import KernelFacts
from midstream.ops.kernel_golden import (
    MORE_REGISTERS,
    differences,
    golden_path,
    read_golden,
    summary,
    write_golden,
)
from midstream.ops.registry import OPS
from midstream.ops.testing import build_args

FACTS = KernelFacts(
    kernel="_kernel",
    warps=4,
    registers=128,
    spill_bytes=0,
    shared_bytes=8192,
    load_bytes=16,
    store_bytes=16,
    wide_percent=80,
    dots=False,
    single_stage_dots=False,
    unordered=(),
)
SOUND = GateRow(SM_90, SMALL_SHARED_BYTES, "op", "R4", True, True, FACTS, 0.1)
WRONG = Path(__file__).with_name("wrong_kernels.py")


@pytest.mark.slow
def test_all_kernels_obey_the_rules_on_all_targets():
    gates.import_all_ops()
    done = run_python("-m", "midstream.ops.gates")
    assert done.returncode == 0, done.stdout + done.stderr
    words = {word for line in done.stdout.splitlines() for word in line.split()[2:3]}
    assert set(OPS) <= words


def test_the_interpreter_is_refused():
    done = run_python("-m", "midstream.ops.gates", interpret="1")
    assert done.returncode == 2
    assert "TRITON_INTERPRET is set" in done.stderr


@pytest.fixture(scope="module")
def wrong() -> dict[str, str]:
    """Faults of each wrong op, as one text."""
    done = run_python(str(WRONG))
    assert done.returncode == 0, done.stderr
    return {name: "\n".join(faults) for name, faults in json.loads(done.stdout).items()}


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("spilling_copy", "spills"),
        ("scalar_copy", "moves 0% of its bytes in 128-bit accesses"),
        ("count_without_barrier", "may store before all warps have loaded: out_ptr (wrong_kernels"),
        ("double_less_than_a_block", "may store before all warps have loaded: out_ptr"),
        ("single_stage_dots", "a loop of one stage around a dot"),
        ("dots_for_large_devices", "bytes of shared memory where a block has 101376"),
        ("dots_for_no_device", "bytes of shared memory where a block has 232448"),
    ],
)
def test_a_wrong_kernel_is_refused(wrong: dict[str, str], name: str, fault: str):
    lines = wrong[name].splitlines()
    assert lines and all(line.startswith(f"{name}: ") for line in lines)
    assert fault in wrong[name]


@pytest.mark.parametrize(
    "name", ["sound_copy", "count_with_barrier", "double_a_block", "sound_dots"]
)
def test_a_sound_kernel_passes(wrong: dict[str, str], name: str):
    assert wrong[name] == ""


def test_only_ops_bound_by_memory_must_leave_registers_for_many_warps():
    assert SOUND.faults() == []
    hungry = replace(SOUND, facts=replace(FACTS, registers=MAX_STREAMING_REGISTERS + 1))
    assert "takes 129 registers" in hungry.faults()[0]
    assert replace(hungry, streaming=False).faults() == []
    assert replace(
        SOUND, streaming=False, facts=replace(FACTS, registers=MAX_REGISTERS + 1)
    ).faults()


def test_narrow_accesses_are_excused_where_the_case_is_not_aligned_or_memory_is_no_bound():
    narrow = replace(SOUND, facts=replace(FACTS, wide_percent=0))
    assert len(narrow.faults()) == 1
    assert replace(narrow, wide=False).faults() == []
    assert replace(narrow, streaming=False).faults() == []


@pytest.mark.parametrize(
    ("name", "bound"),
    [("gated_delta_step", True), ("gated_delta_chunk", False), ("advance", False)],
)
def test_declared_traffic_tells_which_ops_are_bound_by_memory(name: str, bound: bool):
    gates.import_all_ops()
    args = build_args(aligned_cases(OPS[name])[-1], torch.bfloat16, torch.device("cpu"))
    assert is_streaming(OPS[name], args) == bound


def test_an_unknown_op_is_refused_with_the_known_ones():
    gates.import_all_ops()
    with pytest.raises(ConfigError, match=r"kv_wrote.*kv_write"):
        gates.selected(["kv_wrote"])


def test_the_first_the_largest_the_worst_and_the_best_aligned_cases_are_compiled():
    gates.import_all_ops()
    found = [case.id for case in telling_cases(OPS["gated_delta_step"])]
    assert found[0] == OPS["gated_delta_step"].cases[0].id
    best, worst = "R3-H4-G2-K128-V128", "R4-H4-G2-K5-V3-gap3"
    widest, most_rows = "R9-H4-G2-K128-V128-own", "R9-H3-G3-K5-V3"
    assert set(found[1:]) == {best, worst, widest, most_rows}
    assert any("D256" in case.id for case in telling_cases(OPS["paged_attention_chunk"]))


def test_both_targets_and_both_limits_of_shared_memory_are_compiled():
    gates.import_all_ops()
    made = list(builds(OPS["kv_write"], all_cases=False))
    assert {build.arch for build in made} == {SM_90, SM_100}
    small = [build.label() for build in made if build.limit_bytes == SMALL_SHARED_BYTES]
    assert small == [b.label() for b in made if b.arch == SM_90][: len(small)]


def golden_with(**changes: int) -> list[str]:
    """Differences between the sound row and one that differs in these facts."""
    changed = replace(SOUND, facts=replace(FACTS, **changes))
    return differences(summary([SOUND]), summary([changed]))


def test_a_kernel_may_get_better_and_a_little_worse_than_its_record():
    assert golden_with() == []
    assert golden_with(registers=FACTS.registers + MORE_REGISTERS) == []
    assert golden_with(registers=32, shared_bytes=0, wide_percent=100) == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"registers": 145}, "registers 128 -> 145"),
        ({"shared_bytes": 10000}, "shared 8192 -> 10000"),
        ({"spill_bytes": 8}, "spilled 0 -> 8"),
        ({"load_bytes": 4}, "load 16 -> 4"),
        ({"store_bytes": 8}, "store 16 -> 8"),
        ({"wide_percent": 74}, "wide% 80 -> 74"),
    ],
)
def test_a_kernel_that_got_worse_is_named_with_both_numbers(changes: dict[str, int], line: str):
    assert golden_with(**changes) == [f"! sm_90 99K op _kernel R4: {line}"]


def test_new_and_lost_kernels_differ_from_the_record():
    other = summary([replace(SOUND, case="R5")])
    first, second = differences(summary([SOUND]), other)
    assert first == "- sm_90 99K op _kernel R4: recorded, but not compiled any more"
    assert second == "+ sm_90 99K op _kernel R5: compiled, but not recorded"


def test_a_record_is_read_as_it_was_written(tmp_path: Path):
    twice = summary([SOUND, SOUND])  # launched twice by the case
    assert [key[3] for key in twice] == ["_kernel", "_kernel#2"]
    write_golden(tmp_path / "record.txt", twice)
    assert read_golden(tmp_path / "record.txt") == twice


def test_accepting_some_ops_keeps_the_record_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gates.import_all_ops()
    path = tmp_path / "record.txt"
    monkeypatch.setattr(gates, "golden_path", lambda: path)
    rows = [replace(SOUND, op=name) for name in ("kv_write", "ssd_step", "an_op_that_is_gone")]
    write_golden(path, summary(rows))
    changed = summary([replace(SOUND, op="kv_write", case="R9")])
    assert gates.compare(changed, {"kv_write"})[-1].endswith("run with --accept to record them")
    gates.accept(changed, {"kv_write"})
    assert gates.compare(changed, {"kv_write"}) == []
    assert {key[2:] for key in read_golden(path)} == {
        ("kv_write", "_kernel", "R9"),
        ("ssd_step", "_kernel", "R4"),
    }


def test_the_release_of_triton_in_use_by_ci_has_a_record():
    pinned = (Path(__file__).parents[2] / "constraints.txt").read_text()
    if f"triton=={triton.__version__}\n" in pinned:
        assert read_golden(golden_path())


def run_python(*command: str, interpret: str | None = None) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_INTERPRET": interpret} if interpret else {}
    return subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, check=False
    )
