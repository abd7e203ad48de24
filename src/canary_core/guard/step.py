"""`Step`: owns one step of the engine, from the first look at a batch to the report of what was found."""

import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import pluggy

from canary_core.batch import BatchView, require_place, tokens_cut, view_or_none
from canary_core.errors import ViolationError
from canary_core.guard.listener import Listeners, StepListener
from canary_core.guard.overhead import Overhead
from canary_core.guard.pause import Pause
from canary_core.guard.recorder import Recorder
from canary_core.guard.reporting.findings import Reporter
from canary_core.guard.reporting.lookout import Lookout
from canary_core.guard.reporting.read_times import ReadTimes
from canary_core.guard.sampling import SampledTokens
from canary_core.guard.slots import SlotEvents
from canary_core.overlap import Overlap
from canary_core.records import Clock
from canary_core.runtime.streams import capturing
from canary_core.runtime.watchdog import Watchdog
from canary_core.runtime.workspace import Switch
from canary_core.watchers.late import Late
from canary_core.watchers.stores import StoreCheck
from canary_core.watchers.tables import TableCheck

Output = TypeVar("Output")

UNENDED_FORWARDS = 1024
"""Forwards without an `Step.end`, after which it counts as forgotten: nothing that they find is told."""


class Facade(Protocol):
    """What a step needs of its `Canary`, which plugins are told of."""

    sampled: SampledTokens

    def tell_stats(self) -> None:
        """Tells the counters, as a ``stats`` event."""


