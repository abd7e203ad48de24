"""What a scheduler must not say of its blocks, whatever they hold, as findings."""

from collections.abc import Sequence
from dataclasses import dataclass

from canary_adapters.block_events import BlockGroup
from canary_core import Canary, Kind, Phase, Violation


@dataclass(frozen=True, slots=True)
class BlockBreach:
    """``block`` breaks ``rule``; ``detail`` says how, as the end of a sentence."""

    rule: str
    block: int
    detail: str


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
