"""`Recompute`: has an engine compute requests in the cache again, and judges them."""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from canary_core.errors import CanaryError, error_text
from canary_core.recomputer import CachedRequest, Computed, Recomputer, recompute_off, recompute_starved
from canary_core.watchers.recompute.attention_turns import AttentionTurns
from canary_core.watchers.recompute.comparison import Comparing, Comparison
from canary_core.watchers.recompute.judge import Own, RecomputeHost, RecomputeJudge
from canary_core.watchers.recompute.noise import WINDOW_TOKENS, Noise
from canary_core.watchers.recompute.own_noise import OwnNoise
from canary_core.watchers.recompute.questions import Questions
from canary_core.watchers.recompute.sampler import Sampler, TimeShare
from canary_core.watchers.recompute.verification import Verification

CHUNK_TOKENS = 512
"""Tokens of one forward of a recompute: another path than a decode's, and a bound on the memory."""
ODD_CHUNK_TOKENS, MOST_ODD_CHUNKS = 7, 16
"""The same for another look at a fresh request: how far the engine's own paths are from each other."""

MOST_FAILURES = 3
"""Recomputes in a row that may fail by an unknown error, before ``CANARY_RECOMPUTE`` is given up."""
MOST_MEMORY = 0.5
"""Share of the device's free memory that one recompute may take."""
NOT_PARKED = (
    "what requests left in the prefix cache of this engine is not remembered, so none of it can be computed again; "
    "verify a request while it runs"
)
TOO_SHORT = f"requests have fewer than {WINDOW_TOKENS} tokens"
PATHS_APART = (
    "this model computes other KV in calls of one or of several tokens than in one call, by more than rounding "
    "explains, so a second computation proves nothing"
)
UNEXPLAINED = (
    "the KV of a fresh request is further from a second computation than rounding explains: this engine computes "
    "something else in calls of another size, or was wrong from its start; no noise is learnt from that"
)
NO_MEMORY = "the device has no memory for a second computation of this request"


