"""`Canary`: guards the pools of one engine."""

import atexit
import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet, ref

import pluggy
import torch
from torch import Tensor

from canary_core.batch import Batches
from canary_core.config import CanaryConfig, Mode, ScrubBudget
from canary_core.errors import CanaryError
from canary_core.events import Event
from canary_core.guard import attach, glances
from canary_core.guard.coverage import Coverage, require_together, sharing
from canary_core.guard.reporting.findings import Reporter
from canary_core.guard.sampling import SampledTokens
from canary_core.guard.slots import SlotEvents
from canary_core.guard.step import Step
from canary_core.incident import Incident
from canary_core.kinds.facts import ENCODED
from canary_core.layers import resting
from canary_core.ops.state import RegionState
from canary_core.place import Place
from canary_core.records import Kind
from canary_core.region import Region, Uncovered
from canary_core.runtime.journal import Journal
from canary_core.runtime.telling import hook_manager
from canary_core.runtime.watch import WATCH
from canary_core.runtime.witness import Witness
from canary_core.runtime.workspace import Failsafe, Switch, Workspace
from canary_core.runtime.writers import Writers
from canary_core.violation import Violation
from canary_core.watchers.audit.running import RunningAudit

if TYPE_CHECKING:
    from canary_core.guard.reading import Reading
    from canary_core.guard.start_up import StartUp
    from canary_core.watchers.ledger import Ledger
    from canary_core.watchers.recompute import Verifier

_open: "WeakSet[Canary]" = WeakSet()
"""Canaries without a summary yet."""


