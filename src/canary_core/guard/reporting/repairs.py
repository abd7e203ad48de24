"""`Repairs`: puts flipped words of parked slots back, and tells the outcome of each."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from canary_core.config import CanaryConfig
from canary_core.events import Event
from canary_core.incident import Incident
from canary_core.ops.repair_rows import REPAIR_WORDS, RepairOutcome, RepairWord
from canary_core.ops.state import RegionState
from canary_core.ops.upload import upload
from canary_core.records import Kind, Phase, State
from canary_core.runtime.host_copy import HostCopy
from canary_core.runtime.streams import capturing
from canary_core.runtime.workspace import Switch, Workspace
from canary_core.violation import Violation

MOST_WAITING = 16
"""Findings that wait for one launch; others are tried when they are found again."""

MOST_REMEMBERED = 4096
"""Words put back, or not to be put back, remembered: each change of a word is tried once."""

LEAST_ALIGNMENT = 4
"""Of a source whose words can be exchanged one by one."""


class Audit(Protocol):
    """The audit of the first forwards."""

    @property
    def due(self) -> bool:
        """Whether the next forward is audited: every change of a byte must be the engine's then."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A finding to be repaired, by its key, see `known.key_of`."""

    key: int
    violation: Violation


@dataclass(frozen=True, slots=True, eq=False)
class _InFlight:
    """Rows of one region, issued; ``copy``: their outcomes on the way to the host."""

    asked: Sequence[_Asked]
    rows: Tensor
    copy: HostCopy


class Repairs:
    """Takes findings of one changed word in parked slots (`takes`), has the device put the word back between two
    forwards (`step`), and tells the outcome: ``repaired`` or ``repair_failed``. All conditions are tested by the
    device, in the order of the forwards, so no event in between is missed; an unsure case stays as found, and is
    counted by reason. ``condemn``: hands out the verdict of an unrepaired finding. ``incidents``: the open ones.
    """

    def __init__(
        self,
        workspace: Workspace,
        switch: Switch,
        audit: Audit,
        condemn: Callable[[Violation], None],
        incidents: Iterable[Incident],
    ) -> None:
        self._workspace = workspace
        self._switch = switch
        self._audit = audit
        self._condemn = condemn
        self._incidents = incidents
        self._waiting: dict[int, _Asked] = {}
        self._flying: list[_InFlight] = []
        self._steps: OrderedDict[int, int] = OrderedDict()
        self.outcomes: Counter[str] = Counter()
        """Number of tries by outcome: lower-case names of `RepairOutcome`, and ``unaligned``."""

    def takes(self, key: int, violation: Violation) -> bool:
        """Whether the told finding ``violation`` waits for a repair: then `step` gives the verdict, or none."""
        if violation.kind is not Kind.BYTES or violation.phase is not Phase.SCRUB:
            return False
        if violation.stored_state is not State.PARKED or key in self._steps:
            return False
        if key in self._waiting or any(asked.key == key for flight in self._flying for asked in flight.asked):
            # A read may have findings of two rounds.
            return True
        state = self._workspace.states[violation.region]
        if self._audit.due or not (state.readable and state.repairs) or len(self._waiting) >= MOST_WAITING:
            return False
        if state.sources[_column(state, violation)].alignment < LEAST_ALIGNMENT:
            self.outcomes["unaligned"] += 1
            self._remember(key, -1)
            return False
        self._waiting[key] = _Asked(key, violation)
        return True

    def came_back(self, key: int, violation: Violation) -> bool:
        """Whether the repeated finding ``violation`` is of a word put back before, and changed in the same way again: a
        new finding, not repaired a second time."""
        at = self._steps.get(key, -1)
        if at < 0 or violation.step <= at:
            return False
        self._remember(key, -1)
        return True

    def step(self) -> None:
        """At the end of a step, on the stream of the forwards; never captured, never waits: tells arrived outcomes, and
        issues waiting repairs."""
        self.tell()
        if not self._waiting or self._flying or capturing(self._workspace.device):
            return
        asked, self._waiting = list(self._waiting.values()), {}
        workspace = self._workspace
        # A slot that was shared, freed or handed out in the meantime, as far as the host knows, is so on the device.
        workspace.join()
        workspace.queue.settle()
        for name, state in workspace.states.items():
            own = [one for one in asked if one.violation.region == name]
            if own and state.readable:
                rows = upload(_rows(state, own), workspace.device).view(-1, REPAIR_WORDS)
                workspace.backend.repair(state, rows)
                self._flying.append(_InFlight(own, rows, HostCopy(rows)))
            else:
                self._decline(own, RepairOutcome.MOVED_ON)
        self.tell()

    def tell(self) -> None:
        """Tells arrived outcomes. Never waits."""
        while self._flying and self._flying[0].copy.arrived():
            flight = self._flying.pop(0)
            for asked, row in zip(flight.asked, flight.copy.tensors[0].tolist(), strict=True):
                outcome = RepairOutcome(row[RepairWord.OUTCOME])
                if outcome is RepairOutcome.REPAIRED:
                    self._repaired(asked, row)
                elif outcome is RepairOutcome.FAILED:
                    self._failed(asked, row)
                else:
                    self._decline([asked], outcome)

    def stats(self) -> dict[str, int]:
        """Numbers for `Canary.stats`, without zeros."""
        declined = sum(self.outcomes.values()) - self.outcomes["repaired"] - self.outcomes["failed"]
        told = {"repaired": self.outcomes["repaired"], "repair_failed": self.outcomes["failed"]}
        return {name: number for name, number in {**told, "repair_declined": declined}.items() if number}

    def _repaired(self, asked: _Asked, row: Sequence[int]) -> None:
        self.outcomes["repaired"] += 1
        self._remember(asked.key, row[RepairWord.STEP])
        fields = self._about(asked.violation, row)
        self._switch.tell(Event("repaired", "warning", fields))

    def _failed(self, asked: _Asked, row: Sequence[int]) -> None:
        self.outcomes["failed"] += 1
        self._remember(asked.key, -1)
        self._switch.tell(Event("repair_failed", "error", self._about(asked.violation, row)))
        self._condemn(asked.violation)

    def _decline(self, asked: Sequence[_Asked], outcome: RepairOutcome) -> None:
        for one in asked:
            self.outcomes[outcome.name.lower()] += 1
            if outcome is RepairOutcome.UNCLEAR:
                self._remember(one.key, -1)
            self._condemn(one.violation)

    def _about(self, violation: Violation, row: Sequence[int]) -> dict[str, object]:
        """Fields of an event. Counts a repaired word in its incident."""
        old, damaged = row[RepairWord.OLD], row[RepairWord.DAMAGED]
        place = (violation.region, violation.slot)
        incident = next((i for i in reversed(tuple(self._incidents)) if i.told and place in i.slots), None)
        about: dict[str, object] = {} if incident is None else {"incident": incident.number}
        if incident is not None and row[RepairWord.OUTCOME] == RepairOutcome.REPAIRED:
            incident.repaired += 1
        names = ("region", "slot", "source", "layer", "half", "stored_position", "stored_request", "step_written")
        known = {name: getattr(violation, name) for name in names}
        about |= {name: value for name, value in known.items() if value is not None}
        bits = [bit for bit in range(32) if (old ^ damaged) >> bit & 1]
        words = {"word": row[RepairWord.WORD], "bits": bits, "was": f"{old:08x}", "damaged": f"{damaged:08x}"}
        return {**about, **words, "step": row[RepairWord.STEP], "found_at_step": violation.step}

    def _remember(self, key: int, step: int) -> None:
        """``step``: of the repair; -1 for a change never to be tried again."""
        self._steps[key] = step
        self._steps.move_to_end(key)
        if len(self._steps) > MOST_REMEMBERED:
            self._steps.popitem(last=False)


