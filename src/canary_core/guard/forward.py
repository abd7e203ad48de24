"""`Forward`: one forward of the engine under guard, from its check to its record; `PassedBy`: an unguarded one."""

from typing import Protocol

from canary_core.batch import BatchView, require_place, tokens_cut
from canary_core.guard.overhead import Overhead
from canary_core.guard.recorder import Recorder
from canary_core.guard.sampling import SampledTokens
from canary_core.guard.slots import SlotEvents
from canary_core.overlap import Overlap
from canary_core.records import Clock
from canary_core.runtime.streams import capturing
from canary_core.runtime.watchdog import Watchdog
from canary_core.runtime.workspace import Switch

UNENDED_FORWARDS = 1024
"""Forwards without an `Step.end`, after which the call counts as forgotten: their findings are not reported."""


class Facade(Protocol):
    """The part of `Canary` used by a step and shown to plugins."""

    sampled: SampledTokens

    def tell_stats(self) -> None:
        """Tells the counters, as a ``stats`` event."""


class PassedBy:
    """A forward of an engine whose Canary is off or paused: nothing is done."""

    def issues_first(self, overlap: Overlap) -> bool:
        """Returns False: Canary issues nothing for such a forward."""
        return False

    def check(self, view: BatchView, overlap: Overlap) -> None:
        """Does nothing."""

    def record(self, view: BatchView | None = None) -> None:
        """Does nothing."""


