"""`Sampler`: which request is computed again, and when."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from canary_core.config.values import RecomputeShare
from canary_core.recomputer import Outline
from canary_core.watchers.recompute.noise import WINDOW_TOKENS

LOOK_S = 0.1
"""Seconds from one search without a result to the next."""
PATIENCE_S = 30.0
"""Longest time in a row in which nothing is computed because users' requests wait: a server that is always full would
never be looked at."""
MOST_KNOWN = 4096
"""Requests whose last look is remembered."""


class TimeShare:
    """The share of the engine thread's time for all that is computed again without being asked for: after each work
    there is a rest so long that all work is at most the share of the time, whatever happens between. A ``share`` of 0
    has no rests.

    clock: seconds of the host.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._share = share
        self._clock = clock
        self._rest_until = clock()

    @property
    def rests(self) -> bool:
        """Whether the share is used up for now."""
        return self._clock() < self._rest_until

    def spent(self, seconds: float) -> None:
        """A work of so many seconds has just ended."""
        if self._share:
            self._rest_until = self._clock() + seconds * (1 / self._share - 1)


class Sampler:
    """Picks requests: first those that a hit, a fork, an arrival or a preemption touched (the others, while the noise
    is not known), then those with the most tokens that were not looked at. A request comes again once it has twice as
    many tokens as then.

    budget: the share of the time, which others may use up, too. clock: seconds of the host, of the engine's thread.
    """

    def __init__(self, share: RecomputeShare, clock: Callable[[], float] = time.perf_counter) -> None:
        self._share = share
        self._clock = clock
        self.budget = TimeShare(share.share, clock)
        self._rest_until = clock()
        self._waits_since: float | None = None
        self._seen: OrderedDict[str, int] = OrderedDict()
        self.verdicts = 0
        self.starved = 0
        """Searches in a row that found nothing but requests that were never looked at, and can't be yet."""

    @property
    def over(self) -> bool:
        """Whether there is nothing to do, now and later."""
        return not self._share.share and self.verdicts >= self._share.verdicts

    @property
    def rests(self) -> bool:
        """Whether the share is used up for now."""
        return self.over or self.budget.rests or self._clock() < self._rest_until

    def gives_way(self, pressed: bool) -> bool:
        """Whether to wait for others. At most `PATIENCE_S` in a row."""
        now = self._clock()
        if not pressed:
            self._waits_since = None
            return False
        if self._waits_since is None:
            self._waits_since = now
        if now - self._waits_since < PATIENCE_S:
            self.rest()
            return True
        return False

    def rest(self) -> None:
        """There is nothing to do until the next search."""
        self._rest_until = self._clock() + LOOK_S

    def pick(self, requests: Iterable[tuple[str, Outline]], fresh: bool) -> str | None:
        """The next one. ``fresh``: rather one that nothing touched."""
        best, most, unseen = None, (-1, 0), False
        for name, outline in requests:
            unseen = unseen or name not in self._seen
            seen = self._seen.get(name, 0)
            if outline.tokens < seen:
                # Another request of the same name.
                seen = 0
            due = max(2 * seen, WINDOW_TOKENS)
            rank = (int(outline.touched != fresh), outline.tokens - seen)
            if outline.tokens >= due and rank > most:
                best, most = name, rank
        self.starved = self.starved + unseen if best is None else 0
        if best is None:
            self.rest()
        return best

    def looked_at(self, request: str, tokens: int, seconds: float, verdict: bool) -> None:
        """It took so long; ``verdict``: and there is one."""
        self._seen[request] = tokens
        self._seen.move_to_end(request)
        if len(self._seen) > MOST_KNOWN:
            self._seen.popitem(last=False)
        self.verdicts += verdict
        self._waits_since = None
        self.budget.spent(seconds)
