"""Every attribute that lowering sets on a user's objects, with the way back."""

from __future__ import annotations

from typing import Any

_MISSING = object()  # the attribute was not set on the object itself


class Changes:
    """A log of attribute changes.  `undo` restores them, newest first, and may be called again."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, target: Any, name: str, value: Any) -> None:
        """Set an instance attribute and remember what `target` itself held under that name."""
        self._before.append((target, name, vars(target).get(name, _MISSING)))
        setattr(target, name, value)

    def undo(self) -> None:
        """Restore every target.  Attributes that did not exist are deleted again."""
        while self._before:
            target, name, value = self._before.pop()
            if value is _MISSING:
                delattr(target, name)
            else:
                setattr(target, name, value)
