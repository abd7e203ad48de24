"""`Errors` of one request, and `Noise`: the errors of an engine by computing the same on another path."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest

import torch
from torch import Tensor

from canary_core.region import KVSource, Role

WINDOW_TOKENS = 32
"""Tokens in a row whose median is judged: a single odd token is no verdict."""
QUARTER_TOKENS = WINDOW_TOKENS // 4
"""Tokens of a window enough for a verdict, if each error is above the bound of a single token."""
STRIDE = 8
"""Tokens from one window to the next."""

TAUGHT_TOKENS, TAUGHT_REQUESTS = 256, 4
"""Compared tokens, and requests, until the noise counts as known; each was also computed with random roundings."""
PAIRED_TOKENS, PAIRED_REQUESTS = 1024, 8
"""The same where an engine can't do so. Only requests with a difference count."""
EQUAL_TOKENS, EQUAL_REQUESTS = 1024, 16
"""So many equal bit for bit are an engine whose paths give the same, or nearly."""

MARGIN = 2.0
"""Bound of an error, as a multiple of the largest one of fresh requests. Random roundings are a bound as they are: each
number is rounded, where another path rounds some."""
STATES_MARGIN = 2.0
"""The same again for recurrent states: errors of their smallest rows are spread further than those of tokens."""
MEDIANS_MARGINS = 4.0, 8.0
"""Least and most of a bound of a median, as multiples of the largest one of fresh requests, where all of these have
some and few single tokens are further off. Of thousands of requests of a model none was more than 5 times as far off as
the median one."""
FEW_TOKENS = 1 / 32
"""Share of tokens called few."""
UNSEEN_ROUNDINGS, COMPRESSED_ROUNDINGS = 4.0, 8.0
"""Error in the layer behind the first one, in roundings, taken for noise of paths that no fresh request took: kernels
divide the work otherwise in longer sequences and other batches. The second number is that of compressed KV. In states,
the square of the first."""
UNSEEN_LAYERS = 8
"""Errors of `UNSEEN_ROUNDINGS` grow as the number of layers up to this one, and as its root behind; as the root alone
where all tokens of fresh requests were off."""
UNLIKE = 1 / MARGIN
"""An error too large for noise: a bound learnt from such errors would be the size of the KV, and hide anything."""

NO_LAYER = 1 << 30
"""Stands for a layer behind all others."""

Key = tuple[str, str]
"""Region and source by name."""


@dataclass(frozen=True, slots=True, eq=False)
class Errors:
    """Relative L2 errors of one region on the host, float32 ``[sources, n]``, at ``positions`` in ascending order.

    roundoffs: of each source, the largest relative error of one rounding in the type of the stored KV; 0, or none at
    all, for a type of computations. Of a recurrent state (`of_states`) ``positions`` are rows of numbers, not tokens.
    whole: whether all of these are one window.
    """

    region: str
    sources: Sequence[KVSource]
    positions: Sequence[int]
    values: Tensor
    roundoffs: Sequence[float] = ()
    whole: bool = False

    @property
    def of_states(self) -> bool:
        """Whether the sources are recurrent states."""
        return any(source.role is Role.STATE for source in self.sources)

    def before(self, position: int) -> "Errors":
        """Of the tokens before ``position`` alone."""
        positions = [one for one in self.positions if one < position]
        return replace(self, positions=positions, values=self.values[:, : len(positions)])

    def windows(self) -> tuple[list[int], Tensor]:
        """See `windows`."""
        if self.whole and self.values.shape[1]:
            return [0], self.values.median(1, keepdim=True).values
        return windows(self.values)

    def quarters(self) -> Tensor:
        """Of each window of `windows` the error that `QUARTER_TOKENS` of its tokens have at least, ``[sources,
        windows]``."""
        starts, medians = self.windows()
        found = [
            self.values[:, start : start + WINDOW_TOKENS].topk(QUARTER_TOKENS, 1).values[:, -1] for start in starts
        ]
        return torch.stack(found, 1) if found else medians

    def unlike(self) -> tuple[KVSource, int, float] | None:
        """Of the first layer with a median of `UNLIKE` or more: a source, the first such position, and the median."""
        starts, medians = self.windows()
        for row in sorted(range(len(self.sources)), key=lambda row: self.sources[row].layer):
            far = (medians[row] >= UNLIKE).nonzero()[:, 0].tolist()
            if far:
                first = starts[far[0]] + int((self.values[row, starts[far[0]] :] >= UNLIKE).nonzero()[0])
                return self.sources[row], self.positions[first], float(medians[row, far[0]])
        return None

    def first_unlike(self) -> int:
        """The first layer with a token of `UNLIKE` or more, rows of states aside. `NO_LAYER` for none."""
        far = (self.values >= UNLIKE).any(1).tolist()
        layers = (source.layer for source, one in zip(self.sources, far, strict=True) if one)
        return NO_LAYER if self.of_states else min(layers, default=NO_LAYER)

    def like(self) -> list[tuple[KVSource, Tensor]]:
        """The errors below `UNLIKE` of each source. A token sent to another expert may have a larger one."""
        return [(source, tokens[tokens < UNLIKE]) for source, tokens in zip(self.sources, self.values, strict=True)]


