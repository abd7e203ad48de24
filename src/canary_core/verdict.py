"""`Verdict`: KV that was found to be wrong, and which answers it may have spoiled."""

from dataclasses import dataclass

from canary_core.config import CanaryConfig
from canary_core.records import Kind, Phase
from canary_core.violation import Violation

SPOILED = frozenset({Kind.BYTES, Kind.LOST_WRITE, Kind.NON_FINITE, Kind.ARRIVAL, Kind.RECOMPUTE})
"""Findings of a slot whose content is wrong for every reader."""

MISPLACED = frozenset({Kind.POSITION, Kind.TOKEN, Kind.PREFIX, Kind.UNWRITTEN, Kind.FREED})
"""Findings of a slot whose content is wrong for its reader, and perhaps right for others, as in the prefix cache."""

MISLED = frozenset(
    {
        Kind.SLOT_RANGE, Kind.NULL_SLOT, Kind.WRITE_INPUT, Kind.WRITE_SLOT, Kind.TWO_WRITERS, Kind.READ_LENGTH,
        Kind.READ_TABLE, Kind.ATTENTION,
    }
)  # fmt: skip
"""Findings of a request whose forward was given something wrong; no slot is to blame."""

UNDATED = frozenset({Kind.BYTES, Kind.READ_LENGTH, Kind.READ_TABLE, Kind.RECOMPUTE, Kind.ATTENTION})
"""Kinds that the forward before may have had: looked for now and then, or before attention, when bytes may change."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """KV that may not be served.

    finding: the reason, None where findings were lost: then any KV may be wrong. spoiled: the slot's content is wrong
    for every reader. stands: all that was given out before the forward of the finding is right, so that a request may
    go on from there; never with changed bytes, which attention may have read.
    """

    finding: Violation | None
    spoiled: bool = False
    stands: bool = False

    @classmethod
    def of(cls, finding: Violation, config: CanaryConfig, late: bool = False) -> "Verdict | None":
        """The verdict of ``finding``; None where no answer is in doubt, as for a slot freed twice. ``config``: says
        whether all reads are checked. ``late``: later steps may have given out tokens since, as on a GPU."""
        kind = finding.kind
        if kind not in SPOILED | MISPLACED | MISLED or (kind is Kind.NON_FINITE and finding.position is None):
            return None
        at_once = kind not in UNDATED and (finding.phase is not Phase.PRE_FORWARD or config.check_budget == 0)
        return cls(finding, kind in SPOILED, at_once and not late)

    @property
    def slot(self) -> int | None:
        """The slot that must not be read any more; None where only the request is concerned."""
        finding = self.finding
        if finding is None or finding.kind in MISLED or finding.slot is None or finding.slot < 0:
            return None
        return finding.slot
