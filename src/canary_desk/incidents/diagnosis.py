"""`diagnose`: the likely classes of an incident, by the rule of the root's kind."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from canary_core.incident import Incident
from canary_core.kinds import registry
from canary_core.kinds.case import Case, Damage, Held, Pattern
from canary_core.kinds.classes import SURE, UNKNOWN, Diagnosis
from canary_core.kinds.facts import named
from canary_core.records import Kind
from canary_desk.incidents.damage import damage_of
from canary_desk.incidents.evidence import Evidence
from canary_desk.incidents.happened import cleared, had_it, handed_to, held_before, was_cached


def diagnose(incident: Incident, evidence: Evidence | None, patterns: Sequence[Pattern]) -> tuple[Diagnosis, ...]:
    """The likely classes, the surest first; at least one. ``evidence`` None: there are only the findings."""
    case = _Known(
        incident.root, incident.findings, len(incident.slots), len(incident.pages), patterns, incident, evidence
    )
    found = list(registry.of(incident.root.kind).diagnose(case))
    found = found or [Diagnosis(UNKNOWN, "possible", ("no pattern was recognised",))]
    first: dict[str, Diagnosis] = {}
    for diagnosis in sorted(found, key=lambda d: SURE.index(d.sure)):
        first.setdefault(diagnosis.name, diagnosis)
    return tuple(first.values())


@dataclass(slots=True, eq=False)
class _Known(Case):
    """A case with the evidence, if there is any."""

    incident: Incident
    evidence: Evidence | None

    @property
    def explanation(self) -> str:
        return replace(self.incident.root, token=None, stored_token=None).explanation

    @property
    def sources(self) -> int:
        return 0 if self.evidence is None else len(self.evidence.sources)

    @property
    def right_slot(self) -> int | None:
        return None if self.evidence is None else self.evidence.right_slot

    @property
    def only_a_hit(self) -> bool:
        return self.evidence is not None and not self.evidence.reader_began

    @property
    def was_cached(self) -> bool:
        return self.evidence is not None and was_cached(self.evidence, self.root.slot)

    @property
    def held_before(self) -> Held | None:
        return None if self.evidence is None else held_before(self.evidence, self.root)

    @property
    def had_it(self) -> bool | None:
        return None if self.evidence is None else had_it(self.evidence, self.root)

    @property
    def handed_to(self) -> str | None:
        return None if self.evidence is None else named(handed_to(self.evidence, self.root.slot))

    @property
    def reader_last(self) -> int | None:
        return None if self.evidence is None else self.evidence.reader_last

    @property
    def cleared(self) -> int | None:
        return None if self.evidence is None else cleared(self.evidence, self.root.slot)

    @property
    def damage(self) -> Damage:
        return damage_of(self.of(Kind.BYTES), self.evidence)

    def record(self, slot: int) -> list[int] | None:
        return None if self.evidence is None else self.evidence.record(slot)

    def name(self, writer: int) -> str | None:
        return None if self.evidence is None else self.evidence.names.get(writer)
