"""`Investigator`: looks at each incident once, on a thread of its own, and keeps the result."""

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakSet

from canary_core.config import CanaryConfig
from canary_core.errors import CanaryError
from canary_core.events import Event
from canary_core.guard.canary import Canary
from canary_core.incident import NAMED, Incident
from canary_core.kinds.case import Pattern
from canary_core.records import FREED_BY, WRITER
from canary_core.runtime.streams import capturing
from canary_desk.incidents.bundle_writer import Dossier, write_aftermath, write_bundle
from canary_desk.incidents.circumstances import Circumstances
from canary_desk.incidents.diagnosis import diagnose
from canary_desk.incidents.evidence import Taken, take
from canary_desk.incidents.patterns import patterns
from canary_desk.incidents.rotation import Limits
from canary_desk.incidents.signature import Signature, signature
from canary_desk.incidents.spans import add_spans
from canary_desk.incidents.suppressions import Suppressions

MOST_WAITING = 8
"""Most incidents waiting for a look; more are reported without a diagnosis, and each with a ``diagnosis_failed``
event."""

AFTER_S = 1.0
"""Seconds from the writing of a bundle to its aftermath."""

PATIENCE_S = 10.0
"""Most seconds that an ending engine, or one stopped by a finding, waits for pending looks; on a machine with time to
spare a fraction of one."""


@dataclass(slots=True, eq=False)
class Inquiry:
    """An incident, the copies of its evidence, and the circumstances of its finding."""

    canary: Canary
    incident: Incident
    taken: Taken | None
    circumstances: Circumstances | None


@dataclass(slots=True, eq=False)
class Written:
    """A bundle waiting for its aftermath."""

    canary: Canary
    path: Path
    incident: Incident
    since: float
    due: float = field(default_factory=lambda: time.monotonic() + AFTER_S)


_running: "WeakSet[Investigator]" = WeakSet()
"""Investigators with a started thread: a process must not end while one is at work."""


