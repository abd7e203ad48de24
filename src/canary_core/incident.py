"""`Incident`: the findings of one cause."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from canary_core.kinds import registry
from canary_core.records import Kind
from canary_core.violation import Violation
from canary_core.wording import by_name

if TYPE_CHECKING:
    from canary_core.kinds.classes import Diagnosis

MOST_KEPT = 512
"""Findings that an incident keeps; more are counted."""

NAMED = 8
"""Requests that an event names; more are counted."""


@dataclass(slots=True, eq=False)
class Incident:
    """Findings of one cause. ``root`` is the first one by cause (`precedes`), ``findings`` are the first
    `MOST_KEPT` in the order in which they were told, the root among them; ``kinds`` counts all. ``number`` counts a
    Canary's incidents from 1, 0 until it was told. ``told``: whether its ``incident`` event was due, after which the
    root stays. ``diagnoses``: what probably happened, the surest first; empty until somebody has looked. ``bundle``:
    the directory that was written, None if none was. ``signature``: the sort of the incident, in words, empty until
    then; ``suppressed``: why nobody needs to act on it, empty if somebody should. ``traces``: the
    ``traceparent`` of each request whose trace is known. ``repaired``: words of its slots that were put back.
    """

    root: Violation
    number: int = 0
    findings: list[Violation] = field(default_factory=list)
    kinds: dict[Kind, int] = field(default_factory=dict)
    last_step: int = 0
    slots: set[tuple[str, int]] = field(default_factory=set)
    pages: set[tuple[str, int]] = field(default_factory=set)
    requests: dict[str, None] = field(default_factory=dict)
    told: bool = False
    diagnoses: "tuple[Diagnosis, ...]" = ()
    bundle: str | None = None
    signature: str = ""
    suppressed: str = ""
    traces: dict[str, str] = field(default_factory=dict)
    repaired: int = 0

    @property
    def total(self) -> int:
        """How many findings it has."""
        return sum(self.kinds.values())

    @property
    def consequences(self) -> dict[Kind, int]:
        """All findings but the root, by kind, causes first."""
        rest = dict(self.kinds)
        rest[self.root.kind] -= 1
        return {kind: rest[kind] for kind in registry.load() if rest.get(kind)}

    def add(self, violation: Violation, leads: bool = True) -> None:
        """One more finding of the same cause. ``leads``: whether it may be the root."""
        self.kinds[violation.kind] = self.kinds.get(violation.kind, 0) + 1
        self.last_step = max(self.last_step, violation.step)
        if len(self.findings) < MOST_KEPT:
            self.findings.append(violation)
            if violation.slot is not None and violation.slot >= 0:
                self.slots.add((violation.region, violation.slot))
            if violation.page is not None and violation.page >= 0:
                self.pages.add((violation.region, violation.page))
            for name in (violation.request, violation.stored_request):
                if name is not None:
                    self.requests[name] = None
        if leads and not self.told and precedes(violation, self.root):
            self.root = violation

    def trace(self, traces: dict[str, str]) -> None:
        """Requests that belong to traces, each with its ``traceparent``; about `MOST_KEPT` are kept."""
        if traces and len(self.traces) < MOST_KEPT:
            self.traces |= traces

    @property
    def trace_ids(self) -> dict[str, str]:
        """The trace ids, 32 hexadecimal digits, by request."""
        return {name: traceparent.split("-")[1] for name, traceparent in self.traces.items()}

    def merge(self, other: "Incident") -> None:
        """Takes over what ``other`` has; both untold."""
        counted = dict(other.kinds)
        for violation in other.findings:
            self.add(violation)
            counted[violation.kind] -= 1
        for kind, number in counted.items():
            self.kinds[kind] = self.kinds.get(kind, 0) + number
        self.trace(other.traces)

    def fields(self) -> dict[str, object]:
        """Fields of the ``incident`` event: place and kind of the root, and counts of its consequences."""
        root = self.root.fields()
        names = list(self.requests)
        out: dict[str, object] = {"incident": self.number, "findings": self.total}
        out |= {name: root[name] for name in _OF_THE_ROOT if name in root}
        if len(self.kinds) > 1 or self.total > 1:
            out["consequences"] = by_name(self.consequences)
            out["slots"], out["pages"] = len(self.slots), len(self.pages)
            out["requests"] = names[:NAMED] + ([f"and {len(names) - NAMED} more"] if len(names) > NAMED else [])
            if self.last_step != self.root.step:
                out["last_step"] = self.last_step
        if self.traces:
            out["traces"] = list(dict.fromkeys(self.trace_ids.values()))[:NAMED]
        if self.repaired:
            out["repaired"] = self.repaired
        return {**out, "explanation": self.root.explanation}

    def __str__(self) -> str:
        followed = ", ".join(f"{kind} {number}" for kind, number in by_name(self.consequences).items())
        text = f"{self.root}" + (f" It brought more findings: {followed}." if followed else "")
        text += f" Words that were put back: {self.repaired}." if self.repaired else ""
        return text + (f" {self.diagnoses[0].sentence}" if self.diagnoses else "")


_OF_THE_ROOT = (
    "kind", "region", "slot", "page", "source", "layer", "half", "position", "request", "stored_request", "phase",
    "step", "step_written", "step_freed", "freed_by", "rank", "node", "rule",
)  # fmt: skip


def precedes(one: Violation, other: Violation) -> bool:
    """Whether ``one`` comes before ``other`` in a chain of causes: an earlier forward; in one forward what was so
    before it, then what it did, then what happened after it; of these an earlier kind."""
    first, second = registry.of(one.kind).place, registry.of(other.kind).place
    return (one.step, one.phase, first) < (other.step, other.phase, second)
