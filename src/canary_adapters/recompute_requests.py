"""`Recomputes`: has an engine's scheduler compute requests again by internal ones, for workers to compare both."""

import itertools
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from canary_adapters.parked_prefixes import ALL_PARKED, PARKED, GroupBlocks, ParkedPrefix, ParkedPrefixes
from canary_adapters.touched_requests import TouchedRequests
from canary_core import Event, Touch, emit
from canary_core.config.values import RecomputeShare
from canary_core.recomputer import STARVED_LOOKS

PREFIX = "canary-recompute-"
"""Internal requests are called so."""

LEAST_TOKENS = 32
"""Of a request to be computed again without being asked for, and of its decoded part to teach noise: fewer have no
verdict. So many more must be there until the same request is chosen again."""

TEACHING = 48
"""Untouched requests chosen before touched ones: until the noise is known nothing else is judged."""

EVERY = 4
"""Steps between two looks for a request to choose."""

GONE = "it ended, or was preempted, before it was computed again"

UNKNOWN = (
    "nothing is remembered that it left in the prefix cache: it still runs, never did, left no whole block there, or "
    "too many requests have ended since"
)
NOT_REMEMBERED = "what requests leave in the prefix cache is not remembered here: {why}; verify a request while it runs"

NO_CHOICE = {
    "recompute_no_room": "requests of users wait, or fill the batch or the pool: no second one fits in beside them",
    "recompute_too_short": f"without a hit or a preemption they must have {LEAST_TOKENS} decoded tokens",
    "parked_no_room": "the prefix cache fills the pool, and an idle engine evicts nothing of it for a proof",
}
"""Reasons for which nothing is computed again, by the name of the counter."""

REST_S = 0.1
"""Least time between two parked prefixes computed again by an idle engine without being asked for."""


def recompute_off(reason: str) -> Event:
    """``CANARY_RECOMPUTE`` is on, and nothing is computed again."""
    return Event("recompute_off", "warning", {"reason": reason})


@dataclass(frozen=True, slots=True)
class Running:
    """A running request. tokens: those with KV that the host knows; decoded: how many of these one by one. life:
    another number after each preemption."""

    name: str
    tokens: int
    decoded: int
    life: int


@dataclass(frozen=True, slots=True)
class RecomputePair:
    """A message to the workers: with the forward of the same message the internal request ``again`` has computed the
    first ``tokens`` tokens of ``request``. Blocks of both during that forward: ``held`` and ``own``. why: the
    reason why nothing can be compared, None if there is none. asked: whether a caller waits for the answer. decoded: as
    of `Running`. parked, content: of a parked prefix, named `PARKED` and the request, the number of tokens at the end
    of the request, and the ids of ``tokens``; more are gone. names: in answer to the request `ALL_PARKED`.
    """

    request: str
    again: str = ""
    tokens: int = 0
    decoded: int = 0
    held: GroupBlocks = ()
    own: GroupBlocks = ()
    touches: tuple[Touch, ...] = ()
    why: str | None = None
    asked: bool = False
    parked: int | None = None
    content: Sequence[int] = ()
    names: Sequence[str] = ()


