"""`Verdict`: KV that was found to be wrong, and which answers it may have spoiled."""

from dataclasses import dataclass

from canary_core.config import CanaryConfig
from canary_core.records import Kind, Phase
from canary_core.violation import Violation

SPOILED = frozenset({Kind.BYTES, Kind.LOST_WRITE, Kind.NON_FINITE, Kind.ARRIVAL, Kind.RECOMPUTE})
"""Findings of a slot whose content is wrong for every reader."""

MISPLACED = frozenset({Kind.POSITION, Kind.TOKEN, Kind.PREFIX, Kind.UNWRITTEN, Kind.FREED})
"""Findings of a slot whose content is wrong for its reader, perhaps through the prefix cache, and may be right for
others."""

MISLED = frozenset(
    {
        Kind.SLOT_RANGE, Kind.NULL_SLOT, Kind.WRITE_INPUT, Kind.WRITE_SLOT, Kind.TWO_WRITERS, Kind.READ_LENGTH,
        Kind.READ_TABLE,
    }
)  # fmt: skip
"""Findings of a request whose forward was given something wrong; no slot is to blame."""

NOW_AND_THEN = frozenset({Kind.READ_LENGTH, Kind.READ_TABLE, Kind.RECOMPUTE})
"""Kinds looked for now and then only: forwards before may have had the same fault."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """KV that may not be served.

    finding: the reason, None where findings were lost: then any KV may be wrong. spoiled: the slot's content is wrong
    for every reader, not for the request of the finding alone. stands: all that was given out before the forward
    of the finding was computed from KV that was compared before, so that a request may go on from there.
    """

    finding: Violation | None
    spoiled: bool = False
    stands: bool = False

    @classmethod
    def of(cls, finding: Violation, config: CanaryConfig, late: bool = False) -> "Verdict | None":
        """The verdict of ``finding``; None where no answer is in doubt, as for a slot freed twice. ``config``: says
        what is compared before a read. ``late``: later steps may have given out tokens since, as on a GPU."""
        kind = finding.kind
        if kind not in SPOILED | MISPLACED | MISLED or (kind is Kind.NON_FINITE and finding.position is None):
            return None
        if kind is Kind.BYTES:
            stands = finding.phase is Phase.PRE_FORWARD and config.read_check == -1
        else:
            stands = kind not in NOW_AND_THEN and (finding.phase is not Phase.PRE_FORWARD or config.check_budget == 0)
        return cls(finding, kind in SPOILED, stands and not late)

    @property
    def slot(self) -> int | None:
        """The slot that must not be read any more; None where only the request is concerned."""
        finding = self.finding
        if finding is None or finding.kind in MISLED or finding.slot is None or finding.slot < 0:
            return None
        return finding.slot
