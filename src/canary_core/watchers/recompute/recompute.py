"""`Recompute`: compares requests in the cache with a second computation by the engine."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from typing import Protocol

import torch
from torch import Tensor

from canary_core.errors import CanaryError, error_text
from canary_core.events import Event
from canary_core.ops.backends import choose
from canary_core.ops.state import RegionState
from canary_core.recomputer import CachedRequest, Computed, Recomputer, Touch
from canary_core.records import Kind, Phase
from canary_core.region import KVSource, RegionKind
from canary_core.violation import Violation
from canary_core.watchers.recompute.noise import WINDOW_TOKENS, Errors, Noise
from canary_core.watchers.recompute.verification import LayerError, Verification

KINDS = (RegionKind.FULL, RegionKind.WINDOW)
"""Regions of one token a slot, written once."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

CHUNK_TOKENS = 512
"""Tokens of one forward of a recompute: another path than a decode's, and a bound on the memory."""
ODD_CHUNK_TOKENS = 7
"""The same for another look at a fresh request: how far the engine's own paths are from each other."""

MOST_REASONS = 32
"""Different reasons of missing verdicts told by events."""


class RecomputeHost(Protocol):
    """The part of `Canary` used here."""

    @property
    def states(self) -> Mapping[str, RegionState]:
        """Device memory by region."""

    @property
    def slots(self) -> "SlotChecks":
        """Comparison of bytes beside forwards."""

    @property
    def backend(self) -> str:
        """Name of the running ops."""

    @property
    def forwards(self) -> int:
        """How many forwards began."""

    def report(self, violations: Sequence[Violation]) -> int:
        """Reports findings made on the host."""

    def count(self, name: str, number: int = 1) -> None:
        """Adds to a counter of `stats`."""

    def tell(self, event: Event) -> None:
        """Hands an event to every plugin."""


class SlotChecks(Protocol):
    """The part of `SlotEvents` used here."""

    def check(self, region: str, slots: Tensor) -> None:
        """Compares the bytes of ``slots`` with their fingerprints."""