class InternalRequests(ABC):
    """The part of an engine's scheduler used by recompute. Called on the scheduler's own thread, between two batches
    in the making.

    parked: the prefixes of ended requests, known to all methods by `PARKED` and the request's name; or the reason for
    none.
    """

    parked: ParkedPrefixes | str = "of this engine Canary remembers running requests only"

    def prefix(self, name: str) -> ParkedPrefix | None:
        """A remembered prefix by `PARKED` and the request's name; None for any other name."""
        if isinstance(self.parked, str) or not name.startswith(PARKED):
            return None
        return self.parked.get(name.removeprefix(PARKED))

    @abstractmethod
    def running(self) -> Sequence[Running]:
        """Requests of users with KV."""

    @abstractmethod
    def find(self, name: str) -> Running | None:
        """One of `running`, None for no such request."""

    @abstractmethod
    def room(self, request: str) -> bool:
        """Whether no request waits, and a second ``request`` would fit in beside all others."""

    def spare(self, request: str) -> bool:
        """Whether there is room for a parked prefix in blocks without use for the prefix cache."""
        return False

    @abstractmethod
    def begin(self, name: str, request: str, tokens: int) -> str | None:
        """Queues an internal request ``name`` with the first ``tokens`` tokens of ``request``: last in line, of one new
        token, never read from the prefix cache and never kept there. Returns the reason why not, None for done."""

    @abstractmethod
    def computed(self, name: str) -> int | None:
        """Number of tokens of an internal request computed with the last batch made; None after the end of the
        request."""

    @abstractmethod
    def crowded(self, name: str) -> bool:
        """Whether requests of users wait, or would go first, for the seat and blocks of an internal request."""

    @abstractmethod
    def blocks(self, name: str) -> GroupBlocks:
        """The blocks of any request during the last batch made."""

    @abstractmethod
    def end(self, name: str) -> None:
        """Ends an internal request in any state."""


@dataclass(slots=True)
class _One:
    name: str
    target: Running
    asked: bool
    waited: bool = False
    parked: ParkedPrefix | None = None


