"""`RecomputeJudge`: verdicts on requests in the cache whose KV was computed a second time, by whomever."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from canary_core.config import CanaryConfig
from canary_core.events import Event
from canary_core.recomputer import CachedRequest, Computed, Touch
from canary_core.records import Kind, Phase
from canary_core.region import KVSource, Role
from canary_core.runtime.writers import Writers
from canary_core.violation import Violation
from canary_core.watchers.recompute.bytes_look import BytesHost, BytesLook
from canary_core.watchers.recompute.comparison import Comparing, Comparison
from canary_core.watchers.recompute.noise import UNLIKE, WINDOW_TOKENS, Bound, Errors, Noise, first_layer
from canary_core.watchers.recompute.own_noise import OwnNoise
from canary_core.watchers.recompute.state_rows import holds_states
from canary_core.watchers.recompute.verification import LayerError, Reason, Verification, Verifier

Own = Callable[[], OwnNoise]

MOST_REASONS = 32
"""Different reasons of missing verdicts told by events."""

UNKNOWN = (
    "the noise of this engine is not known yet: more requests without a prefix hit, fork, arrival or preemption must "
    "be verified first"
)
UNKNOWN_OF_ANY = "the noise of this engine is not known yet: more requests must be verified first"
ALONE = 4
"""Ratio of the errors of K and V in a layer from which a wrong input of the layer is ruled out."""
FARTHER = (
    "more of its tokens were decoded than of requests from which the noise of recurrent states is known: nothing "
    "differs as far as that is known"
)
FOREIGN = (
    "some of its KV may be {origin}'s, where others store, too, and round otherwise (ledger_shared): a difference "
    "proves nothing"
)
UNCOMPARED = "not compared with it, or its noise is not known, or so large that nearly anything hides"
FAR_APART = (
    "this engine computed a fresh request twice, and some of its KV is as far apart as that of unrelated tokens: no "
    "noise is learnt from such a request"
)


class RecomputeHost(BytesHost, Protocol):
    """The part of `Canary` used here. verifier: has requests computed again for whoever asks."""

    config: CanaryConfig
    verifier: Verifier | None

    @property
    def writers(self) -> Writers:
        """Names of requests, and the weights with which each began."""

    @property
    def forwards(self) -> int:
        """How many forwards began."""

    def report(self, violations: Sequence[Violation]) -> int:
        """Reports findings made on the host."""

    def count(self, name: str, number: int = 1) -> None:
        """Adds to a counter of `stats`."""

    def tell(self, event: Event) -> None:
        """Hands an event to every plugin."""

    def doubt(self, name: str, reason: str) -> None:
        """Adds a doubt to the coverage."""


class RecomputeJudge:
    """Compares, learns the engine's numerical noise, judges, and reports. For engines that compute a request again by
    themselves, in later steps: hand over both sides once the engine is done, between forwards, on the stream of the
    forwards. `Recompute` is for those that compute it at once.

    rounding: gives `Recomputer.rounding`, once the first request is compared. whole: whether this process holds the KV
    of all layers and heads, or only the shard of one rank. alone: whether requests that something touched teach noise,
    too, as in `Recompute`.

    Counters in `Canary.stats`: ``recomputed_requests``, ``recomputed_tokens``, ``recompute_same``,
    ``recompute_differs``, ``recompute_unjudged`` and one for each `Reason`, ``recompute_taught`` for each request from
    which noise was learnt, ``recompute_unlike``, ``recompute_own_noise`` for each look at a request's own, and
    ``recompute_bytes_changed`` for each request with changed bytes; each new reason for a missing verdict is an
    ``unjudged`` event.
    """

    def __init__(
        self, canary: RecomputeHost, rounding: Callable[[], float], whole: bool = True, alone: bool = False
    ) -> None:
        self._canary = canary
        self._whole, self._alone = whole, alone
        self.rounding = rounding
        self._told: set[str] = set()
        self._left_out: set[tuple[str, ...]] = set()
        self.shared: Callable[[], Sequence[str]] = tuple
        """Gives the names of origins that turned out to be shared (`Ledger.shared`); asked before each difference of a
        request that has not computed all by itself. Set where an engine has such origins."""

    @cached_property
    def noise(self) -> Noise:
        """Learnt so far. Read on the engine's thread."""
        return Noise(self.rounding())

    def judge(self, cached: CachedRequest, computed: Mapping[str, Computed]) -> Verification:
        """The verdict by one computation, in slots of the pool itself (`Computed.within`) or elsewhere. As long as the
        noise is not known, it is learnt from requests without a `Touch`. Waits for the device."""
        few = self.too_few(cached)
        if few is not None:
            return few
        return self.finish(cached, self.begin(cached, computed, self.check_bytes(cached)).result())

    def begin(
        self, cached: CachedRequest, computed: Mapping[str, Computed], look: BytesLook | None = None
    ) -> Comparing:
        """The first half of `judge`, which does not wait. look: of `check_bytes`, where fingerprints are compared."""
        return Comparing(self._canary, cached, computed, look)

    def finish(
        self, cached: CachedRequest, comparison: Comparison, teaches: bool = True, decoded: int | None = None
    ) -> Verification:
        """The other half, once the figures have arrived. teaches: whether noise may be learnt: both sides should have
        been computed in different ways. decoded: how many tokens in the cache were computed one by one, None where that
        is not known."""
        # A single head off is no proof: its state may be what little another one has left.
        errors = [replace(one, whole=one.of_states) for one in comparison.errors]
        comparison, tokens = replace(comparison, errors=errors), len(cached.tokens)
        decodes = tokens if decoded is None else decoded
        known = tokens - decodes + self.noise.reach(decodes) if self._recurrent and self.noise.known else tokens
        answer = self.verdict(cached, comparison, known=known)
        if teaches and answer.verdict != "differs" and self.teaches(cached, comparison, known):
            self.noise.learn_pair(comparison.errors, decodes)
            self._canary.count("recompute_taught")
        return answer

    @cached_property
    def _recurrent(self) -> bool:
        """Whether the model has recurrent states."""
        return any(holds_states(state.region) for state in self._canary.states.values())

    def too_few(self, cached: CachedRequest) -> Verification | None:
        """The answer for a request that is too short for any verdict, before anything is computed; None for others."""
        tokens, parked = len(cached.tokens), cached.parked is not None
        if tokens >= WINDOW_TOKENS:
            return None
        if cached.parked is not None and cached.parked > tokens:
            return self.gone(cached.request, tokens, cached.parked)
        why = f"fewer than {WINDOW_TOKENS} tokens are in the cache: a median of so few is no proof"
        return replace(self.unjudged(cached.request, why, "few_tokens", tokens), parked=parked)

    def gone(self, request: str, left: int, parked: int) -> Verification:
        """The answer for a request with too few tokens ``left`` of ``parked`` ones in the prefix cache."""
        self._canary.count("recompute_gone")
        why = f"{left} of the {parked} tokens that it left in the prefix cache are still there"
        return Verification(request, left, "gone", f"{why}: the others were evicted or overwritten", parked=True)

    def check_bytes(self, cached: CachedRequest) -> BytesLook:
        """Compares all bytes with their fingerprints: a finding of its own, and a part of the answer."""
        return BytesLook(self._canary, cached)

    def teaches(self, cached: CachedRequest, comparison: Comparison, known: int | None = None) -> bool:
        """Whether noise is to be learnt from KV in the cache: it is not settled for some tokens, and nothing but the
        request computed the KV. Never from a parked prefix: weights may have changed since. Nor from errors that are no
        noise: a ``recompute_unlike``, nor of changed bytes. known: as of `verdict`."""
        if comparison.bytes is not None and comparison.bytes.changed:
            return False
        lacks = self.noise.lacks_states and any(one.of_states for one in comparison.errors)
        lacks = lacks or (self.noise.equal and not comparison.exact)
        learnt = self.noise.settled and (known is None or known >= len(cached.tokens)) and not lacks
        if learnt or cached.touches or cached.parked is not None:
            return False
        far = next(filter(None, (one.unlike() for one in comparison.errors)), None)
        if far is not None:
            self._canary.count("recompute_unlike")
            source, position, error = far
            place = {} if source.role is Role.STATE else {"position": position}
            self.doubt(FAR_APART, request=cached.request, source=source.name, error=error, **place)
        return far is None and comparison.finite

    def verdict(
        self, cached: CachedRequest, comparison: Comparison, own: Own | None = None, known: int | None = None
    ) -> Verification:
        """By the noise known now; reports a finding, but never about slots with changed records of a parked prefix.
        ``own``: gives the request's own noise, before a finding; what that explains is none. known: of how many tokens
        the noise is known, if not of all."""
        if cached.parked is not None and comparison.left is not None and comparison.left < len(cached.tokens):
            return self.gone(cached.request, comparison.left, cached.parked)
        answer = self._verdict(cached, comparison, own, known)
        parked = cached.parked is not None and comparison.left is not None
        answer = replace(answer, bytes=comparison.bytes, parked=parked)
        if answer.bytes is None or not answer.bytes.changed:
            return answer
        self._canary.count("recompute_bytes_changed")
        sentence = "; ".join(filter(None, (answer.finding, answer.bytes.finding)))
        return replace(answer, verdict="differs", reason=None, finding=sentence)

    def _verdict(
        self, cached: CachedRequest, comparison: Comparison, own: Own | None, known: int | None
    ) -> Verification:
        tokens = len(cached.tokens)
        if not any(len(one.positions) >= WINDOW_TOKENS and one.sources for one in comparison.errors):
            why = f"no region has {WINDOW_TOKENS} tokens of it that can be compared as numbers"
            return self.unjudged(cached.request, why, "no_numbers", tokens, (), comparison.missing)
        self._canary.count("recomputed_requests")
        self._canary.count("recomputed_tokens", tokens)
        bounds = self._bounds(comparison)
        farther = known is not None and known < tokens and not comparison.exact
        errors = comparison.errors
        if farther:
            errors = [one.before(known or 0) for one in errors if not one.of_states]
        layers = self._layers(errors, bounds)
        # Under the noise of some sources nearly anything hides, and of some none is known yet.
        unknown = torch.inf if self.noise.known else 0.0
        hidden = [one for one in layers if (unknown if one.bound is None else one.bound) >= UNLIKE]
        missing = [*comparison.missing, *(f"{one.region} {one.source}" for one in hidden)]
        self._leaves_out(missing)
        whole = {one.region for one in errors if one.whole}
        layers = [one for one in layers if one not in hidden or one.region not in whole]
        # Equal in every bit, whatever the noise may be.
        if not self.noise.known and not comparison.exact:
            why = UNKNOWN_OF_ANY if self._alone else UNKNOWN
            answer = self.unjudged(cached.request, why, "noise_unknown", tokens, layers, missing)
            idle = cached.touches and not self._alone
            touch = f"; this one had {_a(cached.touches[0].what)} and teaches nothing" if idle else ""
            return replace(answer, reason=f"{why}; so far taught by {self.noise.progress}{touch}")
        wrong = [one for one in layers if one.differs]
        if wrong and own is not None:
            bounds = own().widened(bounds)
            layers = self._layers(errors, bounds)
            wrong = [one for one in layers if one.differs]
            self._canary.count("recompute_own_noise")
        # A hit, and what an ended request left, may be of what an arrival brought before.
        foreign = self.shared() if wrong and (cached.touches or cached.parked is not None) else ()
        if foreign:
            why = FOREIGN.format(origin=foreign[0])
            return self.unjudged(cached.request, why, "refused", tokens, layers, missing)
        if farther and not wrong:
            return self.unjudged(cached.request, FARTHER, "noise_unknown", tokens, layers, missing)
        self._canary.count("recompute_differs" if wrong else "recompute_same")
        if not wrong:
            return Verification(cached.request, tokens, "same", None, None, layers, missing)
        of = {(one.region, source.name): one for one in errors for source in one.sources}
        far = [_Far(one, of[one.region, one.source], bounds[one.region, one.source]) for one in wrong]
        finding = self._finding(cached, min(far, key=_Far.order), far)
        self._canary.report([finding])
        return Verification(cached.request, tokens, "differs", None, finding.explanation, layers, missing)

    def unjudged(self, request: str, why: str, reason: Reason = "refused", tokens: int = 0, *rest: Any) -> Verification:
        """The answer where there is no verdict. Counts it, and tells each sentence ``why`` once. ``rest``: the last
        fields of the answer."""
        self._canary.count("recompute_unjudged")
        self._canary.count(f"recompute_{reason}")
        self.doubt(why, request=request)
        return Verification(request, tokens, "unjudged", why, None, *rest)

    def doubt(self, why: str, **about: object) -> None:
        """Tells each sentence ``why`` once, with fields ``about``."""
        if why not in self._told and len(self._told) < MOST_REASONS:
            self._told.add(why)
            self._canary.tell(Event("unjudged", "warning", {**about, "reason": why}))

    def _leaves_out(self, sources: Sequence[str]) -> None:
        """Says once which sources no second computation is compared with."""
        if not sources:
            return
        self._canary.count("recompute_left_out")
        if tuple(sources) not in self._left_out and len(self._left_out) < MOST_REASONS:
            self._left_out.add(tuple(sources))
            self._canary.tell(Event("recompute_left_out", "info", {"sources": list(sources)}))
            more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
            self._canary.doubt(f"second computation of {sources[0]}{more}", UNCOMPARED)

    def _bounds(self, comparison: Comparison) -> dict[tuple[str, str], Bound]:
        """By region and source; none as long as the noise is not known, or where it was never compared."""
        if not self.noise.known:
            return {}
        compared = comparison.errors
        # What is not seen may have differed before.
        first = first_layer(compared) if self._whole and not comparison.missing else -1
        bounds = {
            (one.region, source.name): self.noise.bound(one.region, source, roundoff, first)
            for one in compared
            for source, roundoff in zip(one.sources, one.roundoffs or [0.0] * len(one.sources), strict=True)
        }
        return {name: bound for name, bound in bounds.items() if bound is not None}

    def _layers(self, errors: Sequence[Errors], bounds: Mapping[tuple[str, str], Bound]) -> list[LayerError]:
        layers = []
        for one in errors:
            _, medians = one.windows()
            for source, tokens, *rows in zip(one.sources, one.values, medians, one.quarters(), strict=True):
                if rows[0].numel():
                    bound = bounds.get((one.region, source.name))
                    most = None if bound is None else bound.window
                    single = None if bound is None or bound.quarter == torch.inf else bound.quarter
                    worst, quarter = (float(row.max()) for row in rows)
                    figures = float(tokens.median()), worst, most, quarter, single
                    layers.append(LayerError(one.region, source.name, source.layer, len(tokens), *figures))
        return layers

    def _finding(self, cached: CachedRequest, first: "_Far", far: Sequence["_Far"]) -> Violation:
        """A finding about the first differing layer, at the first differing position."""
        about = self._about(cached, first.source, first.errors.region)
        changed = self._canary.writers.changed(cached.request)
        since = "" if changed is None else f"; the weights were changed since it began ({changed})"
        if first.errors.of_states:
            behind = min((one for one in far if not one.errors.of_states), key=_Far.order, default=None)
            return replace(about, rule="state", detail=_detail(first, cached, behind) + since)
        position, everywhere = first.begins()
        touch = next((touch for touch in cached.touches if position < touch.end), None)
        return replace(
            about,
            slot=int(cached.slots[first.errors.region][position]),
            position=position,
            rule="weights" if changed is not None else _rule(first, everywhere, touch),
            detail=_detail(first, cached) + since,
        )

    def _about(self, cached: CachedRequest, source: KVSource, region: str) -> Violation:
        return Violation(
            kind=Kind.RECOMPUTE,
            region=region,
            phase=Phase.EVENT,
            step=self._canary.forwards,
            source=source.name,
            layer=source.layer,
            half=source.half,
            request=cached.request,
            rank=self._canary.config.rank,
        )


