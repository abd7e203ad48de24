"""`Recomputes`: has an engine's scheduler compute requests again by internal ones, for workers to compare both."""

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from canary_adapters.internal_requests import (
    LEAST_TOKENS,
    PREFIX,
    Internal,
    InternalRequests,
    RecomputePair,
    Running,
    named_like,
)
from canary_adapters.lessons import LESSON, LESSON_TOKENS, Lessons
from canary_adapters.parked_prefixes import ALL_PARKED, LOST_ADAPTER, PARKED, PROOF_SHARE
from canary_adapters.parked_proofs import NO_ROOM, ParkedProofs, too_little
from canary_adapters.sheltered import Sheltered
from canary_adapters.touched_requests import TouchedRequests
from canary_core import Event, emit
from canary_core.config.values import RecomputeShare
from canary_core.errors import error_text
from canary_core.recomputer import recompute_starved

TEACHING = 48
"""Untouched requests chosen before touched ones: until the noise is known nothing else is judged."""

EVERY = 4
"""Steps between two looks for a request to choose."""

GONE = "it ended, or was preempted, before it was computed again"

NO_CHOICE = {
    "recompute_no_room": "requests of users wait, or fill the batch or the pool: no second one fits in beside them",
    "recompute_too_short": f"without a hit or a preemption they must have {LEAST_TOKENS} decoded tokens",
    NO_ROOM: "some of what ended requests left has no room: the prefix cache fills the pool, and a proof takes no more"
    f" than {PROOF_SHARE:.0%} of that, and nothing of the prefix itself",
    "parked_no_adapter": f"of what ended requests left: {LOST_ADAPTER}",
}
"""Reasons for which nothing is computed again, by the name of the counter."""


UNKNOWN = "no request of that name has KV in the cache just now"
SEVERAL = "several running requests have names that begin so: give the whole name of one"