class Recomputes:
    """One scheduler's internal requests, one at a time. Requests asked for by `want` come first; then, for a ``share``
    of all computed tokens, chosen running requests: first, once the noise is known, requests touched by a hit, an
    arrival or a preemption. With nobody to serve, for a ``share`` of the time, the least recently proven parked prefix.
    A number of verdicts in the place of a share: all computed tokens, until so many computations after `TEACHING` ones.

    Under pressure an internal request gives way at once: it ends where requests of users wait.

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
        self._clock = clock
        self._rest_until = 0.0
        self._idle_since: float | None = None
        self._wanted: deque[str] = deque()
        self._one: _One | None = None
        self._numbers = itertools.count(1)
        self._credit, self._step, self._taught, self._starved = 0.0, 0, 0, 0
        self._counts: Counter[str] = Counter()
        self._verified: dict[str, int] = {}
        self._missed: list[RecomputePair] = []
        self.live: set[str] = set()
        """Internal requests that the engine may still know."""

    def want(self, request: str) -> None:
        """A caller asks for ``request``; one computation answers all that ask meanwhile."""
        one = self._one
        if request not in self._wanted and not (one is not None and one.asked and one.target.name == request):
            self._wanted.append(request)

    def before(self) -> None:
        """The scheduler is about to make a batch."""
        one = self._one
        if one is not None:
            if self._engine.crowded(one.name):
                self._give_way()
            elif not self._goes_on(one):
                self._give_up(GONE)
        self._begin_wanted()
        if self._one is None and self._share and self._credit >= 0 and self._step % EVERY == 0:
            chosen = self._choice()
            if chosen is not None:
                self._begin(chosen.name, asked=False)

    def after(self, tokens: int) -> list[RecomputePair]:
        """The scheduler has made a batch of ``tokens`` tokens; gives the messages to send along."""
        self._step += 1
        if tokens and self._one is None:
            self._rest()
        if self._share:
            self._credit = min(self._credit + self._share * tokens, 0.0)
        if self.live:
            self.live = {name for name in self.live if self._engine.computed(name) is not None} | self._current
        one = self._one
        if one is not None:
            computed = self._engine.computed(one.name)
            if not self._goes_on(one) or computed is None:
                self._give_up(GONE)
            elif not computed and one.waited:
                self._give_way()
            elif computed >= one.target.tokens:
                self._one = None
                self._missed.append(self._pair(one))
                self._count(one)
            one.waited = True
        return self.missed()

    def give_way(self) -> None:
        """Ends the present internal request, for somebody who comes. Whoever asked waits on."""
        self._give_way()

    def counted(self) -> dict[str, int]:
        """Counts for `Canary.stats` since the last call, by name."""
        parked = self._engine.parked
        counts, self._counts = self._counts, Counter()
        return {**counts, **({} if isinstance(parked, str) else parked.counted())}

    def missed(self) -> list[RecomputePair]:
        """The messages to send along since the last call."""
        missed, self._missed = self._missed, []
        return missed

    def idle(self) -> float | None:
        """The scheduler has nothing to do. Begins a wanted request, or a parked prefix. Returns the seconds until the
        next call, None for never."""
        self._rest()
        self._begin_wanted()
        while self._one is None and self._wanted:
            self._missed.append(RecomputePair(self._wanted.popleft(), why="it is too long for the room", asked=True))
            self._begin_wanted()
        parked = self._engine.parked
        if self._one is not None or not self._share or isinstance(parked, str) or not parked.names():
            return None
        rest = self._rest_until - self._clock()
        if rest > 0:
            return rest
        chosen = self._least_proven(parked)
        self._rest_until = self._clock() + REST_S
        if chosen is not None:
            self._idle_since = self._clock()
            self._begin(f"{PARKED}{chosen.name}", asked=False)
        return None

    def stop(self, why: str) -> None:
        """Nothing is chosen any more; whoever has asked is told ``why``."""
        one, self._one = self._one, None
        if one is not None and one.asked:
            self.want(one.target.name)
        self._missed += [RecomputePair(request, why=why, asked=True) for request in self._wanted]
        self._share = 0.0
        self._wanted.clear()

    def close(self) -> None:
        """Ends all internal requests."""
        if self._one is not None:
            self._give_up("recompute was switched off")

    @property
    def _current(self) -> set[str]:
        return set() if self._one is None else {self._one.name}

    def _rest(self) -> None:
        """After a proof in an idle engine, as long as the share says; time of other batches does not count."""
        if self._idle_since is not None:
            spent = self._clock() - self._idle_since
            self._rest_until = self._clock() + max(REST_S, spent * (1 / self._share - 1) if self._share else 0.0)
            self._idle_since = None

    def _choice(self) -> Running | None:
        running = self._engine.running()
        names = {one.name for one in running}
        self._verified = {name: tokens for name, tokens in self._verified.items() if name in names}
        due = [one for one in running if one.tokens - self._verified.get(one.name, 0) >= LEAST_TOKENS]
        fit = [one for one in due if self._engine.room(one.name)]
        teaching = self._taught < TEACHING
        # Of what nothing touched only a request that has decoded took two ways to the same KV.
        fresh = [one for one in fit if not self._touched.of(one.name) and one.decoded >= LEAST_TOKENS]
        touched = [one for one in fit if self._touched.of(one.name)]
        for some in (fresh, touched) if teaching else (touched, fresh):
            if some:
                return min(some, key=lambda one: self._verified.get(one.name, 0))
        if due:
            self._starves("recompute_too_short" if fit else "recompute_no_room")
        return None

    def _starves(self, how: str) -> None:
        """Nothing was chosen, though there are requests or prefixes that were not computed again. how: the counter."""
        self._counts[how] += 1
        self._starved += 1
        if self._starved == STARVED_LOOKS:
            emit(Event("recompute_starved", "warning", {"looks": STARVED_LOOKS, "reason": NO_CHOICE[how]}))

    def _begin_wanted(self) -> None:
        while self._one is None and self._wanted:
            request = self._wanted[0]
            if request == ALL_PARKED:
                self._list_parked(self._wanted.popleft())
            elif self._engine.find(request) is not None and not self._engine.room(request):
                # Later, in a quieter engine.
                break
            else:
                self._begin(self._wanted.popleft(), asked=True)

    def _list_parked(self, request: str) -> None:
        parked = self._engine.parked
        if isinstance(parked, str):
            self._missed.append(RecomputePair(request, why=NOT_REMEMBERED.format(why=parked), asked=True))
            return
        names = [f"{PARKED}{name}" for name in parked.names()]
        self._missed.append(RecomputePair(request, asked=True, names=names))
        for name in names:
            self.want(name)

    def _least_proven(self, parked: ParkedPrefixes) -> ParkedPrefix | None:
        """Of prefixes with enough left and without need for the eviction of another one."""
        crowded = False
        for prefix in parked.by_proof():
            if prefix.left() >= LEAST_TOKENS:
                if self._engine.spare(f"{PARKED}{prefix.name}"):
                    return prefix
                crowded = True
        if crowded:
            self._starves("parked_no_room")
        return None

    def _begin(self, request: str, asked: bool) -> None:
        parked = self._parked(request)
        if isinstance(parked, str):
            self._missed.append(RecomputePair(request, why=parked, asked=asked))
            return
        if parked is not None and parked.left() < LEAST_TOKENS:
            self._missed.append(replace(_left(parked), request=request, asked=asked))
            return
        target = self._engine.find(request)
        if target is None or not target.tokens:
            self._missed.append(RecomputePair(request, why="it has no KV in the cache just now", asked=asked))
            return
        name = f"{PREFIX}{next(self._numbers)}"
        why = self._engine.begin(name, request, target.tokens)
        self._verified[request] = target.tokens
        if why is not None:
            self._missed.append(RecomputePair(request, why=why, asked=asked))
            return
        self._one = _One(name, target, asked, parked=parked)
        self.live.add(name)
        if not asked and parked is None:
            self._credit -= target.tokens

    def _parked(self, request: str) -> ParkedPrefix | str | None:
        """A parked prefix, or the reason against a second computation; None for the name of a running request."""
        if not request.startswith(PARKED):
            return None
        known = self._engine.parked
        if isinstance(known, str):
            return NOT_REMEMBERED.format(why=known)
        prefix = known.get(request.removeprefix(PARKED))
        return UNKNOWN if prefix is None else prefix.why or prefix

    def _goes_on(self, one: _One) -> bool:
        if one.parked is not None:
            return one.parked.left() >= LEAST_TOKENS
        now = self._engine.find(one.target.name)
        return now is not None and now.life == one.target.life

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
            pair = RecomputePair(one.target.name, one.name, why=why, asked=one.asked)
            if one.parked is not None and why == GONE:
                pair = replace(_left(one.parked), request=one.target.name, again=one.name, asked=one.asked)
            self._missed.append(pair)

    def _count(self, done: _One) -> None:
        """After the last one of a number nothing is chosen any more."""
        self._starved = 0
        if self._left is not None and not done.asked:
            self._left -= 1
            if self._left <= 0:
                self._share = 0.0

    def _pair(self, one: _One) -> RecomputePair:
        if one.parked is not None:
            return self._parked_pair(one, one.parked)
        target, touches = one.target, self._touched.of(one.target.name)
        self._taught += not touches and target.decoded >= LEAST_TOKENS
        held, own = self._engine.blocks(target.name), self._engine.blocks(one.name)
        return RecomputePair(target.name, one.name, target.tokens, target.decoded, held, own, touches, asked=one.asked)

    def _parked_pair(self, one: _One, parked: ParkedPrefix) -> RecomputePair:
        """Of the tokens left after the making of the batch: no earlier forward has written there."""
        if not isinstance(self._engine.parked, str):
            self._engine.parked.proven(parked)
        tokens = min(one.target.tokens, parked.left())
        return RecomputePair(
            one.target.name, one.name, tokens, 0, parked.blocks(), self._engine.blocks(one.name), parked.touches,
            asked=one.asked, parked=len(parked.content), content=parked.content[:tokens],
        )  # fmt: skip


def _left(parked: ParkedPrefix) -> RecomputePair:
    """Too little to compare."""
    return RecomputePair(parked.name, tokens=parked.left(), parked=len(parked.content))


def is_internal(name: str) -> bool:
    """Whether a request has the name of an internal one."""
    return name.startswith(PREFIX)


def slots_of(blocks: Sequence[int], block_slots: int, tokens: int) -> list[int]:
    """The slot of each of the first ``tokens`` positions in a list of blocks, -1 for none."""
    slots: list[int] = []
    for block in blocks[: -(-tokens // block_slots)]:
        slots.extend(range(block * block_slots, (block + 1) * block_slots) if block > 0 else [-1] * block_slots)
    return [*slots, *[-1] * (tokens - len(slots))][:tokens]