def _rule(first: "_Far", everywhere: bool, touch: Touch | None) -> str:
    """The likely sort of cause, see `canary_core.kinds.recompute`."""
    if touch is not None:
        return "brought"
    if everywhere:
        return "everywhere"
    if first.alone:
        return "half"
    return "input" if first.error.layer == 0 else "attention"


def _detail(far: "_Far", cached: CachedRequest, behind: "_Far | None" = None) -> str:
    first, rows = far.error, "rows" if far.errors.of_states else "tokens"
    touched = "".join(f"; {_a(touch.what)} brought its first {touch.end} tokens" for touch in cached.touches)
    if behind is not None:
        touched += f"; behind it {behind.error.source} differs from position {behind.begins()[0]} on"
    if cached.parked is not None:
        touched += f"; it has ended, and the prefix cache keeps {len(cached.tokens)} tokens of it"
    window = "its" if far.errors.whole else str(WINDOW_TOKENS)
    error, of, most = first.worst, f"the median of {window} {rows}", first.bound
    if first.by_quarter:
        error, of, most = first.quarter, f"a quarter of {WINDOW_TOKENS} {rows} or more", first.quarter_bound
    return (
        f"first in {first.source}, by {error:.2g} of its size in {of}, where noise is at most {most or 0:.2g}{touched}"
    )


