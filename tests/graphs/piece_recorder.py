"""A recorder for tests: torch operations on the CPU in the order of the run, cut where it is told to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from midstream.graphs.captured import Addresses, Step

Work = Callable[[], None]


class Piece:
    """What ran between `begin` and `end`."""

    def __init__(self, name: str, work: list[Work]) -> None:
        self.name, self.memory_bytes, self.seconds = name, 10, 0.0
        self.num_nodes = len(work)
        self.is_released = False
        self._work = work

    def replay(self) -> None:
        assert not self.is_released
        for work in self._work:
            work()

    def release(self) -> None:
        self.is_released = True


class PieceRecorder(TorchDispatchMode):
    """Writes results of a replay where the recorded run had them.  Knows no pool and no device."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[Piece] = []
        self.num_warm_ups = 0
        self._open: list[Work] | None = None

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def capture(self, step: Step, addresses: Addresses, name: str) -> Piece:
        with self.recording(name):
            self.warm_up(step)
            self.begin()
            step()
            return self.end(name)

    @contextmanager
    def recording(self, name: str) -> Iterator[None]:
        try:
            with self:
                yield
        finally:
            self._open = None

    def warm_up(self, step: Step) -> None:
        self.num_warm_ups += 1
        step()

    def begin(self) -> None:
        assert self._open is None
        self._open = []

    def end(self, name: str) -> Piece:
        assert self._open is not None
        piece, self._open = Piece(name, self._open), None
        self.pieces.append(piece)
        return piece

    def enqueuing(self, work: Work) -> Work:
        return work

    def release(self) -> None:
        for piece in self.pieces:
            piece.release()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, before = kwargs or {}, self._open
        result = func(*args, **kwargs)
        is_view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        # an op that ended the piece while it ran is in no piece
        if before is not None and self._open is before and not is_view:
            before.append(lambda: _write_again(result, func(*args, **kwargs)))
        return result


def _write_again(kept: Any, new: Any) -> None:
    for old, again in zip(tree_leaves(kept), tree_leaves(new), strict=True):
        if isinstance(old, Tensor) and old is not again:
            old.copy_(again)
