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
"""Compared tokens, and requests, until the noise counts as known."""

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
        """First index of each window of `WINDOW_TOKENS` compared tokens, the last one at the end; and the median of
        each source in it, ``[sources, windows]``."""
        last = len(self.positions) - WINDOW_TOKENS
        starts = sorted({*range(0, last + 1, STRIDE), last}) if last >= 0 else []
        if not starts:
            return [], self.values.new_zeros(len(self.sources), 0)
        # A slice for each: sources have hundreds of windows at most, and nothing of the kind is in a forward.
        medians = [self.values[:, start : start + WINDOW_TOKENS].median(1).values for start in starts]
        return starts, torch.stack(medians, 1)


class Noise:
    """The largest errors by source: of fresh requests against a second computation, and of a computation with one more
    rounding of all KV read by attention. The latter stands for paths not taken by fresh requests, such as larger
    batches with other roundings.

    rounding: see `Recomputer.rounding`.
    """

    def __init__(self, rounding: float) -> None:
        self._rounding = rounding
        self._bounds: dict[Key, tuple[float, float]] = {}
        self.tokens = self.requests = 0

    @property
    def known(self) -> bool:
        """Whether enough fresh requests were compared for a verdict."""
        return self.tokens >= TAUGHT_TOKENS and self.requests >= TAUGHT_REQUESTS

    def learn(self, paths: Sequence[Sequence[Errors]], rounded: Sequence[Errors]) -> None:
        """Takes in a fresh request, compared with computations by several paths, and with one of random roundings."""
        self.requests += 1
        self.tokens += max((len(errors.positions) for errors in rounded), default=0)
        for path in paths:
            self._widen(path, MARGIN)
        self._widen(rounded, 1.0)

    def _widen(self, compared: Sequence[Errors], margin: float) -> None:
        for errors in compared:
            _, medians = errors.windows()
            for source, windows, tokens in zip(errors.sources, medians, errors.values, strict=True):
                key = errors.region, source.name
                window, token = self._bounds.get(key, (self._rounding, self._rounding))
                self._bounds[key] = (
                    max(window, margin * float(windows.max()) if windows.numel() else 0.0),
                    max(token, margin * float(tokens.max()) if tokens.numel() else 0.0),
                )

    def bound(self, region: str, source: KVSource) -> float | None:
        """Largest median of a window that counts as noise; None where the source was never compared."""
        known = self._bounds.get((region, source.name))
        return None if known is None else known[0]

    def token_bound(self, region: str, source: KVSource) -> float:
        """The same of a single token."""
        return self._bounds.get((region, source.name), (self._rounding, self._rounding))[1]
