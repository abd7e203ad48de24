"""`Coverage`: guarded share of an engine's KV bytes, and the rest with reasons. Reported once, at start-up."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from canary_core.boxes import Box, box_of, boxes_of
from canary_core.errors import AttachError
from canary_core.events import Event, size_text
from canary_core.region import Region, Uncovered
from canary_core.watchers.audit.extents import clipped, distinct_bytes
from canary_core.watchers.audit.memory import EngineMemory, Storage


@dataclass(frozen=True, slots=True)
class Coverage:
    """Guarded and left-out memory. An `Uncovered` without bytes is a doubt, not a gap.

    ``engine_guarded_bytes``: see `of_engine`; None where the adapter is the only source.
    """

    regions: Sequence[Region]
    uncovered: Sequence[Uncovered]
    engine_guarded_bytes: int | None = None

    @classmethod
    def of_engine(cls, regions: Sequence[Region], uncovered: Sequence[Uncovered], memory: EngineMemory) -> "Coverage":
        """As a share of ``memory``, the engine's own: each byte counts once, however many sources share it, and bytes
        neither in a region nor in ``uncovered`` are left out as well, under the engine's names. By addresses alone."""
        described: dict[int, list[Box]] = {}
        for region in regions:
            for source in region.sources:
                held = memory.holding(source, region.slots)
                if held is not None:
                    described.setdefault(held, []).extend(boxes_of(source, region.slots))
        gaps = [_Gap.of(storage, described.get(i, []), uncovered) for i, storage in enumerate(memory.storages)]
        guarded = sum(gap.guarded_bytes for gap in gaps)
        _explain(gaps, [u.size_bytes for u in uncovered if u.tensor is None and u.size_bytes])
        return cls(regions, (*uncovered, *(item for gap in gaps for item in gap.items())), guarded)

    @property
    def guarded_bytes(self) -> int:
        """Bytes described by regions: of the engine's memory, each once; if that is unknown, of all regions."""
        if self.engine_guarded_bytes is not None:
            return self.engine_guarded_bytes
        return sum(r.pool_bytes for r in self.regions)

    @property
    def ratio(self) -> float:
        """Guarded share of all bytes seen; 0 without any."""
        seen = self.guarded_bytes + sum(u.size_bytes for u in self.uncovered)
        return self.guarded_bytes / seen if seen else 0.0

    @property
    def summary(self) -> str:
        """One line for an operator."""
        seen = self.guarded_bytes + sum(u.size_bytes for u in self.uncovered)
        parts = [f"{_percent(self.guarded_bytes, seen)} of {size_text(seen)} guarded"]
        gaps = [u for u in self.uncovered if u.size_bytes]
        if gaps:
            parts.append("left out: " + ", ".join(_listed(gaps)))
        parts += [f"{u.name}: {u.reason}" for u in self.uncovered if not u.size_bytes]
        return "; ".join(parts)

    def event(self) -> Event:
        """The ``coverage`` event; a warning where anything is left out."""
        fields: dict[str, object] = {
            "summary": self.summary,
            "coverage_ratio": round(self.ratio, 6),
            "denominator": "adapter" if self.engine_guarded_bytes is None else "engine",
            "guarded_bytes": self.guarded_bytes,
            "regions": {
                r.name: {
                    "kind": r.kind.value,
                    "bytes": r.pool_bytes,
                    "slots": r.slots,
                    "sources": _halves(r),
                }
                for r in self.regions
            },
            "uncovered": [{"name": u.name, "bytes": u.size_bytes, "reason": u.reason} for u in self.uncovered],
        }
        return Event("coverage", "info" if self.regions and not self.uncovered else "warning", fields)


