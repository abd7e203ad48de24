"""Histories of slots, read: `Happening` is one event of a slot, `life` all events in order. `canary_core.records` has
the layout."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from canary_core.records import HISTORY_EVENT_BITS, HISTORY_NUMBER_BITS, Happened

NOBODY = (1 << HISTORY_NUMBER_BITS) - 1
"""An unknown writer."""


@dataclass(frozen=True, slots=True)
class Happening:
    """One event of a slot. ``event``: a lower-case name of `Happened`. ``who``: the writer id, -1 if unknown; of a copy
    the source slot. ``every``: the event concerned all slots of the region at once."""

    step: int
    event: str
    who: int
    every: bool = False


def read(row: Sequence[int], now: int, every: bool = False) -> list[Happening]:
    """The entries of one row of `RegionState.histories`, oldest first. ``now``: step at which the row was taken;
    completes the steps, stored by their low bits."""
    events = []
    for word in reversed(row):
        what = word & (1 << HISTORY_EVENT_BITS) - 1
        if what:
            who = word >> HISTORY_EVENT_BITS & NOBODY
            behind = now - (word >> HISTORY_EVENT_BITS + HISTORY_NUMBER_BITS) & NOBODY
            events.append(Happening(now - behind, Happened(what).name.lower(), -1 if who == NOBODY else who, every))
    return events


def life(own: Sequence[Happening], every: Iterable[Happening]) -> list[Happening]:
    """``own``, a slot's events, merged with the events of all slots, oldest first. Within one step, events that take
    the slot from its request come before, all others after: the true order is unknown, and engines empty a pool out of
    use."""
    out = list(own)
    for event in dict.fromkeys(every):
        place = len(out)
        while place and _after(out[place - 1], event):
            place -= 1
        out.insert(place, event)
    return out


def _after(own: Happening, every: Happening) -> bool:
    if own.every or own.step != every.step:
        return own.step > every.step
    return own.event not in ("free", "park", "evict", "write")