class Recompute:
    """Judges requests in the cache by a second computation of the KV from the tokens.

    Numerical noise is learnt from verified requests: each is computed again by two paths and more, and with random
    roundings of all KV read by attention. One without a `Touch` is compared with these; of others, and of parked
    prefixes, the computations are compared with each other (`OwnNoise`). Before enough requests were seen nobody is
    judged. `verify` may be called on any thread; the work is done where the engine calls `serve`, between forwards.
    With ``CANARY_RECOMPUTE`` requests are picked there too.

    clock: seconds of the host.
    """

    def __init__(
        self, canary: RecomputeHost, recomputer: Recomputer, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._canary = canary
        self._clock = clock
        self._sampler = Sampler(canary.config.recompute, clock) if canary.config.recompute else None
        self.budget = TimeShare(0.0) if self._sampler is None else self._sampler.budget
        """Of ``CANARY_RECOMPUTE``. Others who compute again without being asked spend from it, too."""
        self._failures = 0
        self._unexplained = False
        if canary.verifier is None:
            canary.verifier = self
        self._recomputer = recomputer
        self._questions = Questions()
        self._server: int | None = None
        self.judge = RecomputeJudge(canary, lambda: recomputer.rounding, alone=True)
        self._turns = AttentionTurns(canary, self.judge, recomputer.attention)

    @property
    def noise(self) -> Noise:
        """Learnt so far. Read on the engine's thread."""
        return self.judge.noise

    def ask(self, request: str | None = None, parked: bool = False) -> "Future[list[Verification]]":
        """Asks for `verify`, and does not wait: for any thread. ``parked`` is refused."""
        if not parked:
            return self._questions.put(request)
        refused: Future[list[Verification]] = Future()
        refused.set_exception(CanaryError(NOT_PARKED))
        return refused

    def verify(self, request: str | None = None, timeout_s: float = 60.0) -> list[Verification]:
        """Verifies one request, or (None) all with KV in the cache, once the engine is between two forwards. Waits
        at most ``timeout_s`` seconds. Raises `CanaryError` if the engine had no time until then, or the work failed."""
        if threading.get_ident() == self._server:
            return self.now(request)
        asked = self.ask(request)
        try:
            return asked.result(timeout_s)
        except LateError:
            asked.cancel()
            raise CanaryError(
                f"nothing was verified within {timeout_s:g} s: the engine's loop did not come between two forwards; "
                "call verify() while it runs, or give it more time (timeout_s)"
            ) from None

    def serve(self) -> None:
        """Answers all calls of `verify`, and computes a request again where ``CANARY_RECOMPUTE`` has one due. On the
        engine's thread and stream, between forwards; never raises."""
        if self._questions:
            self._server = threading.get_ident()
            self._questions.serve(self.now)
        if self._sampler is not None and not self._sampler.rests:
            self._sample(self._sampler)

    def _sample(self, sampler: Sampler) -> None:
        began, name = self._clock(), None
        try:
            if sampler.gives_way(self._recomputer.pressed):
                self._canary.count("recompute_gave_way")
                return
            outlines = {request: self._recomputer.outline(request) for request in self._recomputer.requests()}
            if not outlines:
                # Of an engine that has served nobody yet no noise can be known.
                sampler.rest()
                return
            name = sampler.pick(outlines.items(), fresh=not self.noise.known)
            if name is None:
                if sampler.starved:
                    self._starves(sampler.starved)
                return
            answer = self._verify(name)
            self._failures = 0
            seconds = self._clock() - began
            self._canary.count("recompute_ms", round(1000 * seconds))
            sampler.looked_at(name, outlines[name].tokens, seconds, answer.verdict != "unjudged")
        except Exception as error:
            self._failures += 1
            why = f"the recompute failed: {error_text(error)}"
            self.judge.unjudged(name or "", why, "failed")
            sampler.looked_at(name or "", 0, self._clock() - began, verdict=False)
            if self._failures >= MOST_FAILURES:
                self._sampler = None
                self._canary.tell(recompute_off(f"{MOST_FAILURES} times in a row {why}", "error"))

    def _starves(self, looks: int) -> None:
        self._canary.count("recompute_starved")
        told = recompute_starved(looks, TOO_SHORT)
        if told is not None:
            self._canary.tell(told)

    def now(self, request: str | None = None) -> list[Verification]:
        """`verify` at once: on the engine's thread and stream, between forwards. Waits for the device."""
        names = list(self._recomputer.requests()) if request is None else [request]
        return [self._verify(name) for name in names]

    def judged(self, cached: CachedRequest) -> Verification:
        """The answer for a running request's content of the cache, or a parked prefix. On the engine's thread and
        stream, between forwards. Waits for the device."""
        try:
            answer = self._judged(cached)
        except CanaryError as error:
            answer = self.judge.unjudged(cached.request, str(error), "refused")
        except torch.OutOfMemoryError:
            answer = self.judge.unjudged(cached.request, NO_MEMORY, "no_memory")
        return replace(answer, parked=cached.parked is not None)

    def _verify(self, name: str) -> Verification:
        try:
            cached = self._recomputer.cached(name)
        except CanaryError as error:
            return self.judge.unjudged(name, str(error), "refused")
        return self.judged(cached)

    def _judged(self, cached: CachedRequest) -> Verification:
        few = self.judge.too_few(cached)
        if few is not None:
            return few
        if not self._fits(cached):
            return self.judge.unjudged(cached.request, NO_MEMORY, "no_memory", len(cached.tokens))
        bytes_look = self.judge.check_bytes(cached)
        look = self._turns.next()
        observed: dict[str, Any] = {} if look is None else {"observer": look}
        first = self._recomputer.compute(cached, CHUNK_TOKENS, **observed)
        comparison = self.judge.begin(cached, first, bytes_look).result()
        own = cache(partial(self._own, cached, first))
        foreign, reason = bool(cached.touches) or cached.parked is not None, None
        if foreign and not self.noise.known:
            reason = UNEXPLAINED if self._unexplained else self._learn_alone(cached, own())
        looks = self._recomputer.recurrent or not self.noise.settled
        answer = self.judge.verdict(cached, comparison, own if looks else None)
        if answer.verdict != "differs" and self.judge.teaches(cached, comparison):
            reason = self._learn(cached, comparison, first, own)
        if reason is not None and answer.verdict == "unjudged":
            answer = replace(answer, reason=reason)
        return self._turns.judge(cached, answer, look)

    def _learn_alone(self, cached: CachedRequest, own: OwnNoise) -> str | None:
        """Learns noise from the computations of a request alone; or gives the reason why not."""
        apart = own.unlike(self._recomputer.rounding)
        if apart is not None:
            return self._unlike(PATHS_APART, request=cached.request, source=" ".join(apart))
        self.noise.learn(own.paths, [one for errors in own.rounded for one in errors], fresh=False)
        self._canary.count("recompute_taught")
        return None

    def _learn(
        self, cached: CachedRequest, comparison: Comparison, first: Mapping[str, Computed], own: Own
    ) -> str | None:
        """The same from a fresh request in the cache."""
        if self._recomputer.recurrent:
            apart = own().unlike(self._recomputer.rounding)
            if apart is not None:
                return self._unlike(PATHS_APART, request=cached.request, source=" ".join(apart))
        elif (far := self._rounded(cached, first).unexplained(comparison.errors)) is not None:
            (region, source), error = far
            self._unexplained = True
            return self._unlike(UNEXPLAINED, request=cached.request, source=f"{region} {source}", error=error)
        paths, chunks = self._paths(cached, self._recomputer.recurrent)
        rounded = [self._compare(cached, chunk, self._recomputer.rounding).errors for chunk in chunks]
        others = [self._compare(cached, chunk).errors for chunk in paths]
        self._unexplained = False
        self.noise.learn([comparison.errors, *others], [one for errors in rounded for one in errors])
        self._canary.count("recompute_taught")
        return None

    def _unlike(self, reason: str, **about: object) -> str:
        self._canary.count("recompute_unlike")
        self.judge.doubt(reason, **about)
        return reason

    def _paths(self, cached: CachedRequest, all_of_them: bool) -> tuple[list[int], list[int]]:
        """Tokens of a forward of other computations of a request, and of those with random roundings."""
        odd = max(ODD_CHUNK_TOKENS, -(-len(cached.tokens) // MOST_ODD_CHUNKS) | 1)
        return ([odd, 1], [CHUNK_TOKENS, odd]) if all_of_them else ([odd], [CHUNK_TOKENS])

    def _own(self, cached: CachedRequest, first: Mapping[str, Computed]) -> OwnNoise:
        looks = (*self._paths(cached, all_of_them=True), self._recomputer.rounding)
        return OwnNoise.of(self._canary, cached, first, partial(self._recomputer.compute, cached), looks)

    def _rounded(self, cached: CachedRequest, first: Mapping[str, Computed]) -> OwnNoise:
        """Random roundings alone, of the first computation's path."""
        compute = partial(self._recomputer.compute, cached)
        return OwnNoise.of(self._canary, cached, first, compute, ([], [CHUNK_TOKENS], self._recomputer.rounding))

    def _fits(self, cached: CachedRequest) -> bool:
        """Whether the device has memory for a second copy of the request's KV, and as much again for the forward (with
        states, and as long as noise is learnt, a third one, to be compared with the second), within `MOST_MEMORY` of
        what is free."""
        device = next(iter(cached.slots.values())).device
        if device.type != "cuda":
            return True
        regions = [self._canary.states[name].region for name in cached.slots]
        needed = (
            (2 + (self._recomputer.recurrent or not self.noise.settled))
            * len(cached.tokens)
            * sum(source.slot_bytes for region in regions for source in region.sources)
        )
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return needed <= MOST_MEMORY * (free + kept)

    def _compare(self, cached: CachedRequest, chunk_tokens: int, jitter: float = 0.0) -> Comparison:
        computed = self._recomputer.compute(cached, chunk_tokens, jitter)
        return Comparing(self._canary, cached, computed).result()
