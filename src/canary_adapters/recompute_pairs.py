"""`RecomputePairs`: compares requests with the internal ones that computed them again, in each worker."""

import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from canary_adapters.attention_calls import AttentionCalls
from canary_adapters.attention_watch import AttentionWatch
from canary_adapters.block_events import BlockGroup
from canary_adapters.held_states import HeldStates
from canary_adapters.internal_requests import RecomputePair, is_internal, named_like, slots_of
from canary_adapters.lessons import LESSON
from canary_adapters.parked_prefixes import ALL_PARKED, PARKED
from canary_core import CachedRequest, Canary, CanaryError, Computed, Verification, Writers
from canary_core.ops.upload import upload

if TYPE_CHECKING:
    from canary_core import RecomputeJudge
    from canary_core.watchers.recompute.attention import AttentionLook
    from canary_core.watchers.recompute.comparison import Comparing

KEPT = 1024
"""Last answers."""
NO_CALLS = AttentionCalls()
ENDED = "the engine ended, or Canary was switched off"


@dataclass(frozen=True, slots=True)
class _Begun:
    pair: RecomputePair
    cached: CachedRequest
    comparing: "Comparing"
    look: "AttentionLook | None"

    def arrived(self) -> bool:
        return self.comparing.arrived() and (self.look is None or self.look.arrived())


@dataclass(slots=True)
class _Ask:
    """names: the requests to answer for; set once an output of the runner takes them along, and of all parked prefixes
    once the scheduler has told the names."""

    request: str | None
    parked: bool = False
    answer: "Future[list[Verification]]" = field(default_factory=Future)
    names: Sequence[str] = ()
    got: dict[str, Verification] = field(default_factory=dict)

    def finish(self) -> bool:
        """Gives the answer, unless some are missing. Whether nobody waits for it any more."""
        if self.answer.cancelled():
            return True
        if any(name not in self.got for name in self.names):
            return False
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_result([self.got[name] for name in self.names])
        return True

    def fail(self, why: str) -> None:
        """Tells whoever waits that nothing will come."""
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(CanaryError(why))


MOST_NAMES = 8
"""Requests named in a sentence."""