@dataclass(slots=True)
class _Gap:
    """The part of one storage without a description."""

    storage: Storage
    boxes: list[Box]
    """Described memory, and memory left out by an `Uncovered` with an address."""
    guarded_bytes: int
    missing_bytes: int

    @classmethod
    def of(cls, storage: Storage, boxes: Sequence[Box], uncovered: Sequence[Uncovered]) -> "_Gap":
        """The gap of ``storage``, with ``boxes`` described by regions."""
        tensors = [u.tensor for u in uncovered if u.tensor is not None and u.tensor.numel()]
        there = [t for t in tensors if storage.start <= t.data_ptr() < storage.end and t.device == storage.data.device]
        known = [*boxes, *(box_of(t) for t in there)]
        missing = max(storage.data.numel() - distinct_bytes(known), 0)
        return cls(storage, known, distinct_bytes(boxes), missing)

    def items(self) -> Iterable[Uncovered]:
        """The missing memory, by the engine's tensors; of nested tensors the smallest first."""
        left = self.missing_bytes
        tensors = sorted(self.storage.tensors, key=lambda item: item[1].nbytes)
        sizes = {name: self._missing_of(box_of(tensor)) for name, tensor in tensors} if len(tensors) > 1 else {}
        for name, _ in self.storage.tensors:
            size = min(sizes.get(name, 0 if sizes else left), left)
            if size:
                left -= size
                yield Uncovered(name, size, "nobody describes them")
        if left:
            yield Uncovered(f"beside {self.storage.names}", left, "nobody describes them")

    def _missing_of(self, tensor: Box) -> int:
        there = distinct_bytes(clipped(self.boxes, tensor.start, tensor.end))
        return max(distinct_bytes([tensor]) - there, 0)


def _explain(gaps: Sequence[_Gap], sizes: Sequence[int]) -> None:
    """Subtracts memory left out without an address from the gaps: from a storage with exactly as many missing bytes,
    else from one after the other."""
    unplaced = 0
    for size in sizes:
        exact = next((gap for gap in gaps if gap.missing_bytes == size), None)
        if exact is None:
            unplaced += size
        else:
            exact.missing_bytes = 0
    for gap in gaps:
        taken = min(unplaced, gap.missing_bytes)
        gap.missing_bytes -= taken
        unplaced -= taken


def _halves(region: Region) -> dict[str, int]:
    """How many layers each half has, in order of appearance."""
    counts: dict[str, int] = {}
    for source in region.sources:
        counts[source.half] = counts.get(source.half, 0) + 1
    return counts


def _listed(items: Iterable[Uncovered]) -> list[str]:
    """One line for all items of the same part (the name before the slash; without a slash, the name but for its
    numbers) and the same reason."""
    sizes: dict[tuple[str, str], int] = {}
    items = list(items)
    for item in items:
        part, slash, _ = item.name.partition("/")
        alike = re.sub(r"\d+", "*", part)
        many = not slash and sum(re.sub(r"\d+", "*", i.name) == alike for i in items) > 1
        key = (alike if many else part, item.reason)
        sizes[key] = sizes.get(key, 0) + item.size_bytes
    return [f"{name} {size_text(size)} ({reason})" for (name, reason), size in sizes.items()]


def _percent(part: int, whole: int) -> str:
    """Never 100 % while a byte is missing."""
    if part == whole and whole:
        return "100 %"
    return f"{int(1000 * part / whole) / 10 if whole else 0.0} %"


def require_together(regions: Sequence[Region]) -> None:
    """Raises `AttachError` if one Canary can't guard ``regions``: none, two of one name, or of several devices."""
    if not regions:
        raise AttachError("a Canary needs at least one region, got none; did the pool adapter recognise the pool?")
    names = [r.name for r in regions]
    if len(set(names)) != len(names):
        raise AttachError(f"regions must have different names, got {names}")
    for region in regions:
        if region.device != regions[0].device:
            raise AttachError(
                f"all regions must be on one device, got {region.name!r} on {region.device} and {regions[0].name!r} on "
                f"{regions[0].device}; make one Canary a device"
            )
