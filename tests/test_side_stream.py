"""What `SideStream` keeps for what runs there, on a fake device. What waits for what is shown by tests/races, and on a
GPU by tests/gpu/test_side_stream.py."""

import gc
import weakref

import pytest
from races.streams import Device, Event

from canary_core.runtime.side_stream import LOOKED_AFTER, MOST_KEPT


class Memory:
    """As a tensor, for what is kept."""

    told = 0

    def record_stream(self, stream: object) -> None:
        """Torch's allocator is told."""
        Memory.told += 1


@pytest.fixture
def passed(monkeypatch):
    """Whether the device has got to where events were recorded."""
    found = [False]
    monkeypatch.setattr(Event, "query", lambda event: found[0], raising=False)
    monkeypatch.setattr(Memory, "told", 0)
    return found


def forward(side) -> weakref.ref:
    """Something is read beside, and dropped by the engine; then the next forward begins."""
    memory = Memory()
    with side:
        pass
    side.reads(memory, None)
    side.join(for_good=True)
    return weakref.ref(memory)


def test_what_is_read_is_kept_until_the_device_is_done(monkeypatch, passed):
    """It is let go by the first forward that asks and finds it done, without a word to torch's allocator."""
    side = Device().side_stream(monkeypatch)
    read = [forward(side) for _ in range(LOOKED_AFTER)]
    gc.collect()
    assert None not in [memory() for memory in read]
    passed[0] = True
    last = forward(side)
    gc.collect()
    assert [memory() for memory in read] == [None] * LOOKED_AFTER
    assert last() is not None
    assert Memory.told == 0


def test_a_host_far_ahead_keeps_no_more_than_some(monkeypatch, passed):
    """Then torch's allocator is told, and they are let go."""
    side = Device().side_stream(monkeypatch)
    read = [forward(side) for _ in range(MOST_KEPT + 1)]
    gc.collect()
    assert Memory.told == MOST_KEPT
    assert [memory() is None for memory in read] == [True] * MOST_KEPT + [False]


def test_what_was_postponed_comes_after_the_stream_that_it_was_postponed_on(monkeypatch):
    """Whoever issues it, from whatever stream: the forward is on the other one."""
    device = Device()
    side, after = device.side_stream(monkeypatch), []
    device.main.launch("a forward")
    side.postpone(lambda: after.append(device.now.after[device.main.number]))
    with device.on(device.stream("the scheduler's")):
        side.issue_postponed()
    assert after == [1]


def test_a_mark_holds_for_what_was_postponed_and_for_what_comes_next(monkeypatch):
    """Neither waits for the forward that was issued after the mark; what comes after both waits for it."""
    device = Device()
    side, after = device.side_stream(monkeypatch), []

    def issue():
        after.append(device.now.after[device.main.number])

    device.main.launch("a forward")
    side.postpone(issue)
    side.mark()
    device.main.launch("the next forward")
    side.issue_postponed()
    for _ in range(2):
        with side:
            issue()
    assert after == [1, 1, 2]
