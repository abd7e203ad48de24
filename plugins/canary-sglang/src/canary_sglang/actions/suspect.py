"""`Suspect`: a finding as ranks tell it each other."""

from dataclasses import dataclass

from canary_core import Kind, Phase, Violation

SPOILED = frozenset({Kind.BYTES, Kind.LOST_WRITE, Kind.NON_FINITE})
"""The slot's own content is wrong, for whoever reads it."""

MISPLACED = frozenset({Kind.POSITION, Kind.TOKEN, Kind.PREFIX, Kind.UNWRITTEN, Kind.FREED})
"""The slot is wrong for the request that reads it, through the prefix cache maybe, and may be right for others."""


@dataclass(frozen=True, slots=True, order=True)
class Suspect:
    """A finding as ranks tell it each other. ``slot`` -1: only the requests are at fault. ``spoiled``: see `SPOILED`.
    ``written``: the forward that wrote the slot, -1 if unknown; once another one did, the suspect is gone."""

    region: str
    slot: int
    spoiled: bool
    written: int
    kind: str
    requests: tuple[str, ...]

    @property
    def plain_region(self) -> str:
        """Without the model's name."""
        return self.region.rpartition("/")[2]

    @classmethod
    def of(cls, violation: Violation) -> "Suspect | None":
        """None for findings that nothing can be done about, such as a slot that was freed twice."""
        kind = violation.kind
        if kind is Kind.DOUBLE_FREE:
            return None
        names = {violation.request}
        if kind in (Kind.DOUBLE_ALLOC, Kind.TWO_WRITERS):
            names.add(violation.stored_request)
        spoiled = kind in SPOILED
        written = violation.step if violation.phase is Phase.POST_FORWARD else violation.step_written
        return cls(
            region=violation.region,
            slot=violation.slot if violation.slot is not None and (spoiled or kind in MISPLACED) else -1,
            spoiled=spoiled,
            written=written if spoiled and written is not None else -1,
            kind=kind.name.lower(),
            requests=tuple(sorted(name for name in names if name is not None)),
        )
