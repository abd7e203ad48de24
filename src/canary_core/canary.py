"""`Canary`: guards the pools of one engine, three calls a step."""

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pluggy

from canary_core import plugins
from canary_core.batch import BatchView
from canary_core.config import CanaryConfig
from canary_core.coverage import Coverage
from canary_core.errors import AttachError, ViolationError
from canary_core.events import Event, Level
from canary_core.ops import backends
from canary_core.ops.state import RegionState, Shared
from canary_core.ops.state_checkpoints import record_checkpoints
from canary_core.ops.warm_up import row_counts, warm_up
from canary_core.records import Counter
from canary_core.region import Region, Uncovered
from canary_core.reporting.findings import Findings
from canary_core.runtime.event_queue import Changes
from canary_core.runtime.fingerprint_schedule import FingerprintSchedule
from canary_core.runtime.readback import Letter, Mailbox
from canary_core.runtime.scrub import Scrub
from canary_core.runtime.streams import SideStream, capturing
from canary_core.runtime.watchdog import Watchdog
from canary_core.slots import SlotEvents
from canary_core.violation import Violation
from canary_core.writers import Writers

MOST_ROWS = 65536
"""Requests of one forward; kernels work out each program's share from all their lengths at once."""

STALLED_READS = 100
"""Host reads in a row that show forwards on the host but none on the device, after which checks count as stalled."""