class Forward:
    """A forward under guard. `issues_first` decides whether to issue the forward before the host works for Canary;
    `check` decides where the check runs and which bytes are compared before; `record` decides where the record runs,
    and when.

    One object for all forwards of a Canary, one after the other: each `check` begins the next. `check` and `record` may
    be captured in a CUDA graph, whose replays repeat the decisions made then. Exceptions go to `Switch.fail`.
    """

    def __init__(
        self, canary: Facade, switch: Switch, slots: SlotEvents, recorder: Recorder, watchdog: Watchdog
    ) -> None:
        workspace = slots.workspace
        self._canary = canary
        self._sampled = canary.sampled
        if recorder.ranks is not None:
            self._sampled.heard = recorder.ranks.sampled
        self._switch = switch
        self._workspace = workspace
        self._audit = slots.audit
        self._recorder = recorder
        self._overhead = recorder.overhead
        self._stores = recorder.stores
        self._watchdog = watchdog
        self._hooks = switch.hooks.hook
        self._states = workspace.states
        self._backend = workspace.backend
        self._reads = any(state.reads for state in workspace.states.values())
        self.number = 0
        """How many forwards began."""
        self.unended = 0
        """Number of forwards since the last call of `Step.end`."""
        self.tokens_cut = 0
        """Number of forwards whose requests' own tokens were compared for the first positions only, see
        `batch.tokens_cut`."""
        self.view: BatchView | None = None
        """Of the forward under way: checked, and neither recorded nor abandoned."""
        self.given_up = False
        """Whether Canary had no memory for the forward under way, so that its end finds no view."""
        self.last_view: BatchView | None = None
        """View of the last checked forward."""
        self._overlap = Overlap.NONE
        self._compared: list[str] = []

    def issues_first(self, overlap: Overlap) -> bool:
        """See `Step.issues_first`."""
        workspace = self._workspace
        try:
            issued_first = overlap.after_forward and self._may_issue_first()
            if not (issued_first and overlap.beside_next and self.may_go_on()):
                # A view may be made in the tensors of the one before.
                workspace.join(for_good=True)
                workspace.queue.joined()
            if issued_first and workspace.side is not None:
                workspace.side.mark()
        except Exception as error:
            self._switch.fail("step.issues_first", error)
            return False
        return issued_first

    def _may_issue_first(self) -> bool:
        """Whether a forward that allows it may be issued before the host works for Canary."""
        if self._workspace.side is None or self._recorder.captured or self._audit.due or self._stores.on:
            return False
        hooked = self._reads or self._hooks.canary_pre_forward.get_hookimpls()
        return not (hooked or capturing(self._workspace.device))

    def may_go_on(self) -> bool:
        """Whether a forward that allows it need not wait for the previous record, which reads bytes written by the
        previous forward, if issued first."""
        return not self._recorder.much and self._workspace.queue.frees_nothing

    def check(self, view: BatchView, overlap: Overlap) -> None:
        """See `Step.before`."""
        try:
            if self.view is not None:
                self._switch.misuse(
                    "step.before was called twice for one forward; call step.after when the forward was issued, or "
                    "step.abandon if it failed"
                )
                self._use_up()
            workspace, recorder, side = self._workspace, self._recorder, self._workspace.side
            # If so, `issues_first` has asked for all that could keep the check from running beside.
            issued_first = side is not None and side.inside
            if not issued_first:
                self._wait()
            if not self.number:
                self._watchdog.feed()
            self.number += 1
            self.unended += 1
            workspace.journal.step = self.number
            require_place(view, workspace.device, self._states.keys())
            self.view, self.last_view, self.given_up = view, view, False
            self.tokens_cut += tokens_cut(view)
            self._sampled.begin(view)
            if recorder.ranks is not None:
                recorder.ranks.begin(view, self.number)
            self._overlap = overlap
            self._compared = recorder.begin(view) if recorder.decides else []
            for name in view.tables:
                self._states[name].require_capacity(view)
            if issued_first and not self._overhead.due:
                self._issue_checks(view, hooked=False)
            else:
                self._check_in_place(view)
        except Exception as error:
            self._switch.fail("step.before", error)

    def _wait(self) -> None:
        """Waits for work beside the forwards; a graph may be captured."""
        self._workspace.join(for_good=True)
        self._recorder.captured = self._recorder.captured or capturing(self._workspace.device)

    def _check_in_place(self, view: BatchView) -> None:
        """For a forward not issued first, or under measurement: decides where the check runs, and issues it."""
        captured = self._recorder.captured
        hooked = bool(self._hooks.canary_pre_forward.get_hookimpls())
        # Bytes are compared before the forward changes them, and plugins are called on the engine's stream.
        alone = self._compared or hooked or captured or self._audit.due or self._stores.on
        beside = self._overlap is not Overlap.NONE and not alone
        if not (beside or self._overhead.due):
            self._issue_checks(view, hooked)
        else:
            with self._workspace.beside(beside), self._overhead.device(captured):
                self._issue_checks(view, hooked)
        if self._stores.on:
            self._stores.begin(view)
        self._audit.begin(view)

    def _issue_checks(self, view: BatchView, hooked: bool) -> None:
        """All launches of the check, on the current stream: the forwards', or the side stream. ``hooked``: plugins are
        called."""
        workspace = self._workspace
        workspace.queue.settle()
        if hooked:
            self._hooks.canary_pre_forward(canary=self._canary, batch=view)
        for name, table in view.tables.items():
            state = self._states[name]
            self._backend.check(state, view, table)
            if workspace.proof.looks and not self._recorder.captured:
                workspace.proof.look(state, view, table)
            if name in self._compared and state.readable:
                self._backend.read_check(state, view, table)

    def record(self, view: BatchView | None = None) -> None:
        """See `Step.after`."""
        if not self._switch.enabled:
            return
        try:
            given, self.view = self.view, None
            if given is None and self.given_up:
                return
            if given is None:
                self._switch.misuse(
                    "step.after was called without step.before, so nothing is recorded; call step.before with the view "
                    "of the forward first"
                )
                return
            if self._audit.open:
                self._audit.end()
            recorded = given if view is None else view
            self.issue_record(recorded)
            if self.unended == UNENDED_FORWARDS and not self._recorder.captured:
                self._switch.misuse(
                    f"{UNENDED_FORWARDS} forwards began and step.end was not called, so nothing that they find is "
                    "told; call it after each step"
                )
            self._sampled.recorded(recorded)
        except Exception as error:
            self._switch.fail("step.after", error)

    def issue_record(self, view: BatchView) -> None:
        """Issues all launches of the record, or none yet: a record that may run beside the next forward comes later."""
        workspace, hooks, overlap = self._workspace, self._hooks, self._overlap
        hooked = bool(hooks.canary_post_forward.get_hookimpls() or hooks.canary_recorded.get_hookimpls())
        beside = overlap.after_forward and not (hooked or self._recorder.captured)
        # The check is done before the engine does anything more: it may write to what that reads.
        if workspace.side is not None:
            workspace.side.join(for_good=not beside, live=beside)
        if hooked:
            hooks.canary_post_forward(canary=self._canary, batch=view)
        # One that is measured, or audited, is issued at once.
        at_once = self._overhead.due or self._audit.due or self._stores.on
        self._recorder.record(view, beside, late=overlap.beside_next and not at_once)
        if hooked:
            hooks.canary_recorded(canary=self._canary, batch=view)

    def abandon(self) -> None:
        """See `Step.abandon`."""
        if self.view is not None and self._switch.enabled:
            with self._switch.guard("step.abandon"):
                self._use_up()
        self.view = None
        self._stores.end(compared=False)
        if self._workspace.side is not None:
            self._workspace.side.unmark()
        self._audit.abandon()

    def give_up(self) -> None:
        """There is no memory for the forward under way, if any: nothing of the forward is recorded, wherever its work
        has stopped."""
        self.abandon()
        self._use_up()
        self.given_up = True

    def _use_up(self) -> None:
        """The number of the forward under way is no other's."""
        self._workspace.join()
        clock = self._workspace.shared.clock
        clock[Clock.STEP : Clock.STEP + 1].copy_(clock[Clock.NEXT : Clock.NEXT + 1])

    def close(self) -> None:
        """Canary is off: no view is kept."""
        self._recorder.close()
        self.view = self.last_view = None


class Measured:
    """A forward whose host time in `check` and `record` is measured by ``overhead``."""

    def __init__(self, forward: Forward, overhead: Overhead) -> None:
        self._forward = forward
        self._overhead = overhead

    def issues_first(self, overlap: Overlap) -> bool:
        """See `Forward.issues_first`."""
        return self._forward.issues_first(overlap)

    def check(self, view: BatchView, overlap: Overlap) -> None:
        """See `Forward.check`."""
        with self._overhead:
            self._forward.check(view, overlap)

    def record(self, view: BatchView | None = None) -> None:
        """See `Forward.record`."""
        with self._overhead:
            self._forward.record(view)
