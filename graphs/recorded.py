"""
Calls of a function that writes its state in place, each recorded once and replayed from then on.

Knows no compiler and no model: a function, what its arguments are, and who captures.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, Literal

from torch import Tensor

from midstream.errors import CapacityError, MidstreamError, UnsupportedError
from midstream.graphs.adoption import (
    Homes,
    adopt,
    find_home,
    has_returned,
    homes_where_they_lie,
)
from midstream.graphs.captured import Capturer
from midstream.graphs.events import Events
from midstream.graphs.memory import geometry
from midstream.graphs.obstacles import find_obstacle, needs_gradients
from midstream.graphs.recording import Recording, Run, record
from midstream.graphs.roles import InputRole, Places
from midstream.graphs.stream_order import StreamOrder, order_of

__all__ = ["Events", "InputRole", "RecordedCalls", "Run"]

_IN_USE = (
    4  # a recording is in use that was replayed among the last `_IN_USE * max_recordings` calls
)

_REMEMBERED = 256  # keys without a recording of which something is known

_lock = (
    threading.RLock()
)  # of all recorded calls: they share homes, and one pool of memory on each device


class RecordedCalls:
    """Calls of one function.  Equal numbers, shapes and addresses replay the same recording.

    Safe to call from several threads: one call on a device is enqueued after the other.
    """

    def __init__(
        self,
        run: Run,
        roles: Sequence[InputRole],
        *,
        capturer: Capturer | None,
        name: str,
        max_recordings: int,
        on_unsupported: Literal["fallback", "error"],
        events: Events,
        shapes_are_guarded: bool = False,
    ) -> None:
        """
        Args:
            run: takes one argument for each role, writes STATE tensors in place, returns its outputs.
            capturer: None runs every call eagerly.
            shapes_are_guarded: the caller promises that equal numbers and inputs mean equal shapes of all
                other tensors, as the guards of a compiler do; saves 10 us per 100 tensors and call.
        """
        self._run = run
        self._places = Places(roles)
        self._capturer = capturer
        self._name = name
        self._max_recordings = max_recordings
        self._is_strict = on_unsupported == "error"
        self._events = events
        self._shapes_are_guarded = shapes_are_guarded
        self._order: StreamOrder | None = None
        self._num_calls = 0
        self._recordings: dict[Hashable, Recording] = {}
        self._latest: dict[Hashable, Recording] = {}  # by numbers and shapes of inputs
        self._homes: dict[Hashable, Homes] = {}  # by parameters and shapes of states
        self._failures: OrderedDict[int, str] = OrderedDict()  # by the hash of a key
        self._passed: OrderedDict[int, int] = OrderedDict()  # keys that found no room -> call
        weakref.finalize(self, _release_all, self._recordings).atexit = False

    def __call__(self, *flat: Any) -> list[Any]:
        guard = None if self._order is None else self._order.device_guard()
        if guard is not None:
            with guard:
                return self(*flat)
        with _lock:
            recording = self._find(flat)
            if recording is not None:
                self._events.num_replays += 1
                return recording.replay(flat, self._enter_stream())
        return list(self._run(*flat))

    @property
    def num_recordings(self) -> int:
        """That are held now."""
        return len(self._recordings)

    @property
    def memory_bytes(self) -> int:
        """By which the recordings that are held made their pool grow."""
        return sum(recording.captured.memory_bytes for recording in self._recordings.values())

    def release(self) -> None:
        """Give back all memory; later calls record again."""
        with _lock:
            _release_all(self._recordings)
            self._latest.clear()
            self._homes.clear()
            self._failures.clear()
            self._passed.clear()

    def _find(self, flat: Sequence[Any]) -> Recording | None:
        """The recording of a call, made now if need be; None, and counted, if it must run eagerly."""
        self._num_calls += 1
        inputs = self._places.pick_inputs(flat)
        key = self._places.pick_numbers(flat), tuple([geometry(tensor) for tensor in inputs])
        found = self._latest.get(key)
        if (
            found is None
            or not found.binds(flat)
            or not (self._shapes_are_guarded or found.knows(flat))
            or found.overlaps(inputs)
            or needs_gradients(flat, self._places)
        ):
            found = self._look_up(flat, key)
        if found is not None:
            found.last_call = self._num_calls
        return found

    def _look_up(self, flat: Sequence[Any], key: Hashable) -> Recording | None:
        """As `_find`, with all that a call may differ in looked at."""
        if self._capturer is None:
            self._refuse("there is nothing to record with on this device")
            return None
        obstacle = find_obstacle(flat, self._places)
        if obstacle is not None:
            self._refuse(obstacle)
            return None
        self._order = order_of(self._places.pick_tensors(flat)[0].device)
        self._enter_stream()
        states = self._places.pick_states(flat)
        parameters = _addresses(self._places.pick_parameters(flat))
        kind = key, tuple([geometry(t) for t in self._places.pick_bound(flat)]), parameters
        owner = parameters, _shapes(states)
        reason = ""
        if (kind, _addresses(states)) not in self._recordings:
            reason = self._settle(states, owner)
        full_key = kind, _addresses(states)
        found = self._recordings.get(full_key) or self._record(flat, full_key, owner, reason)
        if found is not None:
            found.recognise(flat)
            self._latest[key] = found
        return found

    def _settle(self, states: Sequence[Tensor], owner: Hashable) -> str:
        """Move states to where recordings bind them, if that is right; why one may have to be made else."""
        homes = self._homes.get(owner)
        if homes is None or all(find_home(state) is not None for state in states):
            return "its numbers, shapes or parameters are new"  # where they lie suits all functions
        if has_returned(states) and len(self._recordings) < self._max_recordings:
            return "its state tensors take turns with others"  # whose moves would cost more
        if not adopt(homes, states):
            return "its state tensors, or those before, share memory with tensors of others"
        self._events.count_adoption(self._name)
        return "its numbers, shapes or parameters are new"

    def _record(
        self, flat: Sequence[Any], key: Hashable, owner: Hashable, reason: str
    ) -> Recording | None:
        """Record a call where its tensors lie; None, and counted, if that fails or there is no room."""
        hashed = hash(key)
        if hashed in self._failures:
            self._refuse(self._failures[hashed])
            return None
        if not self._make_room(hashed):
            self._refuse(f"all {self._max_recordings} recordings are in use", CapacityError)
            return None
        assert self._capturer is not None, "looked up without a capturer"
        homes = homes_where_they_lie(self._places.pick_states(flat))
        try:
            recording = record(self._run, flat, self._places, self._capturer, self._name)
        except RuntimeError as error:
            if self._is_strict and isinstance(error, MidstreamError):
                raise
            reason = f"recording failed: {str(error).partition(chr(10))[0]}"
            _remember(self._failures, hashed, reason)
            self._refuse(reason)
            return None
        if homes is not None:
            self._homes[owner] = recording.homes = homes
        self._recordings[key] = recording
        self._events.count_recording(self._name, reason)
        return recording

    def _make_room(self, hashed: int) -> bool:
        """Whether one more may be made.  At the limit, a key in use takes the place of one that is not."""
        if len(self._recordings) < self._max_recordings:
            return True
        long_ago = self._num_calls - _IN_USE * self._max_recordings
        came_before = self._passed.get(hashed, long_ago) > long_ago
        _remember(self._passed, hashed, self._num_calls)
        if not came_before:
            return False
        for key, recording in sorted(self._recordings.items(), key=lambda item: item[1].last_call):
            if recording.last_call <= long_ago or recording.is_stale():
                self._drop(key, recording)
                return True
        return False

    def _drop(self, key: Hashable, recording: Recording) -> None:
        del self._recordings[key]
        self._latest = {k: kept for k, kept in self._latest.items() if kept is not recording}
        recording.release()
        bound = {kept.homes for kept in self._recordings.values()}
        self._homes = {owner: homes for owner, homes in self._homes.items() if homes in bound}
        self._events.num_releases += 1

    def _refuse(self, reason: str, error: type[MidstreamError] = UnsupportedError) -> None:
        if self._is_strict:
            raise error(
                f"{self._name}: {reason}, expected a call that can be recorded; change the call, or let it "
                "run without a recording with on_unsupported='fallback'"
            )
        self._events.count_eager(self._name, reason)

    def _enter_stream(self) -> int:
        return 0 if self._order is None else self._order.enter()


def _shapes(tensors: Sequence[Tensor]) -> Hashable:
    return tuple([geometry(tensor)[1:] for tensor in tensors])


def _addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(map(Tensor.data_ptr, tensors))


def _remember(memory: OrderedDict[int, Any], key: int, value: Any) -> None:
    memory[key] = value
    memory.move_to_end(key)
    while len(memory) > _REMEMBERED:
        memory.popitem(last=False)


def _release_all(recordings: dict[Hashable, Recording]) -> None:
    for recording in recordings.values():
        recording.release()
    recordings.clear()
