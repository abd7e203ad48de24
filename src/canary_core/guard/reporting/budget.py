"""`Budget`: the engine's time that findings may take; `Firsts`: findings told whatever time they take."""

import time
from collections import OrderedDict
from collections.abc import Hashable

SHARE, BURST_S = 0.01, 0.2
"""Share of the time that passes, and seconds at once, for decoding, grouping and telling, in CPU time of the engine's
threads: 30 to 200 µs a finding, by the machine and by the plugins that hear of a finding."""

OWED_S = 0.04
"""Most that is owed. Beyond half of it findings are counted by kind, without a look whether findings repeat."""

FIRST, FEW = 64, 4
"""Findings of a Canary, and of one kind in each source and of each request, that are told whatever is left."""

MOST_SORTS = 65536
"""Sorts of findings remembered; beyond, the oldest is new again."""


class Budget:
    """CPU time ``left`` for findings, in seconds, of all Canaries of a process: refilled by the clock, spent by the
    engine's threads. Two threads at once may lose some µs of it."""

    def __init__(self) -> None:
        self.fill()

    def fill(self) -> None:
        """As at the start of a process."""
        self.left, self._refilled = BURST_S, time.monotonic()

    def refill(self) -> None:
        """Adds the share of the time since the last refill."""
        now = time.monotonic()
        self.left = min(BURST_S, self.left + (now - self._refilled) * SHARE)
        self._refilled = now

    def spend(self, seconds: float) -> None:
        """Takes ``seconds``, and owes `OWED_S` at most."""
        self.left = max(-OWED_S, self.left - seconds)


PROCESS = Budget()
"""The budget of this process."""


class Firsts:
    """Finds the first findings of a Canary, of each kind in each source, and of each kind of each request."""

    def __init__(self) -> None:
        self._any = 0
        self._seen: OrderedDict[Hashable, int] = OrderedDict()

    def among(self, kind: int, place: Hashable, whose: Hashable) -> bool:
        """Whether a finding of ``kind`` at ``place``, of the request ``whose``, is a first one, and counts the
        finding."""
        self._any += 1
        of_place, of_request = self._few((kind, place)), self._few((kind, None, whose))
        return of_place or of_request or self._any <= FIRST

    def _few(self, sort: Hashable) -> bool:
        number = self._seen.get(sort, 0)
        if number < FEW:
            self._seen[sort] = number + 1
            if len(self._seen) > MOST_SORTS:
                self._seen.popitem(last=False)
        return number < FEW