class Recompute:
    """Judges requests in the cache by a second computation of the KV from the tokens.

    Numerical noise is learnt from verified requests without a `Touch`: each is computed again by two paths, and with
    random roundings of all KV read by attention. Before enough such requests were seen nobody is judged. `verify` may
    be called on any thread; the work is done where the engine calls `serve`, between forwards.

    Counters in `Canary.stats`: ``recomputed_requests``, ``recomputed_tokens``, ``recompute_unjudged``; each new reason
    for a missing verdict is an ``unjudged`` event.
    """

    def __init__(self, canary: RecomputeHost, recomputer: Recomputer) -> None:
        self._canary = canary
        self._recomputer = recomputer
        self._noise: Noise | None = None
        self._asked: deque[tuple[str | None, Future[list[Verification]]]] = deque()
        self._told: set[str] = set()
        self._server: int | None = None

    @property
    def noise(self) -> Noise:
        """Learnt so far. Read on the engine's thread."""
        if self._noise is None:
            self._noise = Noise(self._recomputer.rounding)
        return self._noise

    def verify(self, request: str | None = None, timeout_s: float = 60.0) -> list[Verification]:
        """Verifies one request, or (None) all with KV in the cache, once the engine is between two forwards. Waits
        at most ``timeout_s`` seconds. Raises `CanaryError` if the engine had no time until then, or the work failed."""
        if threading.get_ident() == self._server:
            return self.now(request)
        asked: Future[list[Verification]] = Future()
        self._asked.append((request, asked))
        try:
            return asked.result(timeout_s)
        except LateError:
            asked.cancel()
            raise CanaryError(
                f"nothing was verified within {timeout_s:g} s: the engine's loop did not come between two forwards; "
                "call verify() while it runs, or give it more time (timeout_s)"
            ) from None

    def serve(self) -> None:
        """Answers all calls of `verify`. On the engine's thread and stream, between forwards; never raises."""
        while self._asked:
            self._server = threading.get_ident()
            request, asked = self._asked.popleft()
            if not asked.set_running_or_notify_cancel():
                continue
            try:
                asked.set_result(self.now(request))
            except Exception as error:
                asked.set_exception(CanaryError(f"the recompute failed: {error_text(error)}"))

    def now(self, request: str | None = None) -> list[Verification]:
        """`verify` at once: on the engine's thread and stream, between forwards. Waits for the device."""
        names = list(self._recomputer.requests()) if request is None else [request]
        return [self._verify(name) for name in names]

    def _verify(self, name: str) -> Verification:
        try:
            cached = self._recomputer.cached(name)
            tokens = len(cached.tokens)
            if tokens < WINDOW_TOKENS:
                return self._unjudged(
                    name, tokens, f"fewer than {WINDOW_TOKENS} tokens are in the cache: a median of so few is no proof"
                )
            for region, slots in cached.slots.items():
                self._canary.slots.check(region, slots[slots >= 0])
            errors = self._errors(cached, CHUNK_TOKENS)
            if not any(len(one.positions) >= WINDOW_TOKENS for one in errors):
                why = f"no region has {WINDOW_TOKENS} tokens of it that can be compared as numbers"
                return self._unjudged(name, tokens, why)
            self._canary.count("recomputed_requests")
            self._canary.count("recomputed_tokens", tokens)
            if self.noise.known:
                return self._judge(cached, errors)
            if not cached.touches and all(bool(one.values.isfinite().all()) for one in errors):
                rounded = self._errors(cached, CHUNK_TOKENS, self._recomputer.rounding)
                self.noise.learn([errors, self._errors(cached, ODD_CHUNK_TOKENS)], rounded)
            why = "the noise of this engine is not known yet: more fresh requests must be verified first"
            return self._unjudged(name, tokens, why, self._layers(errors))
        except CanaryError as error:
            return self._unjudged(name, 0, str(error))
        except torch.OutOfMemoryError:
            return self._unjudged(name, 0, "the device has no memory for a second computation of this request")

    def _unjudged(self, name: str, tokens: int, why: str, layers: Sequence[LayerError] = ()) -> Verification:
        self._canary.count("recompute_unjudged")
        if why not in self._told and len(self._told) < MOST_REASONS:
            self._told.add(why)
            self._canary.tell(Event("unjudged", "warning", {"request": name, "reason": why}))
        return Verification(name, tokens, "unjudged", why, None, layers)

    def _errors(self, cached: CachedRequest, chunk_tokens: int, jitter: float = 0.0) -> list[Errors]:
        """Errors of each region, with the slots that are resident."""
        computed = self._recomputer.compute(cached, chunk_tokens, jitter)
        return [
            self._compared(name, self._canary.states[name], slots, computed[name])
            for name, slots in cached.slots.items()
            if name in computed and self._canary.states[name].region.kind in KINDS
        ]

    def _compared(self, name: str, state: RegionState, slots: Tensor, computed: Computed) -> Errors:
        again = {source.name: source for source in computed.sources}
        columns = [i for i, source in enumerate(state.region.sources) if _comparable(source, again.get(source.name))]
        sources = [state.region.sources[column] for column in columns]
        matched = Computed(tuple(again[source.name] for source in sources), computed.slots)
        there = ((slots >= 0) & (computed.slots >= 0)).nonzero()[:, 0]
        out = torch.zeros(2, len(columns), len(there), device=slots.device)
        matched = Computed(matched.sources, computed.slots[there])
        choose(self._canary.backend, slots.device).compare_kv(state, columns, slots[there], matched, out)
        apart, size = out.cpu()
        # Anything is infinitely far from zeros; numbers too large to be squared are not judged.
        values = torch.where(apart == 0, 0.0, (apart / size).sqrt()).nan_to_num(nan=0.0, posinf=torch.inf)
        return Errors(name, sources, there.tolist(), values)

    def _layers(self, errors: Sequence[Errors]) -> list[LayerError]:
        layers = []
        for one in errors:
            _, medians = one.windows()
            for source, tokens, windows in zip(one.sources, one.values, medians, strict=True):
                if windows.numel():
                    bound = self.noise.bound(one.region, source) if self.noise.known else None
                    figures = float(tokens.median()), float(windows.max()), bound
                    layers.append(LayerError(one.region, source.name, source.layer, len(tokens), *figures))
        return layers

    def _judge(self, cached: CachedRequest, errors: Sequence[Errors]) -> Verification:
        layers, tokens = self._layers(errors), len(cached.tokens)
        wrong = [one for one in layers if one.differs]
        if not wrong:
            return Verification(cached.request, tokens, "same", None, None, layers)
        first = min(wrong, key=lambda one: (one.layer, -one.worst / (one.bound or 1)))
        found = next(one for one in errors if one.region == first.region)
        finding = self._finding(cached, first, found)
        self._canary.report([finding])
        return Verification(cached.request, tokens, "differs", None, finding.explanation, layers)

    def _finding(self, cached: CachedRequest, first: LayerError, errors: Errors) -> Violation:
        """A finding about the first differing layer, at the first differing position."""
        column = next(i for i, source in enumerate(errors.sources) if source.name == first.source)
        source, values = errors.sources[column], errors.values[column]
        starts, medians = errors.windows()
        over = [starts[i] for i in (medians[column] > (first.bound or 0)).nonzero()[:, 0].tolist()]
        within = values[over[0] : over[0] + WINDOW_TOKENS] > self.noise.token_bound(errors.region, source)
        # Most tokens of the window are over the bound of medians, if none is over that of a single one.
        at = over[0] + (int(within.nonzero()[0]) if bool(within.any()) else 0)
        position = errors.positions[at]
        everywhere = len(over) == len(starts) and at == 0
        touch = next((touch for touch in cached.touches if position < touch.end), None)
        return Violation(
            kind=Kind.RECOMPUTE,
            region=errors.region,
            phase=Phase.EVENT,
            step=self._canary.forwards,
            slot=int(cached.slots[errors.region][position]),
            source=source.name,
            layer=source.layer,
            half=source.half,
            position=position,
            request=cached.request,
            rule=_rule(first.layer, everywhere, touch),
            detail=_detail(first, cached.touches),
        )


def _rule(layer: int, everywhere: bool, touch: Touch | None) -> str:
    """The likely sort of cause, see `canary_core.kinds.recompute`."""
    if touch is not None:
        return "brought"
    if everywhere:
        return "everywhere"
    return "input" if layer == 0 else "attention"


def _detail(first: LayerError, touches: Sequence[Touch]) -> str:
    touched = "".join(f"; a {touch.what} brought its first {touch.end} tokens" for touch in touches)
    return (
        f"first in {first.source}, by {first.worst:.2g} of its size in the median of {WINDOW_TOKENS} tokens, where "
        f"noise is at most {first.bound or 0:.2g}{touched}"
    )


def _comparable(held: KVSource, again: KVSource | None) -> bool:
    """Whether both have floats, and equally many in a slot."""
    return again is not None and _numbers(held) == _numbers(again) != 0


def _numbers(source: KVSource) -> int:
    """How many floats a slot has, 0 for other types."""
    return source.slot_bytes // source.dtype.itemsize if source.dtype in FLOATS else 0
