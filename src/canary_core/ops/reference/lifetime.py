"""lifetime: what the allocator does with slots. O(changed slots), no read-back needed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from canary_core.ops.mapping import see
from canary_core.ops.reference.ring import report
from canary_core.ops.state import RegionState
from canary_core.records import FREED_BY, POSITION, STATES, STEP_FREED, Clock, Kind, Phase, Row, State, Status


@dataclass(frozen=True, slots=True, eq=False)
class _Event:
    """What one call is about: int64 ``slots``, the first ones of their pages, and who does it to them."""

    state: RegionState
    slots: Tensor
    writer: int | Tensor
    page_slots: int

    @classmethod
    def of(cls, state: RegionState, slots: Tensor, writer: int | Tensor, page_slots: int) -> "_Event":
        return cls(state, slots.long() * page_slots, writer, page_slots)

    def usable(self) -> Tensor:
        """Which are live slots of the region; reports the others."""
        status = self.state.region.status_of(self.slots)
        self.report(Kind.NULL_SLOT, status == Status.NULL)
        self.report(Kind.SLOT_RANGE, status == Status.RANGE)
        return status == Status.OK

    def words(self, usable: Tensor) -> Tensor:
        """Position words of the records, of slot 0 where not ``usable``."""
        return self.state.records[self.slots * usable, POSITION]

    def every(self, mask: Tensor) -> tuple[Tensor, int | Tensor]:
        """All slots of the pages in ``mask``, and the writer of each; the region's last page may be cut short."""
        first = self.slots[mask]
        slots = (first[:, None] + torch.arange(self.page_slots, device=first.device)).flatten()
        there = slots < self.state.region.slots
        if isinstance(self.writer, Tensor):
            return slots[there], self.writer[mask].int().repeat_interleave(self.page_slots)[there]
        return slots[there], self.writer

    def report(self, kind: Kind, mask: Tensor, word: Tensor | None = None) -> None:
        """Reports ``kind`` for the slots in ``mask``; ``word``: the position words to show instead of the records'."""
        if not bool(mask.any()):
            return
        slots = self.slots[mask]
        lost = kind in (Kind.NULL_SLOT, Kind.SLOT_RANGE)
        fields = see(self.state, slots, torch.full_like(slots, Status.RANGE if lost else Status.OK)).fields()
        if word is not None:
            fields[Row.STORED_POSITION] = word[mask].long()
        step = self.state.shared.clock[Clock.NEXT] * 8 + Phase.EVENT
        by = self.writer[mask].long() if isinstance(self.writer, Tensor) else self.writer
        about: dict[Row, Tensor | int] = {Row.REGION: self.state.index, Row.WRITER: by, Row.STEP: step}
        report(self.state.shared, kind, slots, {**fields, **about})


def free(state: RegionState, slots: Tensor, writer: int | Tensor, page_slots: int = 1) -> None:
    """The allocator got ``slots`` (integer ``[n]``) back, from writer id ``writer`` (-1: unknown; int32 ``[n]`` for one
    each). Reports DOUBLE_FREE, also for a slot that is listed twice, and SLOT_RANGE or NULL_SLOT.

    With ``page_slots`` above 1 ``slots`` are numbers of pages of so many slots, which share one fate: a page is judged
    by its first slot, and reported as that one.
    """
    event = _Event.of(state, slots, writer, page_slots)
    usable = event.usable()
    again = _repeated(event.slots) | (event.words(usable) & State.FREED != 0)
    event.report(Kind.DOUBLE_FREE, usable & again)
    every, by = event.every(usable & ~again)
    state.records[every, POSITION] |= int(State.FREED)
    state.records[every, STEP_FREED] = state.shared.clock[Clock.NEXT].int()
    state.records[every, FREED_BY] = by


def alloc(state: RegionState, slots: Tensor, writer: int | Tensor, page_slots: int = 1) -> None:
    """The allocator handed ``slots`` out to ``writer``; see `free`. Reports DOUBLE_ALLOC for a slot that is in use or
    listed twice, and SLOT_RANGE or NULL_SLOT."""
    event = _Event.of(state, slots, writer, page_slots)
    usable = event.usable()
    word = torch.where(_repeated(event.slots), int(State.ALLOCATED), event.words(usable))
    event.report(Kind.DOUBLE_ALLOC, usable & (word & State.FREED == 0) & (word & (STATES - 1) != State.UNWRITTEN), word)
    every, _ = event.every(usable)
    state.records[every, POSITION] = int(State.ALLOCATED)
    for field in (STEP_FREED, FREED_BY):
        state.records[every, field] = 0


def _repeated(slots: Tensor) -> Tensor:
    """Which entries are the second or later of their value."""
    order = slots.argsort(stable=True)
    repeated = torch.zeros_like(slots, dtype=torch.bool)
    repeated[order[1:]] = slots[order][1:] == slots[order][:-1]
    return repeated
