"""note: events of slots, into the histories. O(slots), no read-back needed."""

import torch
from torch import Tensor

from canary_core.ops.state import RegionState
from canary_core.records import HISTORY_EVENT_BITS, HISTORY_NUMBER_BITS, Clock, Happened, Status

_NUMBER = (1 << HISTORY_NUMBER_BITS) - 1
_STEP = HISTORY_EVENT_BITS + HISTORY_NUMBER_BITS


def note(state: RegionState, slots: Tensor, event: int, who: int | Tensor = -1) -> None:
    """Notes ``event`` (a `Happened`) for ``slots``, integer ``[n]``, by writer id ``who``, -1 for nobody; an integer
    tensor ``[n]`` has one for each slot, of a copy the source slots. Numbers beyond the region, and null slots, are
    left out; a slot listed twice is noted once, if ``who`` is the same. Does nothing in a region without histories."""
    if state.histories is None:
        return
    slots = slots.long()
    usable = state.region.status_of(slots) == Status.OK
    push(state.histories, slots[usable], entry(state, event, who[usable] if isinstance(who, Tensor) else who))


def note_all(state: RegionState, event: int) -> None:
    """``event`` happened to all slots at once: O(1), in torch on every device, without a wait. May be captured."""
    if state.histories is not None:
        row = state.histories[-1]
        row.copy_(torch.cat((entry(state, event, -1)[None], row[:-1])))


def entry(state: RegionState, event: int, who: int | Tensor) -> Tensor:
    """The entry of ``event`` by ``who`` now: int64, without dimensions or ``[n]`` as ``who``."""
    number = (who.long() if isinstance(who, Tensor) else who) & _NUMBER
    step = state.shared.clock[Clock.NEXT] & _NUMBER
    return step << _STEP | number << HISTORY_EVENT_BITS | event


def push(histories: Tensor, slots: Tensor, new: Tensor) -> None:
    """Puts ``new`` before the entries of ``slots``, int64 ``[n]``. The newest entry is replaced when the same writer
    does the same again, and when a share follows a share."""
    old = histories[slots]
    new = new.expand(len(slots))
    other = (new ^ old[:, 0]) & (1 << _STEP) - 1
    events = (1 << HISTORY_EVENT_BITS) - 1
    stays = (other == 0) | ((other & events == 0) & (new & events == Happened.SHARE))
    moved = torch.cat((new[:, None], old[:, :-1]), dim=1)
    replaced = torch.cat((new[:, None], old[:, 1:]), dim=1)
    histories[slots] = torch.where(stays[:, None], replaced, moved)
