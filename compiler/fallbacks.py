"""Why something ran without a graph: reasons in the user's words, counted, and logged once each."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import fx
from torch._dynamo.utils import counters
from torch._guards import CompileId
from torch._logging._internal import getArtifactLogger, trace_structured_artifact

from midstream.graphs.events import Events

_log = logging.getLogger("midstream.compiler.backend")
_graphs_log = getArtifactLogger(
    "torch._inductor.cudagraph_trees", "cudagraphs"
)  # TORCH_LOGS=cudagraphs
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(frozen=True, slots=True)
class Reason:
    """What cannot be recorded, by which op at which line, and what to do about it."""

    what: str
    advice: str
    op: str = ""
    line: str = ""  # file:number of the user's code

    def __str__(self) -> str:
        place = " at ".join(filter(None, (self.op, self.line)))
        found = f" (found {place})" if place else ""
        return f"skipping cudagraphs due to {self.what}{found}; {self.advice}"


NO_GPU = Reason("no GPU", "calls run as compiled, which is slower and gives the same results")


def source_line(node: fx.Node) -> str:
    """`file:line` of the innermost frame that the node was traced from, empty if it was not kept."""
    frames = _FRAME.findall(node.stack_trace or "")
    return ":".join(frames[-1]) if frames else ""


class BackendEvents(Events):
    """Counts of one compiled graph, which also stand in `torch._dynamo.utils.counters`."""

    def __init__(self, compile_id: CompileId | None) -> None:
        super().__init__()
        self._compile_id = compile_id

    def count_skip(self, name: str, reason: Reason) -> None:
        """Nothing of this graph will be recorded."""
        counters["inductor"]["cudagraph_skips"] += 1
        counters["midstream"][str(reason)] += 1
        self._trace("skip_reason", name, str(reason))
        if reason is NO_GPU:
            _say_once(str(reason))
        else:
            _log.warning("%s: %s", name, reason)

    def count_recording(self, name: str, reason: str) -> None:
        super().count_recording(name, reason)
        counters["midstream"]["recordings"] += 1
        self._trace("capture_table", name, reason)

    def count_adoption(self, name: str) -> None:
        super().count_adoption(name)
        counters["midstream"]["adoptions"] += 1

    def count_eager(self, name: str, reason: str) -> None:
        is_new = not self.eager[reason]
        super().count_eager(name, reason)
        counters["inductor"]["cudagraph_skips"] += 1
        counters["midstream"][f"skipping cudagraphs due to {reason}"] += 1
        if is_new:
            self._trace("skip_reason", name, reason)

    def _trace(self, artifact: str, name: str, reason: str) -> None:
        _graphs_log.debug("%s: %s: %s", artifact, name, reason)
        payload = {"graph": name, "reason": reason, "recordings": self.num_recordings}
        trace_artifact(artifact, lambda: payload, compile_id=self._compile_id)


def trace_artifact(
    name: str,
    payload: Callable[[], Any],
    encoding: str = "json",
    compile_id: CompileId | None = None,  # None: of the graph that is being compiled
) -> None:
    """Show `payload` in tlparse; it is made only if torch writes such a trace."""
    trace_structured_artifact(f"midstream_{name}", encoding, payload, compile_id)


@cache
def _say_once(text: str) -> None:
    _log.warning(text)
