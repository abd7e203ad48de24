"""What happened to slots before an incident: the device's notes decide where they reach, else the host's calls."""

from dataclasses import replace

import pytest
import torch

from canary_core import Kind, Violation
from canary_core.kinds.case import Held
from canary_core.ops.histories import Happening
from canary_core.records import Phase
from canary_core.runtime.journal import Entry
from canary_desk.incidents.evidence import Evidence
from canary_desk.incidents.happened import had_it, held_before, last_of_all, was_cached

SLOTS = (16, 17)


def evidence(*life: tuple[int, str], calls: tuple[tuple[int, str], ...] = ()) -> Evidence:
    """The same life of both slots, by the device, and calls about them, of which the host is not sure."""
    nothing = torch.zeros((0, 1), dtype=torch.int64)
    noted = [Happening(step, event, 0) for step, event in life]
    entries = [Entry(step, event, "full", 2, 0, torch.tensor(SLOTS), sure=False) for step, event in calls]
    lives = dict.fromkeys(SLOTS, noted) if noted else {}
    return Evidence(
        "full", "full", 64, 1, (), nothing[:, 0], nothing, nothing, nothing, [], {}, history=entries, lives=lives
    )


def root(step_written: int) -> Violation:
    """A finding about one of them."""
    return Violation(Kind.BYTES, "full", step=40, phase=Phase.PRE_FORWARD, slot=16, step_written=step_written)


@pytest.mark.parametrize(
    ("life", "calls", "last"),
    [
        ((), ((5, "share"), (7, "share")), 7),
        (((3, "alloc"), (4, "write")), ((5, "share"),), None),
        (((3, "alloc"), (4, "write"), (5, "park"), (6, "share")), (), 6),
        # Before they were handed out, that is another life.
        (((3, "share"), (4, "evict"), (5, "alloc"), (6, "write")), ((3, "share"),), None),
        # Four entries and no beginning among them: there may have been more.
        (((3, "write"), (4, "park"), (5, "evict"), (6, "free")), ((2, "share"),), 2),
    ],
)
def test_what_happened_to_all_slots(life, calls, last):
    """The last step of it, if it happened to each of them since it was handed out."""
    known = evidence(*life, calls=calls)
    assert last_of_all(known, SLOTS, "share", "share") == last
    assert was_cached(known, 16) == (last is not None or ("park" in [e for _, e in known_life(known)]))


def known_life(known: Evidence) -> list[tuple[int, str]]:
    """Of the first slot, since it was handed out."""
    return [(h.step, h.event) for h in known.life(16)]


def test_a_slot_that_nobody_noted_decides_nothing():
    """Then the calls do, for all of them."""
    known = evidence((3, "alloc"), (4, "share"), calls=((9, "share"),))
    some = replace(known, lives={16: known.lives[16]})
    assert last_of_all(some, SLOTS, "share", "share") == 9


READER, OTHER = 1, 2


def lived(*life: tuple[int, str, int]) -> Evidence:
    """Notes of the first slot: step, event, writer."""
    known = evidence()
    return replace(known, lives={16: [Happening(*h) for h in life]}, names={READER: "ann", OTHER: "bob"})


@pytest.mark.parametrize(
    ("life", "held"),
    [
        # As every slot: handed out, and written in the next forward.
        (((1, "alloc", OTHER), (2, "write", OTHER)), None),
        (((3, "alloc", READER), (4, "write", READER), (8, "alloc", OTHER), (9, "write", OTHER)), Held(4, None, 8)),
        (((4, "write", READER), (6, "free", READER), (8, "alloc", -1), (9, "write", OTHER)), Held(4, 6, 8)),
        (((4, "write", OTHER), (6, "free", OTHER), (8, "alloc", READER)), None),
        (((4, "write", -1), (6, "free", -1), (8, "alloc", OTHER)), None),
    ],
)
def test_a_slot_that_changed_hands(life, held):
    """Its reader had it, and somebody else got it: not whatever was handed out shortly before it was written."""
    assert held_before(lived(*life), replace(root(9), request="ann")) == held
    assert held_before(lived(*life), replace(root(9), request="nobody known")) is None


@pytest.mark.parametrize(
    ("life", "had"),
    [
        (((4, "write", OTHER), (6, "free", OTHER)), False),
        (((4, "write", READER), (6, "free", -1)), True),
        (((4, "write", -1), (6, "free", OTHER)), None),
        # The very write that was found.
        (((4, "write", OTHER), (6, "free", OTHER), (40, "write", READER)), False),
        ((), None),
    ],
)
def test_a_slot_that_a_request_never_had(life, had):
    """As far as notes go back; where one does not say whose it was, nothing is known."""
    assert had_it(lived(*life), replace(root(4), request="ann")) is had


def test_calls_of_another_life_say_nothing_of_a_cached_slot():
    """Where the device has no notes, the host's calls since the slot was handed out, freed or evicted count."""
    assert was_cached(evidence(calls=((5, "share"),)), 16)
    assert not was_cached(evidence(calls=((5, "share"), (7, "evict"), (8, "alloc"))), 16)
