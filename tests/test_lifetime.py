"""What an allocator's events say: who freed a slot, who got it, in pages and in batches of events."""

import pluggy
import pytest
import torch
from support.toy import ToyEngine

from canary_core import Canary, CanaryConfig, Kind, hookspecs
from canary_core.hookspecs import hookimpl
from canary_core.records import FREED_BY, POSITION, STATES, State


class Guarded:
    """A toy engine whose allocator tells of what it does."""

    def __init__(self) -> None:
        self.engine = ToyEngine()
        self.found = []
        hooks = pluggy.PluginManager("canary")
        hooks.add_hookspecs(hookspecs)
        hooks.register(self)
        self.canary = Canary(
            [self.engine.region()], CanaryConfig.load(silence_s=0), hooks=hooks, writers=self.engine.writers
        )

    @hookimpl
    def canary_violation(self, violation):
        self.found.append(violation)

    def submit(self, name):
        return self.engine.submit(name, [5, 6, 7])

    def step(self) -> None:
        for request in self.engine.requests:
            request.tokens.append(8)
        self.engine.step(self.canary)

    def words(self) -> torch.Tensor:
        return self.canary.states["full"].records


@pytest.fixture
def guarded() -> Guarded:
    """A fresh one."""
    return Guarded()


def test_a_read_of_a_freed_slot_names_reader_writer_and_freer(guarded):
    """Freed under a running request by another one: all three are in the finding, and the step of the free."""
    reader = guarded.submit("reader")
    guarded.step()
    slots = torch.tensor(reader.slots[:1])
    guarded.canary.slots.free("full", slots, guarded.engine.writers.id("thief"))
    guarded.step()
    (found,) = guarded.found
    assert found.kind is Kind.FREED
    assert (found.request, found.stored_request, found.freed_by) == ("reader", "reader", "thief")
    assert (found.step_freed, found.step) == (1, 2)


def test_a_double_free_names_both_that_freed(guarded):
    """The second one is the finding's request; the slot stays the first one's."""
    writers = guarded.engine.writers
    guarded.submit("a")
    guarded.step()
    guarded.canary.slots.alloc("full", torch.tensor([9]))
    guarded.canary.slots.free("full", torch.tensor([9]), writers.id("first"))
    guarded.canary.slots.free("full", torch.tensor([9]), writers.id("second"))
    guarded.canary.drain()
    (found,) = guarded.found
    assert (found.kind, found.slot) == (Kind.DOUBLE_FREE, 9)
    assert (found.request, found.freed_by) == ("second", "first")
    assert guarded.words()[9, FREED_BY] == writers.id("first")


def test_each_slot_of_an_event_has_its_own_writer(guarded):
    """A writer may be a function that gives one number for each slot, asked when the event takes effect."""
    writers = guarded.engine.writers
    owner = guarded.submit("owner")
    guarded.step()
    held = torch.tensor(owner.slots[:2])
    ids = torch.tensor([writers.id("one"), writers.id("two")], dtype=torch.int32)
    guarded.canary.slots.alloc("full", held, lambda: ids)
    guarded.canary.drain()
    assert [(v.kind, v.slot, v.request, v.stored_request) for v in guarded.found] == [
        (Kind.DOUBLE_ALLOC, int(held[0]), "one", "owner"),
        (Kind.DOUBLE_ALLOC, int(held[1]), "two", "owner"),
    ]


def test_pages_share_one_fate(guarded):
    """A page is freed and handed out whole; what is wrong with it is one finding, at its first slot."""
    for _ in range(2):
        guarded.canary.slots.alloc("full", torch.tensor([2, 3]), page_slots=4)
        guarded.canary.slots.free("full", torch.tensor([2, 3]), page_slots=4)
    guarded.canary.slots.free("full", torch.tensor([3]), page_slots=4)
    guarded.canary.drain()
    assert [(v.kind, v.slot) for v in guarded.found] == [(Kind.DOUBLE_FREE, 12)]
    states = guarded.words()[:, POSITION] % STATES
    assert states[8:16].tolist() == [State.FREED | State.ALLOCATED] * 8
    assert not states[:8].any()
    assert not states[16:].any()


def test_events_between_two_forwards_keep_their_order(guarded):
    """However many there are and whatever is put together: free, hand out and free again is no finding."""
    for slot in range(1, 6):
        guarded.canary.slots.alloc("full", torch.tensor([slot]))
    for slot in range(1, 6):
        guarded.canary.slots.free("full", torch.tensor([slot]))
    guarded.canary.slots.alloc("full", torch.tensor([2, 3]))
    guarded.canary.slots.free("full", torch.tensor([3]))
    guarded.canary.drain()
    assert guarded.found == []
    states = guarded.words()[:6, POSITION] % STATES
    freed = State.FREED | State.ALLOCATED
    assert states.tolist() == [0, freed, State.ALLOCATED, freed, freed, freed]


@pytest.mark.parametrize("next_event", ["alloc", "clear", "settle"])
def test_events_that_are_told_later_keep_their_place(guarded, next_event):
    """What was freed one by one and is told as one event counts as freed before what comes next, and is told once."""
    canary, freed, told = guarded.canary, [], []

    def tell() -> None:
        told.append(list(freed))
        canary.slots.free("full", torch.tensor(freed))

    canary.slots.alloc("full", torch.tensor([1, 2, 3]))
    for slot in (1, 2):
        freed.append(slot)
        canary.slots.defer(tell)
    assert told == []
    if next_event == "alloc":
        canary.slots.alloc("full", torch.tensor([2]))
    elif next_event == "clear":
        canary.slots.clear("full", torch.tensor([2]))
    canary.slots.settle()
    canary.drain()
    assert told == [[1, 2]]
    assert guarded.found == []
    expected = {"alloc": State.ALLOCATED, "clear": State.UNWRITTEN, "settle": State.FREED | State.ALLOCATED}
    states = guarded.words()[:4, POSITION] % STATES
    assert states.tolist() == [0, State.FREED | State.ALLOCATED, expected[next_event], State.ALLOCATED]


def test_an_allocator_that_is_followed_no_longer_frees_nothing(guarded):
    """After `end_lifetime` a slot that was freed is what it was before."""
    request = guarded.submit("a")
    guarded.step()
    guarded.canary.slots.free("full", torch.tensor(request.slots))
    guarded.canary.slots.end_lifetime("full")
    guarded.step()
    assert guarded.found == []
