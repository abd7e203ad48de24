"""`Patches`: replaces functions of an engine, and puts them back."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

_MISSING = object()


class Patches:
    """Wraps attributes of classes, or of single objects; `undo` restores the originals, last one first.

    An attribute wrapped again by somebody else is left alone by `undo`: an idle wrapper calls the original. Not
    thread-safe: patch before the engine runs, or while it waits.

    ``guard``: makes a context, from a name, for a callback of `follow` that fails: the exception is raised within. With
    `Canary.guard` none reaches the engine in log mode. None: exceptions pass.
    """

    def __init__(self, guard: Callable[[str], AbstractContextManager[object]] | None = None) -> None:
        self._guard = guard or nullcontext
        self._done: list[tuple[Any, str, Any, Any]] = []

    @property
    def done(self) -> bool:
        """Whether anything is wrapped, and not undone since."""
        return bool(self._done)

    def wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replaces ``owner.name`` by ``make(original)``. On a single object the class's method is shadowed for that
        object only."""
        before = vars(owner).get(name, _MISSING)
        wrapper = make(getattr(owner, name))
        setattr(owner, name, wrapper)
        self._done.append((owner, name, before, wrapper))

    def follow(self, owner: Any, name: str, told: Callable[..., None]) -> None:
        """Calls ``told`` after each call of ``owner.name``, with the result and the same arguments; a class's method
        passes the object first."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            guard, where = self._guard, f"after {name}"

            @functools.wraps(original)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                try:
                    told(result, *args, **kwargs)
                except Exception:
                    # Not entered where nothing fails: that is two more calls in each of an engine's own.
                    with guard(where):
                        raise
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
