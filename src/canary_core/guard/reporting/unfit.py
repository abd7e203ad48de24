"""`UnfitRows`: tells that records came of which nothing can be judged."""

from collections.abc import Callable, Sequence

from canary_core.events import Event
from canary_core.records import Counter


class UnfitRows:
    """One ``other_keys`` event, when the first slots have come with records of other keys, or of another layout. How
    many there are is in the counters (`Counter.UNFIT_ROWS`)."""

    def __init__(self, tell: Callable[[Event], object]) -> None:
        self._tell = tell
        self._told = False

    def see(self, counters: Sequence[int]) -> None:
        """``counters``: those of a read."""
        slots = counters[Counter.UNFIT_ROWS]
        if slots and not self._told:
            from canary_core.ops.fingerprint_keys import other_keys

            self._told = True
            self._tell(other_keys("records", slots))