class Investigator:
    """Looks at the incidents of one Canary. `look` is called from the engine's thread, for each reported incident: it
    issues the copies of the evidence and waits for nothing. A thread, started by the first one, does the rest: works
    out the diagnosis, reports it as a ``diagnosis`` event, and writes a bundle for ``CANARY_INCIDENT_DIR``. Holds the
    Canary only while there is work.

    No failure here reaches the engine or switches Canary off: it is an event.
    """

    def __init__(self, config: CanaryConfig) -> None:
        self._config = config
        self._jobs: queue.SimpleQueue[Inquiry | Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting = 0
        self._idle = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._written: list[Written] = []
        self._refused = self._unreadable = False
        self._suppressions = Suppressions(config.suppressions)
        self.skipped = 0
        """Incidents without a look, since too many waited."""

    def look(self, canary: Canary, incident: Incident) -> None:
        """Takes the evidence on ``incident``. From the engine's thread, on the stream of the forwards, never captured.
        Waits for nothing."""
        if not self._looks(canary) or capturing(canary.device):
            return
        if self._waiting >= MOST_WAITING:
            self.skipped += 1
            _failed(canary, incident, f"{MOST_WAITING} incidents wait to be looked at already")
            return
        try:
            canary.step.join()
            state = canary.states.get(incident.root.region)
            taken = None
            if state is not None and state.sources:
                reader = None if incident.root.request is None else canary.writers.known(incident.root.request)
                history = canary.journal.of(incident.root.region)
                taken = take(state, incident, history, reader, canary.step.last_view)
            circumstances = Circumstances.of(canary) if self._config.incident_dir else None
            inquiry = Inquiry(canary, incident, taken, circumstances)
        except Exception as error:
            _failed(canary, incident, error)
            return
        if not self._started(inquiry):
            self._do(inquiry)

    def prove(self, canary: Canary, done: Callable[[], None]) -> bool:
        """Has the thread call ``done``; False where incidents are not looked at."""
        if not self._looks(canary):
            return False
        return self._waiting >= MOST_WAITING or self._started(done)

    def wait(self, seconds: float = PATIENCE_S) -> None:
        """Until all is looked at and written, for so long at most."""
        if threading.current_thread() is not self._thread:
            with self._idle:
                self._idle.wait_for(lambda: not self._waiting, seconds)

    def close(self) -> None:
        """Waits, and ends the thread, after the last aftermaths."""
        self.wait()
        thread = self._thread
        if thread is not None and thread.is_alive():
            self._jobs.put(None)
            thread.join(PATIENCE_S)

    def _looks(self, canary: Canary) -> bool:
        return self._config.diagnose and bool(canary.states) and os.getpid() == self._process

    def _started(self, job: Inquiry | Callable[[], None]) -> bool:
        """Whether there is a thread for ``job``: at the end of a process none can be started."""
        with self._idle:
            self._waiting += 1
            try:
                if self._thread is None or not self._thread.is_alive():
                    self._thread = threading.Thread(target=self._run, name="canary-incidents", daemon=True)
                    self._thread.start()
            except RuntimeError:
                self._thread = None
                return False
            _running.add(self)
            self._jobs.put(job)
        return True

    def _run(self) -> None:
        """Works until nothing is left to do for a while: a thread would keep a Canary from being freed."""
        while True:
            try:
                job = self._jobs.get(timeout=AFTER_S)
            except queue.Empty:
                self._follow_up()
                with self._idle:
                    if self._waiting or self._written:
                        continue
                    self._thread = None
                    return
            if job is None:
                self._follow_up(at_last=True)
                with self._idle:
                    if self._waiting:
                        continue
                    self._thread = None
                    return
            self._do(job)
            self._follow_up()

    def _do(self, job: Inquiry | Callable[[], None]) -> None:
        try:
            if isinstance(job, Inquiry):
                self._investigate(job)
            else:
                job()
        except Exception as error:
            if isinstance(job, Inquiry):
                _failed(job.canary, job.incident, error)
        finally:
            with self._idle:
                self._waiting -= 1
                self._idle.notify_all()

    def _investigate(self, inquiry: Inquiry) -> None:
        incident = inquiry.incident
        evidence = None if inquiry.taken is None else inquiry.taken.evidence()
        seen: list[Pattern] = []
        if evidence is not None:
            writers = {*evidence.records[:, WRITER].tolist()} | {e.writer for e in evidence.history}
            freed = {*evidence.records[:, FREED_BY].tolist()}
            before = {h.who for life in evidence.lives.values() for h in life if h.event != "copy"}
            named = ((w, inquiry.canary.writers.name(w)) for w in writers | freed | before)
            evidence.names = {w: name for w, name in named if name is not None}
            seen = list(patterns(evidence))
        incident.diagnoses = diagnose(incident, evidence, seen)
        sort = signature(incident, evidence, seen)
        incident.signature = sort.text
        incident.suppressed = self._suppressed(inquiry.canary, sort)
        if inquiry.circumstances is not None:
            self._write(inquiry.canary, Dossier(incident, evidence, seen, inquiry.circumstances))
        fields: dict[str, object] = {"incident": incident.number, **incident.diagnoses[0].fields()}
        fields |= {"signature": sort.text, "signature_id": sort.id}
        others = [d.name for d in incident.diagnoses[1:]]
        if others:
            fields["also_possible"] = others
        if incident.bundle is not None:
            fields["bundle"] = incident.bundle
        if incident.suppressed:
            fields["suppressed"] = incident.suppressed
        if incident.traces:
            fields["traces"] = list(dict.fromkeys(incident.trace_ids.values()))[:NAMED]
        inquiry.canary.tell(Event("diagnosis", "warning" if incident.suppressed else "error", fields))
        if incident.traces:
            add_spans(incident)

    def _suppressed(self, canary: Canary, sort: Signature) -> str:
        try:
            return self._suppressions.reason(sort)
        except CanaryError as error:
            if not self._unreadable:
                self._unreadable = True
                canary.tell(Event("suppressions_unavailable", "warning", {"reason": f"{error}; nothing is suppressed"}))
            return ""

    def _write(self, canary: Canary, dossier: Dossier) -> None:
        began = time.time()
        try:
            limits = Limits(self._config.incident_most, self._config.incident_size, self._config.incident_days)
            path = write_bundle(Path(self._config.incident_dir), dossier, limits)
        except (OSError, CanaryError) as error:
            # Once: a disk that is full stays so for a while.
            if not self._refused:
                self._refused = True
                told = {"incident": dossier.incident.number, "directory": self._config.incident_dir}
                reason = f"no bundle could be written: {error}; findings are told as ever"
                canary.tell(Event("bundle_failed", "warning", {**told, "reason": reason}))
            return
        dossier.incident.bundle = str(path)
        self._written.append(Written(canary, path, dossier.incident, began))

    def _follow_up(self, at_last: bool = False) -> None:
        """Adds aftermaths to bundles."""
        now = time.monotonic()
        due = [w for w in self._written if at_last or w.due <= now]
        self._written = [w for w in self._written if w not in due]
        for written in due:
            try:
                events = [(moment, event) for moment, event in written.canary.recent_events if moment >= written.since]
                write_aftermath(written.path, written.incident, events)
            except (OSError, RuntimeError):
                # The bundle is whole without it; somebody may have moved it.
                continue


def _failed(canary: Canary, incident: Incident, error: Exception | str) -> None:
    about = {"incident": incident.number, "error": error if isinstance(error, str) else repr(error)}
    canary.tell(Event("diagnosis_failed", "warning", about))


@atexit.register
def _end_all() -> None:
    for investigator in tuple(_running):
        investigator.close()
