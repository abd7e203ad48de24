"""Do two slots share a byte? Checked once at attach, on addresses alone: nothing is read from the pool.

A source's bytes are ``base + page * P + i * S + c * C + [0, chunk_bytes)``, so two of them meet where a bounded integer
combination of strides falls into an interval. Branch and bound over the strides, largest first, with the greatest
common divisor of the rest as a second bound, decides exactly; for nested layouts (every known pool) in a few dozen
steps. A search beyond its budget is *undecided* and never a refusal.

Out of sight: virtual addresses mapped to the same physical memory (CUDA VMM, kvcached), tensors on different devices,
memory shared between processes, and bytes outside of all sources.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from canary_core.boxes import Box, slot_boxes
from canary_core.errors import AttachError
from canary_core.region import KVSource, Region

PAIR_STEPS = 20_000
"""Search steps for one pair of sources before it counts as undecided."""

TOTAL_STEPS = 400_000
"""Search steps of one `require_disjoint`: under a second of host time."""


def require_disjoint(regions: Sequence[Region], sharing: Iterable[frozenset[str]] = ()) -> tuple[str, ...]:
    """Raises `AttachError` if two sources of one region, or of two regions, hold a byte in common.

    ``sharing``: sets of region names; regions of one set may overlap each other (hybrid groups that take turns on the
    same blocks). Sources of one region never may: list a tensor common to several layers once. Returns undecided pairs,
    as ``region/source ~ region/source``; usually none.
    """
    known = {region.name for region in regions}
    groups = [frozenset(group) for group in sharing]
    for group in groups:
        if not group <= known:
            raise AttachError(f"sharing names regions {sorted(group - known)}, which are not among {sorted(known)}")
    undecided = []
    left = TOTAL_STEPS
    for one, other in _meeting(regions):
        if one.region is not other.region and any({one.region.name, other.region.name} <= group for group in groups):
            continue
        budget = _Budget(min(PAIR_STEPS, left))
        try:
            clash = _cross(one.parts, other.parts, budget)
        except _UndecidedError:
            undecided.append(f"{one.name} ~ {other.name}")
            clash = None
        left -= budget.spent
        if clash is not None:
            advice = (
                "list a tensor that layers share once, or correct offsets and strides"
                if one.region is other.region
                else "correct offsets and strides, or declare the two regions as sharing their memory"
            )
            raise AttachError(
                f"{one.name} and {other.name} overlap: slot {clash[0]} of the first and slot {clash[1]} of the second "
                f"share bytes; {advice}"
            )
    return tuple(undecided)


def require_distinct_slots(source: KVSource, slots: int) -> None:
    """Raises `AttachError` if two of the ``slots`` slots, or two chunks of one slot, share a byte."""
    clash = shared_slots(source, slots)
    if clash is not None:
        raise AttachError(
            f"{source.name}: slots {clash[0]} and {clash[1]} share bytes with page stride {source.page_stride_bytes}, "
            f"slot stride {source.slot_stride_bytes}, {source.chunks} chunk(s) of {source.chunk_bytes} bytes every "
            f"{source.chunk_stride_bytes}; give the tensor that holds each slot once (not expanded, not overlapping)"
        )


def shared_slots(source: KVSource, slots: int) -> tuple[int, int] | None:
    """Two of the ``slots`` slots of ``source`` with a common byte (twice the same: its chunks overlap), None if there
    are none or the search can't decide."""
    # From the first byte on, where most layers of a model have the same.
    return _shared_slots(_slots_of(source, slots, 0))


class _SlotBox(NamedTuple):
    """Slots ``first + page * page_size + i`` of all combinations of the first two dims of ``box``, see `slot_boxes`."""

    first: int
    page_size: int
    box: Box

    def slot(self, page: int, i: int) -> int:
        return self.first + page * self.page_size + i


def _slots_of(source: KVSource, slots: int, address: int) -> tuple[_SlotBox, ...]:
    return tuple(_SlotBox(first, source.page_size, box) for first, box in slot_boxes(source, slots, address))


@lru_cache
def _shared_slots(parts: tuple[_SlotBox, ...]) -> tuple[int, int] | None:
    budget = _Budget(PAIR_STEPS)
    try:
        for part in parts:
            clash = _within(part, budget)
            if clash is not None:
                return clash
        return _cross(parts[:1], parts[1:], budget)
    except _UndecidedError:
        return None


class _UndecidedError(Exception):
    """The search used up its steps."""


@dataclass(slots=True)
class _Budget:
    steps: int
    spent: int = 0

    def spend(self) -> None:
        self.spent += 1
        if self.spent > self.steps:
            raise _UndecidedError


