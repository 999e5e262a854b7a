"""
What a compiled kernel must obey, and which kernels are excused from which rule, with the reason.

Bounds: an op is bound by memory when its declared traffic needs at most RIDGE operations per byte.  Its
kernels must move most bytes in 128-bit accesses and, but for those that multiply matrices, leave registers
for 16 warps on an SM, so that enough loads are in flight.  Ops without floating-point tensors gather
single words of per-slot memory: excused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from midstream.ops.kernel_facts import KernelFacts
from midstream.ops.registry import Args, OpSpec

RIDGE = 14  # fp32 operations per byte of memory traffic that a H200 can do: 67e12 / 4.8e12
MIN_WIDE_PERCENT = 50  # of bytes; the rest are pages, offsets, per-head numbers and rows of padding
MAX_REGISTERS = 255  # of a thread: what the instruction set can name
MAX_STREAMING_REGISTERS = 128  # 65536 registers of an SM / 16 warps / 32 threads

_SAMPLE = "32 logits, their noise and 4 counter words a thread; one scan of the logits a step"
_SCAN = "a thread keeps its states over all tokens of a row; the exponentials are the bound"

# (op, kernel): registers, why the kernel may need more than its op's bound
REGISTERS: dict[tuple[str, str], tuple[int, str]] = {
    ("sample", "_scan_kernel"): (168, _SAMPLE),
    ("selective_scan_chunk", "_selective_scan_chunk_kernel"): (216, _SCAN),
}

_STOP_IDS = (
    "logits are read 128 bits at a time, but reads of stop ids outnumber them as instructions"
)

# (op, kernel): why most bytes are not moved in 128-bit accesses
NARROW: dict[tuple[str, str], str] = {
    ("sample", "_scan_kernel"): _STOP_IDS,
    ("sample", "_finish_kernel"): _STOP_IDS,
    (
        "selective_scan_chunk",
        "_selective_scan_chunk_kernel",
    ): "a warp reads few channels of a token",
}

_ONCE = "stored once and loaded once, outside of loops: ptxas saves registers for one more block"
_TINY = f"with vocabularies below 513 only; {_ONCE}"

_WIDE = "with heads 256 wide and a window, or in fp32; smaller tiles take twice the time on an H200"

# (release of Triton, sm, op, kernel): bytes, why they do no harm
SPILLS: dict[tuple[str, int, str, str], tuple[int, str]] = {
    ("3.6", 90, "sample", "_finish_kernel"): (8, _TINY),
    ("3.6", 100, "paged_attention_chunk", "_attend_kernel"): (8, _WIDE),
    ("3.7", 90, "paged_attention_chunk", "_attend_kernel"): (8, _WIDE),
    ("3.7", 100, "paged_attention_chunk", "_attend_kernel"): (56, _WIDE),
    ("3.7", 90, "sample", "_scan_kernel"): (8, _ONCE),
    ("3.7", 100, "sample", "_scan_kernel"): (8, _ONCE),
    ("3.7", 100, "ssd_chunk", "_prepare_kernel"): (8, _ONCE),
}


@dataclass(frozen=True, slots=True)
class GateRow:
    """A kernel that an op launched, compiled for one target."""

    arch: int  # sm_<arch>
    limit_bytes: int  # shared memory of a block that the launcher was told
    op: str
    case: str  # the first case that needed this kernel
    streaming: bool  # the op is bound by memory
    wide: bool  # the case has real alignments: accesses must be 128-bit ones
    facts: KernelFacts
    seconds: float

    def faults(self) -> list[str]:
        """Why this kernel must not ship."""
        here = f"{self.op}: {self.facts.kernel} of {self.case} on sm_{self.arch}"
        checks = (self._spills(), self._registers(), self._shared(), self._widths(), self._order())
        return [f"{here} {fault}" for fault in checks if fault]

    def _spills(self) -> str:
        release = ".".join(triton.__version__.split(".")[:2])
        key = (release, self.arch, self.op, self.facts.kernel)
        allowed, _ = SPILLS.get(key, (0, ""))
        if self.facts.spill_bytes <= allowed:
            return ""
        return f"spills {self.facts.spill_bytes} bytes a thread; use smaller tiles or more warps"

    def _registers(self) -> str:
        streams = self.streaming and not self.facts.dots
        bound = MAX_STREAMING_REGISTERS if streams else MAX_REGISTERS
        bound, _ = REGISTERS.get((self.op, self.facts.kernel), (bound, ""))
        if self.facts.registers <= bound:
            return ""
        return (
            f"takes {self.facts.registers} registers a thread, at most {bound} are allowed; use smaller "
            "tiles, or declare in gate_rules.REGISTERS why it needs them"
        )

    def _shared(self) -> str:
        if self.facts.shared_bytes <= self.limit_bytes:
            return ""
        return (
            f"wants {self.facts.shared_bytes} bytes of shared memory where a block has "
            f"{self.limit_bytes}; choose stages or tiles by device_limits.shared_limit"
        )

    def _widths(self) -> str:
        if not (self.streaming and self.wide) or (self.op, self.facts.kernel) in NARROW:
            return ""
        if self.facts.wide_percent >= MIN_WIDE_PERCENT:
            return ""
        return (
            f"moves {self.facts.wide_percent}% of its bytes in 128-bit accesses, expected "
            f"{MIN_WIDE_PERCENT}% of an op bound by memory; give addresses tl.multiple_of hints, or "
            "declare in gate_rules.NARROW why not"
        )

    def _order(self) -> str:
        if self.facts.single_stage_dots:
            return (
                "has a loop of one stage around a dot, which triton 3.6 was seen to compile to reads "
                "outside of shared memory; use two stages or more"
            )
        if self.facts.unordered:
            return (
                f"may store before all warps have loaded: {'; '.join(self.facts.unordered)}; put "
                "tl.debug_barrier() between"
            )
        return ""


def is_streaming(spec: OpSpec, args: Args) -> bool:
    """Whether the op is bound by memory, by its own declaration."""
    if not any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in args.values()):
        return False
    moved, operations = spec.traffic(args)
    return operations <= RIDGE * moved
