"""`Reading`: the numbers of one Canary, as of the last host read."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from canary_core.guard.reporting.findings import Reporter
from canary_core.guard.sampling import SampledTokens
from canary_core.guard.step import Step
from canary_core.ops.launches import LATE
from canary_core.records import Counter
from canary_core.runtime.workspace import Switch, Workspace

if TYPE_CHECKING:
    from canary_core.guard.summary import Summary


class Reading:
    """Gathers the figures of a Canary's parts. Empty, or None, in off mode."""

    def __init__(
        self, workspace: Workspace, switch: Switch, findings: Reporter, step: Step, sampled: SampledTokens
    ) -> None:
        self._config = workspace.config
        self._states = workspace.states
        self._switch = switch
        self._findings = findings
        self._step = step
        self._sampled = sampled

    def stats(self) -> dict[str, Any]:
        """Counters of the device, findings by kind, and the parts' own counts, by name."""
        if not self._states:
            return {"violations": 0, "forwards": 0}
        found, step = self._findings, self._step
        named = {c.name.lower(): found.counters[c] for c in Counter if c not in (Counter.ROWS, Counter.DRAINED)}
        late = {"withheld": sum(found.memory.withheld.values()), "incidents": found.incidents.total}
        late["late_compiles"] = LATE.count
        weights = {"weights_changed": found.writers.identities.weights, "carried": found.carried}
        return {
            "violations": sum(found.delivered.values()),
            "forwards": step.forwards,
            **named,
            "repeated": found.known.repeated,
            "dismissed": found.dismissed,
            **{name: number for name, number in {**late, **weights}.items() if number},
            **self._kinds(),
            **found.audit.counts,
            **step.tables.stats(),
            **step.stores.stats(),
            **(step.ranks.stats() if step.ranks is not None else {}),
            **(step.weights.stats() if step.weights is not None else {}),
            **{name: number for name, number in self.left_out().items() if number},
            **(found.repairs.stats() if found.repairs is not None else {}),
            **found.alarm.stats(),
            **found.witness.stats(),
        }

    def left_out(self) -> dict[str, int]:
        """See `Canary.left_out`."""
        if not self._states:
            return {}
        tables, found = self._step.tables, self._findings
        contents = found.writers.any_contents
        return {
            "tokens_beyond_bound": self._step.tokens_cut,
            "samples_left": self._sampled.left_out,
            "tables_left": tables.tables_left,
            "table_rows_left": tables.rows_left,
            "tables_skipped": tables.skipped,
            "rows_dropped": found.dropped.total,
            "findings_limited": found.limited.total,
            "findings_forgotten": found.known.forgotten,
            "misuses_untold": self._switch.misuses_untold,
            "names_forgotten": found.writers.forgotten,
            "identities_forgotten": found.writers.anchors_forgotten,
            "contents_forgotten": contents.forgotten if contents is not None else 0,
            "contents_untold": contents.untold if contents is not None else 0,
        }

    def scrub(self) -> dict[str, float]:
        """See `Canary.scrub_stats`."""
        if not self._states:
            return {}
        weights = self._step.weights.figures() if self._step.weights is not None else {}
        return {**self._step.scrub.stats(self._findings.counters[Counter.SCRUBBED_SLOTS]), **weights}

    def detection_s(self) -> float | None:
        """See `Canary.detection_s`."""
        if not self._states or self._config.bytes == "off":
            return None
        if self._config.read_check == -1:
            return self._step.scrub.step_s
        scrub = self.scrub()
        return scrub.get("live_period_s", scrub.get("scrub_period_s"))

    def summary(self, coverage_ratio: float, events: Mapping[str, Mapping[str, int]]) -> "Summary":
        """The whole life of a Canary that guards ``coverage_ratio`` of the engine's KV. ``events``: of each region, how
        many of each kind were told."""
        from canary_core.guard.summary import Summary

        found, step = self._findings, self._step
        return Summary(
            config=self._config,
            regions={name: state.region for name, state in self._states.items()},
            forwards=step.forwards,
            unchecked=step.unchecked,
            ends=step.ends,
            counters=found.counters,
            events=events,
            findings=self._kinds(),
            incidents=found.incidents.total,
            withheld=sum(found.memory.withheld.values()),
            repeated=found.known.repeated,
            dismissed=found.dismissed,
            misuses=self._switch.misuses,
            went_on=self._switch.enabled,
            coverage_ratio=coverage_ratio,
            witness=found.witness,
            alarm_tests=found.alarm.passed,
        )

    def _kinds(self) -> dict[str, int]:
        return {kind.name.lower(): number for kind, number in self._findings.delivered.items() if number}
