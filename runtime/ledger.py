"""Requests as their users see them: which are open, where news of them go, what is known of ended ones."""

from __future__ import annotations

from collections import OrderedDict, deque
from itertools import count

from midstream.errors import ConfigError, ContractError
from midstream.runtime.explain import NOT_YET, never_looked_up, sentence
from midstream.runtime.handles import Handle, Update
from midstream.runtime.request import Lookup, Output, Request

_REMEMBERED = 4096  # finished requests that explain() still knows
_numbers = count()


class Ledger:
    """Knows no steps.  It outlives the parts of a closed engine."""

    def __init__(self) -> None:
        self._engine = next(_numbers)
        self.open: dict[int, Request] = {}  # by request id
        self.updates: list[Update] = []  # for `Engine.step`
        self.inboxes: dict[int, deque[Update]] = {}  # of running generators, by request id
        self._ended: OrderedDict[int, Lookup | str] = OrderedDict()  # or why there was no lookup

    def enter(self, request: Request) -> Handle:
        """A request is queued."""
        self.open[request.request_id] = request
        return self.handle(request.request_id)

    def handle(self, request_id: int) -> Handle:
        """What users hold of a request."""
        return Handle(request_id, self._engine)

    def id_of(self, handle: object) -> int:
        """The number of a request.  Raises ConfigError for what is no handle of this engine."""
        if not isinstance(handle, Handle):
            raise ConfigError(
                f"Engine: {handle!r} is no handle; expected what `add` returned; keep it with the request"
            )
        if handle.engine not in (None, self._engine):
            raise ConfigError(
                f"Engine: {handle!r} is a handle of another engine; expected what `add` of this one "
                "returned; ask the engine that it came from"
            )
        return handle.request_id

    @property
    def num_unfinished(self) -> int:
        """Requests whose end nobody has been told."""
        return len(self.open) + sum(update.output is not None for update in self.updates)

    def close(
        self, request: Request, token_ids: tuple[int, ...], text: str | None, output: Output
    ) -> None:
        """A request has ended."""
        self.end_unheard(request)
        self.post(request, token_ids, text, output)

    def end_unheard(self, request: Request) -> None:
        """`close` where nobody is told."""
        del self.open[request.request_id]
        self._ended[request.request_id] = request.lookup or never_looked_up(request)
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def post(
        self, request: Request, token_ids: tuple[int, ...], text: str | None, output: Output | None
    ) -> None:
        """Report to the generator that asked for the request, else to `Engine.step`."""
        inbox = self.inboxes.get(request.request_id)
        to = self.updates if inbox is None else inbox
        to.append(Update(self.handle(request.request_id), token_ids, text, output))

    def take_updates(self) -> list[Update]:
        """News for `Engine.step`, each once."""
        updates, self.updates = self.updates, []
        return updates

    def explain(self, request_id: int) -> str:
        """See `Engine.explain`."""
        live = self.open.get(request_id)
        if live is None and request_id not in self._ended:
            raise ContractError(
                f"Engine: request {request_id} is not known here; expected one of this engine, among the "
                f"last {_REMEMBERED} that finished; ask sooner"
            )
        found = self._ended[request_id] if live is None else live.lookup or NOT_YET
        return found if isinstance(found, str) else sentence(found)