def able(workspace: Workspace, switch: Switch) -> bool:
    """Whether anything could ever be repaired, as with ``CANARY_REPAIR`` it is to be; if not, with a ``repair_off``
    event."""
    reason = _unable(workspace.config)
    if reason is None and not any(state.repairs for state in workspace.states.values()):
        reason = "no region has fingerprints of each layer: see CANARY_MEMORY"
    if reason is not None:
        switch.tell(Event("repair_off", "warning", {"reason": reason}))
    return reason is None


def _unable(config: CanaryConfig) -> str | None:
    """Why nothing is ever repaired with the settings."""
    if config.on_violation == "protect":
        return "CANARY_ON_VIOLATION=protect gives up what is damaged, with all that was computed from it"
    if config.bytes == "off" or not (config.scrub_budget.share or config.scrub_budget.step_bytes):
        return "nothing looks at the bytes of KV that no request has: CANARY_BYTES or CANARY_SCRUB_BUDGET is off"
    if not config.lifetime:
        return "CANARY_LIFETIME is off, so nobody knows which KV no request has"
    return None


def _column(state: RegionState, violation: Violation) -> int:
    return next(i for i, source in enumerate(state.sources) if source.name == violation.source)


def _rows(state: RegionState, asked: Sequence[_Asked]) -> Tensor:
    rows = torch.zeros(len(asked), REPAIR_WORDS, dtype=torch.int64, device="cpu")
    for row, one in zip(rows, asked, strict=True):
        v = one.violation
        about = {
            RepairWord.SLOT: v.slot,
            RepairWord.SOURCE: _column(state, v),
            RepairWord.STORED: v.stored_value,
            RepairWord.FOUND: v.found_value,
            RepairWord.WRITTEN: v.step_written,
            RepairWord.POSITION: v.stored_position,
        }
        for word, value in about.items():
            row[word] = -1 if value is None else value
    return rows
