"""
What a captured graph is bound to: every address, whose memory it lies in, and when that is written anew.

An address that no owner claims is reported with the operations that take it.  On a GPU addresses come from
the graph itself (`graph_nodes`), on the CPU from the emulator's recording.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from midstream.errors import UnsupportedError
from midstream.graphs.capture import CudaGraph
from midstream.graphs.captured import Captured
from midstream.graphs.emulator import EmulatedGraph
from midstream.graphs.graph_nodes import find_segment, nodes_of, segments
from midstream.graphs.piecewise import Pieces

_NAME = 96  # letters of a kernel's name


@dataclass(frozen=True, slots=True)
class Owner:
    """Memory that somebody keeps at its place."""

    name: str
    refresh: str  # when its contents are written: "staged every step", "weight", ...
    begin: int
    num_bytes: int

    @staticmethod
    def of(name: str, refresh: str, tensor: Tensor) -> Owner:
        """The span of a tensor."""
        last = sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        num_bytes = (last + 1) * tensor.element_size() if tensor.numel() else 0
        return Owner(name, refresh, tensor.data_ptr(), num_bytes)

    @property
    def end(self) -> int:
        return self.begin + self.num_bytes


class Owners:
    """Finds who owns an address."""

    def __init__(self, owners: Iterable[Owner]) -> None:
        self._ascending = sorted((o for o in owners if o.num_bytes), key=lambda o: o.begin)
        self._longest = max((o.num_bytes for o in self._ascending), default=0)
        self._found: dict[
            tuple[int, int], list[Owner]
        ] = {}  # the same addresses come in every graph

    def overlapping(self, begin: int, num_bytes: int = 1) -> list[Owner]:
        """Owners of any byte of a span.

        >>> owners = Owners([Owner("a", "weight", 0, 8), Owner("b", "weight", 8, 8)])
        >>> [[o.name for o in owners.overlapping(*span)] for span in ((7, 1), (8, 1), (4, 8), (16, 1))]
        [['a'], ['b'], ['a', 'b'], []]
        """
        span = begin, num_bytes
        if span not in self._found:
            first = bisect_right(self._ascending, begin - self._longest, key=lambda o: o.begin)
            last = bisect_right(self._ascending, begin + num_bytes - 1, key=lambda o: o.begin)
            self._found[span] = [o for o in self._ascending[first:last] if o.end > begin]
        return self._found[span]


@dataclass(frozen=True, slots=True)
class Unowned:
    """Addresses that no owner claims, of one operation."""

    operation: str
    num_addresses: int  # distinct ones
    first: int


@dataclass(frozen=True, slots=True)
class GraphAudit:
    """One captured step."""

    name: str
    num_nodes: int
    memory_bytes: int
    seconds: float
    operations: tuple[tuple[str, int], ...]  # by how often they occur
    bound: tuple[tuple[Owner, int], ...]  # and how many addresses lie in it, in order of memory
    unowned: tuple[Unowned, ...]
    num_in_graph_memory: int  # addresses in memory that captures took
    num_unreadable: int  # operations whose arguments could not be read

    @property
    def by_refresh(self) -> Mapping[str, tuple[int, int]]:
        """Buffers and bytes of each refresh point."""
        found: dict[str, tuple[int, int]] = {}
        for owner, _ in self.bound:
            num, num_bytes = found.get(owner.refresh, (0, 0))
            found[owner.refresh] = (num + 1, num_bytes + owner.num_bytes)
        return found

    def lines(self, all_buffers: bool = False) -> list[str]:
        """For people; `all_buffers`: every buffer with its range instead of their sums."""
        took = f"{self.memory_bytes:,} bytes, {1e3 * self.seconds:.0f} ms"
        out = [f"{self.name}: {self.num_nodes} nodes, {took}"]
        out += [f"  {count:>5} x {name}" for name, count in self.operations]
        if all_buffers:
            out += [
                f"  {o.begin:#x}-{o.end:#x} {o.num_bytes:>14,} bytes  {o.refresh}: {o.name} ({uses} uses)"
                for o, uses in self.bound
            ]
        else:
            out += [
                f"  bound {num:>4} buffers of {num_bytes:>14,} bytes: {refresh}"
                for refresh, (num, num_bytes) in sorted(self.by_refresh.items())
            ]
        if self.num_in_graph_memory:
            out.append(f"  {self.num_in_graph_memory} addresses in memory of the graphs' own pool")
        if self.num_unreadable:
            out.append(
                f"  {self.num_unreadable} operations whose arguments the driver does not show"
            )
        out += [
            f"  UNOWNED: {u.num_addresses} addresses of {u.operation}, the first {u.first:#x}"
            for u in self.unowned
        ]
        return out


def audit(graph: Captured, owners: Owners) -> GraphAudit:
    """Look through a captured step.

    Raises:
        UnsupportedError: for a graph of an unknown kind.
    """
    if isinstance(graph, Pieces):
        return _merged(graph, [audit(piece, owners) for piece in graph.graphs if piece.num_nodes])
    if isinstance(graph, EmulatedGraph):
        return _audit_emulated(graph, owners)
    if isinstance(graph, CudaGraph):
        return _audit_cuda(graph, owners)
    raise UnsupportedError(
        f"audit: a {type(graph).__name__} cannot be looked into, expected a graph of midstream.graphs; "
        "capture it with GraphCapture or EmulatedCapture"
    )


def _audit_emulated(graph: EmulatedGraph, owners: Owners) -> GraphAudit:
    uses: Counter[Owner] = Counter()
    unowned = []
    for begin, num_bytes in graph.bound:
        found = owners.overlapping(begin, num_bytes)
        uses.update(found)
        if not found and num_bytes:
            unowned.append(Unowned(f"a buffer of {num_bytes:,} bytes", 1, begin))
    return _audit(graph, Counter(graph.node_names), uses, unowned)


def _audit_cuda(graph: CudaGraph, owners: Owners) -> GraphAudit:
    ascending = segments()
    nodes = nodes_of(graph.raw, ascending)
    uses: Counter[Owner] = Counter()
    missed: dict[str, list[int]] = {}
    in_pool = 0
    for node in nodes:
        for address in node.addresses:
            found = owners.overlapping(address)
            uses.update(found)
            if found:
                continue
            segment = find_segment(address, ascending)
            if segment is not None and segment.is_of_graphs:
                in_pool += 1
            else:
                missed.setdefault(_short(node.name), []).append(address)
    unowned = [Unowned(name, len(set(found)), found[0]) for name, found in missed.items()]
    unreadable = sum(not node.is_readable for node in nodes)
    names = Counter(_short(node.name) for node in nodes)
    return _audit(graph, names, uses, unowned, in_pool, unreadable)


def _audit(
    graph: Captured,
    names: Counter[str],
    uses: Counter[Owner],
    unowned: list[Unowned],
    in_pool: int = 0,
    unreadable: int = 0,
) -> GraphAudit:
    return GraphAudit(
        name=graph.name,
        num_nodes=graph.num_nodes,
        memory_bytes=graph.memory_bytes,
        seconds=graph.seconds,
        operations=tuple(names.most_common()),
        bound=tuple(sorted(uses.items(), key=lambda item: item[0].begin)),
        unowned=tuple(unowned),
        num_in_graph_memory=in_pool,
        num_unreadable=unreadable,
    )


def _merged(graph: Pieces, parts: list[GraphAudit]) -> GraphAudit:
    """One step of several graphs."""
    names, uses = Counter[str](), Counter[Owner]()
    for part in parts:
        names.update(dict(part.operations))
        uses.update(dict(part.bound))
    names["op called between graphs"] = graph.num_calls
    return _audit(
        graph,
        names,
        uses,
        [one for part in parts for one in part.unowned],
        sum(part.num_in_graph_memory for part in parts),
        sum(part.num_unreadable for part in parts),
    )


def _short(name: str) -> str:
    return name if len(name) <= _NAME else name[: _NAME - 3] + "..."
