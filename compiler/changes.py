"""Every attribute that midstream sets on a user's objects, with the way back."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from midstream.errors import ConfigError

# on a changed model: the method that undoes all changes to it; a WeakMethod where the model must not hold it
WAY_BACK = "_midstream_way_back"
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


def restore(model: Any) -> None:
    """Give a model back as transformers built it, where the handle that would do so is lost.

    What `compile` or `lower` did is undone, and an `Engine` that serves the model is closed.  Nothing
    happens to a model that is as it was.

    Raises:
        ConfigError: not a model.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"midstream.restore: {type(model).__name__} {str(model)[:60]!r}, expected the model that was "
            "passed to compile, lower or Engine; a handle of theirs has undo() or close()"
        )
    way_back = vars(model).get(WAY_BACK)
    if isinstance(way_back, weakref.WeakMethod):
        way_back = way_back()
    if way_back is not None:
        way_back()
