"""`Reporter`: reads the violation ring late, turns rows into `Violation` objects and passes each to the hooks once."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from canary_core.errors import ViolationError
from canary_core.events import Event
from canary_core.guard.reporting.alarm_test import AlarmTest
from canary_core.guard.reporting.budget import OWED_S, PROCESS, SHARE, Firsts
from canary_core.guard.reporting.grouping import Incidents
from canary_core.guard.reporting.known import Known, key_of
from canary_core.guard.reporting.readback import HostRead, ReadBack
from canary_core.guard.reporting.unfit import UnfitRows
from canary_core.guard.reporting.wrong_memory import WrongMemory
from canary_core.incident import Incident
from canary_core.kinds.facts import ABSORBED
from canary_core.ops.state import RegionState
from canary_core.records import COUNTERS, GAUGES, PROBE, RECORDED, STATES, UNPARKED, Counter, Kind, Phase, Row, State
from canary_core.region import RegionKind
from canary_core.runtime.telling import Untold
from canary_core.runtime.witness import Witness
from canary_core.runtime.workspace import Switch, Workspace
from canary_core.runtime.writers import Writers
from canary_core.violation import Violation
from canary_core.watchers.audit.running import RunningAudit

if TYPE_CHECKING:
    from canary_core.guard.reporting.repairs import Repairs

MOST_NOT_FINITE = 4096
"""Fingerprints remembered of bytes with NaN or infinity: there are few, since a NaN makes whole slots NaN."""

STALLED_READS = 100
"""Host reads in a row with new forwards on the host but none on the device, after which checks count as stalled."""

LAST_READS, LAST_READ_S = 3, 0.5
"""Most reads at the end of a process, and longest wait: a device that hangs must not keep the process from ending."""


class ReporterHost(Protocol):
    """The `Canary` of the findings."""

    audit: RunningAudit
    witness: Witness
    writers: Writers


class Reporter:
    """Reads, decodes, drops repeats, lets plugins dismiss, delivers, and folds related findings into ``incidents``.
    ``delivered`` counts reported findings by kind; ``known.repeated``, ``dismissed``, ``limited`` and
    ``memory.withheld`` count the others; ``counters`` are those of the last read. Regions whose memory the engine has
    given up, by the audit, are not reported on."""

    def __init__(self, canary: ReporterHost, workspace: Workspace, switch: Switch) -> None:
        self._canary = canary
        self._config = workspace.config
        self._states = list(workspace.states.values())
        self._switch = switch
        self.writers = canary.writers
        self.audit = canary.audit
        self.witness = canary.witness
        self.read_back = ReadBack(workspace.shared, workspace.proof.tallies)
        self.memory = WrongMemory(workspace)
        self._late = workspace.device.type != "cpu"
        self.in_time = False
        """Whether what a check before a forward finds is read before the forward's tokens are given out, on a GPU."""
        self._acted_on = self._config.on_violation != "report"
        self.known = Known()
        ring_rows = workspace.config.ring_rows
        self.dropped = Untold(switch.tell, Event("rows_dropped", "warning", {"ring_rows": ring_rows}), "rows")
        """Rows without room in the ring."""
        self.limited = Untold(switch.tell, Event("findings_limited", "warning", {"limit": f"{SHARE:.0%}"}), "findings")
        """Findings beyond the process's `Budget`: reported when they are found again later, if they are."""
        self._firsts, self._since = Firsts(), 0.0
        self._unfit = UnfitRows(switch.tell)
        self._not_finite: OrderedDict[tuple[int, int, int], None] = OrderedDict()
        self.incidents = Incidents(switch.tell, workspace.config.incident_limit, self._tell_incident)
        self.alarm = AlarmTest([state for state in self._states if len(state.sources)], self._probe)
        """Whether a finding would be told."""
        self.repairs: Repairs | None = None
        if self._config.repair and workspace.states:
            from canary_core.guard.reporting import repairs

            if repairs.able(workspace, switch):
                self.repairs = repairs.Repairs(workspace, switch, canary.audit, self._condemn, self.incidents)
        self._first: Incident | None = None
        self._read_forwards = self._stalled = 0
        self.counters = [0] * workspace.shared.counters.shape[0]
        self._gauges, self._recorded = _gauges([state for state in self._states if not state.region.encoded]), 0
        self.delivered: dict[Kind, int] = dict.fromkeys(Kind, 0)
        self.found: dict[tuple[Kind, str], int] = {}
        """Reported findings, by kind and region."""
        self.last_check: float | None = None
        """Time of the last read with new checks, in seconds since the epoch."""
        self.unknown_slots = 0.0
        """Slots left out by a forward's checks as unknown, a mean over the last read with any."""
        self.table_names: Sequence[str] = ()
        """Names of tables by their numbers in findings."""
        self.dismissed = 0
        self.carried = 0
        """Prefixes of requests that go on across a change of the weights, see `Writers.carried`."""

    def collect(self) -> HostRead | None:
        """Returns an earlier read, if arrived; starts the next one on the current stream. Never waits."""
        return self.read_back.collect()

    def collect_now(self) -> HostRead:
        """Everything up to now; waits for the device."""
        return self.read_back.collect_now()

    def release(self) -> None:
        """Ends collecting, and frees the memory."""
        self.read_back.release()

    def read_last(self, forwards: int) -> None:
        """Reports everything still readable, and waits for a moment only. ``forwards``: see `open`."""
        deadline, reads = time.monotonic() + LAST_READ_S, 0
        while reads < LAST_READS and time.monotonic() < deadline:
            snapshot = self.collect()
            if snapshot is None:
                time.sleep(LAST_READ_S / 100)
                continue
            reads += 1
            self.open(snapshot, forwards)
        self.settle(at_last=True)

    def open(self, snapshot: HostRead, forwards: int) -> None:
        """Reports the findings of a read. ``forwards``: number begun on the host so far."""
        moved = snapshot.counters[Counter.CHECKED_FORWARDS] != self.counters[Counter.CHECKED_FORWARDS]
        # Between two forwards of an engine that idles there is nothing to check.
        self._stalled = 0 if moved else self._stalled + (forwards != self._read_forwards)
        self._read_forwards = forwards
        if self._stalled == STALLED_READS:
            reason = "forwards run but no check does; were they captured without Canary?"
            self._switch.tell(Event("silence", "error", {"reason": reason}))
        if moved:
            self._notice(snapshot.counters)
        before, self._recorded = self._recorded, self._recorded_by(snapshot.counters)
        self.witness.recorded(self._recorded - before)
        self.counters = snapshot.counters
        self.alarm.see(snapshot.counters)
        self._unfit.see(snapshot.counters)
        if snapshot.tallies is not None:
            self.memory.read(snapshot.tallies)
            # From then on a read costs what it did before there were tallies.
            self.read_back.proving = not self.memory.settled
        if snapshot.rows:
            self._begin()
            self._take(self._decoded(snapshot.rows))
        self.settle()
        if snapshot.dropped:
            self.dropped.add(number=snapshot.dropped)
            self._condemn(None)

    def settle(self, at_last: bool = False) -> None:
        """Reports memory found to be the wrong one, and the delayed findings that stand. ``at_last``: all delayed
        ones."""
        events, waited = self.memory.decide(at_last)
        for event in events:
            self._switch.tell(event)
        for violation in waited:
            self._deliver(violation)
        self.incidents.tell()
        if at_last and self.repairs is not None:
            self.repairs.tell()
        for untold in self.untold if at_last else ():
            untold.tell()

    def never_called(self) -> None:
        """No forward was checked for as long as the settings allow."""
        after = f"{self._config.silence_s:g} s"
        reason = f"attached {after} ago and no forward was checked since; is the hook in place?"
        self._switch.tell(Event("silence", "error", {"reason": reason}))

    def raise_first(self) -> None:
        """In raise mode: raises `ViolationError` with the first incident begun since the last call, and its root,
        unless suppressed by its signature."""
        if self._switch.raises and self._first is not None:
            first, self._first = self._first, None
            self.wait()
            for incident in (first, *(other for other in self.incidents if other.number > first.number)):
                if not incident.suppressed:
                    raise ViolationError(incident.root, incident)

    def wait(self, last: bool = False) -> None:
        """Until plugins are done with the incidents, for some seconds at most; see `canary_settle`."""
        self._switch.call("canary_settle", canary=self._canary, last=last)

    def forget_first(self) -> None:
        """Raise mode begins now: earlier findings are not raised."""
        self._first = None

    @property
    def untold(self) -> tuple[Untold, ...]:
        """Counts that an event has yet to tell, now and then."""
        return self.incidents.limited, self.limited, self.dropped

    def take(self, violations: Iterable[Violation]) -> list[Violation]:
        """The new findings not dismissed by anybody, each after its hooks. Findings that wait for the verdict on the
        region's memory (`WrongMemory`) are reported later, or never; those beyond the `Budget` are counted."""
        self._begin()
        among = self._firsts.among
        firsts = ((v, among(v.kind, (v.region, v.source), v.stored_request or v.request)) for v in violations)
        return self._take((violation, first or PROCESS.left > 0) for violation, first in firsts)

    def _take(self, violations: Iterable[tuple[Violation, bool]]) -> list[Violation]:
        """`take`, with whether each may be reported."""
        stand, looked, contents = [], False, self.writers.any_contents
        for violation, within in violations:
            if not looked:
                looked = True
                self.audit.look()
            if violation.region in self.audit.moved:
                self.dismissed += 1
                continue
            if violation.kind is Kind.PREFIX and self.writers.carried(violation):
                self.carried += 1
                continue
            if violation.kind is Kind.PREFIX and contents is not None and contents.undecided(violation):
                self.dismissed += 1
                continue
            key = key_of(violation)
            if self.repairs is not None and self.repairs.came_back(key, violation):
                self.known.forget(key)
            if self.known.repeats(key):
                self.incidents.read_again(violation)
                if self.known.told(key):
                    self._condemn(violation, key)
                continue
            if not within:
                self.limited.add({violation.kind.name.lower(): 1})
                if self._acted_on and self._dismissal(violation) is None:
                    self._condemn(violation)
                continue
            self.known.add(key)
            reason = self._dismissal(violation)
            if reason is not None:
                self.dismissed += 1
                fields = {"reason": reason, **self._told(violation).fields()}
                self._switch.emit(Event("dismissed", "debug", fields))
            elif not self.memory.takes(violation):
                stand.append(violation)
                self._deliver(violation)
            self._spend()
        if stand:
            self.incidents.tell()
        self._spend()
        return stand

    def _begin(self) -> None:
        PROCESS.refill()
        self._since = time.thread_time()

    def _spend(self) -> None:
        since, self._since = self._since, time.thread_time()
        PROCESS.spend(self._since - since)

    def _decoded(self, rows: Sequence[list[int]]) -> Iterator[tuple[Violation, bool]]:
        """The findings of ``rows``, with whether each may be reported. Others are decoded only to be acted on."""
        counted: dict[int, int] = {}
        for row in rows:
            if row[Row.KIND] == PROBE and not self._swallow(row):
                continue
            absorbed = self._absorbed(row)
            kind, place = row[Row.KIND], (row[Row.REGION], row[Row.SOURCE])
            whose = row[Row.STORED_WRITER] if row[Row.STEP_WRITTEN] else row[Row.WRITER]
            within = self._firsts.among(kind, place, whose) or PROCESS.left > 0
            if within or self._acted_on:
                violation = self.decode(row)
                yield (replace(violation, detail=ABSORBED) if absorbed else violation), within
            elif PROCESS.left < -OWED_S / 2 or not self.known.repeats(self._row_key(row)):
                counted[kind] = counted.get(kind, 0) + 1
        if counted:
            kinds = {Kind(kind).name.lower(): number for kind, number in counted.items()}
            self.limited.add(kinds, sum(counted.values()))

    def _absorbed(self, row: Sequence[int]) -> bool:
        """Whether ``row`` is of a write without a trace on bytes with NaN or infinity, by the fingerprint: NaN written
        over NaN. Fingerprints of such bytes are remembered."""
        bytes_ = row[Row.REGION], row[Row.SOURCE], row[Row.FOUND_VALUE]
        if row[Row.KIND] == Kind.NON_FINITE:
            self._not_finite[bytes_] = None
            if len(self._not_finite) > MOST_NOT_FINITE:
                self._not_finite.popitem(last=False)
        return row[Row.KIND] == Kind.LOST_WRITE and bytes_ in self._not_finite

    def _swallow(self, row: list[int]) -> bool:
        """A probe came out of the ring, see `AlarmTest`. Gives whether the slot's bytes are wrong all the same; then
        ``row`` says so."""
        row[Row.KIND] = Kind.BYTES
        self.alarm.came(self.decode(row))
        row[Row.STORED_VALUE] = ~row[Row.STORED_VALUE]
        known = row[Row.STORED_VALUE] != 0 and row[Row.STORED_POSITION] & UNPARKED == State.WRITTEN
        return known and row[Row.STORED_VALUE] != row[Row.FOUND_VALUE]

    def _recorded_by(self, counters: Sequence[int]) -> int:
        """Recorded tokens, by the device's ``counters``: slots of the full region with the fewest, or of the
        window's."""
        return min([counters[gauge] for gauge in self._gauges], default=0)

    def _notice(self, counters: Sequence[int]) -> None:
        """Checks have gone on since the last read."""
        self.last_check = time.time()
        forwards = counters[Counter.CHECKED_FORWARDS] - self.counters[Counter.CHECKED_FORWARDS]
        unknown = counters[Counter.UNKNOWN_SLOTS] - self.counters[Counter.UNKNOWN_SLOTS]
        self.unknown_slots = unknown / max(forwards, 1)

    def _told(self, violation: Violation) -> Violation:
        """``violation`` as every log, event, error, bundle and plugin has it: with tokens only where asked for."""
        return violation if self._config.incident_tokens else violation.redacted()

    def _condemn(self, violation: Violation | None, key: int | None = None) -> None:
        """Hands a verdict to plugins that act on findings. None: findings had no room in the ring. ``key``: of a told
        one, whose verdict may wait for a repair."""
        waits = violation and key is not None and self.repairs is not None and self.repairs.takes(key, violation)
        if self._acted_on and not waits:
            from canary_core.guard.reporting import verdicts

            in_time = self.in_time and violation is not None and violation.phase in _BEFORE
            late = self._late and not in_time
            verdicts.tell(self._switch, self._config, violation and self._told(violation), late)

    def _deliver(self, violation: Violation) -> None:
        self.known.tell(key := key_of(violation))
        self._condemn(violation, key)
        violation = self._told(violation)
        self.delivered[violation.kind] += 1
        place = (violation.kind, violation.region)
        self.found[place] = self.found.get(place, 0) + 1
        incident = self.incidents.add(violation)
        incident.trace(self.writers.traces(violation.request, violation.stored_request))
        if self._first is None or self._first not in self.incidents:
            self._first = incident
        # Built-in reporting comes first, so that no failing listener can silence it.
        self._switch.call("canary_violation", violation=violation)

    def _dismissal(self, violation: Violation) -> str | None:
        """A plugin's reason to dismiss the finding, None for none. A plugin that fails does not dismiss."""
        reason: str | None = self._switch.call("canary_dismiss", violation=violation)
        return reason

    def _tell_incident(self, incident: Incident) -> None:
        self._switch.call("canary_incident", canary=self._canary, incident=incident)

    def _probe(self, passed: Callable[[], None]) -> bool:
        """Whether a plugin accepts a probe where it accepts incidents. A probe given to a failing plugin is lost."""
        return bool(self._switch.call("canary_probe", True, canary=self._canary, passed=passed))

    def decode(self, row: Sequence[int]) -> Violation:
        """One ring row as a `Violation`."""
        state = self._states[row[Row.REGION]]
        kind = Kind(row[Row.KIND])
        source = state.sources.labels[row[Row.SOURCE]] if row[Row.SOURCE] >= 0 else None
        word = row[Row.STORED_POSITION]
        stored = word >= 0
        # Zero where the slot was never written: then the record's writer is nobody, not the one with id 0.
        written = row[Row.STEP_WRITTEN] != 0
        freed = row[Row.FREED] not in (-1, 0)
        length = kind is Kind.READ_LENGTH
        value = row[Row.STORED_VALUE] if stored or length or kind in (Kind.WRITE_SLOT, Kind.READ_TABLE) else None
        if kind is Kind.WRITE_INPUT and value == -1:
            # Nothing is known of the sampler.
            value = None
        violation = Violation(
            kind=kind,
            region=state.region.name,
            phase=Phase(row[Row.STEP] % 8),
            step=row[Row.STEP] // 8,
            slot=None if length else row[Row.SLOT],
            page=None if length else row[Row.SLOT] // state.region.sources[0].page_size,
            source=source.name if source else None,
            layer=source.layer if source else None,
            half=source.half if source else None,
            sources=(source and source.several) or None,
            position=_known(row[Row.POSITION]),
            token=_known(row[Row.TOKEN]),
            stored_state=State.of(word) if stored else None,
            arrived=True if stored and word & State.ARRIVED else None,
            stored_position=word // STATES if stored else None,
            stored_token=row[Row.STORED_TOKEN] if stored else None,
            stored_value=value,
            found_value=row[Row.FOUND_VALUE] if kind in _FOUND else None,
            request=self.writers.name(row[Row.WRITER]),
            stored_request=self.writers.name(row[Row.STORED_WRITER]) if written else None,
            step_written=_known(row[Row.STEP_WRITTEN]) if written else None,
            step_freed=(row[Row.FREED] & 0xFFFFFFFF or None) if freed else None,
            freed_by=self.writers.name(row[Row.FREED] >> 32) if freed else None,
            rank=self._config.rank,
            detail=self._table_name(kind, row),
            window=True if state.region.kind is RegionKind.WINDOW and len(self._states) > 1 else None,
        )
        if kind is Kind.PREFIX and (anchors := self.writers.crossed(violation)) is not None:
            whose = self.writers.identities.tell(*anchors)
            if whose is not None:
                return replace(violation, identity=whose[0], stored_identity=whose[1])
        contents = self.writers.any_contents
        return violation if contents is None else contents.tell(violation)

    def _table_name(self, kind: int, row: Sequence[int]) -> str | None:
        word = {Kind.READ_TABLE: Row.FOUND_VALUE, Kind.READ_LENGTH: Row.STORED_TOKEN}.get(Kind(kind))
        return None if word is None else self.table_names[row[word]]

    def _row_key(self, row: Sequence[int]) -> int:
        """`key_of` the row's finding."""
        kind, state = row[Row.KIND], self._states[row[Row.REGION]]
        if kind == Kind.TOKEN and self.writers.any_contents is not None:
            return key_of(self.decode(row))
        if kind == Kind.READ_LENGTH:
            more = row[Row.FOUND_VALUE] - row[Row.STORED_VALUE]
            name, writer = self._table_name(kind, row), self.writers.name(row[Row.WRITER])
            return hash((kind, state.region.name, name, writer, more))
        source = state.sources.labels[row[Row.SOURCE]].name if row[Row.SOURCE] >= 0 else None
        written = _known(row[Row.STEP_WRITTEN]) if row[Row.STEP_WRITTEN] else None
        found = row[Row.FOUND_VALUE] if kind in _FOUND else None
        key = (kind, state.region.name, row[Row.SLOT], source, written, found)
        if kind != Kind.BYTES:
            return hash((*key, _known(row[Row.POSITION]), self.writers.name(row[Row.WRITER])))
        return hash(key)


_BEFORE = frozenset({Phase.PRE_FORWARD, Phase.EVENT})
"""Phases of findings that are there before a forward's tokens."""

_FOUND = frozenset({Kind.PREFIX, Kind.BYTES, Kind.LOST_WRITE, Kind.READ_LENGTH})
"""Kinds with a `Violation.found_value`, and one in their rows."""


def _known(value: int) -> int | None:
    return None if value < 0 else value


def _gauges(states: Sequence[RegionState]) -> list[int]:
    """Places of the counters of recorded tokens in full regions, or where there are none in windows."""
    kinds = ([state for state in states if state.region.kind is kind] for kind in (RegionKind.FULL, RegionKind.WINDOW))
    return [COUNTERS + state.index * GAUGES + RECORDED for state in next(filter(None, kinds), ())]
