"""
Find stores that may overtake loads of the same memory, in a compiled kernel.

All warps of a block load a scalar, or a tile smaller than the block, and one warp stores it.  A store
to memory that was loaded before is therefore a race unless a barrier lies between: one warp may store
before another has loaded.  Triton orders neither, and its interpreter does not show it.

The paths from loads to stores are those of the PTX, where barriers are visible that Triton inserts for
its own sake; every one of them must have a barrier.  Pointers are told apart by the kernel argument that
they come from; one that went through shared memory may point anywhere.  A store is fine without a
barrier where every thread stores elements that it loaded itself, i.e. where a load of the same argument
has the same tile and layout, and no two warps share elements of it.
Not seen: tiles of one layout that overlap at a distance, as of a window that moves within itself.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass

ANYWHERE = -1  # in place of an argument: a pointer of unknown origin

_INSTRUCTION = re.compile(r"(?:@!?(%\w+)\s+)?([a-z][\w.:]*)\s*(.*?);?$")


@dataclass(frozen=True, slots=True)
class _Instruction:
    guarded: bool  # runs only where a predicate holds
    name: str
    operands: str
    line: str  # of the Python source, as file:line


def unordered_stores(ptx: str, ttgir: str, num_warps: int) -> tuple[str, ...]:
    """What may race, one text per argument of the kernel."""
    if num_warps == 1:
        return ()
    names = argument_names(ttgir)
    shared = _pointers_stored_by_others(ttgir, num_warps)
    found = []
    for argument, lines in sorted(_unguarded_pairs(ptx).items()):
        name = "an unknown pointer" if argument == ANYWHERE else names[argument]
        if argument == ANYWHERE or name in shared:
            pairs = ", ".join(f"{load} -> {store}" for load, store in sorted(lines))
            found.append(f"{name} ({pairs})")
    return tuple(found)


def argument_names(ttgir: str) -> list[str]:
    """Names of the arguments that the compiled kernel takes, in order."""
    return re.findall(r"%(\w+): ", re.findall(r"tt\.func public @\w+\((.*)", ttgir)[0])


def _pointers_stored_by_others(ttgir: str, num_warps: int) -> set[str]:
    """Arguments of which a thread may store elements that it has not loaded."""
    tiles: dict[str, dict[str, set[str]]] = {"load": defaultdict(set), "store": defaultdict(set)}
    base = {name: name for name in argument_names(ttgir)}
    for line in ttgir.splitlines():
        for carried, start in re.findall(r"%([\w#]+) = %([\w#]+)[,)]", line):  # of a loop
            base[carried] = base.get(start, "")
        if made := re.match(r"\s*%(\w+) = \S+ %([\w#]+)", line):
            base[made[1]] = base.get(made[2], "")
        access = (
            r"(?:tt\.(load|store)|ttg\.async_copy_global_to_(local)) %([\w#]+).*? : ([^:]*?) loc"
        )
        if found := re.search(access, line):
            tiles[found[1] or "load"][base.get(found[3], "")].add(found[4].split(" -> ")[0])
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", ttgir, re.M))
    return {
        name
        for name, stored in tiles["store"].items()
        if any(
            tile not in tiles["load"][name] or repeats_over_warps(tile, layouts, num_warps)
            for tile in stored
        )
    }


def repeats_over_warps(tile: str, layouts: dict[str, str], num_warps: int) -> bool:
    """Whether two warps hold the same element of a tile, given as its type in Triton's GPU dialect.

    >>> row = {"#b": "#ttg.blocked<{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [4]}>"}
    >>> [repeats_over_warps(f"tensor<{n}x!tt.ptr<i32>, #b>", row, 4) for n in (64, 128)]
    [True, False]
    >>> repeats_over_warps("!tt.ptr<i32>", {}, 4)
    True
    """
    if not tile.startswith("tensor"):
        return True
    shape = [int(size) for size in re.findall(r"(\d+)x", tile.split("!")[0])]
    if math.prod(shape) < 32 * num_warps:
        return True
    layout = layouts.get(tile.rpartition(", ")[2].rstrip(">"), tile)
    if blocked := re.findall(
        r"(?:sizePerThread|threadsPerWarp|warpsPerCTA) = \[([\d, ]+)\]", layout
    ):
        owned, lanes, warps = ([int(n) for n in each.split(",")] for each in blocked[:3])
        reach = zip(shape, owned, lanes, warps, strict=True)
        return any(size < own * lane * warp and warp > 1 for size, own, lane, warp in reach)
    return "slice" in layout or "[0]" in layout or "[0, 0]" in layout.partition("warp = ")[2]


def _unguarded_pairs(ptx: str) -> dict[int, set[tuple[str, str]]]:
    """By argument (or ANYWHERE): source lines of (load, store) with no barrier between."""
    instructions, labels = _parse(ptx)
    follow = _next_places(instructions, labels)
    origin = _origins(ptx, instructions)
    stores = _accesses(r"(st|red|atom)\..*\bglobal\b", instructions, origin)
    found: dict[int, set[tuple[str, str]]] = defaultdict(set)
    for place, source in _accesses(r"(ld|cp)\..*\bglobal\b", instructions, origin).items():
        for reached in _reached(place, follow) & stores.keys():
            target = stores[reached]
            for argument in (source & target) if source and target else {ANYWHERE}:
                found[argument].add((instructions[place].line, instructions[reached].line))
    return found


def _parse(ptx: str) -> tuple[list[_Instruction], dict[str, list[int]]]:
    """Instructions of the kernel's body, and the places of each label; inline assembly repeats labels."""
    instructions: list[_Instruction] = []
    labels: dict[str, list[int]] = defaultdict(list)
    source_line = ""
    for line in ptx[ptx.index("{", ptx.index(".entry")) :].splitlines():
        line, _, remark = map(str.strip, line.partition("//"))
        if label := re.match(r"([$\w]+):(?!:)\s*", line):
            labels[label[1]].append(len(instructions))
            line = line[label.end() :]
        if line.startswith(".loc"):
            source_line = remark.split()[0].rpartition(":")[0]  # from file:line:column
        elif found := _INSTRUCTION.match(line):
            instructions.append(_Instruction(bool(found[1]), found[2], found[3], source_line))
    return instructions, labels