def _a(what: str) -> str:
    return f"an {what}" if what == "arrival" else f"a {what}"


def _excess(error: LayerError) -> float:
    """By how many times the error is above its bound."""
    single = error.quarter / (error.quarter_bound or 1) if error.by_quarter else 0.0
    return max(error.worst / (error.bound or 1), single)


@dataclass(frozen=True, slots=True)
class _Far:
    """A source whose error is no noise."""

    error: LayerError
    errors: Errors
    bound: Bound

    @property
    def column(self) -> int:
        """Its place in `errors`."""
        return next(i for i, source in enumerate(self.errors.sources) if source.name == self.error.source)

    @property
    def source(self) -> KVSource:
        """Where its numbers are."""
        return self.errors.sources[self.column]

    @property
    def alone(self) -> bool:
        """Whether only K, or only V, of the layer is wrong, so that the input of the layer is right."""
        own, quarters = self.source, self.errors.quarters().amax(1).tolist()
        others = [
            error
            for source, error in zip(self.errors.sources, quarters, strict=True)
            if source.layer == own.layer and {source.half, own.half} == {"k", "v"}
        ]
        return bool(others) and ALONE * max(others) <= quarters[self.column]

    def order(self) -> tuple[float, ...]:
        """By layer; of one layer rather KV, which has positions."""
        return self.error.layer, self.errors.of_states, -_excess(self.error)

    def begins(self) -> tuple[int, bool]:
        """The first differing position, and whether all of it differs."""
        values, (starts, medians) = self.errors.values[self.column], self.errors.windows()
        far_medians = medians[self.column] > self.bound.window
        far_windows = far_medians | (self.errors.quarters()[self.column] > self.bound.quarter)
        over = int(far_windows.nonzero()[0])
        if not far_medians[over]:
            # Tokens of that sort may lie before, in windows with too few of them.
            return self.errors.positions[int((values > self.bound.quarter).nonzero()[0])], False
        window = values[starts[over] : starts[over] + WINDOW_TOKENS]
        # At least half of the window is over the bound of medians, if nothing is over that of a single token.
        far = window > (self.bound.token if bool((window > self.bound.token).any()) else self.bound.window)
        at = starts[over] + int(far.nonzero()[0])
        return self.errors.positions[at], bool(far_medians.all()) and at == 0
