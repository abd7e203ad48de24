"""`Errors` of one request, and `Noise`: the errors of an engine by computing the same on another path."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from canary_core.region import KVSource

WINDOW_TOKENS = 32
"""Tokens in a row whose median is judged: a single odd token is no verdict."""
STRIDE = 8
"""Tokens from one window to the next."""

TAUGHT_TOKENS, TAUGHT_REQUESTS = 256, 4
"""Compared tokens, and requests, until the noise counts as known; each was also computed with random roundings."""
PAIRED_TOKENS, PAIRED_REQUESTS = 1024, 8
"""The same where an engine can't do so. Only requests that differ at all count."""
EQUAL_TOKENS, EQUAL_REQUESTS = 1024, 16
"""So many that are equal bit for bit, and no other, are an engine whose paths all give the same."""

MARGIN = 2.0
"""Bound of an error, as a multiple of the largest one of fresh requests. Random roundings are a bound as they are: each
number is rounded, where another path rounds some."""

Key = tuple[str, str]
"""Region and source by name."""


@dataclass(frozen=True, slots=True, eq=False)
class Errors:
    """Relative L2 errors of one region on the host, float32 ``[sources, n]``, at ``positions`` in ascending order."""

    region: str
    sources: Sequence[KVSource]
    positions: Sequence[int]
    values: Tensor

    def windows(self) -> tuple[list[int], Tensor]:
        """See `windows`."""
        return windows(self.values)


@dataclass(frozen=True, slots=True)
class Bound:
    """Largest errors of a source that count as noise: of the median of a window, and of a single token."""

    window: float
    token: float


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
    """The largest errors by source of fresh requests against a second computation; and, where the engine can, of one
    with one more rounding of all KV read by attention, which stands for paths not taken by fresh requests, such as
    larger batches with other roundings. Where it can't, single tokens bound the medians, and no layer is taken to be
    more exact than those before it.

    rounding: see `Recomputer.rounding`.
    """

    def __init__(self, rounding: float) -> None:
        self._least = Bound(rounding, rounding)
        self._bounds: dict[Key, Bound] = {}
        self.tokens = self.requests = 0
        self.paired_tokens = self.paired_requests = 0
        self.equal_tokens = self.equal_requests = 0

    @property
    def known(self) -> bool:
        """Whether enough fresh requests were compared for a verdict."""
        equal = self.equal_tokens >= EQUAL_TOKENS and self.equal_requests >= EQUAL_REQUESTS
        return (
            (self.tokens >= TAUGHT_TOKENS and self.requests >= TAUGHT_REQUESTS)
            or (self.paired_tokens >= PAIRED_TOKENS and self.paired_requests >= PAIRED_REQUESTS)
            or (equal and not self.paired_requests)
        )

    def learn(self, paths: Sequence[Sequence[Errors]], rounded: Sequence[Errors]) -> None:
        """Takes in a fresh request, compared with computations by several paths, and with one of random roundings."""
        self.requests += 1
        self.tokens += _most_tokens(rounded)
        for path in paths:
            for errors in path:
                self._widen(errors, MARGIN)
        for errors in rounded:
            self._widen(errors, 1.0)

    def learn_pair(self, pair: Sequence[Errors]) -> None:
        """Takes in a fresh request, compared with one other computation and no more."""
        if any(bool(errors.values.any()) for errors in pair):
            self.paired_requests += 1
            self.paired_tokens += _most_tokens(pair)
        else:
            self.equal_requests += 1
            self.equal_tokens += _most_tokens(pair)
        for errors in pair:
            deepest: dict[str, float] = {}
            for source, tokens in sorted(zip(errors.sources, errors.values, strict=True), key=lambda one: one[0].layer):
                worst = MARGIN * float(tokens.max()) if tokens.numel() else 0.0
                deepest[source.half] = worst = max(worst, deepest.get(source.half, 0.0))
                self._raise(errors.region, source, Bound(worst, worst))

    def bound(self, region: str, source: KVSource) -> Bound | None:
        """None where the source was never compared."""
        return self._bounds.get((region, source.name))

    def _widen(self, errors: Errors, margin: float) -> None:
        _, medians = errors.windows()
        for source, windows, tokens in zip(errors.sources, medians, errors.values, strict=True):
            if tokens.numel():
                window = margin * float(windows.max()) if windows.numel() else 0.0
                self._raise(errors.region, source, Bound(window, margin * float(tokens.max())))

    def _raise(self, region: str, source: KVSource, least: Bound) -> None:
        known = self._bounds.get((region, source.name), self._least)
        self._bounds[region, source.name] = Bound(max(known.window, least.window), max(known.token, least.token))


def _most_tokens(compared: Sequence[Errors]) -> int:
    return max((len(errors.positions) for errors in compared), default=0)
