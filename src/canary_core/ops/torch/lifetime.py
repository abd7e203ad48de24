"""lifetime: events of the allocator and the prefix cache. O(changed slots), no read-back needed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from canary_core.ops.mapping import see
from canary_core.ops.state import RegionState
from canary_core.ops.torch.histories import entry, push
from canary_core.ops.torch.ring import report
from canary_core.records import (
    CONTENT,
    FREED_BY,
    POSITION,
    STEP_FREED,
    Clock,
    Happened,
    Kind,
    Phase,
    Row,
    State,
    Status,
)

_RELEASED = int(State.FREED | State.PARKED)
"""The bits of a slot without a request."""


@dataclass(frozen=True, slots=True, eq=False)
class _Event:
    """One call: int64 ``slots``, the first ones of their pages, and the writer of each."""

    happened: Happened
    state: RegionState
    slots: Tensor
    writer: int | Tensor
    page_slots: int

    @classmethod
    def of(
        cls, happened: Happened, state: RegionState, slots: Tensor, writer: int | Tensor, page_slots: int
    ) -> "_Event":
        return cls(happened, state, slots.long() * page_slots, writer, page_slots)

    def usable(self) -> Tensor:
        """Whether each is a live slot of the region; reports the others. Notes the event in the live pages' histories,
        whether it applies or not: it happened."""
        status = self.state.region.status_of(self.slots)
        self.report(Kind.NULL_SLOT, status == Status.NULL)
        self.report(Kind.SLOT_RANGE, status == Status.RANGE)
        self.note(status == Status.OK)
        return status == Status.OK

    def note(self, usable: Tensor) -> None:
        """Notes the event once for each page, by its first slot."""
        histories = self.state.histories
        if histories is None:
            return
        new = entry(self.state, self.happened, self.writer)
        slots, by = self.every(usable & (histories[self.slots * usable, 0] != new))
        push(histories, slots, entry(self.state, self.happened, by))

    def words(self, usable: Tensor) -> Tensor:
        """Position words of the records, of slot 0 where not ``usable``."""
        return self.state.records[self.slots * usable, POSITION]

    def freed(self) -> tuple[Tensor, Tensor, Tensor]:
        """For events that free slots: whether each is a live slot, reporting the others; the words, for a slot listed
        twice as left by the first entry; and whether each was not free before."""
        usable = self.usable()
        word = self.words(usable)
        fresh = usable & (word & State.FREED == 0)
        left = (word & ~int(State.PARKED)) | int(State.FREED)
        return usable, torch.where(fresh & _repeated(self.slots), left, word), fresh

    def move(self, mask: Tensor, keep: int, add: int, released: bool) -> None:
        """For all slots of the pages in ``mask``: keeps the bits ``keep`` of their position words, and adds ``add``. A
        ``released`` slot gets step and writer of the release; any other slot gets zeros."""
        every, by = self.every(mask)
        state = self.state
        state.records[every, POSITION] = (state.records[every, POSITION] & keep) | add
        state.records[every, STEP_FREED] = state.shared.clock[Clock.NEXT].int() if released else 0
        state.records[every, FREED_BY] = by if released else 0

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


def alloc(state: RegionState, slots: Tensor, writer: int | Tensor, page_slots: int = 1) -> None:
    """The allocator handed ``slots`` (integer ``[n]``) out to writer id ``writer`` (-1: unknown; int32 ``[n]`` for one
    each). Reports DOUBLE_ALLOC for a slot in use, parked or listed twice, and SLOT_RANGE or NULL_SLOT.

    With ``page_slots`` above 1 ``slots`` are numbers of pages of so many slots with one fate: a page is judged and
    reported by its first slot.
    """
    event = _Event.of(Happened.ALLOC, state, slots, writer, page_slots)
    usable = event.usable()
    word = torch.where(_repeated(event.slots), int(State.ALLOCATED), event.words(usable))
    event.report(
        Kind.DOUBLE_ALLOC, usable & (word & State.FREED == 0) & (_held(word) | (word & State.PARKED != 0)), word
    )
    event.move(usable, keep=0, add=int(State.ALLOCATED), released=False)


def park(state: RegionState, slots: Tensor, writer: int | Tensor, page_slots: int = 1) -> None:
    """The last request, ``writer``, let go of ``slots``, and the prefix cache keeps them; see `alloc`. Reports
    DOUBLE_FREE for a slot already parked, free, or listed twice. A free slot stays free."""
    event = _Event.of(Happened.PARK, state, slots, writer, page_slots)
    usable = event.usable()
    word = event.words(usable)
    fresh = usable & (word & _RELEASED == 0)
    word = torch.where(fresh & _repeated(event.slots), word | int(State.PARKED), word)
    event.report(Kind.DOUBLE_FREE, usable & (word & _RELEASED != 0), word)
    event.move(fresh, keep=-1, add=int(State.PARKED), released=True)


def share(state: RegionState, slots: Tensor, writer: int | Tensor, page_slots: int = 1) -> None:
    """Request ``writer`` takes ``slots`` of the prefix cache, parked or not; see `alloc`. Reports FREED for a free
    slot, and leaves it free."""
    event = _Event.of(Happened.SHARE, state, slots, writer, page_slots)
    usable = event.usable()
    word = event.words(usable)
    event.report(Kind.FREED, usable & (word & State.FREED != 0))
    event.move(usable & (word & State.FREED == 0), keep=~int(State.PARKED), add=0, released=False)


def evict(state: RegionState, slots: Tensor, writer: int | Tensor, page_slots: int = 1) -> None:
    """The prefix cache gave ``slots`` up: they are free; see `alloc`. Reports EVICTED_IN_USE for a slot handed out or
    written and not parked, DOUBLE_FREE for a free one or one listed twice."""
    event = _Event.of(Happened.EVICT, state, slots, writer, page_slots)
    usable, word, fresh = event.freed()
    event.report(Kind.DOUBLE_FREE, usable & (word & State.FREED != 0), word)
    event.report(Kind.EVICTED_IN_USE, usable & (word & _RELEASED == 0) & _held(word), word)
    event.move(fresh, keep=~int(State.PARKED), add=int(State.FREED), released=True)


def free(state: RegionState, slots: Tensor, writer: int | Tensor, page_slots: int = 1) -> None:
    """The allocator got ``slots`` back from ``writer``; see `alloc`. Reports DOUBLE_FREE for a slot already free,
    parked, or listed twice; afterwards all are free."""
    event = _Event.of(Happened.FREE, state, slots, writer, page_slots)
    usable, word, fresh = event.freed()
    event.report(Kind.DOUBLE_FREE, usable & (word & _RELEASED != 0), word)
    event.move(fresh, keep=~int(State.PARKED), add=int(State.FREED), released=True)


def _held(word: Tensor) -> Tensor:
    """Whether each slot has content of a request, by the position words. Other slots had no event, or none since bytes
    arrived without records."""
    content = word & CONTENT
    return (content == State.WRITTEN) | (content == State.ALLOCATED)


def _repeated(slots: Tensor) -> Tensor:
    """Whether each entry is a repetition of an earlier one."""
    order = slots.argsort(stable=True)
    repeated = torch.zeros_like(slots, dtype=torch.bool)
    repeated[order[1:]] = slots[order][1:] == slots[order][:-1]
    return repeated