class RecomputePairs:
    """Judges each `RecomputePair` that a worker is sent, within the memory of ``canary``. ``groups``: those of
    attention, of which some may have no numbers. ``rounding``: see `RecomputeJudge`. ``running``: names of all requests
    with KV. ``attention``: see `AttentionWatch`, to be told of each forward.

    Nothing waits for the device, unless somebody asked for the answer by `ask`: then all bytes are compared with
    their fingerprints, too.
    """

    def __init__(
        self,
        canary: Canary,
        groups: Iterable[BlockGroup],
        rounding: Callable[[], float],
        running: Callable[[], Sequence[str]],
        attention: AttentionCalls = NO_CALLS,
    ) -> None:
        self._canary = canary
        self._groups = list(groups)
        self._rounding = rounding
        self._running = running
        self._judge: RecomputeJudge | None = None
        self.attention = AttentionWatch(canary, attention, lambda: self.judge)
        self._begun: deque[_Begun] = deque()
        self._lock = threading.RLock()
        self._ended = False
        self._asked: list[_Ask] = []
        self._waiting: list[_Ask] = []
        self._unsent: list[str] = []
        self.answers: deque[Verification] = deque(maxlen=KEPT)
        """The last ones, oldest first."""
        self.wake: Callable[[], None] | None = None
        """Has an idle scheduler of the same process look for wanted requests; on any thread."""
        self.states = HeldStates(canary)
        """Of requests whose states the engine computes on in place; set before the first pair comes."""
        self.whole = True
        """Whether this process holds the KV of all layers and heads; set before the first pair comes."""
        self.adapters: Callable[[], Container[int]] = tuple
        """Numbers of the adapters that are loaded, so that a request with one of these loads nothing."""
        canary.verifier = self

    @property
    def judge(self) -> "RecomputeJudge":
        """Made on first use."""
        if self._judge is None:
            from canary_core import RecomputeJudge

            self._judge = RecomputeJudge(self._canary, self._rounding, self.whole)
            self._judge.shared = self._shared
        return self._judge

    def _shared(self) -> Sequence[str]:
        ledger = self._canary.ledger
        # Its verdict on what came for the request may be on the host by now.
        ledger.read()
        return ledger.shared

    def ask(self, request: str | None = None, parked: bool = False) -> "Future[list[Verification]]":
        """Asks for a running request, or (None) for all that run, from any thread; parked: for the prefixes of ended
        requests. The answer comes some steps later, in a running engine."""
        ask = _Ask(request, parked)
        with self._lock:
            self._asked.append(ask)
        if self._ended:
            self.close()
        elif self.wake is not None:
            self.wake()
        return ask.answer

    def wanted(self) -> Sequence[str]:
        """Requests asked for since the last call, for the scheduler: with the next output of the runner."""
        if not self._asked and not self._unsent:
            return ()
        with self._lock:
            self._take()
            unsent, self._unsent = self._unsent, []
        return list(dict.fromkeys(unsent))

    def _take(self) -> None:
        """Takes up what was asked for: what comes to be compared from now on may be the answer."""
        asked, self._asked = self._asked, []
        for one in asked:
            if one.parked:
                one.names = [ALL_PARKED if one.request is None else f"{PARKED}{one.request}"]
            else:
                running = [name for name in self._running() if not is_internal(name)]
                one.names = running if one.request is None else _meant(one.request, running)
        self._waiting = [one for one in (*self._waiting, *asked) if not one.finish()]
        self._unsent += [name for one in asked if not one.answer.done() for name in one.names]

    def compare(self, pairs: Sequence[RecomputePair]) -> None:
        """After the forward that ``pairs`` came with, on its stream, before the next one."""
        if pairs and self._asked:
            # Of several ranks another one may have asked the scheduler.
            with self._lock:
                self._take()
        for pair in pairs:
            if pair.request == ALL_PARKED:
                self._listed(pair)
                continue
            if pair.why is not None:
                self.attention.forget(pair.again)
                self.states.forget(pair.again)
                self._missed(pair, pair.why)
                continue
            cached = self._cached(pair)
            few = self.judge.too_few(cached)
            if few is not None:
                self.attention.forget(pair.again)
                self._answer(few)
                continue
            look = self.attention.finish(pair.again, partial(self._own, pair))
            bytes_look = self.judge.check_bytes(cached) if pair.asked else None
            computed = self._computed(pair)
            # The copy is in the place of the second computation: a region's slots are those of the pool.
            for name, (slot, copied) in self.states.take(pair.again, pair.own).items():
                cached, computed[name] = replace(cached, slots={**cached.slots, name: slot}), copied
            comparing = self.judge.begin(cached, computed, bytes_look)
            self._begun.append(_Begun(pair, cached, comparing, look))

    def count(self, counted: Mapping[str, int]) -> None:
        """Adds counts of the scheduler to the stats."""
        for name, number in counted.items():
            self._canary.count(name, number)

    def read(self) -> None:
        """Judges what has arrived on the host; where somebody asked, waits for it. Raises `ViolationError` in raise
        mode."""
        if not self._begun:
            return
        # An idle engine makes no forward after which it could have arrived.
        waits = any(one.pair.asked and one.pair.parked is not None for one in self._begun)
        while self._begun and (waits or self._begun[0].arrived()):
            one = self._begun.popleft()
            answer = self.judge.finish(one.cached, one.comparing.result(), one.pair.teaches, one.pair.decoded)
            if answer.verdict == "unjudged" and answer.layers and not (one.pair.teaches or self.judge.noise.known):
                self._unsent.append(LESSON)
            self._answer(self.attention.turns.judge(one.cached, answer, one.look))

    def close(self) -> None:
        """Nothing is answered any more."""
        self._begun.clear()
        self._ended = True
        with self._lock:
            waiting, self._waiting, self._asked = [*self._waiting, *self._asked], [], []
        for one in waiting:
            one.fail(ENDED)

    def _listed(self, pair: RecomputePair) -> None:
        """The scheduler has told the names of all parked prefixes."""
        with self._lock:
            for one in self._waiting:
                if list(one.names) == [ALL_PARKED]:
                    one.names = pair.names
                    if pair.why is not None:
                        one.fail(pair.why)
            self._waiting = [one for one in self._waiting if not one.answer.done() and not one.finish()]

    def _missed(self, pair: RecomputePair, why: str) -> None:
        if pair.asked:
            name = pair.request.removeprefix(PARKED)
            answer = replace(self.judge.unjudged(name, why), parked=name != pair.request)
            self._answer(replace(answer, reason=f"{why}; running are {_some(pair.names)}") if pair.names else answer)
        else:
            # Nobody has asked: no event for an engine that has better things to do.
            self._canary.count("recompute_unjudged")

    def _answer(self, answer: Verification) -> None:
        self.answers.append(answer)
        name = f"{PARKED * answer.parked}{answer.request}"
        with self._lock:
            for one in self._waiting:
                if name in one.names:
                    one.got[name] = answer
            self._waiting = [one for one in self._waiting if not one.finish()]

    def _cached(self, pair: RecomputePair) -> CachedRequest:
        slots = {group.region: self._slots(group, pair.held[group.number], pair.tokens) for group in self._there(pair)}
        if pair.parked is None:
            return CachedRequest(pair.request, range(pair.tokens), slots, pair.touches)
        name, content = pair.request.removeprefix(PARKED), pair.content or range(pair.tokens)
        return CachedRequest(name, content, slots, pair.touches, pair.parked)

    def _computed(self, pair: RecomputePair) -> dict[str, Computed]:
        regions = self._canary.regions
        names = [group.region for group in self._there(pair)]
        return {name: Computed.within(regions[name], self._own(pair, name, pair.tokens)) for name in names}

    def _there(self, pair: RecomputePair) -> list[BlockGroup]:
        """Groups of which both requests have something to compare."""
        groups = self._groups if pair.held and pair.own else ()
        return [group for group in groups if len(pair.held[group.number]) and len(pair.own[group.number])]

    def _own(self, pair: RecomputePair, region: str, tokens: int) -> torch.Tensor:
        group = next(group for group in self._groups if group.region == region)
        return self._slots(group, pair.own[group.number], tokens)

    def _slots(self, group: BlockGroup, blocks: Sequence[int] | torch.Tensor, tokens: int) -> torch.Tensor:
        if isinstance(blocks, torch.Tensor):
            return blocks[:tokens]
        return upload(slots_of(blocks, group.block, tokens), self._canary.device)


def _some(names: Sequence[str]) -> str:
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return ", ".join([*map(Writers.told, names[:MOST_NAMES]), *more])


def _meant(request: str, running: Sequence[str]) -> list[str]:
    """The one request of `named_like`; the scheduler has the sentence for several, or none."""
    alike = named_like(request, running)
    return alike if len(alike) == 1 else [request]


def model_rounding(dtype: torch.dtype, config: object) -> float:
    """`Recomputer.rounding` of a model's products of matrices in ``dtype``, whose sums are kept in 32 bits. ``config``:
    Hugging Face's, of the text model."""
    terms = max(getattr(config, name, None) or 1 for name in ("hidden_size", "intermediate_size"))
    return float(max(torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps / 2 * terms**0.5))