class Step:
    """One step of the engine after the other. This is the whole protocol:

    | when               | on which stream          | what                                                            |
    |--------------------|--------------------------|------------------------------------------------------------------|
    | before the forward | the forwards'            | it waits for what still runs beside ⁴; `begin` of listeners     |
    | view               | the forwards', or side ¹ | the view is made, `before` of listeners may amend it            |
    | `before`           | the forwards', or side ² | queued events take effect; every slot that will be read is      |
    |                    |                          | checked, and the bytes that are compared before a forward       |
    | the forward        | the forwards'            | the engine's own                                                |
    | after the forward  | the forwards'            | it waits for the check; `after` of listeners                    |
    | `after`            | the forwards', or side ³ | what was written is fingerprinted and recorded, and the next    |
    |                    |                          | stretch of the pool scrubbed                                    |
    | `end`              | host only                | starts a late read of the counters, reports what an earlier one |
    |                    |                          | brought                                                         |

    ¹ With `Overlap.ALL` the forward is issued first, and the side stream goes on from what the engine's stream had to
    do before it. ² From `Overlap.CHECK` on. ³ With `Overlap.ALL`; then the next `before`, and every event of
    `Canary.slots`, waits for it. ⁴ With `Overlap.NEXT` only where slots were given back since the last forward: those
    may be handed out and written again. Bytes that are compared before a forward, and plugins that hook forwards, keep
    all of it on the engine's stream.

    In a CUDA graph: `before` and `after` may be captured, together with the forward. Then no host code runs before a
    replay, so events take effect in `end`, which is called for each replay; nothing runs beside any more; every launch
    is always the same.

    `run` does it all around a function. Engines that call at two places use `before` and `after`, and `abandon` where a
    forward failed; `issues_first` and `beside` give them what `run` has from `Overlap.ALL`. Called in another order,
    Canary says so with a ``misuse`` event, or raises `MisuseError` in raise mode. In log mode nothing of this raises
    into the engine; in raise mode `end` raises the first finding.

    Methods stand in the order of the table. `Recorder` has the launches of `after`, `Listeners` calls what accompanies
    a forward, `Pause` lets forwards pass by.
    """

    def __init__(self, canary: Facade, switch: Switch, slots: SlotEvents, findings: Reporter) -> None:
        workspace, config = slots.workspace, slots.workspace.config
        self._canary = canary
        self._switch = switch
        self._workspace = workspace
        self._slots = slots
        self._audit = slots.audit
        self._findings = findings
        self._config = config
        self._hooks: pluggy.HookRelay = switch.hooks.hook
        self._states = workspace.states
        self._backend = workspace.backend
        self._reads = any(state.reads for state in workspace.states.values())
        self.tables = TableCheck(workspace, switch, config.table_interval)
        """Whether attention is given the slots that the engine keeps."""
        findings.table_names = self.tables.names
        self.stores = StoreCheck(workspace, switch)
        """Whether what layers store is there at the end of the forward."""
        self.overhead = Overhead(workspace.device)
        """What Canary itself costs."""
        self._recorder = Recorder(workspace, switch, self.overhead, self.tables, self.stores)
        self.scrub = self._recorder.scrub
        findings.alarm.probe = self.scrub.probe
        self.watchdog = Watchdog(config.silence_s if switch.enabled else 0.0, findings.never_called)
        self._pause = Pause(slots, canary.sampled, self.tables, self.watchdog, switch)
        self._passing = False
        self.forwards = 0
        """How many began."""
        self.unchecked = 0
        self.tokens_cut = 0
        """Forwards whose requests' own tokens were compared for the first positions only, see `tokens_cut`."""
        """How many could not be checked: they had no view."""
        self.ends = 0
        """How often `end` was called."""
        self._listeners = Listeners(switch)
        self._inside = False
        self._view: BatchView | None = None
        self.last_view: BatchView | None = None
        """Of the last forward that was checked."""
        self._overlap = Overlap.NONE
        self._reads_at = ReadTimes(config, workspace.device)
        self.late: list[Late] = []
        """Watchers that are read with the counters."""
        self.lookout: Lookout | None = None
        """Told now and then that forwards go on."""
        self._ended_forwards = 0

    @property
    def listeners(self) -> tuple[StepListener, ...]:
        """In the order in which they are called."""
        return self._listeners.all

    def add(self, listener: StepListener) -> None:
        """``listener`` comes after those that are there."""
        self._listeners.add(listener)

    @property
    def inside(self) -> bool:
        """Whether a forward of `run` is being issued."""
        return self._inside

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph has Canary's work in it."""
        return self._recorder.captured

    def run(
        self,
        forward: Callable[[], Output],
        view: Callable[[], BatchView | None],
        *,
        batch: Any = None,
        overlap: Overlap = Overlap.NONE,
        settle: Callable[[BatchView, Output], None] | None = None,
    ) -> Output:
        """Runs one forward, from `begin` to `end`, and gives its output.

        ``view`` is called once, when the time has come; None says that the forward can't be checked, and listeners
        `forget` it. ``settle`` gets view and output before anything is recorded. Within a ``forward`` another `run`
        only calls its own: what the engine issues as several forwards may be one to Canary.

        Raises what ``forward`` raises, and `ViolationError` in raise mode.
        """
        if self._inside:
            return forward()
        if self._switch.put_off is not None:
            self._switch.put_off()
        if not self._switch.enabled:
            self.close()
            return forward()
        pause = self._pause
        if (pause.on or pause.missed) and pause.passes():
            return self._unguarded(forward)
        if not self.overhead.due:
            return self._guarded(forward, view, batch, overlap, settle)
        with self.overhead:
            return self._guarded(self.overhead.leaving_out(forward), view, batch, overlap, settle)

    def _guarded(
        self,
        forward: Callable[[], Output],
        view: Callable[[], BatchView | None],
        batch: Any,
        overlap: Overlap,
        settle: Callable[[BatchView, Output], None] | None,
    ) -> Output:
        heard = bool(self._listeners.all)
        if heard:
            self._begin(batch, overlap)
        issued_first = self.issues_first(overlap)
        self._inside = True
        try:
            if issued_first:
                # The device has the forward before the host works for us.
                output = forward()
                with self._workspace.beside(True):
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
                with self._switch.guard("settle"):
                    settle(seen, output)
        except BaseException:
            self.abandon()
            raise
        if seen is not None:
            self.after()
        self.end()
        if not self._switch.enabled:
            self.close()
        return output

    def _unguarded(self, forward: Callable[[], Output]) -> Output:
        """The forward alone. What was found before is still told."""
        self._inside = True
        try:
            output = forward()
        finally:
            self._inside = False
        self.end()
        return output

    def _begin(self, batch: Any, overlap: Overlap) -> None:
        """For the listeners, where there are any."""
        with self._switch.guard("begin_forward"):
            if not (overlap.beside_next and self._may_go_on()):
                # A listener may write to the tensors of the view before.
                self._workspace.join(for_good=True)
        self._listeners.begin(batch)

    def issues_first(self, overlap: Overlap) -> bool:
        """For engines that call `before` and `after`: a forward is issued next, on the current stream. Gives whether it
        may be issued before the host works for Canary. If so, tell the events of slots, make the view and call `before`
        as soon as it was issued, all of it within `beside`; if not, now."""
        if self._switch.put_off is not None:
            self._switch.put_off()
        if not self._switch.enabled or self._pause.on or self._pause.missed:
            return False
        workspace = self._workspace
        try:
            issued_first = overlap.after_forward and self._may_issue_first()
            if not (issued_first and overlap.beside_next and self._may_go_on()):
                # A view may be made in the tensors of the one before.
                workspace.join(for_good=True)
                workspace.queue.joined()
            if issued_first and workspace.side is not None:
                workspace.side.mark()
        except Exception as error:
            self._switch.fail("issues_first", error)
            return False
        return issued_first

    def _may_issue_first(self) -> bool:
        """Whether a forward that allows it may be issued before the host works for Canary."""
        if self._workspace.side is None or self._recorder.captured or self._audit.due or self.stores.on:
            return False
        hooked = self._reads or self._hooks.canary_pre_forward.get_hookimpls()
        return not (hooked or capturing(self._workspace.device))

    def _may_go_on(self) -> bool:
        """Whether a forward that allows it need not wait for the record of the one before, which reads the bytes that
        this one has written, if it is issued first."""
        return not self._recorder.much and self._workspace.queue.frees_nothing

    def beside(self) -> AbstractContextManager[None]:
        """What is issued within comes after what the forwards' stream had to do at `issues_first`, not after the
        forward that was issued since. Only where that said so."""
        return self._workspace.beside(True)

    def _check(self, batch: Any, view: Callable[[], BatchView | None], overlap: Overlap) -> BatchView | None:
        seen: BatchView | None = None
        try:
            seen = view_or_none(view())
        except ViolationError:
            raise
        except Exception as error:
            self._switch.fail("batch", error)
        if self._listeners.all:
            seen = self._listeners.before(batch, seen)
        if seen is None:
            self._audit.begin(None)
            self.unchecked += 1
        else:
            self.before(seen, overlap)
        return seen

    def before(self, view: BatchView, overlap: Overlap = Overlap.NONE) -> None:
        """Checks every slot that the forward of ``view`` will read. May be captured in a graph."""
        if self._switch.put_off is not None:
            self._switch.put_off()
        if not self._switch.enabled:
            return
        pause = self._pause
        if (pause.on or pause.missed) and pause.passes():
            self._passing = True
            return
        measured = self.overhead.due
        if measured:
            self.overhead.enter()
        try:
            if self._view is not None:
                self._switch.misuse(
                    "step.before was called twice for one forward; call step.after when the forward was issued, or "
                    "step.abandon if it failed"
                )
                self._use_up()
            workspace, recorder, side = self._workspace, self._recorder, self._workspace.side
            # If so, `issues_first` has asked for all that could keep the check from running beside.
            issued_first = side is not None and side.inside
            if not issued_first:
                workspace.join(for_good=True)
                recorder.captured = recorder.captured or capturing(workspace.device)
            if not self.forwards:
                self.watchdog.feed()
            self.forwards += 1
            workspace.journal.step = self.forwards
            require_place(view, workspace.device, self._states.keys())
            self._view = self.last_view = view
            self.tokens_cut += tokens_cut(view)
            self._canary.sampled.begin()
            self._overlap = overlap
            compared = recorder.begin(view) if recorder.decides else ()
            for name in view.tables:
                self._states[name].require_capacity(view)
            if issued_first and not measured:
                self._issue_checks(view)
                return
            hooked = bool(self._hooks.canary_pre_forward.get_hookimpls())
            # Bytes are compared before the forward changes them, and plugins are called on the engine's stream.
            alone = compared or hooked or recorder.captured or self._audit.due or self.stores.on
            beside = overlap is not Overlap.NONE and not alone
            with workspace.beside(beside), self.overhead.device(recorder.captured):
                self._issue_checks(view, compared, hooked)
            self.stores.begin(view)
            self._audit.begin(view)
        except Exception as error:
            self._switch.fail("pre_forward", error)
        finally:
            if measured:
                self.overhead.leave()

    def _issue_checks(self, view: BatchView, compared: Collection[str] = (), hooked: bool = False) -> None:
        """All launches of `before`, on the current stream: the forwards', or the side stream."""
        workspace = self._workspace
        workspace.queue.settle()
        if hooked:
            self._hooks.canary_pre_forward(canary=self._canary, batch=view)
        for name, table in view.tables.items():
            state = self._states[name]
            self._backend.check(state, view, table)
            if workspace.proof.looks and not self._recorder.captured:
                workspace.proof.look(state, view, table)
            if name in compared and state.readable:
                self._backend.read_check(state, view, table)

    def require_place(self, view: BatchView) -> None:
        """Raises `AttachError` for a view that doesn't fit what is guarded here, see `canary_core.batch`."""
        require_place(view, self._workspace.device, self._states.keys())

    def stored(self, layer: int, halves: Collection[str] | None = None, region: str | None = None) -> None:
        """Between `before` and `after`: the store of ``layer`` was issued on the current stream, of all its sources or
        of those of ``halves``; in all regions that have the layer, or in ``region`` only, where others number theirs
        alike. With ``CANARY_STORE_CHECK`` what the new slots hold there is compared with what they hold at the end of
        the forward; else, and where no forward is checked, it does nothing. If a layer is stored in several parts, tell
        each of them. Nothing may write to these bytes from then on until `after`. Within the capture of a graph it does
        nothing."""
        self.stores.stored(layer, halves, region)

    def after(self, view: BatchView | None = None) -> None:
        """Records the slots that the forward has written, then scrubs the next stretch of every region. May be captured
        in a graph. ``view``: where more is known after the forward (tokens, writers), what says it; None: what `before`
        was given. Written slots are those that `before` saw in either."""
        if not self._switch.enabled:
            return
        if self._passing:
            self._passing = False
            return
        measured = self.overhead.due
        if measured:
            self.overhead.enter()
        try:
            given, self._view = self._view, None
            if given is None:
                self._switch.misuse(
                    "step.after was called without step.before, so nothing is recorded; call step.before with the view "
                    "of the forward first"
                )
                return
            if self._audit.open:
                self._audit.end()
            recorded = given if view is None else view
            self._record(recorded)
            self._canary.sampled.recorded(recorded)
        except Exception as error:
            self._switch.fail("post_forward", error)
        finally:
            if measured:
                self.overhead.leave()

    def _record(self, view: BatchView) -> None:
        workspace, hooks = self._workspace, self._hooks
        hooked = bool(hooks.canary_post_forward.get_hookimpls() or hooks.canary_recorded.get_hookimpls())
        beside = self._overlap.after_forward and not (hooked or self._recorder.captured)
        # The check is done before the engine does anything more: it may write to what that reads.
        if workspace.side is not None:
            workspace.side.join(for_good=not beside, live=beside)
        if hooked:
            hooks.canary_post_forward(canary=self._canary, batch=view)
        # One that is measured, or audited, is issued at once.
        at_once = self.overhead.due or self._audit.due or self.stores.on
        self._recorder.record(view, beside, late=self._overlap.beside_next and not at_once)
        if hooked:
            hooks.canary_recorded(canary=self._canary, batch=view)
        if self.forwards - self._ended_forwards == UNENDED_FORWARDS and not self.captured:
            self._switch.misuse(
                f"{UNENDED_FORWARDS} forwards began and step.end was not called, so nothing that they find is told; "
                "call it after each step"
            )

    def _forget(self, batch: Any) -> None:
        self._listeners.forget(batch)
        self._canary.sampled.forget()
        # With no check before the forward, nothing else lets queued events take effect.
        self._slots.settle()
        self._audit.end()

    def abandon(self) -> None:
        """The forward that was checked last has failed: nothing is recorded of it. Its number is used up, so that the
        slots that it was going to write are the next forward's."""
        if self._view is not None and self._switch.enabled:
            with self._switch.guard("abandon"):
                self._use_up()
        self._view = None
        self._passing = False
        self.stores.end(compared=False)
        if self._workspace.side is not None:
            self._workspace.side.unmark()
        self._audit.abandon()

    def _use_up(self) -> None:
        self._workspace.join()
        clock = self._workspace.shared.clock
        clock[Clock.STEP : Clock.STEP + 1].copy_(clock[Clock.NEXT : Clock.NEXT + 1])

    def join(self) -> None:
        """The current stream waits for what of Canary's runs beside the forwards: before anything but a forward writes
        to tensors of the last view (`run` and `before` do it by themselves)."""
        if self._switch.enabled:
            with self._switch.guard("join"):
                self._workspace.join()

    def follow_check(self) -> None:
        """After `after`: what the current stream does from now on comes after that forward's check. For a stream other
        than the forwards', on which an engine writes to its tables while a forward runs and the check beside it may
        still have to read them."""
        if self._switch.enabled and self._workspace.side is not None:
            with self._switch.guard("follow_check"):
                self._workspace.side.follow()
                self.tables.follow()

    def end(self) -> None:
        """Host only, never captured: starts a late read of the counters and reports what the last one brought. On the
        stream of the forwards, where these are replayed from a graph that holds `before` and `after`.

        In raise mode it raises `ViolationError` with the first finding, and `CanaryError` where the alarm is dead.
        """
        if not self._switch.enabled or (self._pause.missed and not self._reads_at.due_idle()):
            return
        measured = self.overhead.due
        if measured:
            self.overhead.enter()
        try:
            workspace, captured = self._workspace, self._recorder.captured
            if captured:
                # No host code of ours runs before a replay.
                workspace.queue.settle()
            self.ends += 1
            # Not the forwards: replays are not counted on the host, and an engine that idles should hear of the last.
            idle = self.ends > 1 and self.forwards == self._ended_forwards and not captured
            self._ended_forwards = self.forwards
            if workspace.side is not None:
                workspace.side.unmark()
            now = self.scrub.pace.pause() if idle else self.scrub.pace.step()
            if idle or self._reads_at.due(self.ends, now):
                # What runs beside the engine's stream is read, and told how far to go, where it runs.
                moment = time.monotonic()
                with workspace.beside(workspace.side is not None and workspace.side.open):
                    snapshot = self._findings.collect()
                    self.scrub.adjust(captured)
                    self._findings.alarm.step(moment, not self.scrub.pace.off, captured)
                    for late in self.late:
                        late.send()
                if self.lookout is not None:
                    self.lookout.look_back(moment)
                self.overhead.read()
                self._audit.look(now_and_then=True)
                if snapshot is not None:
                    self._findings.open(snapshot, self.forwards)
                    self.scrub.observe(snapshot.counters)
                for late in self.late:
                    late.read()
            if idle:
                self._findings.settle(at_last=True)
            interval = self._config.stats_interval
            if interval and not idle and self.ends % interval == 0:
                self._canary.tell_stats()
            if not idle:
                self.overhead.step()
                self.tables.ended()
        except Exception as error:
            self._switch.fail("end_step", error)
        finally:
            if measured:
                self.overhead.leave()
        if self._audit.problems:
            self._audit.judge()
        if self._switch.raises:
            self._findings.raise_first()
            self._findings.alarm.require()

    def flushed(self) -> None:
        """The engine has emptied its caches: no slot of any region holds anything any more. It may give the memory back
        and take other memory, whose null slots hold anything."""
        if not self._switch.enabled:
            return
        for name in self._states:
            self._slots.clear(name, None)
        with self._switch.guard("flushed"):
            self._workspace.join()
            for state in self._states.values():
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

    def close(self) -> None:
        """Closes the listeners: Canary is off. Again: does nothing."""
        self._view = self.last_view = None
        self._listeners.close()

    def pause(self) -> None:
        """From the next forward on nothing is checked, recorded or scrubbed until `resume`; events of slots are
        followed all the same. From any thread. Raises `CanaryError` where Canary is off, or its work is part of a CUDA
        graph, which always does the same."""
        self._pause.begin(self.forwards, self.captured)

    def resume(self) -> None:
        """Undoes `pause`. What the forwards in between have written was not recorded, so what slots hold by then is not
        judged until it is written again. From any thread."""
        self._pause.end()

    @property
    def paused(self) -> bool:
        """Whether forwards run without Canary until `resume`."""
        return self._pause.on

    @property
    def passed_by(self) -> int:
        """How many forwards ran while Canary was paused."""
        return self._pause.passed_by
