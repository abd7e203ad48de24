"""`Agreement`: the facts by which ranks have requests computed again, the same on all of them at each turn."""

import time
from collections.abc import Sequence

from canary_sglang.actions.ranks import Ranks

AGREE_EVERY = 4
"""Turns between two exchanges, as many as a request or an end waits at least."""

MICROSECONDS = 1e6


class Agreement:
    """Of one scheduler's `Ranks`. Their schedulers make the same batches from the same requests and slots, so internal
    requests begin and end alike on all, unless a decision depends on a fact that a single rank knows: who has asked
    there, that rank's clock, and an end of that rank's Canary. These go through `turn`.

    As with `Quarantine`, one word is asked for in every `AGREE_EVERY`-th turn and read in the next of these, so that
    nobody waits. Only after a word do ranks exchange what there is to say. A single rank agrees with itself at once.
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
        time of the work since the last look is in."""
        return self.ranks.size == 1 or self._turn % (2 * AGREE_EVERY) == 0

    def turn(self, wanted: Sequence[str], end: str | None) -> tuple[Sequence[str], Sequence[str]]:
        """One turn of the scheduler's loop, on every rank. ``wanted``: requests asked for on this rank. end: the reason
        for which this rank can't go on, as long as there is one. Returns both of all ranks."""
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
