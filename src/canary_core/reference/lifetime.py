"""lifetime: what the allocator does with slots. O(changed slots), no read-back needed."""

import torch
from torch import Tensor

from canary_core.records import FREED_BY, POSITION, STATES, STEP_FREED, Clock, Kind, Phase, Row, State, Status
from canary_core.reference.check import record_fields, see
from canary_core.reference.ring import report
from canary_core.state import RegionState


def free(state: RegionState, slots: Tensor, writer: int) -> None:
    """The allocator got ``slots`` (integer ``[n]``) back, from writer id ``writer`` (-1: unknown). Reports DOUBLE_FREE,
    also for a slot that is listed twice, and SLOT_RANGE or NULL_SLOT."""
    slots, usable = _usable(state, slots, writer)
    again = _repeated(slots) | (state.records[slots * usable, POSITION] & State.FREED != 0)
    _report(state, Kind.DOUBLE_FREE, slots[usable & again], writer)
    fresh = slots[usable & ~again]
    state.records[fresh, POSITION] |= int(State.FREED)
    state.records[fresh, STEP_FREED] = state.shared.clock[Clock.NEXT].int()
    state.records[fresh, FREED_BY] = writer


def alloc(state: RegionState, slots: Tensor, writer: int) -> None:
    """The allocator handed ``slots`` out to ``writer``. Reports DOUBLE_ALLOC for a slot that is in use or listed twice,
    and SLOT_RANGE or NULL_SLOT."""
    slots, usable = _usable(state, slots, writer)
    word = torch.where(_repeated(slots), int(State.ALLOCATED), state.records[slots * usable, POSITION])
    in_use = usable & (word & State.FREED == 0) & (word & (STATES - 1) != State.UNWRITTEN)
    _report(state, Kind.DOUBLE_ALLOC, slots[in_use], writer, word[in_use].long())
    state.records[slots[usable], POSITION] = int(State.ALLOCATED)
    for field in (STEP_FREED, FREED_BY):
        state.records[slots[usable], field] = 0


def _usable(state: RegionState, slots: Tensor, writer: int) -> tuple[Tensor, Tensor]:
    slots = slots.long()
    null = slots < 0 if state.region.null_slot is None else (slots < 0) | (slots == state.region.null_slot)
    beyond = slots >= state.region.slots
    _report(state, Kind.NULL_SLOT, slots[null], writer)
    _report(state, Kind.SLOT_RANGE, slots[beyond], writer)
    return slots, ~(null | beyond)


def _repeated(slots: Tensor) -> Tensor:
    """Which entries are the second or later of their value."""
    order = slots.argsort(stable=True)
    repeated = torch.zeros_like(slots, dtype=torch.bool)
    repeated[order[1:]] = slots[order][1:] == slots[order][:-1]
    return repeated


def _report(state: RegionState, kind: Kind, slots: Tensor, writer: int, word: Tensor | None = None) -> None:
    lost = kind in (Kind.NULL_SLOT, Kind.SLOT_RANGE)
    seen = see(state, slots, torch.full_like(slots, Status.RANGE if lost else Status.OK))
    fields = record_fields(seen)
    if word is not None:
        fields[Row.STORED_POSITION] = word
    step = state.shared.clock[Clock.NEXT] * 8 + Phase.EVENT
    report(state.shared, kind, slots, {**fields, Row.REGION: state.index, Row.WRITER: writer, Row.STEP: step})