class Canary:
    """Records the content of every slot of ``regions`` and checks it around each forward.

    ``step`` is called for each forward of the engine, ``slots`` where slots change in another way (freed, copied,
    loaded, ...). In log mode no call raises into the engine: an exception of Canary's own switches this Canary off with
    a ``disabled`` event. In raise mode `Step.end` raises `ViolationError` with the first finding.

    ``hooks``: plugin manager that receives findings and events (default: the process-wide one). ``writers``: names of
    writer ids for reports. ``uncovered``: KV memory outside of the regions.
    ``pool_tensors``: returns every tensor with KV of the engine, by the engine's own names
    (`PoolAdapter.pool_tensors`); then coverage is of the engine's own bytes, ``CANARY_AUDIT`` can audit forwards, and a
    moving pool is noticed. Called at the start, for audited forwards, and at intervals.
    ``warms_up``: `warm_up` is called next, before the engine does anything to the pool; all slots are fingerprinted
    there, and the kernels for it compiled beside the rest. ``witness``: for several Canaries that guard one model, one
    after the other; by default each has its own.
    Raises `AttachError` if the regions do not fit together, `ConfigError` if a setting can't be used.
    """

    def __init__(  # noqa: PLR0913  (one noun, what an engine says of its pool; all but the first have defaults)
        self,
        regions: Sequence[Region],
        config: CanaryConfig | None = None,
        *,
        hooks: pluggy.PluginManager | None = None,
        writers: Writers | None = None,
        uncovered: Iterable[Uncovered] = (),
        pool_tensors: Callable[[], Mapping[str, Tensor]] | None = None,
        warms_up: bool = False,
        witness: Witness | None = None,
    ) -> None:
        require_together(regions)
        self.config = config or CanaryConfig.load()
        self.writers = writers or Writers()
        for region in regions:
            if region.encoded:
                self.writers.contents.name(region.name, ENCODED)
        on = self.config.mode != "off"
        tensors = pool_tensors() if on and pool_tensors is not None else {}
        self.regions = {r.name: r for r in regions}
        """The guarded regions by name."""
        self._counts: dict[str, int] = {}
        hooks = hooks or hook_manager()
        if on:
            hooks.hook.canary_configure(config=self.config, manager=hooks)
            self._workspace = Workspace.allocate(regions, self.config)
        else:
            self._workspace = Workspace.off(self.config, regions[0].device)
        doubts = (*resting(regions, self.config), *sharing(self._workspace.states.values(), self.config))
        self.coverage = Coverage.of_engine(tuple(regions), left_out := (*uncovered, *doubts), tensors)
        self._switch = Switch(self._workspace, hooks)
        footprint = None
        if pool_tensors is not None and tensors:
            from canary_core.watchers.audit.footprint import FootprintAudit

            footprint = FootprintAudit(pool_tensors, regions, uncovered=left_out)
        self.audit = RunningAudit(self._switch, footprint, self.config.audit)
        """Results of audited forwards, see ``CANARY_AUDIT``."""
        self.witness = Witness() if witness is None else witness
        """Tokens computed by the engine's own account, beside those recorded here."""
        self._findings = Reporter(self, self._workspace, self._switch)
        self.slots = SlotEvents(self._workspace, self._switch, self.audit)
        """Events of slots beside forwards."""
        self._ledger: Ledger | None = None
        self.sampled = SampledTokens(self._workspace, self._switch)
        """The sampler's tokens, to compare with those of the next forward."""
        self.step = Step(self, self._switch, self.slots, self._findings)
        """Calls around a forward."""
        self.verifier: Verifier | None = None
        """Has requests computed again; None where nobody can. `Recompute` puts itself here."""
        own = ref(self)
        from canary_core.guard.reporting.lookout import Lookout

        self._lookout = Lookout(self._switch, self._findings, lambda: glances.unable_to_recompute(own()))
        self.step.reader.lookout = self._lookout
        self._start_up: StartUp | None = None
        self.audit.forget = self.slots.forget
        self._attached, self._process = on, os.getpid()
        if on:
            if not warms_up:
                self.step.scrub.start()
            _open.add(self)
            self.witness.calls = lambda: glances.calls(own())
            self.witness.why = lambda: glances.unguarded(own(), _open)
            WATCH.add(self._lookout)
            attach.made(self)
            self.tell(attach.attached(self.config, self.backend, regions, self.states.values()))
            self.tell(self.coverage.event())
            hooks.hook.canary_attached(canary=self)

    @property
    def ledger(self) -> "Ledger":
        """Stored KV of the pool, for comparison with returning KV. Made on first use."""
        if self._ledger is None:
            from canary_core.watchers.ledger import Ledger

            self._ledger = Ledger(self, self.slots, self._switch)
            self.step.reader.late.append(self._ledger)
        return self._ledger

    @property
    def ledger_doubt(self) -> float | None:
        """`Ledger.doubt_ratio`; None where nobody has asked for a ledger."""
        return None if self._ledger is None else self._ledger.doubt_ratio

    @property
    def enabled(self) -> bool:
        """Whether anything is checked: not in off mode, nor after an exception of Canary's own has switched it off."""
        return self._switch.enabled

    @property
    def place(self) -> Place:
        """Machine, GPU, replica, rank."""
        return self._switch.place

    @property
    def backend(self) -> str:
        """Name of the running ops: ``triton`` or ``torch``."""
        return self._workspace.backend.name

    @property
    def journal(self) -> Journal:
        """The last events of slots."""
        return self._workspace.journal

    @property
    def device(self) -> torch.device:
        """Where the guarded bytes are."""
        return self._workspace.device

    @property
    def mode(self) -> Mode:
        """``CANARY_MODE``, or the mode of the last `set_mode`."""
        if self.config.mode == "off":
            return "off"
        return "raise" if self._switch.raises else "log"

    def doubt(self, name: str, reason: str) -> None:
        """Adds a doubt to the coverage, and tells it once more."""
        self.coverage = self.coverage.with_doubt(name, reason)
        self.tell(self.coverage.event())

    def set_mode(self, mode: Literal["log", "raise"]) -> None:
        """From now on findings are told, or the next one stops the engine; from any thread. Raises `CanaryError` where
        Canary is off."""
        self._require_on()
        if mode == "raise" and not self._switch.raises:
            self._findings.forget_first()
        self._switch.raises = mode == "raise"
        self.tell(Event("mode_changed", "warning", {"mode": mode}))

    def set_budget(self, budget: ScrubBudget) -> None:
        """Sets the work allowed to the scrub, from one of the next steps on; from any thread. Raises `CanaryError`
        where Canary is off, or is part of a CUDA graph, whose work can't change."""
        self._require_on()
        if self.step.captured:
            raise CanaryError("the scrub is part of a CUDA graph of this engine, whose work can't be changed any more")
        self.step.scrub.budget = budget
        self.tell(Event("budget_changed", "warning", {"budget": str(budget)}))

    @property
    def uncovered(self) -> tuple[Uncovered, ...]:
        """Unguarded KV memory."""
        return tuple(self.coverage.uncovered)

    @property
    def forwards(self) -> int:
        """How many forwards began."""
        return self.step.forwards

    @property
    def states(self) -> dict[str, RegionState]:
        """Canary's own device memory by region, for tests, faults and tools; empty in off mode."""
        return self._workspace.states

    def compares_reads(self, region: str) -> bool:
        """Whether bytes of ``region`` are compared before forwards read them."""
        return region in self.states and self.states[region].reads

    def warm_up(self, batches: Batches, most_rows: int, *, beside: bool = False, alone: bool = False) -> None:
        """Compiles everything for forwards of up to ``most_rows`` rows, in another process: no request waits for a
        compiler. ``batches(rows)``: one view of each sort to be issued by the engine, alike in dtypes, strides and
        left-out fields, with so many rows of padding. Launches every op and leaves no trace in slots, counters, cursors
        and the step. Never captured. With ``warms_up``, fingerprints all slots first.

        ``beside``: the engine goes on to start (it captures graphs), and none of its forwards is guarded until then. So
        nobody waits for that process, and the rest is put off until `finish_warm_up`, the first guarded forward, or the
        first event of slots. Tensors of the views must stay until then. ``alone``: the engine serves already, and has
        compiled for its first forwards; what comes later is compiled only in another process, which may outlive this
        Canary. Nothing is launched, and nobody waits.
        """
        if self.enabled:
            with self.guard("warm_up"):
                from canary_core.guard.start_up import ALONE, StartUp

                if alone:
                    ALONE.begin(self._workspace, self._switch, batches, most_rows)
                    return
                if self._start_up is None:
                    self._start_up = StartUp(self._workspace, self._switch, self.step)
                self._start_up.begin(batches, most_rows, beside)

    def finish_warm_up(self) -> None:
        """Runs a pending warm-up at once: for engines that know when they have started, and before a guarded forward is
        captured in a graph. Never captured."""
        if self._switch.put_off is not None:
            self._switch.put_off()

    def guard_weights(self, model: torch.nn.Module, resume: bool = False) -> None:
        """With ``CANARY_WEIGHTS``: compares the parameters of ``model`` with the present bytes from now on (``resume``:
        with those of the model's last Canary). Again, after an update past version counters: takes the bytes anew."""
        if self.step.weights is not None and self.enabled:
            self.step.weights.guard(model, resume)

    def drain(self) -> None:
        """Waits for the device and reports everything found so far. For shutdown and tests: it synchronizes.

        Raises `ViolationError` with the first finding in raise mode.
        """
        if not self.enabled:
            return
        with self.guard("drain"):
            self.audit.look()
            self._workspace.join()
            self._workspace.queue.settle()
            if self._ledger is not None:
                self._ledger.read(wait=True)
            # The first read may only learn that there are rows; the second one takes them.
            for _ in range(2):
                self._findings.open(self._findings.collect_now(), self.forwards)
            self._findings.settle(at_last=True)
            self._findings.wait()
            self.step.reader.tell_late_compiles()
        self._findings.raise_first()

    def close(self) -> None:
        """Drains, closes the step's listeners, tells the ``summary`` event, and stops for good: later calls do
        nothing."""
        self._give_up()
        try:
            self.audit.tell()
            self.drain()
        finally:
            self.step.close()
            self._findings.wait(last=True)
            WATCH.discard(self._lookout)
            self._tell_summary()
            if self._attached:
                self._attached = False
                self.step.watchdog.feed()
                self._switch.hooks.hook.canary_detached(canary=self)
            self._switch.enabled = False

    def release(self) -> None:
        """After `close`: frees the device memory at once. The parts of a closed Canary refer to each other, so Python
        frees them late, and the next Canary would have to find other memory. Does nothing where a CUDA graph, possibly
        replayed, contains Canary's work."""
        if self.enabled or self.step.captured:
            return
        for state in self.states.values():
            state.release()
        self._findings.release()

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """Findings by cause, the oldest first: the last ones that may still grow."""
        return tuple(self._findings.incidents)

    def decode(self, row: Sequence[int]) -> Violation:
        """A finding from a row of the ring (see `records.Row`), with the names of its region, source and requests."""
        return self._findings.decode(row)

    def report(self, violations: Sequence[Violation]) -> int:
        """Reports findings of a check on the host, like those of the device; returns how many are new. In raise mode
        the next `Step.end` raises."""
        return len(self._findings.take(violations)) if self.enabled else 0

    def count(self, name: str, number: int = 1) -> None:
        """Adds to a plugin's own counter, listed in `stats` as ``name``."""
        self._counts[name] = self._counts.get(name, 0) + number

    @cached_property
    def _reading(self) -> "Reading":
        from canary_core.guard.reading import Reading

        return Reading(self._workspace, self._switch, self._findings, self.step, self.sampled)

    def stats(self) -> dict[str, Any]:
        """The counters as of the last host read, by lower-case name of `records.Counter`; reported findings by name of
        `Kind`, ``violations``, their sum, and plugins' own counters (`count`)."""
        ledger = self._ledger.stats() if self._ledger is not None else {}
        return {**self._reading.stats(), **ledger, **self._counts}

    @property
    def left_out(self) -> dict[str, int]:
        """Work left unchecked, unreported or without a name because of Canary's own bounds, by reason: the table of
        docs/how-it-works.md, "Bounds, and how full they are"."""
        return self._reading.left_out()

    def scrub_stats(self) -> dict[str, float]:
        """Figures of the scrub. ``scrub_coverage``: number of rounds over all pools in search of slots of running
        requests. ``scrub_share``: share of the time; once a forward's length is known. ``live_period_s``: seconds for
        one comparison of each slot of a running request, ``scrub_period_s``: seconds for every written slot; from the
        end of the first round on. Idle time of the engine doesn't count."""
        return self._reading.scrub()

    def overhead_stats(self) -> dict[str, float]:
        """Canary's cost, measured at intervals in the engine itself: ``overhead_host`` and, on a GPU,
        ``overhead_device``, see `Overhead.stats`."""
        return self.step.overhead.stats()

    @property
    def found(self) -> Mapping[tuple[Kind, str], int]:
        """How many findings were reported, by kind and region."""
        return self._findings.found

    @property
    def incident_counts(self) -> Mapping[tuple[Kind, str], int]:
        """How many incidents there were, by kind and region of the first finding by cause."""
        return self._findings.incidents.counts

    @property
    def last_check(self) -> float | None:
        """Time at which the host last saw new checks, in seconds since the epoch; None before the first."""
        return self._findings.last_check

    @property
    def last_alarm_test(self) -> float | None:
        """Time at which a probe last passed through the alarm, in seconds since the epoch; None before the first."""
        return self._findings.alarm.last

    @property
    def unknown_slots(self) -> float:
        """Slots in a forward's context that can't be judged, as of the last host read."""
        return self._findings.unknown_slots

    @property
    def recent_events(self) -> tuple[tuple[float, Event], ...]:
        """The last events reported, each with its time, in seconds since the epoch."""
        return tuple(self._switch.recent)

    @property
    def detection_s(self) -> float | None:
        """Most seconds from a flip in requests' KV to its report, at the present pace; None where unknown, or where no
        bytes are compared. Without the wait for the host's read of the counters."""
        return self._reading.detection_s()

    def tell(self, event: Event) -> None:
        """Hands ``event`` to every plugin, with the fields of `place`; a broken one never stops the engine."""
        self._switch.tell(event)

    def tell_stats(self) -> None:
        """Tells `stats`, `scrub_stats` and `overhead_stats`, as a ``stats`` event."""
        self.tell(Event("stats", fields={**self.stats(), **self.scrub_stats(), **self.overhead_stats()}))

    def fail(self, where: str, error: Exception) -> None:
        """Handles an exception of Canary's own, or of an adapter: off for good and loudly in log mode, so that the
        engine goes on; raised in raise mode. ``where``: the failed work."""
        self._switch.fail(where, error)

    def guard(self, where: str) -> Failsafe:
        """A context for work of an adapter within the engine: its exceptions go to `fail`, findings pass through."""
        return self._switch.guard(where)

    def _require_on(self) -> None:
        if not self.enabled:
            why = "CANARY_MODE is off" if self.config.mode == "off" else "an error switched it off, or it was closed"
            raise CanaryError(f"nothing is checked here any more ({why}), so there is nothing to change")

    def _at_exit(self) -> None:
        """The process ends with this Canary unclosed. Never waits for a device that may be lost."""
        if os.getpid() != self._process:
            return
        with contextlib.suppress(Exception):
            self._give_up()
            if self.enabled:
                if self.device.type == "cpu":
                    self._workspace.queue.settle()
                self._findings.read_last(self.forwards)
                self._findings.wait(last=True)
        self._tell_summary()

    def _tell_summary(self) -> None:
        """Tells the ``summary`` event, once."""
        if self not in _open:
            return
        _open.discard(self)
        self.tell(self._reading.summary(self.coverage.ratio, self.slots.counts).event())

    def _give_up(self) -> None:
        if self._start_up is not None:
            self._start_up.give_up()


@atexit.register
def _tell_open() -> None:
    for canary in tuple(_open):
        canary._at_exit()
