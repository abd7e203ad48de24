"""`Agreement`: the facts by which ranks have requests computed again, the same on all of them at each turn."""

import time
from collections.abc import Sequence

from canary_sglang.actions.ranks import Ranks

AGREE_EVERY = 4
"""Turns between two exchanges, as many as a request or an end waits at least."""

MICROSECONDS = 1e6


class Agreement:
    """Of one scheduler's `Ranks`. Schedulers of all ranks make the same batches from the same requests and slots, so
    internal requests begin and end alike, unless a decision depends on a fact known to a single rank: an ask there, the
    rank's clock, the end of the rank's Canary. Such facts go through `turn`.

    As with `Quarantine`, one word is asked for in every `AGREE_EVERY`-th turn and read in the next such turn, so nobody
    waits. Only after a word do ranks exchange the facts themselves. A single rank agrees at once.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._began = time.monotonic()
        self._now = 0.0
        self._turn = 0
        self._wanted: list[str] = []

    def clock(self) -> float:
        """Seconds; over ranks the latest time of all ranks at an exchange up to two exchanges ago."""
        return time.monotonic() if self.ranks.size == 1 else self._now

    def idles(self) -> bool:
        """Whether an idle scheduler may look at the `clock` in this turn: over ranks in every other exchange, so that
        work since the last look is in the time."""
        return self.ranks.size == 1 or self._turn % (2 * AGREE_EVERY) == 0

    def turn(self, wanted: Sequence[str], end: str | None) -> tuple[Sequence[str], Sequence[str]]:
        """One turn of the scheduler's loop, on every rank. ``wanted``: requests asked for on this rank. end: why
        this rank can't go on; None if it can. Returns both of all ranks."""
        if self.ranks.size == 1:
            return wanted, [] if end is None else [end]
        self._turn += 1
        self._wanted += wanted
        if self._turn % AGREE_EVERY:
            return [], []
        said: tuple[Sequence[str], Sequence[str]] = [], []
        if self.ranks.anybody_had():
            own = [(True, name) for name in self._wanted] + ([] if end is None else [(False, end)])
            told, self._wanted = self.ranks.union(own), []
            said = [name for wants, name in told if wants], [reason for wants, reason in told if not wants]
        self._now = max([self._now * MICROSECONDS, *self.ranks.largest()]) / MICROSECONDS
        if not said[1]:
            now = int((time.monotonic() - self._began) * MICROSECONDS)
            self.ranks.ask(bool(self._wanted) or end is not None, now)
        return said
