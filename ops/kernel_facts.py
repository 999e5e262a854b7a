"""What a compiled kernel takes from the GPU and how it goes about memory, read from what Triton made."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass

import triton
from triton.compiler.compiler import CompiledKernel

from midstream.ops.kernel_order import unordered_stores

WIDE_BYTES = 16  # of one thread's access: 128 bits

_ELEMENT_ACCESS = re.compile(r"\b(ld|st)\.(?:[\w:]+\.)*?global[\w.:]*?(?:\.v(\d))?\.[busf](\d+)\b")
_ASYNC_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[^;]*?\], \[[^\]]*\], 0x(\w+)")


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """One compiled kernel; counts of accesses are static: an instruction in a loop counts once."""

    kernel: str
    warps: int
    registers: int  # of a thread
    spill_bytes: int  # of a thread
    shared_bytes: int  # of a block
    load_bytes: int  # widest load from global memory, of a thread
    store_bytes: int  # widest store
    wide_percent: int  # of the bytes that loads and stores move, those of 128-bit accesses
    dots: bool  # multiplies matrices
    single_stage_dots: bool  # a loop around a dot has one stage
    unordered: tuple[str, ...]  # stores that may overtake loads of the same memory


def facts_of(kernel: str, compiled: CompiledKernel) -> KernelFacts:
    """All facts of a kernel that was compiled for an NVIDIA GPU."""
    asm, options = compiled.asm, compiled.metadata
    registers, stack_bytes = resource_usage(asm["cubin"])
    loads, stores = global_accesses(asm["ptx"])
    moved = Counter(loads) + Counter(stores)
    total = sum(width * count for width, count in moved.items())
    wide = sum(width * count for width, count in moved.items() if width >= WIDE_BYTES)
    return KernelFacts(
        kernel=kernel,
        warps=options.num_warps,
        registers=registers,
        spill_bytes=stack_bytes,
        shared_bytes=options.shared,
        load_bytes=max(loads, default=0),
        store_bytes=max(stores, default=0),
        wide_percent=100 * wide // max(total, 1),
        dots="tt.dot" in asm["ttir"],
        single_stage_dots=has_single_stage_dots(asm["ttir"], options.num_stages),
        unordered=unordered_stores(asm["ptx"], asm["ttgir"], options.num_warps),
    )


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread; Triton kernels have no stack but for spilled registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = re.findall(r"REG:(\d+) STACK:(\d+)", text)
    return max(int(reg) for reg, _ in used), max(int(stack) for _, stack in used)


def global_accesses(ptx: str) -> tuple[Counter[int], Counter[int]]:
    """Loads from and stores to global memory: how many instructions by bytes of one thread.

    >>> copy = "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10;"
    >>> loads = "ld.global.v4.b32 {%r1} ld.global.L1::evict_last.b16 {%r1}"
    >>> global_accesses(f"{copy} {loads} st.global.v2.b64 [ %rd2 + 0 ]")
    (Counter({16: 2, 2: 1}), Counter({16: 1}))
    """
    loads: Counter[int] = Counter()
    stores: Counter[int] = Counter()
    for kind, elements, bits in _ELEMENT_ACCESS.findall(ptx):
        (loads if kind == "ld" else stores)[int(elements or 1) * int(bits) // 8] += 1
    for width in _ASYNC_COPY.findall(ptx):
        loads[int(width, 16)] += 1
    return loads, stores


def has_single_stage_dots(ttir: str, default_stages: int) -> bool:
    """Whether a loop around a dot has one stage, asked for by `tl.range` or by the launch.

    >>> loop = "scf.for %i = %a to %b {\\n tt.dot %x\\n} {tt.num_stages = 1 : i32}"
    >>> has_single_stage_dots(loop, 3), has_single_stage_dots(loop.replace("1", "2"), 3)
    (True, False)
    """
    open_blocks: list[tuple[bool, bool]] = []  # is a loop, has a dot
    for line in ttir.splitlines():
        if line.strip().startswith("}") and open_blocks:
            is_loop, has_dot = open_blocks.pop()
            stages = re.findall(r"tt\.num_stages = (\d+)", line)
            if is_loop and has_dot and int(stages[0] if stages else default_stages) == 1:
                return True
        if "tt.dot" in line:
            open_blocks = [(is_loop, True) for is_loop, _ in open_blocks]
        if re.search(r"\{\s*(loc\(.*\))?$", line):
            open_blocks.append(("scf.for" in line, False))
    return False
