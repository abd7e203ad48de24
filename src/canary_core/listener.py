"""`StepListener`: what accompanies the forwards of one `Canary`."""

from typing import Any

from canary_core.batch import BatchView


class StepListener:
    """What accompanies the forwards of one Canary: subclass it, override what you need, `Step.add` it.

    Listeners are called in the order in which they were added, on the engine's stream unless said otherwise. ``batch``
    is the engine's own object, as `Step.run` was given it; None where there is none. An exception of a listener is one
    of Canary's own: it switches Canary off in log mode, and is raised in raise mode.
    """

    def begin(self, batch: Any) -> None:
        """A forward is issued next. Its view is not made yet."""

    def before(self, batch: Any, view: BatchView | None) -> BatchView | None:
        """A forward is checked next; gives the view to check: ``view``, or one that says more. On the side stream where
        the forward was issued first (`Overlap.ALL`). ``view`` None: it can't be checked."""
        return view

    def after(self, batch: Any, view: BatchView | None) -> None:
        """The forward was issued, and all that it waited for has arrived. Nothing of it is recorded yet."""

    def forget(self, batch: Any) -> None:
        """The forward could not be checked, and may have written any of its slots."""

    def flushed(self) -> None:
        """The engine has emptied its caches: no slot holds anything."""

    def idle(self) -> None:
        """The engine has nothing to run."""

    def close(self) -> None:
        """The Canary is off from now on. Called once."""