@dataclass(frozen=True, slots=True)
class _Extent:
    """One source of a region, ``place`` in the order of all, with the address range of its slots."""

    place: int
    region: Region
    source: KVSource
    parts: tuple[_SlotBox, ...]
    start: int = field(init=False)
    end: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", min(part.box.start for part in self.parts))
        object.__setattr__(self, "end", max(part.box.end for part in self.parts))

    @property
    def name(self) -> str:
        return f"{self.region.name}/{self.source.name}"


def _meeting(regions: Sequence[Region]) -> list[tuple[_Extent, _Extent]]:
    """Pairs of sources on one device with overlapping address ranges, in the regions' order within and between pairs,
    so that the order of reports does not depend on an allocator's addresses."""
    described = [
        (region, source, parts)
        for region in regions
        for source in region.sources
        if (parts := _slots_of(source, region.slots, source.address))
    ]
    extents = [_Extent(place, *one) for place, one in enumerate(described)]
    pairs = []
    for device in {extent.region.device for extent in extents}:
        reaching: list[_Extent] = []
        for extent in sorted((e for e in extents if e.region.device == device), key=lambda e: e.start):
            reaching = [e for e in reaching if e.end > extent.start]
            pairs += [(e, extent) if e.place < extent.place else (extent, e) for e in reaching]
            reaching.append(extent)
    return sorted(pairs, key=lambda pair: (pair[0].place, pair[1].place))


def _cross(ones: Sequence[_SlotBox], others: Sequence[_SlotBox], budget: _Budget) -> tuple[int, int] | None:
    """A slot of ``ones`` and one of ``others`` with a byte in common."""
    for one in ones:
        for other in others:
            gap = other.box.start - one.box.start
            terms = [(stride, 0, count - 1) for stride, count in one.box.dims]
            terms += [(stride, 1 - count, 0) for stride, count in other.box.dims]
            low, high = gap - (one.box.length - 1), gap + (other.box.length - 1)
            found = _solve(terms, low, high, budget)
            if found is not None:
                return one.slot(found[0], found[1]), other.slot(-found[3], -found[4])
    return None


def _within(part: _SlotBox, budget: _Budget) -> tuple[int, int] | None:
    """Two places of one part with a byte in common. The first nonzero part of their difference is taken as positive, so
    that a place is not compared with itself."""
    reach = part.box.length - 1
    for lead in range(3):
        terms = [
            (stride, 0, 0) if d < lead else (stride, 1, count - 1) if d == lead else (stride, 1 - count, count - 1)
            for d, (stride, count) in enumerate(part.box.dims)
        ]
        found = _solve(terms, -reach, reach, budget)
        if found is not None:
            page, i = found[0], found[1]
            return part.slot(0, max(0, -i)), part.slot(page, max(0, i))
    return None


def _solve(terms: Sequence[tuple[int, int, int]], low: int, high: int, budget: _Budget) -> list[int] | None:
    """Integers ``x[k]`` in ``[lo, hi]`` for each term ``(stride, lo, hi)`` with ``low <= sum(stride * x) <= high``."""
    if any(lo > hi for _, lo, hi in terms):
        return None
    # Terms of one stride act as one: their sum takes every value between the sums of their bounds.
    strides = sorted({stride for stride, _, _ in terms if stride}, reverse=True)
    bounds = [
        (sum(lo for s, lo, _ in terms if s == stride), sum(hi for s, _, hi in terms if s == stride))
        for stride in strides
    ]
    least, most, common = [0], [0], [0]
    for stride, (lo, hi) in zip(reversed(strides), reversed(bounds), strict=True):
        least.append(least[-1] + stride * lo)
        most.append(most[-1] + stride * hi)
        common.append(gcd(common[-1], stride))

    def descend(k: int, low: int, high: int) -> list[int] | None:
        budget.spend()
        rest = len(strides) - k
        if rest == 0:
            return [] if low <= 0 <= high else None
        if high // common[rest] * common[rest] < low:
            return None
        stride, (lo, hi) = strides[k], bounds[k]
        first = max(lo, -((most[rest - 1] - low) // stride))
        last = min(hi, (high - least[rest - 1]) // stride)
        for x in range(first, last + 1):
            tail = descend(k + 1, low - stride * x, high - stride * x)
            if tail is not None:
                return [x, *tail]
        return None

    found = descend(0, low, high)
    if found is None:
        return None
    values = [lo for _, lo, _ in terms]
    for stride, total, (least_sum, _) in zip(strides, found, bounds, strict=True):
        spare = total - least_sum
        # Backwards, so that of two sources (the second one's bounds are negative) the lowest slots are named.
        for k, (s, lo, hi) in reversed(list(enumerate(terms))):
            if s == stride:
                step = min(hi - lo, spare)
                values[k] += step
                spare -= step
    return values
