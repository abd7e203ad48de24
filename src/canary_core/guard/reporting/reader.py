"""`Reader`: the host's look, at intervals, at the device's counters and findings."""

import time
from threading import RLock
from typing import TYPE_CHECKING, Protocol

from canary_core.events import Event
from canary_core.guard.recorder import Recorder
from canary_core.guard.reporting.findings import Reporter
from canary_core.ops.launches import LATE
from canary_core.runtime.workspace import Switch, Workspace
from canary_core.watchers.audit.running import RunningAudit

if TYPE_CHECKING:
    from canary_core.guard.reporting.in_time import InTime
    from canary_core.guard.reporting.lookout import Lookout


class Late(Protocol):
    """A watcher that gathers on the device, and judges on the host when that has arrived. Called at each read of the
    counters, between forwards, never captured."""

    def send(self) -> None:
        """Starts the copy of gathered rows, on the current stream. Never waits."""

    def read(self) -> None:
        """Judges what has arrived. Never waits."""


class Reader:
    """Starts a late read of the counters, tells what the last one brought, and does what else is done no more often:
    sets how far the scrub goes, asks for a probe of the alarm, and has the audit and the watch looked at.
    `ReadTimes` says when."""

    def __init__(
        self, workspace: Workspace, switch: Switch, findings: Reporter, recorder: Recorder, audit: RunningAudit
    ) -> None:
        self._workspace = workspace
        self._switch = switch
        self._findings = findings
        self._recorder = recorder
        self._scrub = recorder.scrub
        self._audit = audit
        if recorder.weights is not None:
            recorder.weights.report = findings.take
        self.late: list[Late] = []
        """Watchers that are read with the counters."""
        if recorder.ranks is not None:
            recorder.ranks.report, recorder.ranks.writers = findings.take, findings.writers
            self.late.append(recorder.ranks)
        self.lookout: Lookout | None = None
        """Told that forwards go on."""
        acts, late = workspace.config.on_violation == "protect", workspace.device.type != "cpu"
        self._in_time: InTime | None = None
        if acts and late:
            from canary_core.guard.reporting import in_time

            self._in_time = in_time.InTime(workspace, findings)
        self._forwards = 0
        # An engine may ask for verdicts in a thread of its own.
        self._lock = RLock()

    @property
    def judged(self) -> bool:
        """Whether the engine calls `judge` for each forward. Not so on a CPU, where `read` has it all."""
        return self._in_time is not None and self._findings.in_time

    def end(self, forwards: int, due: bool) -> None:
        """At the end of a step, on the stream of the forwards; never captured, never waits. ``forwards``: how many
        began on the host so far. ``due``: whether to `read`."""
        if self._in_time is not None:
            self._in_time.sent()
        if due:
            self.read(forwards)

    def read(self, forwards: int) -> None:
        """Where `end` does, and while the engine idles."""
        self._forwards = forwards
        with self._lock:
            self._read(forwards)
            if self._in_time is not None:
                self._in_time.handed()

    def judge(self) -> None:
        """The engine has waited for the tokens of a forward, or for later work of its stream, and gives them out next:
        hands what was found up to then to the plugins. Waits only where something was found. From any thread. Does
        nothing unless ``CANARY_ON_VIOLATION=protect``, nor on a CPU, where `read` has done so."""
        in_time = self._in_time
        if in_time is None:
            return
        with self._switch.guard("step.reader.judge"):
            number = in_time.due()
            if number is None:
                return
            with self._lock:
                self._findings.open(self._findings.read_back.collect_beside(number), self._forwards)
                in_time.handed()

    def _read(self, forwards: int) -> None:
        side, captured, now = self._workspace.side, self._recorder.captured, time.monotonic()
        # What runs beside the engine's stream is read, and told how far to go, where it runs.
        with self._workspace.beside(side is not None and side.open):
            snapshot = self._findings.collect()
            self._scrub.adjust(captured)
            self._findings.alarm.step(now, not self._scrub.pace.off, captured)
            for late in self.late:
                late.send()
        if self.lookout is not None:
            self.lookout.look_back(now)
        self._recorder.overhead.read()
        self._audit.look(now_and_then=True)
        if snapshot is not None:
            self._findings.open(snapshot, forwards)
            self._scrub.observe(snapshot.counters)
        if self._findings.repairs is not None:
            self._findings.repairs.step()
        for late in self.late:
            late.read()
        if LATE.untold:
            self.tell_late_compiles()

    def tell_late_compiles(self) -> None:
        """Kernels that an engine has waited for since the last call."""
        for kernel, seconds in LATE.take().items():
            self._switch.tell(Event("compiled_late", "warning", {"kernel": kernel, "seconds": round(seconds, 2)}))
