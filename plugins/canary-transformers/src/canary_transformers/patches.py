"""`Patches`: replaces functions of the engine, and puts them back."""

from collections.abc import Callable
from typing import Any

_MISSING = object()


class Patches:
    """Wraps attributes of classes, or of single objects; `undo` restores them, last one first.

    A wrapper is made by ``make(original)``. Where somebody else has wrapped ours since, `undo` leaves the attribute
    alone: what we were for is gone by then, and the wrapper only calls on.
    """

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []

    def wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replaces ``owner.name``. On an object that shadows the class's method for this object only."""
        before = vars(owner).get(name, _MISSING)
        wrapper = make(getattr(owner, name))
        setattr(owner, name, wrapper)
        self._done.append((owner, name, before, wrapper))

    def undo(self) -> None:
        """Restores everything; again: does nothing."""
        while self._done:
            owner, name, before, wrapper = self._done.pop()
            if vars(owner).get(name) is not wrapper:
                continue
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