class Recomputes:
    """One scheduler's internal requests, one at a time, and a lesson beside. Requests asked for by `want` come first;
    then, for a ``share`` of all computed tokens, chosen running requests: first, once the noise is known, requests
    touched by a hit, an arrival, a preemption, an adapter, media or embeddings. With nobody to serve, for a ``share``
    of the time, the least recently proven parked prefix. A number of verdicts in the place of a share: all computed
    tokens, until so many computations after `TEACHING` ones.

    Where workers lack noise for a verdict (`LESSON`) and no fresh request runs that could teach it, `Lessons` are begun
    and computed again, charged to the share; without a share, too.

    Under pressure internal requests give way: they end where requests of users wait, a lesson after a batch that left
    one waiting.

    clock: seconds of the host.
    """

    def __init__(
        self,
        engine: InternalRequests,
        touched: TouchedRequests,
        share: RecomputeShare | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._touched = touched
        wanted = share or RecomputeShare()
        self._share = 1.0 if wanted.verdicts else wanted.share
        self._left = TEACHING + wanted.verdicts if wanted.verdicts else None
        self._proofs = ParkedProofs(engine, clock)
        self._lessons = Lessons(engine)
        self._wanted: deque[str] = deque()
        self._one: Internal | None = None
        self._numbers = itertools.count(1)
        self._credit, self._step, self._taught = 0.0, 0, 0
        self._counts: Counter[str] = Counter()
        self._starved: Counter[bool] = Counter()
        self._verified: dict[str, int] = {}
        self._missed: list[RecomputePair] = []
        self.live: set[str] = set()
        """Internal requests that the engine may still know."""
        self._shelter = Sheltered(self._failed, "requests are not computed again")

    def want(self, request: str) -> None:
        """A caller asks for ``request``; one computation answers all that ask meanwhile. Or workers for a `LESSON`."""
        if request == LESSON:
            self._lessons.want()
            return
        one = self._one
        if request not in self._wanted and not (one is not None and one.asked and one.target.name == request):
            self._wanted.append(request)

    def before(self) -> None:
        """The scheduler is about to make a batch."""
        one = self._one
        if one is not None:
            if self._engine.crowded(one.name):
                self._give_way()
            else:
                why = self._ends(one)
                if why is not None:
                    self._give_up(why)
        if self._lessons.hindered(made=False):
            self.end_lesson()
        self._begin_wanted()
        if self._one is None and self._step % EVERY == 0:
            chosen = self._lessons.ready() or (self._choice() if self._may_choose else None)
            if chosen is not None:
                self._begin(chosen.name, asked=False)

    def after(self, tokens: int) -> list[RecomputePair]:
        """The scheduler has made a batch of ``tokens`` tokens; gives the messages to send along."""
        self._step += 1
        if tokens and self._one is None:
            self._proofs.rest(self._share)
        if self._share:
            self._credit = min(self._credit + self._share * tokens, 0.0)
        if self.live:
            self.live = {name for name in self.live if self._engine.computed(name) is not None} | self._current
        one = self._one
        if one is not None:
            computed = self._engine.computed(one.name)
            why = GONE if computed is None else self._ends(one)
            if why is not None:
                self._give_up(why)
            elif not computed and one.waited:
                self._give_way()
            elif computed is not None and computed >= one.target.tokens:
                self._one = None
                self._missed.append(self._pair(one))
                self._count(one)
                if one.target.name == self._lessons.name:
                    self._lessons.compared()
            one.waited = True
        if self._lessons.hindered(made=True):
            self.end_lesson()
        return self.missed()

    def give_way(self) -> None:
        """Ends the present internal requests, for somebody who comes. Whoever asked waits on."""
        self._give_way()
        self.end_lesson()

    def counted(self) -> dict[str, int]:
        """Counts for `Canary.stats` since the last call, by name."""
        parked = self._engine.parked
        counts: dict[str, int] = {}
        if self._counts:
            counts, self._counts = dict(self._counts), Counter()
        return counts if isinstance(parked, str) else counts | parked.counted()

    def missed(self) -> list[RecomputePair]:
        """The messages to send along since the last call."""
        missed, self._missed = self._missed, []
        return missed

    def idle(self) -> float | None:
        """The scheduler has nothing to do. Begins a wanted request, or a parked prefix. Returns the seconds until the
        next call, None for never."""
        self._proofs.rest(self._share)
        self._begin_wanted()
        while self._one is None and self._wanted:
            self._missed.append(RecomputePair(self._wanted.popleft(), why="it is too long for the room", asked=True))
            self._begin_wanted()
        seconds = self._proofs.waits() if self._one is None and self._share else None
        if seconds != 0.0:
            return seconds
        chosen, lacks = self._proofs.begin()
        if chosen is not None:
            self._begin(f"{PARKED}{chosen.name}", asked=False)
        if lacks is not None:
            self._starves(lacks, parked=True)
        elif chosen is not None:
            self._starved[True] = 0
        return None

    def stop(self, why: str) -> None:
        """Nothing is chosen any more; whoever has asked is told ``why``."""
        one, self._one = self._one, None
        if one is not None and one.asked:
            self.want(one.target.name)
        self._missed += [RecomputePair(request, why=why, asked=True) for request in self._wanted]
        self._share = 0.0
        self._lessons.stop()
        self._wanted.clear()

    def sheltered(self) -> Sheltered:
        """A context of code of ours on the scheduler's thread. After an exception nothing is computed again any more,
        and the engine's `InternalRequests.failed` is called; none reaches the scheduler."""
        return self._shelter

    def _failed(self, where: str, error: Exception) -> None:
        reason = f"{where}: {error_text(error)}"
        self.stop(reason)
        self._engine.parked = reason
        emit(Event("hooks_left_out", "error", {"reason": reason}))
        self._engine.failed()

    def close(self) -> None:
        """Ends all internal requests."""
        if self._one is not None:
            self._give_up("recompute was switched off")
        self.end_lesson()

    @property
    def _current(self) -> set[str]:
        one = None if self._one is None else self._one.name
        return {name for name in (one, self._lessons.name) if name is not None}

    @property
    def _may_choose(self) -> bool:
        return self._credit >= 0 if self._share else self._lessons.wanted

    def _choice(self) -> Running | None:
        running = self._engine.running()
        names = {one.name for one in running}
        self._verified = {name: tokens for name, tokens in self._verified.items() if name in names}
        due = [one for one in running if one.tokens - self._verified_tokens(one) >= LEAST_TOKENS]
        fit = [one for one in due if self._engine.room(one.name)]
        teaching = self._taught < TEACHING
        # Of what nothing touched only a request that has decoded took two ways to the same KV.
        fresh = [one for one in fit if not self._touched.of(one.name) and one.decoded >= LEAST_TOKENS]
        touched = [one for one in fit if one.beyond_tokens or self._touched.of(one.name)]
        coming = any(not self._touched.of(one.name) for one in running)
        if fit and not fresh and self._lessons.due(coming, bool(touched)):
            self._begin_lesson(fit)
        if self._lessons.name is not None and not fresh:
            return None
        asked_only = not self._share
        for some in (fresh,) if asked_only else (fresh, touched) if teaching else (touched, fresh):
            if some:
                return min(some, key=self._verified_tokens)
        if due and not asked_only:
            self._starves("recompute_too_short" if fit else "recompute_no_room")
        return None

    def _begin_lesson(self, fit: Sequence[Running]) -> None:
        """With the tokens of one of ``fit``."""
        target, name = min(fit, key=self._verified_tokens), f"{PREFIX}{next(self._numbers)}"
        if not self._lessons.begin(name, target):
            self._counts["recompute_no_lesson"] += 1
            return
        self.live.add(name)
        self._verified[target.name] = target.tokens
        self._credit -= target.tokens + LESSON_TOKENS
        self._counts["recompute_lessons"] += 1

    def _verified_tokens(self, one: Running) -> int:
        return self._verified.get(one.name, 0)

    def end_lesson(self) -> None:
        """Ends the present lesson, as where no request of a user is left: the engine rests as it would."""
        if self._lessons.name is not None:
            self._lessons.give_up(user_first=bool(self._share))
            self._counts["recompute_lessons_ended"] += 1

    def _starves(self, how: str, parked: bool = False) -> None:
        """Nothing was chosen, though there are requests that were not computed again; or a prefix was passed over. how:
        the counter."""
        self._counts[how] += 1
        self._starved[parked] += 1
        told = recompute_starved(self._starved[parked], NO_CHOICE[how])
        if told is not None:
            emit(told)

    def _begin_wanted(self) -> None:
        while self._one is None and self._wanted:
            request = self._wanted[0]
            if request == ALL_PARKED:
                self._wanted.popleft()
                listed = self._proofs.listed()
                self._missed.append(listed)
                for name in listed.names:
                    self.want(name)
            elif self._engine.find(request) is not None and not self._engine.room(request):
                # Later, in a quieter engine.
                break
            else:
                self._begin(self._wanted.popleft(), asked=True)

    def _begin(self, request: str, asked: bool) -> None:
        parked = self._proofs.find(request)
        if isinstance(parked, str):
            self._missed.append(RecomputePair(request, why=parked, asked=asked))
            return
        if parked is not None and parked.left() < LEAST_TOKENS:
            self._missed.append(too_little(parked, request, asked=asked))
            return
        target = self._engine.find(request)
        if target is None or not target.tokens:
            held = "it has no KV in the cache just now"
            unknown = target is None
            pair = self._unknown(request, asked) if unknown else RecomputePair(request, why=held, asked=asked)
            self._missed.append(pair)
            return
        name = f"{PREFIX}{next(self._numbers)}"
        why = self._engine.begin(name, request, target.tokens)
        self._verified[request] = target.tokens
        if why is not None:
            self._missed.append(RecomputePair(request, why=why, asked=asked))
            return
        self._one = Internal(name, target, asked, parked=parked)
        self._lessons.began_other()
        self.live.add(name)
        if not asked and parked is None:
            self._credit -= target.tokens

    def _unknown(self, request: str, asked: bool) -> RecomputePair:
        """There is no such request: with names that may have been meant."""
        running = [one.name for one in self._engine.running()]
        alike = named_like(request, running)
        return RecomputePair(request, why=SEVERAL if alike else UNKNOWN, asked=asked, names=alike or running)

    def _ends(self, one: Internal) -> str | None:
        """Why nothing comes of it any more, None if it goes on."""
        if one.parked is not None:
            return self._engine.hindered(one.parked) if one.parked.left() >= LEAST_TOKENS else GONE
        now = self._engine.find(one.target.name)
        return None if now is not None and now.life == one.target.life else GONE

    def _give_way(self) -> None:
        """For now. Whoever asked waits on."""
        one, self._one = self._one, None
        if one is not None:
            self._engine.end(one.name)
            if one.asked:
                self._wanted.appendleft(one.target.name)
            else:
                self._missed.append(RecomputePair(one.target.name, one.name, why="other requests waited"))

    def _give_up(self, why: str) -> None:
        one, self._one = self._one, None
        if one is not None:
            self._engine.end(one.name)
            if one.parked is not None and why == GONE:
                self._missed.append(too_little(one.parked, one.target.name, one.name, one.asked))
            else:
                self._missed.append(RecomputePair(one.target.name, one.name, why=why, asked=one.asked))

    def _count(self, done: Internal) -> None:
        """After the last one of a number nothing is chosen any more."""
        if done.parked is None:
            self._starved[False] = 0
        if self._left is not None and not done.asked:
            self._left -= 1
            if self._left <= 0:
                self._share = 0.0

    def _pair(self, one: Internal) -> RecomputePair:
        if one.parked is not None:
            return self._proofs.pair(one, one.parked)
        target, touches = one.target, self._touched.of(one.target.name)
        held, own = self._engine.blocks(target.name), self._engine.blocks(one.name)
        pair = RecomputePair(target.name, one.name, target.tokens, target.decoded, held, own, touches, asked=one.asked)
        self._taught += pair.teaches
        return pair