def _origins(ptx: str, instructions: list[_Instruction]) -> dict[str, set[int]]:
    """Which pointer arguments each register is computed from."""
    pointers = {int(n) for n in re.findall(r"\.ptr \.global [^,)]*_param_(\d+)", ptx)}
    origin: dict[str, set[int]] = defaultdict(set)
    for _ in range(2):  # twice: values that go round a loop
        for each in instructions:
            registers = re.findall(r"%\w+", each.operands)
            if each.name.startswith("ld.param"):
                argument = int(re.findall(r"_param_(\d+)", each.operands)[0])
                origin[registers[0]] |= {argument} & pointers
            elif registers and not re.match(r"(ld|st|cp|atom|red|bra|setp)\b", each.name):
                origin[registers[0]].update(*(origin[name] for name in registers[1:]))
    return origin


def _accesses(
    kind: str, instructions: list[_Instruction], origin: dict[str, set[int]]
) -> dict[int, set[int]]:
    """Places of accesses of this kind, and the arguments that they may point into."""
    return {
        place: origin[re.findall(r"\[\s*(%\w+)", each.operands)[-1]]  # cp: target, then source
        for place, each in enumerate(instructions)
        if re.match(kind, each.name)
    }


def _next_places(instructions: list[_Instruction], labels: dict[str, list[int]]) -> list[list[int]]:
    """Where each instruction goes on; nowhere from a barrier."""
    follow: list[list[int]] = []
    for place, each in enumerate(instructions):
        branch = each.name.startswith("bra")
        ends = not each.guarded and (branch or each.name == "ret")
        follow.append([] if ends else [place + 1])
        if branch:
            named = labels[each.operands.split()[-1]]
            follow[-1].append(min(named, key=lambda target: abs(target - place)))
        if re.match(r"bar(rier)?\.", each.name):
            follow[-1].clear()
    follow[-1].clear()
    return follow


def _reached(start: int, follow: list[list[int]]) -> set[int]:
    seen: set[int] = set()
    todo = list(follow[start])
    while todo:
        place = todo.pop()
        if place not in seen:
            seen.add(place)
            todo += follow[place]
    return seen
