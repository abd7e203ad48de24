"""`Summary`: totals of a Canary, reported once at its end, with sentences for suspicious zeros."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from canary_core.config import CanaryConfig
from canary_core.events import Event, size_text
from canary_core.records import Counter
from canary_core.region import Region, RegionKind
from canary_core.runtime.witness import Witness
from canary_core.wording import numbered

FEW_FORWARDS = 16
"""Forwards that may pass before the scrub has met a written slot."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts of one Canary's life. ``forwards`` began on the host, ``unchecked`` had no view, ``ends`` are calls of
    `Step.end`; ``counters`` are the device's, as of the last read. ``events``: for each region, number of reported
    events by kind. ``findings``: number of reported findings by kind, in ``incidents``; ``withheld`` were not reported,
    see `WrongMemory`. ``went_on``: whether Canary was on until its end. ``witness``: the engine's own count of tokens.
    ``alarm_tests``: probes that passed through the alarm."""

    config: CanaryConfig
    regions: Mapping[str, Region]
    forwards: int
    unchecked: int
    ends: int
    counters: list[int]
    events: Mapping[str, Mapping[str, int]]
    findings: Mapping[str, int]
    incidents: int
    withheld: int
    repeated: int
    dismissed: int
    misuses: int
    went_on: bool
    coverage_ratio: float
    witness: Witness = field(default_factory=Witness)
    alarm_tests: int = 0
    warnings: tuple[str, ...] = field(init=False)
    """Sentences about numbers that should not be zero, or should be."""

    def __post_init__(self) -> None:
        said = (*self._of_forwards(), *self._of_tokens(), *self._of_regions(), *self._of_trouble())
        object.__setattr__(self, "warnings", said)

    @property
    def line(self) -> str:
        """The whole in one line."""
        found = sum(self.findings.values())
        kinds = ", ".join(f"{kind} {number}" for kind, number in self.findings.items())
        slots, size = self.counters[Counter.CHECKED_SLOTS], self.counters[Counter.CHECKED_BYTES]
        incidents, of = numbered(self.incidents, "incident"), numbered(found, "finding")
        findings = f"{incidents} of {of} ({kinds})" if found else "no finding"
        ratio = self.witness.ratio
        guarded = "" if ratio is None else f"{_share(ratio)} of {self.witness.computed_tokens} tokens guarded, "
        forwards, checked = numbered(self.forwards, "forward"), numbered(slots, "slot")
        short = self.config.bytes != "off" and not size and 0 < self.forwards < FEW_FORWARDS
        few = " (too few forwards for the scrub to compare any)" if short else ""
        return f"{forwards}, {guarded}{checked} and {size_text(size)}{few} checked, {findings}"

    def event(self) -> Event:
        """The ``summary`` event; a warning where there are `warnings`."""
        counted = (Counter.CHECKED_FORWARDS, Counter.CHECKED_SLOTS, Counter.RECORDED_SLOTS, Counter.CHECKED_BYTES)
        rare = {name: getattr(self, name) for name in ("incidents", "repeated", "dismissed", "withheld", "misuses")}
        fields: dict[str, object] = {
            "summary": self.line,
            "forwards": self.forwards,
            "unchecked_forwards": self.unchecked,
            **{counter.name.lower(): self.counters[counter] for counter in counted},
            "events": {region: dict(kinds) for region, kinds in self.events.items()},
            "findings": dict(self.findings),
            **{name: number for name, number in rare.items() if number},
            "coverage_ratio": round(self.coverage_ratio, 6),
            **self.witness.stats(),
            "alarm_tests": self.alarm_tests,
            "warnings": list(self.warnings),
        }
        return Event("summary", "warning" if self.warnings else "info", fields)

    def _of_forwards(self) -> list[str]:
        if not self.forwards:
            if self.unchecked:
                return [f"no forward was checked: the view of each of {self.unchecked} was None; look at the adapter"]
            return ["no forward was checked: neither step.run nor step.before was called; is the hook in place?"]
        said = []
        if not self.counters[Counter.CHECKED_FORWARDS]:
            said.append(f"{self.forwards} forwards began and no check of them ran on the device")
        elif not self.counters[Counter.CHECKED_SLOTS]:
            if self.forwards > 1:
                said.append("no slot was checked: no forward read what an earlier one wrote; are prefix_lens right?")
            elif self.unchecked:
                said.append(
                    f"no slot was checked: {numbered(self.unchecked, 'forward')} beside the only one had no view"
                )
        if not self.counters[Counter.RECORDED_SLOTS]:
            said.append("no slot was recorded: step.after was not called, or no view has new tokens")
        if not self.ends:
            said.append("step.end was never called, so nothing was told before the end; call it after each step")
        budget = self.config.scrub_budget
        if self.config.bytes != "off" and not self.counters[Counter.CHECKED_BYTES]:
            if not (budget.share or budget.step_bytes or self.config.read_check):
                said.append("no byte was compared: CANARY_SCRUB_BUDGET and CANARY_READ_CHECK are both 0")
            elif self.forwards >= FEW_FORWARDS:
                said.append("no byte was compared: nothing that a forward wrote was there when the scrub came by")
        return said

    def _of_tokens(self) -> list[str]:
        missing = self.witness.missing if self.went_on else 0
        return [self.witness.sentence(missing)] if missing else []

    def _of_regions(self) -> list[str]:
        if not (self.config.lifetime and self.forwards):
            return []
        return [
            f"nothing was told of the allocator of region {name!r} (slots.alloc, free, ...): use after free and slots "
            "handed out twice are not found"
            for name, region in self.regions.items()
            if region.kind is not RegionKind.RING and not self.events.get(name)
        ]

    def _of_trouble(self) -> list[str]:
        said = []
        if not self.went_on:
            said.append("Canary was switched off by an error; what came after the disabled event was not checked")
        if self.withheld:
            said.append(f"{self.withheld} findings were counted and not told: see wrong_memory")
        if self.misuses:
            said.append(f"{self.misuses} calls were refused: see misuse")
        return said


def _share(ratio: float) -> str:
    """Never 100 % while a token is missing."""
    return "100 %" if ratio == 1 else f"{int(1000 * ratio) / 10} %"
