"""Checkpoints under way: keys whose states a step that is planned or in flight will publish."""

from __future__ import annotations

from collections.abc import Sequence


class Expectations:
    """Owners are numbers of requests in slots (epochs).  A key is expected while it can still be kept.

    >>> expected = Expectations()
    >>> expected.add(5, key=71, position=8)
    >>> expected.beyond(0, [70, 71, 72], max_tokens=12, block=4)
    8
    """

    def __init__(self) -> None:
        self._position_of: dict[int, dict[int, int]] = {}  # owner -> key -> position
        self.num_ended = 0

    def add(self, owner: int, key: int, position: int) -> None:
        """A step will publish the state after the `position` tokens whose key this is."""
        self._position_of.setdefault(owner, {})[key] = position

    def end(self, owner: int, keys: Sequence[int] | None = None) -> None:
        """What `owner` was to publish under these keys, or at all, is published or never will be."""
        expected = self._position_of.get(owner)
        if expected is None:
            return
        for key in list(expected) if keys is None else keys:
            if expected.pop(key, None) is not None:
                self.num_ended += 1
        if not expected:
            del self._position_of[owner]

    def clear(self) -> None:
        """Nothing is under way."""
        self._position_of.clear()

    def __contains__(self, key: int) -> bool:
        return any(key in expected for expected in self._position_of.values())

    def beyond(self, position: int, keys: Sequence[int], max_tokens: int, block: int) -> int:
        """The longest prefix of a prompt, longer than `position`, whose state is under way; or 0.

        `keys`: of the prompt's blocks of `block` tokens; `max_tokens`: no prefix is longer.
        """
        best, limit = 0, min(max_tokens, len(keys) * block)
        for expected in self._position_of.values():
            for key, found in expected.items():
                inside = max(position, best) < found <= limit
                if inside and keys[found // block - 1] == key:
                    best = found
        return best
