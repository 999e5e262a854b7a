"""What kernels do before the one in front of them has ended: read from their source, and tried on a GPU."""

import ast
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from midstream import ops
from midstream.ops import dependent_launch
from midstream.ops.causal_conv_step import causal_conv_step
from midstream.ops.gated_delta_step import gated_delta_step
from midstream.ops.guarded_memory import same_bits
from midstream.ops.launch_recorder import record
from midstream.ops.registry import Args, OpSpec
from midstream.ops.ssd_step import ssd_step

HOME = Path(dependent_launch.__file__)
SOURCES = {path.name: path.read_text() for path in sorted(Path(ops.__file__).parent.glob("*.py"))}
MAY_READ = {f"{name}_ptr" for name in dependent_launch.READ_EARLY}
STORES = (
    "store",
    *(f"atomic_{x}" for x in ("add", "and", "cas", "max", "min", "or", "xchg", "xor")),
)
WIDTH = 2**18  # numbers that a slow kernel adds up before it writes a page number


def functions(source: str) -> dict[str, ast.FunctionDef]:
    """The top-level functions of a module by name."""
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}


def calls(node: ast.AST, name: str) -> list[ast.Call]:
    """Calls of `name` or `something.name` in a piece of source, in order."""
    found = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
    found = [call for call in found if ast.unparse(call.func).rpartition(".")[2] == name]
    return sorted(found, key=lambda call: (call.lineno, call.col_offset))


def waiting_kernels(source: str) -> dict[str, ast.FunctionDef]:
    """Kernels that wait for the one in front, and then let the next one begin."""
    return {name: f for name, f in functions(source).items() if calls(f, "after_previous")}


def pointers(node: ast.AST, meaning: dict[str, set[str]]) -> set[str]:
    """Pointer arguments that an expression is made of, but for numbers loaded through them."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load":
        return set()
    if isinstance(node, ast.Name):
        return meaning.get(node.id, {node.id} if node.id.endswith("_ptr") else set())
    return set().union(*(pointers(child, meaning) for child in ast.iter_child_nodes(node)))


def assignments(kernel: ast.FunctionDef) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What is assigned to what, a tuple to a tuple piece by piece."""
    for node in ast.walk(kernel):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                yield from zip(target.elts, value.elts, strict=True)
            else:
                yield target, value


def written(kernel: ast.FunctionDef) -> set[str]:
    """Pointer arguments through which a kernel stores."""
    meaning: dict[str, set[str]] = {}  # of local names
    for target, value in assignments(kernel):
        for name in ast.walk(target):
            if isinstance(name, ast.Name):
                meaning[name.id] = meaning.get(name.id, set()) | pointers(value, meaning)
    stores = [call for name in STORES for call in calls(kernel, name)]
    return set().union(*(pointers(store.args[0], meaning) for store in stores))


def faults(source: str) -> list[str]:
    """How the kernels of a module break the rules of ops/dependent_launch.py."""
    found, lines = [], source.splitlines()
    for name, kernel in waiting_kernels(source).items():
        waits = [
            n
            for n, line in enumerate(kernel.body)
            if ast.unparse(line) == "after_previous(DEPENDENT)"
        ]
        if len(waits) != 1 or len(calls(kernel, "after_previous")) != 1:
            found.append(f"{name} does not wait once, in any case")
        early = ast.Module(kernel.body[: waits[0] if waits else 0], [])
        if {
            n.id for n in ast.walk(early) if isinstance(n, ast.Name) and n.id.endswith("_ptr")
        } - MAY_READ:
            found.append(f"{name} touches more than numbers before it waits")
        if calls(early, "store") or any(isinstance(n, ast.Return) for n in ast.walk(early)):
            found.append(f"{name} writes or ends before it waits")
        integers = {a.arg for a in kernel.args.args if "# i" in lines[a.lineno - 1]} | MAY_READ
        if written(kernel) & integers or not written(kernel):
            found.append(f"{name} writes {sorted(written(kernel))}")
    launches = source.count("**dependent_launch()")
    if launches != len(waiting_kernels(source)):
        found.append(f"{launches} launches for {len(waiting_kernels(source))} kernels that wait")
    return found


@pytest.mark.parametrize("name", [name for name in SOURCES if name != HOME.name])
def test_a_kernel_that_lets_the_next_one_begin_early_writes_no_page_numbers_offsets_or_counts(name):
    assert not faults(SOURCES[name])


