"""
Eviction policies on request traces: the runtime's index, scheduler and planner over a device without a model.

Prints for each trace, pool and policy tokens asked and reused, evictions and bytes; then one line of JSON.
Pools hold what live calls need and a part of the working set: in bytes, divided by the planner, or of each
kind of page (`--split each`).  Page sizes are those of a model of 24
layers, 3 of them attention: a state page weighs as much as the KV of 7,257 tokens.

`offline` is a bound from above: it knows all calls, keeps KV pages by farthest next use, needs no states and
gives live calls their pages for nothing.  No policy can reuse more with as many KV pages and the same times.

    python bench/simulate.py
    python bench/simulate.py --trace chat,system --pool 25 --policy value,lru,offline
    python bench/simulate.py --json result.json --plot result.png
"""

from __future__ import annotations

import argparse
import heapq
import json
import platform
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product, takewhile
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import numpy as np
from traces import POOLS, SEEDS, TRACES, Call, PoolSize, longest, working_set

from midstream.errors import ConfigError
from midstream.runtime.admission import Admission
from midstream.runtime.chains import Chains
from midstream.runtime.checkpoints import Checkpoints
from midstream.runtime.commit import Committer, StepResult
from midstream.runtime.eviction import EVICTIONS
from midstream.runtime.hashing import BlockHasher, as_keys
from midstream.runtime.live import LiveTable
from midstream.runtime.options import EngineConfig
from midstream.runtime.ownership import PageOwnership
from midstream.runtime.pages import PagePool
from midstream.runtime.plan import StepPlan
from midstream.runtime.planner import PageBytes, kv_pages, plan_pages, state_pages
from midstream.runtime.prefix import PrefixIndex
from midstream.runtime.request import Request
from midstream.runtime.retention import Retention
from midstream.runtime.sampling import SamplingParams
from midstream.runtime.scheduler import Scheduler
from midstream.runtime.slots import SlotLayout, SlotSampling

