"""`Suspect`: a finding as exchanged by ranks."""

from dataclasses import dataclass

from canary_core import Kind, Phase, State, Violation

SPOILED = frozenset({Kind.BYTES, Kind.LOST_WRITE, Kind.NON_FINITE})
"""The slot's content is wrong for every reader."""

MISPLACED = frozenset({Kind.POSITION, Kind.TOKEN, Kind.PREFIX, Kind.UNWRITTEN, Kind.FREED})
"""The slot is wrong for its reader, perhaps through the prefix cache, and may be right for others."""


@dataclass(frozen=True, slots=True, order=True)
class Suspect:
    """A finding as exchanged by ranks. ``slot``: -1 if only the requests are wrong. ``spoiled``: see `SPOILED`.
    ``written``: the forward that wrote the slot, -1 if unknown; after another forward's write the suspect is gone."""

    region: str
    slot: int
    spoiled: bool
    written: int
    kind: str
    requests: tuple[str, ...]

    @property
    def plain_region(self) -> str:
        """The region's name without the model's."""
        return self.region.rpartition("/")[2]

    @classmethod
    def of(cls, violation: Violation, at_once: bool = False) -> "Suspect | None":
        """The suspect of a finding; None where nothing can be done, as for a slot freed twice or evicted too early, or
        for the null slot. ``at_once``: acted on before the slot can be written again, so that what came wrong, of which
        no forward is known, is spoiled, too."""
        kind = violation.kind
        if kind in (Kind.DOUBLE_FREE, Kind.EVICTED_IN_USE) or (kind is Kind.NON_FINITE and violation.position is None):
            return None
        names = {violation.request}
        # A slot that is parked, or handed out and not written yet, has the record of whoever had it before.
        if kind is Kind.DOUBLE_ALLOC and violation.stored_state not in (State.ALLOCATED, State.PARKED):
            names.add(violation.stored_request)
        spoiled = kind in SPOILED or (at_once and kind is Kind.ARRIVAL)
        written = violation.step if violation.phase is Phase.POST_FORWARD else violation.step_written
        return cls(
            region=violation.region,
            slot=violation.slot if violation.slot is not None and (spoiled or kind in MISPLACED) else -1,
            spoiled=spoiled,
            written=written if spoiled and written is not None else -1,
            kind=kind.name.lower(),
            requests=tuple(sorted(name for name in names if name is not None)),
        )
