"""`Canary`: guards the pools of one engine, three calls a step."""

import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pluggy
import torch
from torch import Tensor

from canary_core import backends, faults, plugins, twin
from canary_core.adapters import Writers
from canary_core.batch import BatchView, SlotTable
from canary_core.budget import Pace, ScrubBudget
from canary_core.config import CanaryConfig
from canary_core.coverage import Coverage
from canary_core.errors import AttachError, ViolationError
from canary_core.events import Event, Level
from canary_core.findings import Findings
from canary_core.looks import Looks
from canary_core.mailbox import Letter, Mailbox
from canary_core.records import POSITION, STATES, Counter, Cursor, State
from canary_core.region import KVSource, Region, Uncovered
from canary_core.state import RegionState, Shared
from canary_core.violation import Violation
from canary_core.watch import Watch

MOST_ROWS = 65536
"""Requests of one forward; kernels work out each program's share from all their lengths at once."""

STALLED_READS = 100
"""Host reads in a row that show forwards on the host but none on the device, after which checks count as stalled."""


Owner = int | Callable[[], int | Tensor]
"""Who frees or is given slots: a writer id, -1 if unknown, or a function that gives it, or an int32 tensor ``[n]`` with
one for each slot. It is called when the event takes effect, on the stream of the forwards."""


@dataclass(slots=True, eq=False)
class _Change:
    """Something that the host issued between two forwards. ``tensors`` are what it uses, made by ``ready``;
    ``arrival``: it changes what slots hold, not only whose they are. Changes of the same ``key``, one after the other,
    take effect together."""

    apply: Callable[[list[Tensor]], None]
    tensors: list[Tensor]
    ready: list[torch.cuda.Event]
    arrival: bool = False
    key: tuple[object, ...] | None = None