@dataclass(frozen=True, slots=True)
class Bound:
    """Largest errors of a source that count as noise: of the median of a window, of a single token, and of a quarter of
    a window (`Errors.quarters`); infinite where nothing is judged by a quarter."""

    window: float
    token: float
    quarter: float = torch.inf

    def wider(self, other: "Bound") -> "Bound":
        """The larger bounds of both."""
        pairs = (self.window, other.window), (self.token, other.token), (self.quarter, other.quarter)
        return Bound(*map(max, pairs))


@dataclass(slots=True)
class _Medians:
    """Medians of a source in fresh requests. most: the largest one; requests: number with a median above 0, and of
    others, exact. far: of ``tokens`` those further off than `MEDIANS_MARGINS` allow for the largest median so far."""

    most: float = 0.0
    requests: int = 0
    exact: int = 0
    tokens: int = 0
    far: int = 0

    def add(self, tokens: Tensor, medians: Tensor) -> None:
        """Of one request: errors of a source by token, and its medians."""
        most = float(medians.max()) if medians.numel() else 0.0
        self.most = max(self.most, most)
        self.requests += most > 0
        self.exact += most == 0
        self.tokens += tokens.numel()
        self.far += int((tokens > MEDIANS_MARGINS[1] * self.most).sum())

    @property
    def dense(self) -> bool:
        """Whether the paths of the requests rounded otherwise in nearly all tokens."""
        return self.requests >= PAIRED_REQUESTS and not self.exact and self.far <= FEW_TOKENS * self.tokens


def windows(values: Tensor) -> tuple[list[int], Tensor]:
    """Of ``values``, ``[rows, n]``: first index of each window of `WINDOW_TOKENS` of ``n`` tokens, the last one at the
    end; and the median of each row in it, ``[rows, windows]``."""
    last = values.shape[1] - WINDOW_TOKENS
    starts = sorted({*range(0, last + 1, STRIDE), last}) if last >= 0 else []
    if not starts:
        return [], values.new_zeros(len(values), 0)
    # A slice for each: there are hundreds of windows at most, and nothing of the kind is in a forward.
    return starts, torch.stack([values[:, start : start + WINDOW_TOKENS].median(1).values for start in starts], 1)


