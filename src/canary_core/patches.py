"""`Patches`: replaces functions of an engine, and puts them back."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

_MISSING = object()


class Patches:
    """Wraps attributes of classes, or of single objects; `undo` restores them, last one first.

    Where somebody else has wrapped ours since, `undo` leaves the attribute alone: a wrapper that has nothing to do any
    more calls the original. Not thread-safe: patch before the engine runs, or where it waits.

    ``guard``: a context for each call of what `follow` was given, by what is followed; with `Canary.guard` no exception
    of it reaches the engine in log mode. None: they do.
    """

    def __init__(self, guard: Callable[[str], AbstractContextManager[object]] | None = None) -> None:
        self._guard = guard or nullcontext
        self._done: list[tuple[Any, str, Any, Any]] = []

    @property
    def done(self) -> bool:
        """Whether anything is wrapped, and not undone since."""
        return bool(self._done)

    def wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replaces ``owner.name`` by ``make(original)``. On an object that shadows the class's method for this object
        only."""
        before = vars(owner).get(name, _MISSING)
        wrapper = make(getattr(owner, name))
        setattr(owner, name, wrapper)
        self._done.append((owner, name, before, wrapper))

    def follow(self, owner: Any, name: str, told: Callable[..., None]) -> None:
        """After each call of ``owner.name``, calls ``told`` with its result and the very arguments; those of a class's
        method begin with the object."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                with self._guard(f"after {name}"):
                    told(result, *args, **kwargs)
                return result

            return wrapper

        self.wrap(owner, name, make)

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
