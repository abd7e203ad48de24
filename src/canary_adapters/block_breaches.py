"""Rules for a scheduler's books about blocks, whatever they hold, with breaches as findings."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from canary_adapters.block_events import BlockGroup
from canary_core import Canary, Event, Kind, Phase, Violation

MOST_BREACHES = 32
"""Most breaches reported in one sweep; further ones usually have the same cause."""


@dataclass(frozen=True, slots=True)
class BlockBreach:
    """``block`` breaks ``rule``; ``detail`` says how, as the end of a sentence."""

    rule: str
    block: int
    detail: str


@dataclass(frozen=True, slots=True)
class BlockSweep:
    """One look at a scheduler's blocks: number of cached ones, and breaches."""

    cached: int
    breaches: tuple[BlockBreach, ...]

    @classmethod
    def of(cls, cached: int, breaches: Iterable[BlockBreach]) -> "BlockSweep":
        """The first `MOST_BREACHES` of ``breaches``."""
        return cls(cached, tuple(islice(breaches, MOST_BREACHES)))

    def report(self, canary: Canary, group: BlockGroup) -> None:
        """Reports the breaches, and the sweep. ``group``: one with the blocks."""
        new = report_breaches(canary, group, self.breaches)
        canary.tell(Event("sweep", "warning" if new else "info", {"nodes": self.cached, "findings": new}))
        canary.count("sweeps")


def count_breaches(counts: Mapping[int, int], held: Counter[int], free: Counter[int]) -> Iterator[BlockBreach]:
    """Contradictions between reference counts and holders of blocks. ``counts``: of each block. ``held``: number of
    known requests with the block; others may have it, too. ``free``: number of its entries in the free list."""
    for block, count in counts.items():
        if count < 0:
            yield BlockBreach("ref_negative", block, f"block {block} was released {-count} times too often")
        if held[block] > max(count, 0):
            yield BlockBreach("ref_low", block, f"{held[block]} requests have block {block}, its count says {count}")
        if free[block] and count > 0:
            yield BlockBreach("in_use_free", block, f"block {block} is in the free list, and its count says {count}")
        if free[block] > 1:
            yield BlockBreach("free_twice", block, f"block {block} is in the free list more than once")


def report_breaches(canary: Canary, group: BlockGroup, breaches: Sequence[BlockBreach]) -> int:
    """Reports ``breaches`` of blocks of ``group`` as `Kind.CACHE_STRUCTURE`; gives how many were not told before."""
    return canary.report(
        [
            Violation(
                kind=Kind.CACHE_STRUCTURE,
                region=group.region,
                phase=Phase.SWEEP,
                step=canary.forwards,
                slot=breach.block * group.block,
                node=breach.block,
                rule=breach.rule,
                detail=breach.detail,
            )
            for breach in breaches
        ]
    )
