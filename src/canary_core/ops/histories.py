"""Histories of slots, read: `Happening` is one thing that happened, `life` all of it in order. The layout is in
`canary_core.records`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from canary_core.records import HISTORY_EVENT_BITS, HISTORY_NUMBER_BITS, Happened

NOBODY = (1 << HISTORY_NUMBER_BITS) - 1
"""A writer that is not known."""


@dataclass(frozen=True, slots=True)
class Happening:
    """One thing that happened to a slot. ``event``: a lower-case name of `Happened`. ``who``: the writer id, -1 if
    unknown; of a copy the slot that it came from. ``every``: it happened to all slots of the region at once."""

    step: int
    event: str
    who: int
    every: bool = False


def read(row: Sequence[int], now: int, every: bool = False) -> list[Happening]:
    """The entries of one row of `RegionState.histories`, oldest first. ``now``: the step at which it was taken, which
    says what the step numbers were, of which the row has the low bits."""
    events = []
    for word in reversed(row):
        what = word & (1 << HISTORY_EVENT_BITS) - 1
        if what:
            who = word >> HISTORY_EVENT_BITS & NOBODY
            behind = now - (word >> HISTORY_EVENT_BITS + HISTORY_NUMBER_BITS) & NOBODY
            events.append(Happening(now - behind, Happened(what).name.lower(), -1 if who == NOBODY else who, every))
    return events


def life(own: Sequence[Happening], every: Iterable[Happening]) -> list[Happening]:
    """``own``, a slot's events, with those of all slots where they belong, oldest first. In one step what takes a slot
    from its request comes before, all else after: nobody knows better, and engines empty a pool that nobody uses."""
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