def test_kernels_that_begin_early_are_those_of_decoding_steps():
    waiting = {kernel for source in SOURCES.values() for kernel in waiting_kernels(source)}
    assert waiting >= {"_linear_step_kernel", "_ssd_step_kernel", "_causal_conv_step_kernel"}


def test_nothing_but_after_previous_lets_the_next_kernel_begin():
    for words in ("gdc_", "griddepcontrol", "launch_pdl"):
        assert [name for name, source in SOURCES.items() if words in source] in ([HOME.name], [])
    assert [
        ast.unparse(line) for line in functions(SOURCES[HOME.name])["after_previous"].body[1].body
    ] == [
        "tl.extra.cuda.gdc_wait()",
        "tl.extra.cuda.gdc_launch_dependents()",
    ]


GOOD = """
    def kernel(
        arena_ptr,
        out_ptr,  # [R]
        offset_ptr,  # i64[1]
        count_ptr,  # i32[R]
        DEPENDENT,
    ):
        offset = tl.load(offset_ptr)
        after_previous(DEPENDENT)
        place = arena_ptr + offset
        tl.store(place, tl.load(out_ptr))
    launch(**dependent_launch())
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.load(offset_ptr)", "tl.load(count_ptr)"),
        ("after_previous(DEPENDENT)", "if DEPENDENT: after_previous(DEPENDENT)"),
        ("offset = tl.load(offset_ptr)", "tl.store(offset_ptr, 0)"),
        ("offset = tl.load(offset_ptr)", "if DEPENDENT: return"),
        ("place = arena_ptr + offset", "place = count_ptr + 1"),
        ("place = arena_ptr + offset", "other, place = arena_ptr, offset_ptr"),
        ("tl.store(place,", "tl.atomic_add(count_ptr,"),
        ("launch(**dependent_launch())", "launch()"),
    ],
)
def test_breaking_a_rule_is_noticed(old, new):
    assert old in GOOD
    assert not faults(textwrap.dedent(GOOD))
    assert faults(textwrap.dedent(GOOD.replace(old, new)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "spec", [gated_delta_step, ssd_step, causal_conv_step], ids=lambda spec: spec.name
)
def test_page_numbers_written_by_a_slow_kernel_are_those_that_the_next_ones_read(spec, device):
    want = StepsPerPageTable(spec, device, torch.cuda.synchronize)
    for _ in range(2):
        want.steps()
    got = StepsPerPageTable(spec, device, lambda: None)
    record(got.steps, device)()  # runs once, is captured, and runs again
    assert same_bits(got.arena, want.arena)
    assert same_bits(got.results, want.results)


class StepsPerPageTable:
    """A slow kernel writes the rows' pages, then an op steps three times; over and over."""

    def __init__(self, spec: OpSpec, device: torch.device, between: Callable[[], None]) -> None:
        args = row_args(spec, device)
        rows, host = args["out"].shape[0], torch.Generator().manual_seed(2)
        wide = torch.zeros(6, rows, WIDTH, dtype=torch.int32)
        wide[:, :, 7] = torch.stack([1 + torch.randperm(rows, generator=host) for _ in wide])
        self._wide, self._between, self._spec = wide.to(device), between, spec
        self.arena = args["arena"]
        self.results = args["out"].new_empty(len(wide), 3, *args["out"].shape)
        self._page = torch.zeros(rows, dtype=torch.int32, device=device)
        self._args = args | {"read_page": self._page, "write_page": self._page}

    def steps(self) -> None:
        """One round of all page tables."""
        for numbers, results in zip(self._wide, self.results, strict=True):
            torch.sum(numbers, 1, dtype=torch.int32, out=self._page)
            self._between()
            for out in results:
                self._spec(**self._args | {"out": out})
                self._between()


def row_args(spec: OpSpec, device: torch.device) -> Args:
    """Real sizes, one page per row; the convolution has no bench case and takes one of its tests."""
    if spec.bench_cases:
        case = next(case for case in spec.bench_cases if case.id.startswith("R32-"))
        return case.build(torch.Generator(device).manual_seed(0), torch.bfloat16, device)
    case = next(case for case in spec.cases if "D512" in case.id)
    args = case.build(torch.Generator().manual_seed(0), torch.bfloat16, device)
    args["arena"].normal_(generator=torch.Generator().manual_seed(1))
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in args.items()}