class Noise:
    """The largest errors by source of fresh requests against a second computation (with too few of these, of two
    computations of others); and, where the engine can, of one with one more rounding of all KV read by attention, which
    stands for paths not taken by fresh requests, such as larger batches with other roundings. Where it can't, single
    tokens bound the medians, no layer being more exact than those before it, and medians of KV do where each fresh
    request has some. Longer sequences and larger batches may take paths that no fresh request took: a few roundings are
    no finding, and a few more where some fresh request had no median above 0.

    KV in a coarse type, such as fp8, differs by a whole step in the few numbers rounded to different sides by two
    paths, and is equal in all others; attention takes such a step to all tokens and layers behind. So a layer behind
    the first one with a different number may be off by one rounding of the type in all numbers. Where no median of a
    fresh request was above 0, the first layer may be off by as many steps as a rounding of the numbers before the
    store makes, and no more.

    A quarter of a window is judged by the bound of a single token, in a coarse type by a step of all numbers at least.
    Not judged so are layers from the first one on in which a token of a fresh request was `UNLIKE` noise, since where
    rounding sends one token to another expert it may send several, and never in states.

    A recurrent state is rounded with each decoded token, and keeps these errors: of such models only as many decodes
    are judged as noise was learnt of (`reach`). Where states are compared in some of the pairs only, they are not
    judged until as many pairs had some as it takes for KV (`lacks_states`).

    rounding: see `Recomputer.rounding`.
    """

    def __init__(self, rounding: float) -> None:
        self._least = Bound(rounding, rounding)
        self._bounds: dict[Key, Bound] = {}
        self._medians: dict[Key, _Medians] = defaultdict(_Medians)
        self.tokens = self.requests = 0
        self.paired_tokens = self.paired_requests = self.equal_tokens = self.equal_requests = 0
        self._alone = self._of_states = 0
        self._states_differ = False
        self._coarse = False
        self._dense = self._unlike = NO_LAYER
        self._decodes: list[int] = []

    @property
    def known(self) -> bool:
        """Whether enough fresh requests were compared for a verdict."""
        return any(share >= 1 for share, _ in self._ways())

    @property
    def settled(self) -> bool:
        """Whether it is `known`, and not by computations alone: nothing more is learnt."""
        return self.known and (not self._alone or self.requests - self._alone >= TAUGHT_REQUESTS)

    @property
    def equal(self) -> bool:
        """Whether nearly all fresh requests were equal bit for bit: a first one with any error teaches."""
        return not self.requests and self.paired_requests < PAIRED_REQUESTS

    @property
    def lacks_states(self) -> bool:
        """Whether too few pairs, and nothing but pairs, had states for a verdict on these."""
        return not self.requests and self._of_states < (PAIRED_REQUESTS if self._states_differ else EQUAL_REQUESTS)

    @property
    def progress(self) -> str:
        """Numbers of requests and tokens learnt from, and needed."""
        return max(self._ways())[1]

    def _ways(self) -> Iterator[tuple[float, str]]:
        """Ways to known noise: share of each, 1 at the end, and the numbers."""
        yield _way(self.requests, TAUGHT_REQUESTS, self.tokens, TAUGHT_TOKENS)
        yield _way(self.paired_requests, PAIRED_REQUESTS, self.paired_tokens, PAIRED_TOKENS)
        if self._coarse:
            # That some differ, and most don't, is usual.
            requests, tokens = self.equal_requests + self.paired_requests, self.equal_tokens + self.paired_tokens
            yield _way(requests, EQUAL_REQUESTS, tokens, EQUAL_TOKENS)
        else:
            yield _way(self.equal_requests, EQUAL_REQUESTS, self.equal_tokens, EQUAL_TOKENS)

    def reach(self, decodes: int) -> int:
        """Of how many of a request's decoded tokens the noise is known: at least `PAIRED_REQUESTS` fresh requests had
        as many. Of all where paths never differed."""
        longest = self._decodes[-1] if len(self._decodes) == PAIRED_REQUESTS else 0
        return min(decodes, longest) if self.paired_requests else decodes

    def learn(self, paths: Sequence[Sequence[Errors]], rounded: Sequence[Errors], fresh: bool = True) -> None:
        """Takes in a request, compared with computations by several paths, and with those of random roundings: a fresh
        one as it is in the cache, or another one as first computed, alone."""
        self.requests += 1
        self._alone += not fresh
        self.tokens += _most_tokens(rounded)
        for path in paths:
            for errors in path:
                self.widen(errors, MARGIN)
        for errors in rounded:
            self.widen(errors, 1.0)

    def learn_pair(self, pair: Sequence[Errors], decoded: int = 0) -> None:
        """Takes in a fresh request of so many ``decoded`` tokens, compared with one other computation and no more."""
        self._decodes = nlargest(PAIRED_REQUESTS, [*self._decodes, decoded])
        if any(bool(errors.values.any()) for errors in pair):
            self.paired_requests += 1
            self.paired_tokens += _most_tokens(pair)
        else:
            self.equal_requests += 1
            self.equal_tokens += _most_tokens(pair)
        states = [errors for errors in pair if errors.of_states]
        self._of_states += bool(states)
        self._states_differ = self._states_differ or any(bool(errors.values.any()) for errors in states)
        self._coarse = self._coarse or any(any(errors.roundoffs) for errors in pair)
        self._dense = min(self._dense, first_layer(pair, dense=True))
        for errors in pair:
            self._unlike = min(self._unlike, errors.first_unlike())
        found = [(errors.region, *one) for errors in pair for one in errors.like()]
        deepest: dict[str, float] = {}
        for region, source, tokens in sorted(found, key=lambda one: one[1].layer):
            margin = MARGIN * (STATES_MARGIN if source.role is Role.STATE else 1.0)
            worst = margin * float(tokens.max()) if tokens.numel() else 0.0
            deepest[source.half] = worst = max(worst, deepest.get(source.half, 0.0))
            self._raise(region, source, Bound(worst, worst))
        for errors in pair:
            for source, tokens, medians in zip(errors.sources, errors.values, errors.windows()[1], strict=True):
                self._medians[errors.region, source.name].add(tokens, medians)

    def bound(self, region: str, source: KVSource, roundoff: float = 0.0, first: int = NO_LAYER) -> Bound | None:
        """None for a source without any comparison. ``roundoff``: of `Errors.roundoffs`. ``first``: the first layer of
        the request with any error."""
        known = self._bounds.get((region, source.name))
        if known is None or (source.role is Role.STATE and self._of_states and self.lacks_states):
            return None
        unseen, medians = self._unseen(source), self._medians[region, source.name]
        of_kv = source.role is not Role.STATE
        if of_kv and medians.dense:
            least, most = (margin * medians.most for margin in MEDIANS_MARGINS)
            window = max(min(known.window, most), least, self._unseen(source, dense=True))
            known = Bound(window, max(known.token, window))
        elif self.equal or (of_kv and not self.requests):
            known = known.wider(Bound(unseen, unseen))
        quarters = of_kv and source.layer < self._unlike
        quarter = max(known.token, 2 * roundoff) if quarters else torch.inf
        if not roundoff:
            return replace(known, quarter=quarter)
        if source.layer <= first and source.layer < self._dense:
            # A change of all numbers by the rounding takes so large a share of them over to the next step, which is
            # twice the roundoff: the rounding by the step. The root of share times step squared:
            most = (unseen * 2 * roundoff) ** 0.5
            return Bound(most, most, max(most, quarter))
        return Bound(max(known.window, roundoff), max(known.token, roundoff), quarter)

    def widen(self, errors: Errors, margin: float) -> None:
        """Raises bounds to the largest ``errors`` times ``margin``."""
        margin *= STATES_MARGIN if errors.of_states else 1.0
        self._unlike = min(self._unlike, errors.first_unlike())
        _, medians = errors.windows()
        for (source, tokens), windows in zip(errors.like(), medians, strict=True):
            if tokens.numel():
                window = margin * float(windows.max()) if windows.numel() else 0.0
                self._raise(errors.region, source, Bound(window, margin * float(tokens.max())))

    def _unseen(self, source: KVSource, dense: bool = False) -> float:
        """Largest error by roundings on paths that no fresh request took. dense: see `_Medians.dense`."""
        if source.role is Role.STATE:
            return self._least.window * UNSEEN_ROUNDINGS**2 * (source.layer + 1)
        roundings = COMPRESSED_ROUNDINGS if source.half == "kv" else UNSEEN_ROUNDINGS
        layers = source.layer**0.5 * (1.0 if dense else min(source.layer, UNSEEN_LAYERS) ** 0.5)
        return self._least.window * (roundings * layers or 1.0)

    def _raise(self, region: str, source: KVSource, least: Bound) -> None:
        self._bounds[region, source.name] = self._bounds.get((region, source.name), self._least).wider(least)


def _way(requests: int, most_requests: int, tokens: int, most_tokens: int) -> tuple[float, str]:
    share = min(requests / most_requests, tokens / most_tokens)
    if not requests:
        return share, "no request"
    known, of = min(requests, most_requests), min(tokens, most_tokens)
    return share, f"{known} of {most_requests} requests with {of} of {most_tokens} tokens"


def first_layer(compared: Sequence[Errors], dense: bool = False) -> int:
    """The first layer with any error; with ``dense``, with a median of a window above 0. `NO_LAYER` for none."""
    found = NO_LAYER
    for errors in compared:
        rows = errors.windows()[1] if dense else errors.values
        differing = (source.layer for source, row in zip(errors.sources, rows, strict=True) if bool(row.any()))
        found = min(found, *differing, NO_LAYER)
    return found


def _most_tokens(compared: Sequence[Errors]) -> int:
    return max((len(errors.positions) for errors in compared if not errors.of_states), default=0)
