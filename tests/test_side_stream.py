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
