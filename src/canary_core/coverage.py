"""`Coverage`: what share of an engine's KV bytes is guarded, and what is not and why. Told once, at start-up."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.filesize import decimal

from canary_core.events import Event
from canary_core.region import Region, Uncovered


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the regions guard, and what they leave out. An `Uncovered` without bytes is a doubt, not a gap."""

    regions: Sequence[Region]
    uncovered: Sequence[Uncovered]

    @property
    def guarded_bytes(self) -> int:
        """Bytes of all regions."""
        return sum(r.pool_bytes for r in self.regions)

    @property
    def ratio(self) -> float:
        """Guarded bytes among all that were seen; 0 where nothing was."""
        seen = self.guarded_bytes + sum(u.size_bytes for u in self.uncovered)
        return self.guarded_bytes / seen if seen else 0.0

    @property
    def summary(self) -> str:
        """One line for an operator."""
        seen = self.guarded_bytes + sum(u.size_bytes for u in self.uncovered)
        parts = [f"{_percent(self.guarded_bytes, seen)} of {decimal(seen)} guarded"]
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
    """Items of one part (what is before the slash) with one reason are told together."""
    sizes: dict[tuple[str, str], int] = {}
    for item in items:
        key = (item.name.partition("/")[0], item.reason)
        sizes[key] = sizes.get(key, 0) + item.size_bytes
    return [f"{name} {decimal(size)} ({reason})" for (name, reason), size in sizes.items()]


def _percent(part: int, whole: int) -> str:
    """Never 100 % while a byte is missing."""
    if part == whole and whole:
        return "100 %"
    return f"{int(1000 * part / whole) / 10 if whole else 0.0} %"
