"""`Comparison`: the KV of a request in the cache against a second computation of it; `Comparing`: one under way."""

import copy
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from canary_core.ops.backends import choose
from canary_core.ops.sources import type_of
from canary_core.ops.state import RegionState
from canary_core.ops.torch.compare_kv import elements
from canary_core.recomputer import CachedRequest, Computed
from canary_core.region import KVSource, RegionKind, Role
from canary_core.runtime.host_copy import HostCopy
from canary_core.watchers.recompute.bytes_look import BytesLook
from canary_core.watchers.recompute.compared import Compared
from canary_core.watchers.recompute.compared_bytes import ComparedBytes
from canary_core.watchers.recompute.noise import Errors
from canary_core.watchers.recompute.parked import ParkedRecords
from canary_core.watchers.recompute.state_rows import by_rows, row_slots

KINDS = (RegionKind.FULL, RegionKind.WINDOW)
"""Regions of one token a slot, written once."""

ROUNDOFF = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3, torch.int8: 2.0**-6}
"""Largest relative error of one rounding, of types for storage alone. In int8: half a step, of 1/127 of the largest
number of a token and head, where the root mean square of the numbers is a quarter of the largest."""
SMALLEST = {torch.float8_e4m3fn: 2.0**-9, torch.float8_e5m2: 2.0**-16}
"""Distance of the smallest numbers, with their larger relative error."""


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Errors of each region where both sides have slots. missing: what is not compared at all, as region and source by
    name: recurrent states, say, and a drafter's layers. left: number of tokens of a parked prefix in slots with
    unchanged records; None for a running request. bytes: a comparison with the fingerprints, None without one."""

    errors: Sequence[Errors]
    missing: Sequence[str]
    left: int | None = None
    bytes: ComparedBytes | None = None

    @property
    def exact(self) -> bool:
        """Whether all compared bits are equal."""
        return not any(bool(one.values.any()) for one in self.errors)

    @property
    def finite(self) -> bool:
        """Whether the errors are numbers."""
        return all(bool(one.values.isfinite().all()) for one in self.errors)


class Comparing:
    """A `Comparison` whose figures are on their way to the host. On the stream of the forwards, between these; never
    waits. look: at the bytes, under way, too."""

    def __init__(
        self,
        canary: Compared,
        cached: CachedRequest,
        computed: Mapping[str, Computed],
        look: BytesLook | None = None,
    ) -> None:
        self._look = look
        self._begun: list[tuple[str, Sequence[KVSource], HostCopy]] = []
        self._missing: list[str] = []
        regions = [state.region for state in canary.states.values()]
        self._scaled = {one.layer for region in regions for one in region.sources if one.role is Role.SCALE}
        self._before = self._after = None if cached.parked is None else ParkedRecords(canary.states, cached)
        for name, slots in cached.slots.items():
            state, again = canary.states[name], computed.get(name)
            sources: Sequence[KVSource] = ()
            if again is not None and state.region.kind is RegionKind.STATE:
                sources = self._begin_states(canary.backend, state, slots, again)
            elif again is not None and state.region.kind in KINDS:
                sources = self._begin(canary.backend, state, slots, again)
            names = {source.name for source in sources}
            self._missing += [f"{name} {source.name}" for source in state.region.sources if source.name not in names]
        self._missing += [f"{one.name} {source.name}" for one in regions if one.name not in cached.slots
                          for source in one.sources]  # fmt: skip
        if self._before is not None:
            self._after = ParkedRecords(canary.states, cached)

    def _begin_states(self, backend: str, state: RegionState, slots: Tensor, computed: Computed) -> Sequence[KVSource]:
        """Row by row, where both sides have as many rows."""
        again = dict(by_rows(computed.sources))
        compared: list[KVSource] = []
        for rows, sources in by_rows(state.region.sources):
            if rows in again:
                of_rows = copy.copy(state)
                of_rows.region = replace(
                    state.region, sources=sources, slots=state.region.slots * rows, null_slot=None, slot_map=None
                )
                own = Computed(again[rows], row_slots(computed.slots, rows))
                compared += self._begin(backend, of_rows, row_slots(slots, rows), own)
        return compared

    def _begin(self, backend: str, state: RegionState, slots: Tensor, computed: Computed) -> Sequence[KVSource]:
        again = {source.name: source for source in computed.sources}
        compared = partial(_comparable, scaled=self._scaled)
        columns = [i for i, source in enumerate(state.region.sources) if compared(source, again.get(source.name))]
        sources = [state.region.sources[column] for column in columns]
        matched = Computed(tuple(again[source.name] for source in sources), computed.slots)
        out = torch.zeros(2, len(columns), len(slots), device=slots.device)
        choose(backend, slots.device).compare_kv(state, columns, slots, matched, out)
        self._begun.append((state.region.name, sources, HostCopy(out, (slots >= 0) & (computed.slots >= 0))))
        return sources

    def arrived(self) -> bool:
        """Whether `result` does not wait."""
        looks = all(look is None or look.arrived() for look in (self._before, self._after, self._look))
        return looks and all(copy.arrived() for _, _, copy in self._begun)

    def result(self) -> Comparison:
        """Waits for the device, unless all has `arrived`."""
        left = None if self._before is None or self._after is None else self._before.left(self._after)
        compared = None if self._look is None else self._look.result()
        return Comparison([_errors(*one) for one in self._begun], self._missing, left, compared)


def _errors(name: str, sources: Sequence[KVSource], copy: HostCopy) -> Errors:
    copy.wait()
    (apart, size), there = copy.tensors
    # Anything is infinitely far from zeros; numbers too large to be squared are not judged.
    values = torch.where(apart == 0, 0.0, (apart / size).sqrt()).nan_to_num(nan=0.0, posinf=torch.inf)
    roundoffs = [_roundoff(source, sizes[there]) for source, sizes in zip(sources, size, strict=True)]
    return Errors(name, sources, there.nonzero()[:, 0].tolist(), values[:, there], roundoffs)


def _roundoff(source: KVSource, sizes: Tensor) -> float:
    """See `Errors.roundoffs`. ``sizes``: the sum of squares of each token."""
    dtype = type_of(source)
    if dtype is None or dtype not in ROUNDOFF or not len(sizes):
        return 0.0
    smallest = 0.0 if source.scaled is not None else SMALLEST.get(dtype, 0.0)
    usual = float((sizes / elements(source)).sqrt().median())
    return min(1.0, math.hypot(ROUNDOFF[dtype], smallest / 2 / usual if usual else 1.0))


def _comparable(held: KVSource, again: KVSource | None, scaled: Container[int]) -> bool:
    """Whether both have numbers, and equally many in a slot. ``scaled``: layers with scales in tensors beside the KV,
    without which bytes are no numbers."""
    if again is None or (held.dtype in ROUNDOFF and held.layer in scaled):
        return False
    return elements(held) == elements(again) != 0
