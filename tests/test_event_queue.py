"""`EventQueue`: what the host issued between two forwards takes effect in that order, however it is put together."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from canary_core.runtime.event_queue import EventQueue, QueuedEvent


class Told:
    """A queue, and which events took effect with which numbers."""

    def __init__(self) -> None:
        self.queue = EventQueue(torch.device("cpu"))
        self.done: list[tuple[str, list[int]]] = []

    def put(self, name: str, *numbers: int, key: str | None = None) -> None:
        """An event of the allocator."""

        def apply(tensors: list[torch.Tensor]) -> None:
            self.done.append((name, [int(tensor) for tensor in tensors]))

        tensors = [torch.tensor(number) for number in numbers]
        self.queue.put(QueuedEvent(apply, tensors, key=None if key is None else (key,)))

    def arrive(self, name: str) -> None:
        """Slots get other content."""
        self.queue.put_arrival(lambda: self.done.append((name, [])))

    def deferred(self, name: str) -> Callable[[], None]:
        """Puts an event when it is asked to."""
        return lambda: self.put(name)

    @property
    def names(self) -> list[str]:
        """Of the events that took effect, in order."""
        return [name for name, _ in self.done]


@pytest.fixture
def told() -> Told:
    """An empty one."""
    return Told()


def test_events_wait_and_then_take_effect_in_order(told):
    """Nothing happens before `settle`, and each event once."""
    for name in ("free", "alloc", "free"):
        told.put(name)
    assert told.done == []
    assert len(told.queue) == 3
    told.queue.settle()
    told.queue.settle()
    assert told.names == ["free", "alloc", "free"]
    assert len(told.queue) == 0


def test_events_put_at_once_are_those_put_one_by_one(told):
    """In order, each once; those of one key in a row, also with the last one before, are applied together."""
    told.put("before", 1, key="free")
    names = ("free", "free", "alloc", "free")
    several = [
        QueuedEvent(
            lambda tensors, name=name: told.done.append((name, [int(one) for one in tensors])),
            [torch.tensor(2 + number)],
            key=(name,),
            frees=False,
        )
        for number, name in enumerate(names)
    ]
    told.queue.put(*several)
    told.queue.settle()
    assert told.done == [("before", [1, 2, 3]), ("alloc", [4]), ("free", [5])]


def test_events_of_one_key_in_a_row_are_applied_together(told):
    """With all their tensors in order; another event between them keeps them apart."""
    told.put("first", 1, key="free")
    told.put("second", 2, 3, key="free")
    told.put("other", 4, key="alloc")
    told.put("third", 5, key="free")
    assert len(told.queue) == 3
    told.queue.settle()
    assert told.done == [("first", [1, 2, 3]), ("other", [4]), ("third", [5])]


def test_events_without_a_key_stay_alone(told):
    """They may mean different things."""
    told.put("one", 1)
    told.put("two", 2)
    told.queue.settle()
    assert told.done == [("one", [1]), ("two", [2])]


@pytest.mark.parametrize("what", ["put", "arrive"])
def test_what_is_deferred_comes_before_the_next_event(told, what):
    """Told when another event is queued, so that it keeps its place."""
    told.queue.defer(told.deferred("deferred"))
    assert len(told.queue) == 1
    getattr(told, what)("next")
    assert told.done == []
    told.queue.settle()
    assert told.names == ["deferred", "next"]


def test_what_is_deferred_comes_before_the_next_forward(told):
    """Told by `settle` where no other event follows; after what was queued before it."""
    told.put("before")
    told.queue.defer(told.deferred("deferred"))
    told.queue.settle()
    assert told.names == ["before", "deferred"]


def test_what_is_deferred_is_told_once_for_all_of_its_events(told):
    """However often it is deferred, and again once it was told."""
    tell = told.deferred("deferred")
    for _ in range(3):
        told.queue.defer(tell)
    told.queue.settle()
    assert told.names == ["deferred"]
    told.queue.defer(tell)
    told.queue.settle()
    assert told.names == ["deferred"] * 2


def test_content_that_arrives_takes_effect_at_once(told):
    """Where nothing waits, the order of the stream is the order of events."""
    told.arrive("copy")
    assert told.names == ["copy"]
    assert len(told.queue) == 0


def test_content_that_arrives_waits_behind_the_allocator(told):
    """An event of the allocator applied later would take it back."""
    told.put("alloc", key="alloc")
    told.arrive("copy")
    told.put("free", key="alloc")
    assert told.done == []
    told.queue.settle()
    assert told.names == ["alloc", "copy", "free"]


def test_reading_content_settles_only_for_content_that_waits(told):
    """Events that change owners alone go on waiting; what waits behind them with new content takes them along."""
    told.put("alloc")
    told.queue.settle_arrivals()
    assert told.done == []
    told.arrive("copy")
    told.put("free")
    told.queue.settle_arrivals()
    assert told.names == ["alloc", "copy", "free"]


def test_an_event_that_is_put_while_others_take_effect_waits(told):
    """It was issued after them: the next forward's."""
    told.queue.put(QueuedEvent(lambda _: told.put("late"), []))
    told.queue.settle()
    assert told.done == []
    told.queue.settle()
    assert told.names == ["late"]


@pytest.mark.gpu
def test_events_wait_for_the_streams_that_made_their_slots():
    """Slots may be made on another stream than the forwards': what takes effect there sees them as they were made."""
    device = torch.device("cuda")
    queue, other = EventQueue(device), torch.cuda.Stream()
    slots, seen = torch.zeros(1 << 16, dtype=torch.int64, device=device), []
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(50_000_000)
        slots.fill_(7)
        queue.put(QueuedEvent(lambda tensors: seen.append(tensors[0].clone()), [slots]))
    queue.settle()
    assert int(seen[0].min()) == 7


def test_it_knows_whether_slots_may_be_written_anew(told):
    """After whatever gives slots back or changes them, until forwards come after what was recorded; not after slots
    were handed out alone."""
    queue = told.queue
    assert queue.frees_nothing
    queue.put(QueuedEvent(lambda _: None, [], frees=False))
    assert queue.frees_nothing
    for issue in (partial(told.put, "free"), partial(told.arrive, "load"), partial(queue.defer, told.deferred("free"))):
        issue()
        assert not queue.frees_nothing
        queue.settle()
        assert not queue.frees_nothing
        queue.joined()
        assert queue.frees_nothing