OFFLINE = "offline"
SPLITS = ("planner", "each")
POLICIES = (*EVICTIONS, OFFLINE)
PAGE_BYTES = PageBytes(state=44_588_544, kv=98_304)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the engine."""

    kv_block: int = 16
    state_block: int = 64
    max_rows: int = 16
    max_step_tokens: int = 2048
    retention: str | int | None = "auto"


@dataclass(frozen=True, slots=True)
class Point:
    """One line of the table; tokens unless said."""

    trace: str
    split: str  # of the pools
    pool: int  # percent of the working set
    policy: str
    requests: int  # number
    asked: int  # that could have been reused: all but the last of each prompt
    reused: int
    evictions: int  # pages
    preemptions: int  # number
    kv_pages: int
    state_pages: int
    pool_bytes: int

    @property
    def hit_rate(self) -> float:
        return self.reused / max(self.asked, 1)


@dataclass(frozen=True, slots=True)
class Span:
    """When a call held its pages, as numbers of events."""

    admitted: int
    finished: int


class Simulation:
    """Serves a trace as `Engine` does, one step in flight; answers are those of the trace."""

    def __init__(
        self, calls: Sequence[Call], pools: PoolSize, eviction: str, sizes: Sizes | None = None
    ) -> None:
        """`pools`: pages of each, null pages not counted."""
        self.sizes = sizes = Sizes() if sizes is None else sizes
        self.calls = calls
        max_len = longest(calls)
        layout = SlotLayout(
            sizes.max_rows, -(-max_len // sizes.state_block), kv_pages(max_len, sizes.kv_block)
        )
        self.live = LiveTable(layout, max_len)
        self.kv_pool, self.state_pool = (
            PagePool(pools.kv + 1, "kv"),
            PagePool(pools.state + 1, "state"),
        )
        self.index = PrefixIndex(
            self.kv_pool, self.state_pool, sizes.kv_block, eviction=eviction,
            page_bytes=(PAGE_BYTES.kv, PAGE_BYTES.state),
        )  # fmt: skip
        self.ownership = PageOwnership(
            self.live, layout, self.kv_pool, self.state_pool, self.index, sizes.kv_block, sizes.state_block
        )  # fmt: skip
        chains = Chains(hasher_of(sizes), self.live)
        retention = Retention(sizes.retention, sizes.state_block, sizes.kv_block)
        checkpoints = Checkpoints(self.live, self.ownership, chains, retention)
        self.scheduler = Scheduler(
            self.live, layout, self.ownership, checkpoints, Admission(self.ownership, chains),
            sizes.max_step_tokens,
        )  # fmt: skip
        self.committer = Committer(self.live, self.ownership, self.scheduler)
        self.requests: list[Request] = []
        self.flights: deque[tuple[StepPlan, StepResult]] = deque()
        self.admitted: dict[int, int] = {}  # event by place of the call
        self.finished: dict[int, int] = {}
        self._clock = 0

    def run(self) -> None:
        """Serve all calls; then nobody owns a page."""
        while len(self.finished) < len(self.calls) or self.flights:
            while len(self.requests) < len(self.calls) and self._is_due():
                self._add(self.calls[len(self.requests)])
            self._turn()
        self.index.check_books()
        if self.kv_pool.num_owned or self.state_pool.num_owned:
            raise AssertionError("pages are owned, and no call is left")

    def spans(self) -> list[Span]:
        """Of each call."""
        return [Span(self.admitted[i], self.finished[i]) for i in range(len(self.calls))]

    def _is_due(self) -> bool:
        at = self.calls[len(self.requests)].at
        if not self.flights and not self.scheduler.num_unfinished:
            self._clock = max(self._clock, at)  # nothing else happens until then
        return at <= self._clock

    def _add(self, call: Call) -> None:
        count = len(call.answer)
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        request = Request(
            request_id=len(self.requests), prompt=call.prompt, params=params,
            sampling=SlotSampling(params, 0, (), 0), max_tokens=count, priority=0, root=b"",
            streamed=False, watched=False,
        )  # fmt: skip
        self.requests.append(request)
        self.scheduler.add(request)

    def _turn(self) -> None:
        self._clock += 1
        plan = self.scheduler.next_step()
        if plan is not None:
            for chunk in plan.chunks:
                self.admitted.setdefault(chunk.request.request_id, self._event())
            self.flights.append((plan, self._answer(plan)))
        elif not self.flights and self.scheduler.num_unfinished:
            raise ConfigError(
                f"simulate: {self.scheduler.num_unfinished} calls can never start with "
                f"{self.kv_pool.num_pages} KV and {self.state_pool.num_pages} state pages; expected room "
                f"for the longest of {longest(self.calls)} tokens; give a larger pool"
            )
        if len(self.flights) > 1 or (plan is None and self.flights):
            for arrival in self.committer.commit(*self.flights.popleft()):
                if arrival.finish_reason is not None:
                    self.scheduler.drop(arrival.request, keep=True)
                    self.finished[arrival.request.request_id] = self._event()

    def _event(self) -> int:
        return len(self.admitted) + len(self.finished)

    def _answer(self, plan: StepPlan) -> StepResult:
        """The trace's next token of each row that samples."""
        token = np.full(plan.num_rows, -1, np.int32)
        after = plan.num_computed + plan.num_new
        for row in np.nonzero(plan.samples)[0].tolist():
            request = self.live.request[plan.slot[row]]
            assert request is not None
            token[row] = self.calls[request.request_id].answer[after[row] - len(request.prompt)]
        return StepResult(token, np.zeros(plan.num_rows, np.float32), None, None)


def hasher_of(sizes: Sizes) -> BlockHasher:
    """The same keys in every run."""
    return BlockHasher(block=sizes.kv_block, key=bytes(16))


def chains_of(calls: Sequence[Call], sizes: Sizes) -> list[list[int]]:
    """Keys of the blocks that each call computes or reuses; the last token of an answer is not fed back."""
    hasher = hasher_of(sizes)
    return [as_keys(hasher.extend(None, call.tokens[:-1])) for call in calls]


def bytes_of(pools: PoolSize) -> int:
    """Of all pages."""
    return pools.kv * PAGE_BYTES.kv + pools.state * PAGE_BYTES.state


