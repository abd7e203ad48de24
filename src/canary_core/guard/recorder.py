"""`Recorder`: launches after a forward: its fingerprints, its records, and the next stretch of the scrub."""

from functools import partial
from typing import TYPE_CHECKING

from canary_core.batch import BatchView, SlotTable
from canary_core.guard.fingerprint_schedule import FingerprintSchedule
from canary_core.guard.overhead import Overhead
from canary_core.guard.scrub import Pace, Scrub
from canary_core.ops.state import RegionState
from canary_core.runtime.workspace import Switch, Workspace
from canary_core.watchers.stores import StoreCheck
from canary_core.watchers.tables import TableCheck

if TYPE_CHECKING:
    from canary_core.watchers.ranks.watch import RankWatch
    from canary_core.watchers.weights import WeightWatch

MOST_LATE_BYTES = 64 << 20
"""Most bytes written by a forward whose record may run beside the next one: a short read of memory hides there. A
longer one takes processors from the forward for longer than its own share."""


class Recorder:
    """Issues the record of one forward after the other: right after the forward, or later, beside the next one.

    For each region: the forward's writes are fingerprinted, compared with the layers' stores (`StoreCheck`), and
    recorded. Then comes the scrub, unless a comparison of tables (`TableCheck`) took its turn.
    """

    def __init__(
        self, workspace: Workspace, switch: Switch, overhead: Overhead, tables: TableCheck, stores: StoreCheck
    ) -> None:
        config = workspace.config
        self._workspace = workspace
        self._switch = switch
        self.overhead = overhead
        """Measures the launches of one forward of many."""
        self._tables = tables
        self.stores = stores
        """Compares the layers' stores with the bytes left by a forward."""
        self._states = workspace.states
        self._backend = workspace.backend
        self._schedules = {name: FingerprintSchedule.of(s.region, config) for name, s in self._states.items()}
        compares = any(state.reads for state in self._states.values())
        self.decides = compares or not all(schedule.always for schedule in self._schedules.values())
        """Whether `begin` has anything to decide: else each forward is fingerprinted, and nothing compared before."""
        self._token_bytes = sum(s.sources.slot_bytes / s.region.tokens_per_slot for s in self._states.values())
        self.scrub = Scrub(list(self._states.values()), self._backend, config.scrub_budget)
        """The slow walk over all slots."""
        self.weights = _weights(workspace, switch, self.scrub.pace)
        """Compares the model's parameters; None without ``CANARY_WEIGHTS``."""
        self.ranks = _ranks(workspace, switch)
        """Compares what this rank computes with what others do; None without ``CANARY_RANKS_INTERVAL``."""
        self.captured = False
        """Whether a CUDA graph contains Canary's work: its launches are always the same."""
        self.much = False
        """Whether the last forward wrote too much for a late record, and the next one waits for the record."""

    def begin(self, view: BatchView) -> list[str]:
        """A forward of ``view`` will be recorded; returns the regions whose bytes are compared before, see
        `FingerprintSchedule`. Host only."""
        # Each region's schedule counts the forward, whether or not it compares bytes.
        return [
            name
            for name in view.tables
            if self._schedules[name].begin(view, self.captured) and self._states[name].reads
        ]

    def record(self, view: BatchView, beside: bool, late: bool) -> None:
        """The forward of ``view`` was issued on the current stream. ``beside``: the record runs on the side stream, if
        the device has one. ``late``: the record may run beside the next forward, so it is issued at the side stream's
        next `SideStream.issue_postponed` or `SideStream.join`, unless the forward wrote `much`."""
        side = self._workspace.side
        self.much = view.tokens * self._token_bytes > MOST_LATE_BYTES
        if beside and late and side is not None and not self.much:
            side.postpone(partial(self._issue_late, view))
        elif beside or self.overhead.due:
            with self._workspace.beside(beside), self.overhead.device(self.captured):
                self._issue(view, beside)
        else:
            self._issue(view, beside)

    def ended(self, step: int) -> None:
        """Host only, never captured: the ``step``-th forward ended, on the current stream."""
        self._tables.ended()
        if self.weights is not None:
            self.weights.turn(step)

    def close(self) -> None:
        """Canary is off."""
        if self.ranks is not None:
            self.ranks.close()
        if self.weights is not None:
            self.weights.close()

    def _issue_late(self, view: BatchView) -> None:
        """Issues the record of a forward that may run beside the next one, once the work after the forward was
        issued."""
        if self._switch.enabled:
            try:
                self._issue(view, beside=True)
            except Exception as error:
                self._switch.fail("step.after", error)

    def _issue(self, view: BatchView, beside: bool) -> None:
        """All launches, on the current stream: ``beside`` the forwards', or theirs."""
        side, proof = self._workspace.side, self._workspace.proof
        carried = False
        for name, table in view.tables.items():
            state = self._states[name]
            if table.carried:
                # Fingerprints came with the bytes: taken now they would say that whatever was copied is right.
                carried = True
                self._backend.record(state, view, table)
            elif state.readable and self._schedules[name].now:
                if self.stores.on or state.launches.compiling() or (proof.looks and not self.captured):
                    self._fingerprint_and_record(state, view, table)
                else:
                    self._backend.fingerprint_record(state, view, table)
            else:
                if state.sources:
                    state.forget_written()
                self._backend.record(state, view, table)
            if table.checkpoints is not None:
                from canary_core.ops.state_checkpoints import record_checkpoints

                record_checkpoints(self._backend, state, view, table)
                if beside and side is not None:
                    side.reads(table.checkpoints.slots, table.checkpoints.positions)
        if self.stores.on:
            self.stores.end(compared=not carried)
        if self.ranks is not None:
            self.ranks.recorded(view)
        # A forward has either a scrub or a comparison of tables, so that it has no launch more.
        if not self._tables.took_turn() or self.captured:
            self.scrub.run(self.captured)
        if beside and side is not None:
            # The rest of the view was read by the check alone, which is done.
            side.reads(
                view.prefix_lens, view.new_lens, view.token_ids, view.writers, view.positions, view.expected_tokens
            )  # fmt: skip

    def _fingerprint_and_record(self, state: RegionState, view: BatchView, table: SlotTable) -> None:
        """Records a forward's writes to one region, with the work between the two ops."""
        proof, backend = self._workspace.proof, self._backend
        looks = proof.looks and not self.captured
        first = proof.writes(state, view) if looks else None
        backend.fingerprint(state, view, table)
        self.stores.compare(state, view, table)
        if first is not None:
            proof.compare(state, first)
        backend.record(state, view, table)


def _weights(workspace: Workspace, switch: Switch, pace: Pace) -> "WeightWatch | None":
    if not (workspace.config.weights and switch.enabled):
        return None
    from canary_core.watchers.weights import WeightWatch

    return WeightWatch(workspace, switch, pace)


def _ranks(workspace: Workspace, switch: Switch) -> "RankWatch | None":
    if not (workspace.config.ranks_interval and switch.enabled):
        return None
    from canary_core.watchers.ranks.watch import RankWatch

    return RankWatch(workspace, switch)
