"""`StepListener`: companion of one `Canary`'s forwards; `Listeners`: all of them."""

from collections.abc import Callable
from typing import Any

from canary_core.batch import BatchView
from canary_core.runtime.workspace import Failsafe, Switch


class StepListener:
    """Companion of one Canary's forwards: subclass it, override what you need, `Step.add` it.

    Listeners are called in the order added, on the engine's stream unless said otherwise. ``batch`` is the engine's own
    object, as given to `Step.run`; None where there is none. An exception of a listener counts as Canary's own: in log
    mode Canary switches off, in raise mode the exception passes.
    """

    def begin(self, batch: Any) -> None:
        """A forward is issued next. Its view is not made yet."""

    def before(self, batch: Any, view: BatchView | None) -> BatchView | None:
        """A forward is checked next; returns the view to check: ``view``, or one with more in it. On the side stream
        where the forward was issued first (`Overlap.ALL`). ``view`` None: the forward can't be checked."""
        return view

    def after(self, batch: Any, view: BatchView | None) -> None:
        """The forward was issued, and all arrivals it waited for are there. Nothing of the forward is recorded yet."""

    def forget(self, batch: Any) -> None:
        """The forward could not be checked, and may have written any of its slots."""

    def flushed(self) -> None:
        """The engine has emptied its caches: no slot holds anything."""

    def idle(self) -> None:
        """The engine has nothing to run."""

    def close(self) -> None:
        """The Canary is off from now on. Called once."""


METHODS = ("begin", "before", "after", "forget", "flushed", "idle", "close")


class Listeners:
    """Calls the listeners of one Canary, in the order added. An exception of one goes to ``switch``: in log mode the
    others are called all the same."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch
        self.all: tuple[StepListener, ...] = ()
        """In the order of calls."""
        self._calls: dict[str, list[tuple[Failsafe, Callable[..., Any]]]] = {}
        """By method, the listeners that override it."""
        self._find_calls()

    def add(self, listener: StepListener) -> None:
        """Adds ``listener`` after the present ones."""
        self.all += (listener,)
        self._find_calls()

    def begin(self, batch: Any) -> None:
        """A forward is issued next."""
        self._each("begin", batch)

    def before(self, batch: Any, view: BatchView | None) -> BatchView | None:
        """A forward is checked next; returns the view to check, amended by one listener after the other."""
        for guard, before in self._calls["before"]:
            with guard:
                view = before(batch, view)
        return view

    def after(self, batch: Any, view: BatchView | None) -> None:
        """The forward was issued."""
        self._each("after", batch, view)

    def forget(self, batch: Any) -> None:
        """The forward could not be checked."""
        self._each("forget", batch)

    def flushed(self) -> None:
        """The engine has emptied its caches."""
        self._each("flushed")

    def idle(self) -> None:
        """The engine has nothing to run."""
        self._each("idle")

    def close(self) -> None:
        """The Canary is off: each is closed, and there are none from now on. Again: does nothing."""
        closing = self._calls["close"]
        self.all = ()
        self._find_calls()
        for guard, close in closing:
            with guard:
                close()

    def _each(self, method: str, *given: Any) -> None:
        for guard, call in self._calls[method]:
            with guard:
                call(*given)

    def _find_calls(self) -> None:
        for method in METHODS:
            self._calls[method] = [
                (self._switch.guard(f"{type(listener).__name__}.{method}"), getattr(listener, method))
                for listener in self.all
                if getattr(getattr(listener, method), "__func__", None) is not getattr(StepListener, method)
            ]