class Canary:
    """Remembers what is in every slot of ``regions`` and checks it around each forward.

    Order per step: `pre_forward` (before the engine's forward), `post_forward` (after it, same stream), `end_step`
    (host only). In log mode none of the three ever raises into the engine: an exception of ours disables this Canary
    with a ``disabled`` event. In raise mode `end_step` raises `ViolationError`, which carries the first finding.

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
        self._hooks = hooks or plugins.manager()
        self._regions = {r.name: r for r in regions}
        self._states: dict[str, RegionState] = {}
        self._first: Violation | None = None
        self._counts: dict[str, int] = {}
        self._closed = False
        _require_together(regions)
        if not self.enabled:
            return
        faults.enable(self.config.faults, self.config.seed, self._hooks)
        device = regions[0].device
        self._backend = backends.choose(self.config.backend, device)
        self._shared = Shared.allocate(self.config, device)
        self._states = {r.name: RegionState(r, i, self._shared, self.config) for i, r in enumerate(regions)}
        self._looks = {r.name: Looks.of(r, self.config) for r in regions}
        self._scrubbed_bytes = sum(s.pool_bytes for s in self._states.values())
        self._mailbox = Mailbox(self._shared)
        self._counters = [0] * self._shared.counters.shape[0]
        self._findings = Findings(list(self._states.values()), self._hooks, self.writers, self.config.rank)
        self._pace = Pace(ScrubBudget.parse(self.config.scrub_budget), self._baseline(device))
        # A graph may be captured before the first step ends, and a scrub that it lacks would be lacking for good.
        self._set_scrub()
        self._changes: list[_Change] = []
        self._captured = False
        self._read_interval = self.config.read_interval
        if device.type == "cpu" or self.config.mode == "raise":
            self._read_interval = 1
        self._steps = 0
        self._ended = 0
        self._opened = 0
        self._stalled = 0
        self._watch = Watch(self.config.silence_s, self._never_called)
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
            if any(_capturing(s.cursors) for s in self._states.values()):
                raise AttachError("warm_up can't be captured in a graph; call it when the engine starts")
            kept = [self._shared.counters, self._shared.clock, *(s.cursors for s in self._states.values())]
            copies = [tensor.clone() for tensor in kept]
            for rows in _row_counts(self._backend.row_steps, most_rows):
                for batch in batches(rows):
                    self._require_place(batch)
                    for name, table in batch.tables.items():
                        self._launch_all(self._states[name], batch, table)
            for tensor, copy in zip(kept, copies, strict=True):
                tensor.copy_(copy)
        except Exception as error:
            self.fail("warm_up", error)

    def pre_forward(self, batch: BatchView) -> None:
        """Checks every slot the forward will read. May be captured in a graph."""
        if not self.enabled:
            return
        try:
            self._watch.alive()
            self.forwards += 1
            self._captured = self._captured or _capturing(self._shared.counters)
            self._flush_changes()
            self._call(self._hooks.hook.canary_pre_forward, batch)
            self._require_place(batch)
            for name, table in batch.tables.items():
                state = self._states[name]
                state.require_capacity(batch)
                self._backend.check(state, batch, table)
                compare = self._looks[name].begin(batch, self._captured)
                if state.reads and compare:
                    self._backend.read_check(state, batch, table)
        except Exception as error:
            self.fail("pre_forward", error)

    def post_forward(self, batch: BatchView) -> None:
        """Records the slots the forward has written (the same ``batch`` as `pre_forward`), then scrubs the next
        stretch of every region. May be captured in a graph."""
        if not self.enabled:
            return
        try:
            self._call(self._hooks.hook.canary_post_forward, batch)
            for name, table in batch.tables.items():
                state = self._states[name]
                if state.sources and self._looks[name].now:
                    self._backend.fingerprint(state, batch, table)
                elif state.sources:
                    state.forget_written()
                self._backend.record(state, batch, table)
            for state in self._states.values():
                if state.scrub_slots:
                    self._backend.scrub(state)
            self._call(self._hooks.hook.canary_recorded, batch)
        except Exception as error:
            self.fail("post_forward", error)

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
                self._flush_changes()
            self._steps += 1
            # Not the forwards: replays are not counted on the host, and an engine that idles should hear of the last.
            idle = self._steps > 1 and self.forwards == self._ended and not self._captured
            self._ended = self.forwards
            if idle:
                self._pace.pause()
            else:
                self._pace.step()
            if idle or self._steps % self._read_interval == 0:
                letter = self._mailbox.collect()
                if letter is not None:
                    self._open(letter)
                self._set_scrub()
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
            # The first read may only learn that there are rows; the second one takes them.
            self._flush_changes()
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
                self._watch.alive()
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

    def settle(self) -> None:
        """Lets events that wait for the next forward take effect now, on the current stream, which must be the
        forwards'. Never captured."""
        if self.enabled:
            self._flush_changes()

    def count(self, name: str, number: int = 1) -> None:
        """Adds to a counter of a plugin's own, which `stats` gives as ``name``."""
        self._counts[name] = self._counts.get(name, 0) + number

    def tell(self, event: Event) -> None:
        """Hands ``event`` to every plugin; a broken one never stops the engine. Where the settings name the model, so
        does the event."""
        if self.config.model:
            event = replace(event, fields={"model": self.config.model, **event.fields})
        plugins.emit(event, self._hooks)

    def copy_slots(self, region: str, source: Tensor, destination: Tensor) -> None:
        """The engine copied slots ``source`` to ``destination`` (integer tensors ``[n]``, region slots): records
        travel with the bytes. Call it when the copy was issued, on the same stream. Overlaps are read first; numbers
        that are no slots are left out."""
        state = self._states.get(region)
        if state is not None and self.enabled:
            self._arrive(partial(_copy_records, state, source, destination), source, destination)

    def payload_layout(self, region: str) -> twin.PayloadLayout | None:
        """What the payloads of `export_slots` mean, for `twin.check_payload`; None in off mode."""
        state = self._states.get(region)
        return None if state is None else twin.PayloadLayout.of(state)

    def export_slots(self, region: str, slots: Tensor) -> Tensor:
        """What is known of ``slots`` (integer tensor ``[n]``), to travel with their bytes: an int64 payload
        ``[n, payload_layout(region).words]`` on the pool's device, ``[n, 0]`` in off mode. Call it when the bytes are
        read, on the same stream. Any place may keep it; its rows may be cut and joined as the slots are."""
        state = self._states.get(region)
        if state is None:
            return slots.new_empty((slots.shape[0], 0), dtype=torch.int64)
        try:
            if self.enabled:
                if any(change.arrival for change in self._changes):
                    self._flush_changes()
                return twin.export_records(state, slots)
        except Exception as error:
            self.fail("export_slots", error)
        return slots.new_zeros((slots.shape[0], twin.PayloadLayout.of(state).words), dtype=torch.int64)

    def import_slots(self, region: str, slots: Tensor, payload: Tensor, writer: int = -1) -> None:
        """Bytes arrived in ``slots`` (integer tensor ``[n]``, each at most once) with the ``payload`` of the slots they
        come from: rows of `export_slots`, of this Canary or another one, here or in host memory. Slots whose row does
        not fit are not judged until they are written again, as with `forget_slots`. Call it when the transfer was
        issued, on the same stream; a pinned ``payload`` must stay as it is until that stream has read it. ``writer``:
        who is named as the writer of slots that another Canary exported (-1: nobody)."""
        state = self._states.get(region)
        if state is None or not self.enabled:
            return
        try:
            payload = payload.to(slots.device, non_blocking=True)
            self._arrive(partial(twin.import_records, state, slots, payload, writer), slots, payload)
        except Exception as error:
            self.fail("import_slots", error)

    def expect_slots(self, region: str, slots: Tensor) -> None:
        """Bytes of ``slots`` (integer tensor ``[n]``) will arrive by another way than a forward: not judged any more.

        Unlike the other events it does not wait for those issued before, but takes effect on the current stream at
        once, whatever is in flight on others; the transfer must begin after it. `forget_slots` or `import_slots` must
        follow, in the order of events.
        """
        state = self._states.get(region)
        if state is not None and self.enabled:
            try:
                _mark_records(state, slots, State.UNKNOWN, keep=int(State.FREED))
            except Exception as error:
                self.fail("expect_slots", error)

    def check_slots(self, region: str, slots: Tensor) -> None:
        """Compares the bytes of ``slots`` (integer tensor ``[n]``) with their records, on the current stream: right
        after they arrived with records, where the scrub would come by only later. Numbers that are no slots are left
        out. Never captured."""
        state = self._states.get(region)
        if state is None or not self.enabled or not state.sources:
            return
        try:
            if any(change.arrival for change in self._changes):
                self._flush_changes()
            self._backend.verify(state, slots)
        except Exception as error:
            self.fail("check_slots", error)

    def forget_slots(self, region: str, slots: Tensor) -> None:
        """Bytes of ``slots`` (integer tensor ``[n]``) arrived without records: not judged until written again. Numbers
        that are no slots are left out."""
        self._mark(region, slots, State.UNKNOWN)

    def clear_slots(self, region: str, slots: Tensor) -> None:
        """``slots`` hold nothing any more (a roll-back, a reset): reading one before it is written is a finding."""
        self._mark(region, slots, State.UNWRITTEN)

    def free_slots(self, region: str, slots: Tensor, writer: Owner = -1, page_slots: int = 1) -> None:
        """The engine's allocator got ``slots`` back, from request ``writer``. With ``page_slots`` above 1 they number
        pages of so many slots.

        Events take effect in the order in which the host issues them, before the next forward that it issues: call it
        from any stream; ``slots`` must stay as they are until then. Once slots of a region are freed by events, they
        must be handed out by `alloc_slots` too, until `end_lifetime`.
        """
        self._own(region, slots, writer, ("free", page_slots))

    def alloc_slots(self, region: str, slots: Tensor, writer: Owner = -1, page_slots: int = 1) -> None:
        """The engine's allocator handed ``slots`` out to ``writer``; see `free_slots`."""
        self._own(region, slots, writer, ("alloc", page_slots))

    def end_lifetime(self, region: str) -> None:
        """The engine's allocator can't be followed any more: no slot of the region counts as freed from now on."""
        state = self._states.get(region)
        if state is not None and self.enabled:
            self._arrive(partial(_forget_frees, state))

    def rebind(self, region: str, sources: Sequence[KVSource]) -> None:
        """The engine moved the region's bytes to other tensors (a cache that grew): same slots, same records, new
        addresses. Sources must match the old ones in name, size and page size, else `AttachError`. Never captured."""
        state = self._states.get(region)
        if state is not None and self.enabled:
            state.rebind(sources, self.config)

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
        slots = sum(r.slots for r in self._regions.values())
        if not self._states:
            return {}
        coverage = self._counters[Counter.SCRUBBED_SLOTS] / slots
        step_bytes = sum(s.scrub_slots * s.slot_bytes for s in self._states.values())
        return {"scrub_coverage": coverage, **self._pace.achieved(step_bytes, self._scrubbed_bytes)}

    def fail(self, where: str, error: Exception) -> None:
        """An exception of ours: off for good and loudly in log mode, so that the engine goes on; raised in raise mode.
        Adapters call it for their own exceptions too."""
        if self.config.mode == "raise":
            raise error
        self.enabled = False
        self._tell(
            "disabled",
            "error",
            {"where": where, "error": repr(error), "traceback": "".join(traceback.format_exception(error))},
        )

    def _launch_all(self, state: RegionState, batch: BatchView, table: SlotTable) -> None:
        state.require_capacity(batch)
        state.cursors[Cursor.SCRUB_SLOTS].fill_(0)
        self._backend.check(state, batch, table)
        if state.reads:
            self._backend.read_check(state, batch, table)
        if state.sources:
            self._backend.fingerprint(state, batch, table)
        self._backend.record(state, batch, table)
        if state.sources:
            self._backend.scrub(state)
        none = torch.empty(0, dtype=torch.int64, device=batch.device)
        self._backend.verify(state, none)
        for writer in (-1, none.int()):
            self._backend.free(state, none, writer, 1)
            self._backend.alloc(state, none, writer, 1)

    def _own(self, region: str, slots: Tensor, writer: Owner, event: tuple[str, int]) -> None:
        state = self._states.get(region)
        if state is None or not self.enabled or not len(slots):
            return
        name, page_slots = event
        op = self._backend.free if name == "free" else self._backend.alloc

        def apply(tensors: list[Tensor]) -> None:
            op(
                state,
                tensors[0] if len(tensors) == 1 else torch.cat(tensors),
                writer() if callable(writer) else writer,
                page_slots,
            )

        key = None if callable(writer) else (region, writer, event)
        self._queue(_Change(apply, [slots], [], key=key))

    def _queue(self, change: _Change) -> None:
        if any(t.is_cuda for t in change.tensors):
            # They may be made on another stream than the forwards run on.
            ready = torch.cuda.Event()
            ready.record()
            change.ready.append(ready)
        last = self._changes[-1] if self._changes else None
        if last is not None and change.key is not None and last.key == change.key:
            last.tensors += change.tensors
            last.ready += change.ready
        else:
            self._changes.append(change)

    def _arrive(self, apply: Callable[[], None], *tensors: Tensor) -> None:
        """Slots get other content: now, or after the allocator's events that the host issued before and that wait for
        the next forward; applied to a slot later, those would take it back."""
        if self._changes and not _capturing(self._shared.counters):
            self._queue(_Change(lambda _: apply(), list(tensors), [], arrival=True))
        else:
            apply()

    def _call(self, hook: pluggy.HookCaller, batch: BatchView) -> None:
        # Most have no implementation, and pluggy takes microseconds to find that out.
        if hook.get_hookimpls():
            hook(canary=self, batch=batch)

    def _flush_changes(self) -> None:
        """Applies what waits on the current stream: after all forwards issued so far, before the next."""
        if not self._changes or _capturing(self._shared.counters):
            return
        changes, self._changes = self._changes, []
        for change in changes:
            for ready in change.ready:
                ready.wait()
            for tensor in change.tensors if change.ready else ():
                if tensor.is_cuda:
                    # Made on another stream, its memory must not be handed out there before this one has read it.
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
            change.apply(change.tensors)

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

    def _baseline(self, device: torch.device) -> float:
        """Fingerprints all slots; returns the speed in bytes a second."""
        if not self._scrubbed_bytes:
            return 0.0
        started = 0.0
        # The first round on a GPU compiles; its time says nothing of the scrub's.
        for _ in range(1 if device.type == "cpu" else 2):
            _synchronize(device)
            started = time.perf_counter()
            for state in self._states.values():
                self._backend.baseline(state)
        _synchronize(device)
        return self._scrubbed_bytes / max(time.perf_counter() - started, 1e-9)

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

    def _set_scrub(self) -> None:
        if self._pace.off:
            return
        for state in self._states.values():
            if not state.slot_bytes:
                continue
            share = state.pool_bytes / self._scrubbed_bytes
            state.set_scrub_slots(int(self._pace.step_bytes * share / state.slot_bytes))

    def _mark(self, region: str, slots: Tensor, new: State) -> None:
        state = self._states.get(region)
        if state is not None and self.enabled:
            self._arrive(partial(_mark_records, state, slots, new), slots)

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


def _row_counts(steps: Sequence[int], most: int) -> list[int]:
    """The largest batch of each step that is not beyond ``most`` rows."""
    below = [step for step in steps if step < most]
    return [*below, most] if steps and most > 0 else []


def _copy_records(state: RegionState, source: Tensor, destination: Tensor) -> None:
    twin.import_records(state, destination, twin.export_records(state, source))


def _forget_frees(state: RegionState) -> None:
    state.records[:, POSITION] &= ~int(State.FREED)


def _mark_records(state: RegionState, slots: Tensor, new: State, keep: int = 0) -> None:
    """``keep``: bits of the old state that stay."""
    if len(slots):
        _, slot, anything = twin.entries(state, slots.long())
        word = state.records[slot, POSITION]
        marked = word // STATES * STATES + (word & keep) + int(new)
        # The state first: a scrub in flight looks at it once more before it reports.
        state.records[slot, POSITION] = torch.where(anything, marked, word)
        if new is State.UNKNOWN:
            # What the bytes were is no longer known, so the next write can't be judged to have left them as they were.
            state.fingerprints[slot] = torch.where(anything, 0, state.fingerprints[slot])


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
