"""`OwnNoise`: the noise of one request, by computations of it alone."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from canary_core.ops.state import RegionState
from canary_core.recomputer import CachedRequest, Computed
from canary_core.region import KVSource
from canary_core.watchers.recompute.compared import Compared
from canary_core.watchers.recompute.comparison import Comparing
from canary_core.watchers.recompute.noise import Bound, Errors, Key, Noise

MARGIN = 4.0
"""Bound of an error, as a multiple of the largest one between computations of the same request."""
MOST_APART = 64.0
"""The same of a path's error and those of random roundings: paths further apart compute different things. Of models
whose paths are the same, none was more than 7 times as far."""

Compute = Callable[[int, float], Mapping[str, Computed]]
"""`Recomputer.compute` of one request: by tokens of a forward, and jitter."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnNoise:
    """Errors of a request's computations against the first one: nothing of the cache is in the errors, so what is wrong
    in the cache can't be taken for noise. paths: without random roundings. rounded: with random roundings, the first
    one on the path of the first computation."""

    paths: Sequence[Sequence[Errors]]
    rounded: Sequence[Sequence[Errors]]

    @classmethod
    def of(cls, canary: Compared, cached: CachedRequest, first: Mapping[str, Computed], compute: Compute,
           looks: tuple[Sequence[int], Sequence[int], float]) -> "OwnNoise":  # fmt: skip
        """By further computations. looks: tokens of a forward of each path, and of each with roundings; and the size
        of the roundings. Waits for the device."""
        before, slots = _Before(canary, cached, first), {}
        for name, held in cached.slots.items():
            if name in before.states:
                slots[name] = torch.where(held >= 0, first[name].slots, -1)
        own = CachedRequest(cached.request, cached.tokens, slots)
        paths, rounded, jitter = looks

        def errors(chunk_tokens: int, size: float) -> Sequence[Errors]:
            return Comparing(before, own, compute(chunk_tokens, size)).result().errors

        return cls([errors(chunk, 0.0) for chunk in paths], [errors(chunk, jitter) for chunk in rounded])

    def widened(self, bounds: Mapping[Key, Bound]) -> dict[Key, Bound]:
        """``bounds`` for this request: no error that its own computations have from each other differs."""
        own = _noise((*self.paths, *self.rounded), MARGIN)
        return {key: bound.wider(own.get(key, bound)) for key, bound in bounds.items()}

    def unexplained(self, errors: Sequence[Errors]) -> tuple[Key, float] | None:
        """Of ``errors`` of the cache the first source that is further off than the largest of random roundings times
        `MOST_APART`, and its median; None where none is. One limit for all layers: few roundings reach the first."""
        roundings = _noise(self.rounded, MOST_APART)
        most = max((bound.window for bound in roundings.values()), default=0.0)
        return _first_above(errors, lambda key: most)

    def unlike(self, rounding: float) -> Key | None:
        """The first source of which a path is further off than any ``rounding`` explains; None for a model whose paths
        compute the same."""
        # The others take another path than the first computation.
        allowed = _noise(self.rounded[:1], MOST_APART)

        def most(key: Key) -> float:
            return max(allowed[key].window if key in allowed else 0.0, rounding)

        far = _first_above([one for path in self.paths for one in path], most)
        return None if far is None else far[0]


def _first_above(compared: Sequence[Errors], most: Callable[[Key], float]) -> tuple[Key, float] | None:
    """The first source with a median of a window above its ``most``, and the largest such median."""
    for one in compared:
        _, medians = one.windows()
        for source, found in zip(one.sources, medians, strict=True):
            key = one.region, source.name
            if found.numel() and float(found.max()) > most(key):
                return key, float(found.max())
    return None


def _noise(compared: Sequence[Sequence[Errors]], margin: float) -> dict[Key, Bound]:
    noise, found = Noise(0.0), {}
    for one in (one for errors in compared for one in errors):
        noise.widen(one, margin)
        found.update({(one.region, source.name): noise.bound(one.region, source) for source in one.sources})
    return {key: bound for key, bound in found.items() if bound is not None}


class _Before:
    """The first computation in the cache's place: see `Compared`."""

    def __init__(self, canary: Compared, cached: CachedRequest, first: Mapping[str, Computed]) -> None:
        self.backend = canary.backend
        self.states: dict[str, RegionState] = {}
        for name in cached.slots:
            state = copy.copy(canary.states[name])
            names = [source.name for source in state.region.sources]
            sources: list[KVSource] = [source for source in first[name].sources if source.name in names]
            if sources:
                slots = int(first[name].slots.max()) + 1
                state.region = replace(
                    state.region, sources=tuple(sources), slots=slots, null_slot=None, null_slots=1, null_reads=None,
                    slot_map=None,
                )  # fmt: skip
                self.states[name] = state