def working_set_of(calls: Sequence[Call], sizes: Sizes) -> PoolSize:
    """Of a trace, in pages."""
    asked = [(len(call.prompt) - 1) // sizes.kv_block for call in calls]
    return working_set(chains_of(calls, sizes), asked)


def pools_of(calls: Sequence[Call], split: str, percent: int, sizes: Sizes) -> PoolSize:
    """Pools of what live calls need and a part of the working set.

    Args:
        split: "planner": that part in bytes, divided as an engine does with a mix; "each": of each kind.
    """
    whole = working_set_of(calls, sizes)
    part, length = whole.part(percent), sum(len(call.tokens) for call in calls) // len(calls)
    live = PoolSize(
        sizes.max_rows * kv_pages(length, sizes.kv_block),
        sizes.max_rows * state_pages("align", length, sizes.state_block) + 1,
    )
    if split == "each":
        return PoolSize(live.kv + part.kv, live.state + part.state)
    room = PoolSize(live.kv + part.kv + 1, live.state + part.state + 1)
    config = EngineConfig(
        kv_block=sizes.kv_block, state_block=sizes.state_block, max_rows=sizes.max_rows,
        max_len=longest(calls), mix=f"{sizes.max_rows}x{length}",
        memory=bytes_of(room),
    )  # fmt: skip
    num_state, num_kv = plan_pages(config, PAGE_BYTES, None, 0)
    return PoolSize(num_kv - 1, num_state - 1)


# -- the bound ----------------------------------------------------------------------------------------


def most_reusable(
    calls: Sequence[Call], spans: Sequence[Span], num_pages: int, sizes: Sizes
) -> int:
    """Tokens that any policy could have reused at most, with `num_pages` KV pages and these times.

    Reusing a block means that its page was kept from the end of the last call that had it to the begin of
    this one.  Of such intervals as many as possible are kept, never more than `num_pages` at once: whenever
    there are too many, the one that ends last goes (Belady's rule, optimal for pages of one size).
    """
    chains, block = chains_of(calls, sizes), sizes.kv_block
    last: dict[int, int] = {}  # key -> event after which nobody holds it
    intervals, total = [], 0
    order = sorted(range(len(calls)), key=lambda place: spans[place].admitted)
    follow: dict[int, set[tuple[int, ...]]] = {}  # what was computed behind a block, by its key
    for place in order:
        asked, begin = len(calls[place].prompt) - 1, spans[place].admitted
        known = list(takewhile(last.__contains__, chains[place][: asked // block]))
        for key in known:
            if last[key] < begin:
                intervals.append((last[key], begin))
            else:
                total += block  # shared with a live call
        total += _tail(calls[place], known, asked, block, follow)
        for key in chains[place]:
            last[key] = max(last.get(key, 0), spans[place].finished)
        tokens = calls[place].tokens[:-1]
        for number, key in enumerate([0, *chains[place]]):
            behind = tuple(tokens[number * block : (number + 1) * block].tolist())
            follow.setdefault(key, set()).add(behind)
    return total + block * _kept(intervals, num_pages)


def _tail(
    call: Call, known: list[int], asked: int, block: int, follow: dict[int, set[tuple[int, ...]]]
) -> int:
    """Tokens behind the whole blocks that an earlier call computed too: given for nothing."""
    begin = len(known) * block
    mine = call.prompt[begin : min(asked, begin + block)].tolist()
    best = 0
    for other in follow.get(known[-1] if known else 0, ()):
        pairs = zip(mine, other, strict=False)
        best = max(best, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return best


def _kept(intervals: list[tuple[int, int]], num_pages: int) -> int:
    """How many of the intervals fit at most.

    >>> _kept([(0, 9), (1, 3), (2, 4), (3, 8)], num_pages=2)
    3
    """
    ending: list[int] = []  # those kept, by end, the last first
    done: list[int] = []  # the same, the first first
    active, dropped = 0, 0
    gone: dict[int, int] = {}  # end -> dropped intervals that `done` still lists
    for begin, end in sorted(intervals):
        while done and done[0] <= begin:
            over = heapq.heappop(done)
            if gone.get(over):
                gone[over] -= 1
            else:
                active -= 1
        heapq.heappush(ending, -end)
        heapq.heappush(done, end)
        active += 1
        if active > num_pages:
            last = -heapq.heappop(ending)
            gone[last] = gone.get(last, 0) + 1
            active, dropped = active - 1, dropped + 1
    return len(intervals) - dropped


# -- the table ----------------------------------------------------------------------------------------


def simulate(
    trace: str, calls: Sequence[Call], split: str, percent: int, pools: PoolSize, policies: Sequence[str],
    sizes: Sizes | None = None,
) -> list[Point]:  # fmt: skip
    """Points of one trace and pool; the bound holds for the times of all policies of the list."""
    sizes = Sizes() if sizes is None else sizes
    points, bound = [], 0
    online = [policy for policy in policies if policy != OFFLINE]
    for policy in online or [EVICTIONS[0]]:
        run = Simulation(calls, pools, policy, sizes)
        run.run()
        counters = run.scheduler.admission.counters
        point = Point(
            trace, split, percent, policy, counters.requests, counters.asked, counters.reused,
            run.index.evictions, run.scheduler.num_preemptions, pools.kv, pools.state, bytes_of(pools),
        )  # fmt: skip
        points += [point] if policy in online else []
        if OFFLINE in policies:
            bound = max(bound, most_reusable(calls, run.spans(), pools.kv, sizes))
    if OFFLINE in policies:
        asked = sum(len(call.prompt) - 1 for call in calls)
        points.append(
            Point(
                trace, split, percent, OFFLINE, len(calls), asked, bound, 0, 0, pools.kv, pools.state,
                bytes_of(pools),
            )
        )  # fmt: skip
    return points


def line(point: Point, points: Sequence[Point]) -> str:
    """One row of the table."""
    lru = [
        p.reused
        for p in points
        if (p.trace, p.split, p.pool, p.policy) == (point.trace, point.split, point.pool, "lru")
    ]
    ratio = f"{point.reused / lru[0]:6.2f}" if lru and lru[0] else "     -"
    return (
        f"{point.trace:<10}{point.split:<8}{point.pool:>4}% {point.policy:<8}{point.requests:>6}"
        f"{point.asked:>10,}{point.reused:>10,}{point.hit_rate:>6.0%}{ratio}{point.evictions:>10,}"
        f"{point.kv_pages:>8,}{point.state_pages:>7,}{point.pool_bytes / 1e9:>8.1f}"
    )


HEAD = (
    "trace     split   pool  policy   calls     asked    reused  hit  /lru   evicted   "
    "KV pg  st pg      GB"
)


def write_plot(points: Sequence[Point], path: Path) -> None:
    """Hit rates as bars; without matplotlib only a message."""
    try:
        import matplotlib
    except ImportError:
        print(
            "no plot: matplotlib is not installed (pip install midstream[bench])", file=sys.stderr
        )
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = list(dict.fromkeys((p.trace, p.split, p.pool) for p in points))
    policies = list(dict.fromkeys(p.policy for p in points))
    figure, axes = pyplot.subplots(figsize=(9, 3.5))
    for number, policy in enumerate(policies):
        rates = {(p.trace, p.split, p.pool): p.hit_rate for p in points if p.policy == policy}
        places = [g + 0.8 * number / len(policies) for g in range(len(groups))]
        heights = [100 * rates.get(group, 0.0) for group in groups]
        axes.bar(places, heights, 0.8 / len(policies), align="edge", label=policy)
    axes.set_xticks(
        [g + 0.4 for g in range(len(groups))], [f"{t}\n{s} {p} %" for t, s, p in groups]
    )
    axes.set_ylabel("tokens reused, % of asked")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"plot: {path}", file=sys.stderr)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Flags; lists are separated by commas."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", default=",".join(TRACES))
    parser.add_argument("--pool", default=",".join(map(str, POOLS)))
    parser.add_argument("--split", default=SPLITS[0], help=f"some of {','.join(SPLITS)}")
    parser.add_argument("--policy", default=",".join(POLICIES))
    parser.add_argument("--json", type=Path, help="also write the result there")
    parser.add_argument("--plot", type=Path, default=Path(gettempdir()) / "midstream_simulate.png")
    flags = parser.parse_args(arguments)
    for name, known in (("trace", TRACES), ("policy", POLICIES), ("split", SPLITS)):
        found = getattr(flags, name).split(",")
        setattr(flags, name, found)
        unknown = [word for word in found if word not in known]
        if unknown:
            parser.error(f"--{name} {','.join(unknown)}; expected some of {','.join(known)}")
    try:
        flags.pool = [int(word) for word in flags.pool.split(",")]
    except ValueError:
        parser.error(f"--pool {flags.pool}; expected percents such as 25,50")
    return flags


def main(arguments: Sequence[str] | None = None) -> None:
    flags, sizes, points = parse(arguments), Sizes(), []
    print(HEAD)
    begin = time.perf_counter()
    for trace in flags.trace:
        calls = TRACES[trace]()
        for split, percent in product(flags.split, flags.pool):
            pools = pools_of(calls, split, percent, sizes)
            new = simulate(trace, calls, split, percent, pools, flags.policy, sizes)
            points += new
            for point in new:
                print(line(point, new), flush=True)
    setup: dict[str, Any] = {
        "seeds": {trace: SEEDS[trace] for trace in flags.trace},
        "sizes": asdict(sizes),
        "page_bytes": asdict(PAGE_BYTES),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "seconds": round(time.perf_counter() - begin, 1),
    }
    result = {
        "setup": setup,
        "points": [asdict(p) | {"hit_rate": round(p.hit_rate, 4)} for p in points],
    }
    write_plot(points, flags.plot)
    if flags.json is not None:
        flags.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
