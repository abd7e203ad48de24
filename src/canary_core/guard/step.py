"""`Step`: owns one step of the engine, from the first look at a batch to the report of findings."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from canary_core.batch import BatchView, require_place, view_or_none
from canary_core.errors import ViolationError
from canary_core.events import Event
from canary_core.guard.forward import Facade, Forward, Measured, PassedBy
from canary_core.guard.listener import Listeners, StepListener
from canary_core.guard.overhead import Overhead
from canary_core.guard.recorder import Recorder
from canary_core.guard.reporting.findings import Reporter
from canary_core.guard.reporting.read_times import ReadTimes
from canary_core.guard.reporting.reader import Reader
from canary_core.guard.slots import SlotEvents
from canary_core.overlap import Overlap
from canary_core.records import Clock
from canary_core.runtime.streams import capturing
from canary_core.runtime.watchdog import Watchdog
from canary_core.runtime.workspace import NOTHING, Switch
from canary_core.watchers.stores import StoreCheck
from canary_core.watchers.tables import TableCheck

Output = TypeVar("Output")

PASSED_BY = PassedBy()


class Step:
    """One step of the engine after the other. The whole protocol:

    | when               | on which stream          | event                                                           |
    |--------------------|--------------------------|------------------------------------------------------------------|
    | before the forward | the forwards'            | a wait for work still running beside ⁴; `begin` of listeners    |
    | view               | the forwards', or side ¹ | the view is made, `before` of listeners may amend it            |
    | `before`           | the forwards', or side ² | queued events take effect; every slot to be read is checked,    |
    |                    |                          | and bytes due for comparison before a forward are compared      |
    | the forward        | the forwards'            | the engine's own                                                |
    | after the forward  | the forwards'            | a wait for the check; `after` of listeners                      |
    | `after`            | the forwards', or side ³ | writes are fingerprinted and recorded, and the next stretch of  |
    |                    |                          | the pool is scrubbed                                            |
    | `end`              | host only                | starts a late read of the counters, reports the findings of an  |
    |                    |                          | earlier one                                                     |

    ¹ With `Overlap.ALL` the forward is issued first, and the side stream goes on from the engine's stream's earlier
    work. ² From `Overlap.CHECK` on. ³ With `Overlap.ALL`; then the next `before`, and every event of `Canary.slots`,
    waits for the record. ⁴ With `Overlap.NEXT` only where slots were given back since the last forward: they may be
    handed out and written again. Comparisons of bytes before a forward, and plugins that hook forwards, keep all of the
    work on the engine's stream.

    In a CUDA graph: `before` and `after` may be captured, together with the forward. Then no host code runs before a
    replay, so events take effect in `end`, called for each replay; nothing runs beside any more; every launch is always
    the same.

    `run` does all of this around a function. Engines that call at two places use `before` and `after`, and `abandon`
    after a failed forward; `issues_first` and `beside` give them the gain of `run` from `Overlap.ALL`. A call in
    another order is reported by a ``misuse`` event, or raises `MisuseError` in raise mode. In log mode nothing here
    raises into the engine; in raise mode `end` raises the first finding.

    Methods stand in the order of the table. `Recorder` has the launches of `after`, `Listeners` calls a forward's
    companions, `Pause` lets forwards pass by.
    """

    def __init__(self, canary: Facade, switch: Switch, slots: SlotEvents, findings: Reporter) -> None:
        workspace, config = slots.workspace, slots.workspace.config
        self._canary = canary
        self._switch = switch
        self._workspace = workspace
        self._slots = slots
        self._audit = slots.audit
        self._findings = findings
        self.tables = TableCheck(workspace, switch, config.table_interval)
        """Whether attention is given the slots in the engine's own tables."""
        findings.table_names = self.tables.names
        self.stores = StoreCheck(workspace, switch)
        """Whether bytes stored by layers are the same at the end of the forward."""
        self.overhead = Overhead(workspace.device)
        """Canary's own cost."""
        self._recorder = Recorder(workspace, switch, self.overhead, self.tables, self.stores)
        self.scrub = self._recorder.scrub
        findings.alarm.probe = self.scrub.probe
        self.weights = self._recorder.weights
        """Whether the model's parameters keep their bytes; None without ``CANARY_WEIGHTS``."""
        self.ranks = self._recorder.ranks
        """Whether ranks that must compute the same do; None without ``CANARY_RANKS_INTERVAL``."""
        self.watchdog = Watchdog(config.silence_s if switch.enabled else 0.0, findings.never_called)
        from canary_core.guard.pause import Pause

        self._pause = Pause(slots, canary.sampled, self.tables, self.watchdog, switch)
        self._forward = Forward(canary, switch, slots, self._recorder, self.watchdog)
        self._measured = Measured(self._forward, self.overhead)
        self._current: Forward | Measured | PassedBy = self._forward
        switch.rest = self._rest
        self._inside = False
        self.unchecked = 0
        """Number of forwards without a view, which could not be checked."""
        self.ends = 0
        """How often `end` was called."""
        self._listeners = Listeners(switch)
        self._reads_at = ReadTimes(config, workspace.device)
        self.reader = Reader(workspace, switch, findings, self._recorder, slots.audit)
        """Reads the device's counters and findings."""

    @property
    def listeners(self) -> tuple[StepListener, ...]:
        """In the order of calls."""
        return self._listeners.all

    def add(self, listener: StepListener) -> None:
        """Adds ``listener`` after the present ones."""
        self._listeners.add(listener)

    @property
    def inside(self) -> bool:
        """Whether a forward of `run` is being issued."""
        return self._inside

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph contains Canary's work."""
        return self._recorder.captured

    @property
    def forwards(self) -> int:
        """How many began."""
        return self._forward.number

    @property
    def tokens_cut(self) -> int:
        """Forwards whose requests' own tokens were compared for the first positions only, see `batch.tokens_cut`."""
        return self._forward.tokens_cut

    @property
    def last_view(self) -> BatchView | None:
        """View of the last checked forward."""
        return self._forward.last_view

    def run(
        self,
        forward: Callable[[], Output],
        view: Callable[[], BatchView | None],
        *,
        batch: Any = None,
        overlap: Overlap = Overlap.NONE,
        settle: Callable[[BatchView, Output], None] | None = None,
    ) -> Output:
        """Runs one forward, from `begin` to `end`, and returns its output.

        ``view`` is called once, at the right time; None: the forward can't be checked, and listeners `forget` it.
        ``settle`` gets view and output before anything is recorded. Within a ``forward``, another `run` only calls its
        own: several forwards of the engine may be one to Canary.

        Raises any exception of ``forward``, and `ViolationError` in raise mode.
        """
        if self._inside:
            return forward()
        coming = self._coming()
        if coming is PASSED_BY:
            return self._passing_by(forward)
        self._current = coming
        if coming is self._forward:
            return self._guarded(forward, view, batch, overlap, settle)
        with self.overhead:
            return self._guarded(self.overhead.leaving_out(forward), view, batch, overlap, settle)

    def _coming(self) -> Forward | Measured | PassedBy:
        """The next forward: under guard, or passed by. A pending warm-up runs first."""
        if self._switch.put_off is not None:
            self._switch.put_off()
        pause = self._pause
        if not self._switch.enabled or ((pause.on or pause.missed) and pause.passes()):
            return PASSED_BY
        return self._measured if self.overhead.due else self._forward

    def _guarded(
        self,
        forward: Callable[[], Output],
        view: Callable[[], BatchView | None],
        batch: Any,
        overlap: Overlap,
        settle: Callable[[BatchView, Output], None] | None,
    ) -> Output:
        current, heard = self._current, bool(self._listeners.all)
        if heard:
            self._begin(batch, overlap)
        # A listener that fails switches Canary off.
        issued_first = self._switch.enabled and current.issues_first(overlap)
        self._inside = True
        try:
            if issued_first:
                # The device has the forward before the host works for us.
                output = forward()
                with self.beside():
                    seen = self._check(batch, view, overlap)
            else:
                seen = self._check(batch, view, overlap)
                output = forward()
        except BaseException:
            self.abandon()
            raise
        finally:
            self._inside = False
        try:
            if heard:
                self._listeners.after(batch, seen)
            if seen is None:
                self._forget(batch)
            elif settle is not None:
                with self._switch.guard("step.run(settle=)"):
                    settle(seen, output)
        except BaseException:
            self.abandon()
            raise
        if seen is not None:
            current.record()
        self.end()
        if not self._switch.enabled:
            self.close()
        return output

    def _passing_by(self, forward: Callable[[], Output]) -> Output:
        """The forward alone. Findings from before a pause are still reported."""
        if not self._switch.enabled:
            self.close()
            return forward()
        self._inside = True
        try:
            output = forward()
        finally:
            self._inside = False
        self.end()
        return output

    def _begin(self, batch: Any, overlap: Overlap) -> None:
        """For the listeners, where there are any."""
        with self._switch.guard("step.run"):
            if not (overlap.beside_next and self._forward.may_go_on()):
                # A listener may write to the tensors of the view before.
                self._workspace.join(for_good=True)
        self._listeners.begin(batch)

    def _check(self, batch: Any, view: Callable[[], BatchView | None], overlap: Overlap) -> BatchView | None:
        seen: BatchView | None = None
        try:
            seen = view_or_none(view())
        except ViolationError:
            raise
        except Exception as error:
            self._switch.fail("step.run(view=)", error)
        if self._listeners.all:
            seen = self._listeners.before(batch, seen)
        if seen is None:
            self._audit.begin(None)
            self.unchecked += 1
        elif self._switch.enabled:
            self._current.check(seen, overlap)
        return seen

    def _forget(self, batch: Any) -> None:
        self._listeners.forget(batch)
        self._canary.sampled.forget()
        # With no check before the forward, nothing else lets queued events take effect.
        self._slots.settle()
        self._audit.end()

    def issues_first(self, overlap: Overlap) -> bool:
        """For engines that call `before` and `after`: a forward is issued next, on the current stream. Returns whether
        to issue it before the host works for Canary. If so, report the events of slots, make the view and call `before`
        right after issuing the forward, all within `beside`; if not, now."""
        pause = self._pause
        # Whether one passes by is decided, and counted, by `before`.
        return not (pause.on or pause.missed) and self._coming().issues_first(overlap)

    def beside(self) -> AbstractContextManager[None]:
        """Context: work issued within runs after the forwards' stream's work as of `issues_first`, not after the
        forward issued since. Only after `issues_first` returned True."""
        return self._workspace.side or NOTHING

    def before(self, view: BatchView, overlap: Overlap = Overlap.NONE) -> None:
        """Checks every slot to be read by the forward of ``view``. May be captured in a graph."""
        self._current = self._coming()
        self._current.check(view, overlap)

    def require_place(self, view: BatchView) -> None:
        """Raises `AttachError` for a view that doesn't fit the guarded pool, see `canary_core.batch`."""
        require_place(view, self._workspace.device, self._workspace.states.keys())

    def stored(self, layer: int, halves: Collection[str] | None = None, region: str | None = None) -> None:
        """Between `before` and `after`: the store of ``layer`` was issued on the current stream, of all its sources or
        of those of ``halves``; in all regions with the layer, or in ``region`` only, where others have the same layer
        numbers. With ``CANARY_STORE_CHECK`` the layer's bytes in the new slots are compared with those at the end of
        the forward; without, and for an unchecked forward, nothing is done. If a layer is stored in several parts,
        report each. Nothing may write to these bytes from then on until `after`. Does nothing within the capture of a
        graph."""
        self.stores.stored(layer, halves, region)

    def after(self, view: BatchView | None = None) -> None:
        """Records the slots written by the forward, then scrubs the next stretch of every region. May be captured in a
        graph. ``view``: a view with more facts known after the forward (tokens, writers); None: the view of `before`.
        Either way the written slots are those known to `before`."""
        current, self._current = self._current, self._forward
        current.record(view)

    def abandon(self) -> None:
        """The last checked forward has failed: nothing is recorded. The step number is used up, so that the slots it
        was going to write belong to the next forward."""
        self._forward.abandon()
        self._current = self._forward

    def _rest(self) -> float | None:
        """See `Switch.rest`."""
        if self._recorder.captured or capturing(self._workspace.device):
            return None
        self._forward.give_up()
        return self._pause.rest()

    def join(self) -> None:
        """The current stream waits for Canary's work beside the forwards: before anything but a forward writes to
        tensors of the last view (`run` and `before` wait by themselves)."""
        if self._switch.enabled:
            with self._switch.guard("step.join"):
                self._workspace.join()

    def follow_check(self) -> None:
        """After `after`: later work of the current stream runs after the forward's check. For a stream other than the
        forwards', on which an engine writes to its tables while a forward runs and the check beside may still have to
        read them."""
        if self._switch.enabled and self._workspace.side is not None:
            with self._switch.guard("step.follow_check"):
                self._workspace.side.follow()
                self.tables.follow()

    def end(self) -> None:
        """Starts a late read of the counters and reports the findings of the last one. Host only, never captured. On
        the stream of the forwards, where these are replayed from a graph that contains `before` and `after`.

        In raise mode raises `ViolationError` with the first finding, and `CanaryError` if the alarm is dead.
        """
        if not self._switch.enabled or (self._pause.missed and not self._reads_at.due_idle()):
            return
        if self.overhead.due:
            with self.overhead:
                self._end()
        else:
            self._end()
        if self._audit.problems:
            self._audit.judge()
        if self._switch.raises:
            self._findings.raise_first()
            self._findings.alarm.require()

    def _end(self) -> None:
        try:
            workspace, forward, captured = self._workspace, self._forward, self._recorder.captured
            if captured:
                # No host code of ours runs before a replay.
                workspace.queue.settle()
            self.ends += 1
            # Not the forwards: replays are not counted on the host, and an engine that idles should hear of the last.
            idle = self.ends > 1 and not forward.unended and not captured
            forward.unended = 0
            if workspace.side is not None:
                workspace.side.unmark()
            if idle:
                self.scrub.pace.pause()
                self.reader.read(forward.number)
                self._findings.settle(at_last=True)
                return
            due = self._reads_at.due(self.ends, self.scrub.pace.step(), self.reader.judged)
            self.reader.end(forward.number, due)
            interval = self._workspace.config.stats_interval
            if interval and self.ends % interval == 0:
                self._canary.tell_stats()
            self.overhead.step()
            self._recorder.ended(forward.number)
        except Exception as error:
            self._switch.fail("step.end", error)

    def flushed(self) -> None:
        """The engine has emptied its caches: no slot of any region holds anything. The engine may free the memory and
        take other memory, with anything in its null slots."""
        if not self._switch.enabled:
            return
        for name in self._workspace.states:
            self._slots.clear(name, None)
        with self._switch.guard("step.flushed"):
            self._workspace.join()
            for state in self._workspace.states.values():
                state.forget_nulls()
        self._listeners.flushed()

    def idle(self) -> None:
        """The engine has nothing to run, and nothing is in flight: now and then reports what the last forwards left
        behind. Raises `ViolationError` in raise mode."""
        if not self._switch.enabled:
            return
        self._listeners.idle()
        if self._reads_at.due_idle():
            # With nothing in flight this stream does for what would wait for the next forward.
            self._slots.settle()
            self.end()

    def weights_changed(self, how: str, since: int | None = None, lora: str | None = None) -> None:
        """The engine computes with other weights from the next forward on, or with another content of the adapter
        ``lora``, named as for `Writers.identify`. A request that begins later and hits a prefix from before is a
        `prefix` finding; what running requests go on with is the engine's policy. Tells ``weights_changed``, but in an
        engine that learns ever more rarely. Between forwards, never captured.

        ``how``: what changed the weights, for findings: the engine's function. ``since``: a forward
        known to have run before the change, by `Canary.forwards`; None for all that are recorded so far, for which the
        host waits for the device."""
        if not self._switch.enabled:
            return
        with self._switch.guard("step.weights_changed"):
            if self.weights is not None and lora is None:
                self.weights.changed()
            if since is None:
                self._workspace.join()
                since = int(self._workspace.shared.clock[Clock.STEP])
            number = self._findings.writers.identities.change_weights(how, since, lora)
            if number & (number - 1) == 0:
                self._switch.tell(Event("weights_changed", "info", {"how": how, "changes": number, "since": since}))

    def close(self) -> None:
        """Closes the listeners: Canary is off. Again: does nothing."""
        self._forward.close()
        self._listeners.close()

    def pause(self) -> None:
        """Stops checks, records and scrubs from the next forward on, until `resume`; events of slots are still
        followed. From any thread. Raises `CanaryError` where Canary is off, or is part of a CUDA graph, whose work
        can't change."""
        self._pause.begin(self._forward.number, self._recorder.captured)

    def resume(self) -> None:
        """Undoes `pause`. Writes of the forwards in between were not recorded, so present slots are not judged until
        rewritten. From any thread."""
        self._pause.end()

    @property
    def paused(self) -> bool:
        """Whether forwards run without Canary until `resume`."""
        return self._pause.on

    @property
    def passed_by(self) -> int:
        """How many forwards ran while Canary was paused."""
        return self._pause.passed_by
