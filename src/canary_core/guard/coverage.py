"""`Coverage`: guarded share of an engine's KV bytes, and the rest with reasons. Reported at start-up, and with each
later doubt."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from canary_core.config import CanaryConfig
from canary_core.errors import AttachError
from canary_core.events import Event, size_text
from canary_core.ops.state import RegionState
from canary_core.region import Region, Uncovered


@dataclass(frozen=True, slots=True)
class Coverage:
    """Guarded and left-out memory. An `Uncovered` without bytes is a doubt, not a gap.

    ``engine_guarded_bytes``: see `of_engine`; None where the adapter is the only source.
    """

    regions: Sequence[Region]
    uncovered: Sequence[Uncovered]
    engine_guarded_bytes: int | None = None

    @classmethod
    def of_engine(
        cls, regions: Sequence[Region], uncovered: Sequence[Uncovered], tensors: Mapping[str, Tensor]
    ) -> "Coverage":
        """As a share of the engine's own ``tensors``, by name: each byte counts once, however many sources share it,
        and bytes neither in a region nor in ``uncovered`` are left out as well, under the engine's names. By addresses
        alone. Without any as of the adapter alone."""
        if not tensors:
            return cls(regions, uncovered)
        from canary_core.watchers.audit.gaps import gaps_of
        from canary_core.watchers.audit.memory import EngineMemory

        guarded, gaps = gaps_of(regions, uncovered, EngineMemory(tensors))
        return cls(regions, (*uncovered, *gaps), guarded)

    def with_doubt(self, name: str, reason: str) -> "Coverage":
        """The same memory with a doubt that came up later."""
        return replace(self, uncovered=(*self.uncovered, Uncovered(name, 0, reason)))

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


def sharing(states: Iterable[RegionState], config: CanaryConfig) -> list[Uncovered]:
    """The regions whose layers share fingerprints, see `Sums`: doubts of the coverage without a size, since a change in
    any layer is seen."""
    told = []
    for state in states:
        sources = state.sources
        if sources.sums:
            most = max(len({sources[i].layer for i in group}) for group in sources.sums.groups)
            halves = any(label.half is None for label in sources.judged)
            layer, layers = ("layer or half", "layers, with all halves,") if halves else ("layer", "layers")
            reason = (
                f"CANARY_MEMORY={config.memory}: up to {most} {layers} share fingerprints. A changed layer is named, "
                f"of several only their group. A write lost in a part of a group, or a {layer} left out by a load of "
                "foreign KV, is not seen, and CANARY_STORE_CHECK and CANARY_REPAIR rest; CANARY_MEMORY=exact has all"
            )
            told.append(Uncovered(f"single layers of {state.region.name}", 0, reason))
    return told