class Canary(SlotEvents):
    """Remembers what is in every slot of ``regions`` and checks it around each forward.

    Order per step: `pre_forward` (before the engine's forward), `post_forward` (after it, same stream), `end_step`
    (host only). In log mode none of the three ever raises into the engine: an exception of ours disables this Canary
    with a ``disabled`` event. In raise mode `end_step` raises `ViolationError`, which carries the first finding. What
    happens to slots beside forwards (freed, copied, loaded, ...) is told by the calls of `SlotEvents`.

    ``hooks``: plugin manager that receives findings and events (default: the process-wide one of
    `canary_core.plugins`). ``writers``: names of writer ids for reports. ``uncovered``: KV memory that the regions
    leave out. Raises `AttachError` if the regions do not fit together, `ConfigError` if a setting can't be used.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        config: CanaryConfig | None = None,
        *,
        hooks: pluggy.PluginManager | None = None,
        writers: Writers | None = None,
        uncovered: Iterable[Uncovered] = (),
    ) -> None:
        self.config = config or CanaryConfig.load()
        self.writers = writers or Writers()
        self.enabled = self.config.mode != "off"
        self.coverage = Coverage(tuple(regions), tuple(uncovered))
        self.forwards = 0
        self._hooks = hooks or plugins.hook_manager()
        self._regions = {r.name: r for r in regions}
        self._states: dict[str, RegionState] = {}
        self._first: Violation | None = None
        self._counts: dict[str, int] = {}
        self._closed = False
        _require_together(regions)
        if not self.enabled:
            return
        self._hooks.hook.canary_configure(config=self.config, manager=self._hooks)
        device = regions[0].device
        self._backend = backends.choose(self.config.backend, device)
        self._shared = Shared.allocate(self.config, device)
        self._states = {r.name: RegionState(r, i, self._shared, self.config) for i, r in enumerate(regions)}
        self._looks = {r.name: FingerprintSchedule.of(r, self.config) for r in regions}
        self._mailbox = Mailbox(self._shared)
        self._counters = [0] * self._shared.counters.shape[0]
        self._findings = Findings(list(self._states.values()), self._hooks, self.writers, self.config.rank)
        self._scrub = Scrub(list(self._states.values()), self._backend, self.config.scrub_budget)
        self._changes = Changes(device)
        self._aside = SideStream(device) if device.type == "cuda" else None
        self._captured = False
        self._read_interval = self.config.read_interval
        if device.type == "cpu" or self.config.mode == "raise":
            self._read_interval = 1
        self._steps = 0
        self._ended = 0
        self._opened = 0
        self._stalled = 0
        self._watch = Watchdog(self.config.silence_s, self._never_called)
        self._tell_attached()
        self._hooks.hook.canary_attached(canary=self)

    @property
    def regions(self) -> dict[str, Region]:
        """The guarded regions by name."""
        return self._regions

    @property
    def uncovered(self) -> tuple[Uncovered, ...]:
        """KV memory that is not guarded."""
        return tuple(self.coverage.uncovered)

    @property
    def states(self) -> dict[str, RegionState]:
        """Canary's own device memory by region, for tests, faults and tools; empty in off mode."""
        return self._states

    def warm_up(self, batches: Callable[[int], Iterable[BatchView]], most_rows: int) -> None:
        """Compiles what forwards of up to ``most_rows`` rows need, so that no request waits for it. ``batches(rows)``:
        one view of each sort that the engine will issue, alike in dtypes, strides and what it leaves out, with that
        many rows of padding. Launches every op and leaves no trace: slots, counters, cursors and the step stay what
        they are. Never captured."""
        if not self.enabled:
            return
        try:
            began = time.perf_counter()
            launched = warm_up(self._backend, self._states, self._padding(batches, most_rows))
            seconds = round(time.perf_counter() - began, 2)
            if launched:
                self._tell("warmed_up", fields={"backend": self._backend.name, "batches": launched, "seconds": seconds})
        except Exception as error:
            self.fail("warm_up", error)

    def begin_forward(self) -> bool:
        """The forward is issued next, on the current stream. True: its `pre_forward`, ``beside`` and after it was
        issued, is as good as one before if it is called `aside`, so that the device needn't wait for the host's work of
        ours. False: it has to come first."""
        if not self.enabled or self._aside is None:
            return False
        try:
            self.join(for_good=True)
            hooked = bool(self._hooks.hook.canary_pre_forward.get_hookimpls())
            if hooked or self._captured or any(state.reads for state in self._states.values()):
                return False
            self._aside.mark()
        except Exception as error:
            self.fail("begin_forward", error)
        return self.enabled

    def aside(self) -> AbstractContextManager[None]:
        """After `begin_forward` gave True: what is issued within comes after what the current stream had to do then,
        and does not wait for the forward. A view whose tensors are made for it is made here."""
        return self._beside(True)

    def pre_forward(self, batch: BatchView, beside: bool = False) -> None:
        """Checks every slot the forward will read. May be captured in a graph. ``beside``: the check may run beside the
        forward on a stream of ours, since until `post_forward` nothing writes to tensors of ``batch``: no kernel of the
        forward, and nobody who does not wait for them. Called before the forward is issued, or see `begin_forward`."""
        if not self.enabled:
            return
        try:
            self.join(for_good=True)
            self._watch.feed()
            self.forwards += 1
            self._captured = self._captured or capturing(self._shared.counters.device)
            self._require_place(batch)
            compared = [name for name in batch.tables if self._looks[name].begin(batch, self._captured)]
            compared = [name for name in compared if self._states[name].reads]
            # Bytes are compared before the forward changes them, and plugins are called on the engine's stream.
            hooked = bool(self._hooks.hook.canary_pre_forward.get_hookimpls())
            apart = beside and not (compared or hooked or self._captured)
            for name in batch.tables:
                self._states[name].require_capacity(batch)
            with self._beside(apart):
                self._changes.settle()
                if hooked:
                    self._hooks.hook.canary_pre_forward(canary=self, batch=batch)
                for name, table in batch.tables.items():
                    self._backend.check(self._states[name], batch, table)
                    if name in compared:
                        self._backend.read_check(self._states[name], batch, table)
        except Exception as error:
            self.fail("pre_forward", error)

    def post_forward(self, batch: BatchView, beside: bool = False) -> None:
        """Records the slots the forward has written (the same ``batch`` as `pre_forward`), then scrubs the next
        stretch of every region. May be captured in a graph. ``beside``: that may run beside what comes next, on a
        stream of ours, since until `join`, which the next `pre_forward` and all events begin with, nothing writes to
        any guarded slot or to tensors of ``batch``."""
        if not self.enabled:
            return
        try:
            hooks = self._hooks.hook
            hooked = bool(hooks.canary_post_forward.get_hookimpls() or hooks.canary_recorded.get_hookimpls())
            apart = beside and not (hooked or self._captured)
            # The check is done before the engine does anything more: it may write to what that reads.
            self.join(for_good=not apart)
            if hooked:
                hooks.canary_post_forward(canary=self, batch=batch)
            with self._beside(apart):
                for name, table in batch.tables.items():
                    state = self._states[name]
                    if state.sources and self._looks[name].now:
                        self._backend.fingerprint(state, batch, table)
                    elif state.sources:
                        state.forget_written()
                    self._backend.record(state, batch, table)
                    if table.checkpoints is not None:
                        record_checkpoints(self._backend, state, batch, table)
                self._scrub.run(self._captured)
            if hooked:
                hooks.canary_recorded(canary=self, batch=batch)
            if apart and self._aside is not None:
                # The rest of the batch was read by the check alone, which is done.
                self._aside.reads(batch.prefix_lens, batch.new_lens, batch.token_ids, batch.writers)
                self._aside.reads(batch.positions, batch.expected_tokens)
                for made in (table.checkpoints for table in batch.tables.values() if table.checkpoints is not None):
                    self._aside.reads(made.slots, made.positions)
        except Exception as error:
            self.fail("post_forward", error)

    def follow_check(self) -> None:
        """After `post_forward`: what the current stream does from now on comes after that forward's check. For a stream
        other than the forwards', on which an engine writes to its tables while a forward runs and the check beside it
        may still have to read them."""
        if not self.enabled or self._aside is None:
            return
        try:
            self._aside.follow()
        except Exception as error:
            self.fail("follow_check", error)

    def end_step(self) -> None:
        """Host only, never captured: starts a late read of the counters and reports what the last one brought. On the
        stream of the forwards, where these are replayed from a graph that holds our bracket.

        Raises `ViolationError` with the first finding in raise mode.
        """
        if not self.enabled:
            return
        try:
            if self._captured:
                # No host code of ours runs before a replay.
                self._changes.settle()
            self._steps += 1
            # Not the forwards: replays are not counted on the host, and an engine that idles should hear of the last.
            idle = self._steps > 1 and self.forwards == self._ended and not self._captured
            self._ended = self.forwards
            if self._aside is not None:
                self._aside.unmark()
            self._scrub.step(idle)
            if idle or self._steps % self._read_interval == 0:
                # What runs beside the engine's stream is read, and told how far to go, where it runs.
                with self._beside(self._aside is not None and self._aside.open):
                    letter = self._mailbox.collect()
                    self._scrub.adjust(self._captured)
                if letter is not None:
                    self._open(letter)
            interval = self.config.stats_interval
            if interval and not idle and self._steps % interval == 0:
                self._tell("stats", fields={**self.stats(), **self.scrub_stats()})
        except Exception as error:
            self.fail("end_step", error)
        self._raise_first()

    def drain(self) -> None:
        """Waits for the device and reports everything found so far. For shutdown and tests: it synchronizes.

        Raises `ViolationError` with the first finding in raise mode.
        """
        if not self.enabled:
            return
        try:
            self.join()
            self._changes.settle()
            # The first read may only learn that there are rows; the second one takes them.
            for _ in range(2):
                self._open(self._mailbox.collect_now())
        except Exception as error:
            self.fail("drain", error)
        self._raise_first()

    def close(self) -> None:
        """Drains, then stops for good: later calls do nothing."""
        try:
            self.drain()
        finally:
            if self._states and not self._closed:
                self._watch.feed()
                self._closed = True
                self._hooks.hook.canary_detached(canary=self)
            self.enabled = False

    def decode(self, row: Sequence[int]) -> Violation:
        """A row as the ring has them (see `Row`), with the names of its region, source and requests."""
        return self._findings.decode(row)

    def report(self, violations: Sequence[Violation]) -> int:
        """Findings of a check that ran on the host: reported like those of the device; gives how many are new. In
        raise mode the next `end_step` raises."""
        if not self.enabled:
            return 0
        found = self._findings.take(violations)
        if found and self._first is None:
            self._first = found[0]
        return len(found)

    def count(self, name: str, number: int = 1) -> None:
        """Adds to a counter of a plugin's own, which `stats` gives as ``name``."""
        self._counts[name] = self._counts.get(name, 0) + number

    def tell(self, event: Event) -> None:
        """Hands ``event`` to every plugin; a broken one never stops the engine. Where the settings name the model, so
        does the event; so it does a rank other than 0."""
        about = {name: value for name, value in (("model", self.config.model), ("rank", self.config.rank)) if value}
        if about:
            event = replace(event, fields={**about, **event.fields})
        plugins.emit(event, self._hooks)

    def stats(self) -> dict[str, int]:
        """The counters as of the last host read, by lower-case name of `Counter`; what was reported by name of `Kind`,
        ``violations``, their sum, and what plugins `count`."""
        if not self._states:
            return {"violations": 0, "forwards": 0}
        named = {c.name.lower(): self._counters[c] for c in Counter if c not in (Counter.ROWS, Counter.DRAINED)}
        kinds = {k.name.lower(): n for k, n in self._findings.delivered.items() if n}
        found = sum(self._findings.delivered.values())
        late = {"repeated": self._findings.repeated, "dismissed": self._findings.dismissed}
        return {"violations": found, "forwards": self.forwards, **named, **late, **kinds, **self._counts}

    def scrub_stats(self) -> dict[str, float]:
        """What the scrub comes to: ``scrub_coverage``, how often it went round all pools; ``scrub_share`` of the time,
        and ``scrub_period_s``, how long a round takes. The last two once the length of a step is known."""
        return self._scrub.stats(self._counters[Counter.SCRUBBED_SLOTS]) if self._states else {}

    def fail(self, where: str, error: Exception) -> None:
        """An exception of ours: off for good and loudly in log mode, so that the engine goes on; raised in raise mode.
        Adapters call it for their own exceptions too."""
        if self.config.mode == "raise":
            raise error
        self.enabled = False
        # Our tensors may be given up now.
        self.join(for_good=True)
        self._tell(
            "disabled",
            "error",
            {"where": where, "error": repr(error), "traceback": "".join(traceback.format_exception(error))},
        )

    def _padding(self, batches: Callable[[int], Iterable[BatchView]], most_rows: int) -> Iterator[BatchView]:
        for rows in row_counts(self._backend.row_steps, most_rows):
            for batch in batches(rows):
                self._require_place(batch)
                yield batch

    def _beside(self, apart: bool) -> AbstractContextManager[None]:
        """``apart``: what is issued within runs on a stream of our own, where the device has such."""
        return self._aside if apart and self._aside is not None else nullcontext()

    def _require_place(self, batch: BatchView) -> None:
        """Raises `AttachError` for a batch of another device (a kernel would read foreign addresses) or an unknown
        region."""
        device = self._shared.counters.device
        if batch.device != device:
            raise AttachError(f"the batch is on {batch.device}, the pool on {device}; build the BatchView there")
        if batch.rows > MOST_ROWS:
            raise AttachError(f"a batch may have {MOST_ROWS} rows, got {batch.rows}; split it")
        if not batch.tables.keys() <= self._states.keys():
            unknown = sorted(batch.tables.keys() - self._states.keys())
            raise AttachError(f"the batch has tables of unknown regions {unknown}; there are {sorted(self._states)}")

    def _open(self, letter: Letter) -> None:
        moved = letter.counters[Counter.CHECKED_FORWARDS] != self._counters[Counter.CHECKED_FORWARDS]
        # Between two forwards of an engine that idles there is nothing to check.
        self._stalled = 0 if moved else self._stalled + (self.forwards != self._opened)
        self._opened = self.forwards
        if self._stalled == STALLED_READS:
            self._tell(
                "silence", "error", {"reason": "forwards run but no check does; were they captured without Canary?"}
            )
        self._counters = letter.counters
        found = self._findings.deliver(letter.rows)
        if found and self._first is None:
            self._first = found[0]
        if letter.dropped:
            self._tell("rows_dropped", "warning", {"rows": letter.dropped, "ring_rows": self.config.ring_rows})

    def _raise_first(self) -> None:
        if self.config.mode == "raise" and self._first is not None:
            first, self._first = self._first, None
            raise ViolationError(first)

    def _never_called(self) -> None:
        after = f"{self.config.silence_s:g} s"
        reason = f"attached {after} ago and no forward was checked since; is the hook in place?"
        self._tell("silence", "error", {"reason": reason})

    def _tell(self, name: str, level: Level = "info", fields: dict[str, object] | None = None) -> None:
        self.tell(Event(name, level, fields or {}))

    def _tell_attached(self) -> None:
        memory = sum(s.memory_bytes for s in self._states.values())
        guarded = sum(r.pool_bytes for r in self._regions.values())
        self._tell(
            "attached",
            fields={
                "backend": self._backend.name,
                "mode": self.config.mode,
                "bytes": self.config.bytes,
                "regions": {
                    r.name: {"kind": r.kind.value, "slots": r.slots, "sources": len(r.sources)}
                    for r in self._regions.values()
                },
                "memory_bytes": memory,
                "pool_bytes": guarded,
            },
        )
        self.tell(self.coverage.event())


def _require_together(regions: Sequence[Region]) -> None:
    if not regions:
        raise AttachError("a Canary needs at least one region, got none; did the pool adapter recognise the pool?")
    names = [r.name for r in regions]
    if len(set(names)) != len(names):
        raise AttachError(f"regions must have different names, got {names}")
    for region in regions:
        if region.device != regions[0].device:
            raise AttachError(
                f"all regions must be on one device, got {region.name!r} on {region.device} and {regions[0].name!r} on "
                f"{regions[0].device}; make one Canary a device"
            )
