"""`ReadBack`: what the host takes from the device's counters and ring, and what it learns of what it missed."""

import pytest
import torch

from canary_core import CanaryConfig
from canary_core.guard.reporting.readback import ReadBack
from canary_core.ops.state import Shared
from canary_core.records import Counter, Row

RING_ROWS = 4


class Device:
    """Counters and a small ring, and a check that finds things."""

    def __init__(self, device: str = "cpu") -> None:
        self.shared = Shared.allocate(CanaryConfig.load(ring_rows=RING_ROWS), torch.device(device))
        self.read_back = ReadBack(self.shared)

    def find(self, *slots: int) -> None:
        """One finding in each of ``slots``, as `check` does it: a row is dropped where its place isn't free yet."""
        counters, ring = self.shared.counters, self.shared.ring
        for slot in slots:
            number = int(counters[Counter.ROWS])
            if number - int(counters[Counter.DRAINED]) < RING_ROWS:
                ring[number % RING_ROWS, Row.SLOT] = slot
                ring[number % RING_ROWS, Row.SEQUENCE] = number + 1
            counters[Counter.ROWS] += 1
        counters[Counter.CHECKED_FORWARDS] += 1


def slots_of(snapshot) -> list[int]:
    """Of the new rows."""
    return [row[Row.SLOT] for row in snapshot.rows]


def test_nothing_found_is_counters_alone():
    """A read brings the counters, no rows."""
    device = Device()
    device.find()
    snapshot = device.read_back.collect()
    assert (snapshot.rows, snapshot.dropped) == ([], 0)
    assert snapshot.counters[Counter.CHECKED_FORWARDS] == 1


def test_on_a_cpu_rows_are_there_at_once():
    """Each read brings what is new since the last one, in order, and gives its place in the ring free."""
    device = Device()
    device.find(7, 8, 9)
    assert slots_of(device.read_back.collect()) == [7, 8, 9]
    device.find(10, 11, 12)
    assert int(device.shared.counters[Counter.DRAINED]) == 3
    assert slots_of(device.read_back.collect()) == [10, 11, 12]
    snapshot = device.read_back.collect()
    assert (snapshot.rows, snapshot.dropped) == ([], 0)


def test_rows_are_taken_up_to_a_number():
    """Beside kernels that run, a read takes the rows of those that have ended; the others come with the next one."""
    device = Device()
    device.find(7, 8, 9)
    assert slots_of(device.read_back.collect_beside(2)) == [7, 8]
    assert device.read_back.seen == 2
    assert slots_of(device.read_back.collect_beside(2)) == []
    assert slots_of(device.read_back.collect()) == [9]


def test_more_findings_than_rows_are_counted_as_dropped():
    """The first ones stay; what is found after the read has room again."""
    device = Device()
    device.find(*range(10, 17))
    snapshot = device.read_back.collect()
    assert (slots_of(snapshot), snapshot.dropped) == ([10, 11, 12, 13], 3)
    device.find(20, 21)
    snapshot = device.read_back.collect()
    assert (slots_of(snapshot), snapshot.dropped) == ([20, 21], 0)


def test_a_read_that_waits_brings_the_same():
    """`collect_now` and `collect` take turns without a row twice, or none."""
    device = Device()
    device.find(1)
    assert slots_of(device.read_back.collect_now()) == [1]
    device.find(2)
    assert slots_of(device.read_back.collect()) == [2]
    assert device.read_back.collect_now().rows == []


@pytest.mark.gpu
def test_on_a_gpu_rows_come_one_read_after_their_number():
    """The first call only starts a read; the next one brings the counters, the one after it the rows that these told
    of."""
    device = Device("cuda")
    device.find(5, 6)
    told = []
    for _ in range(4):
        snapshot = device.read_back.collect()
        told.append(None if snapshot is None else (snapshot.counters[Counter.ROWS], slots_of(snapshot)))
        torch.cuda.synchronize()
    assert told == [None, (2, []), (2, [5, 6]), (2, [])]


@pytest.mark.gpu
def test_a_read_in_flight_is_never_waited_for():
    """While the device is busy `collect` gives nothing, and starts no other read."""
    device = Device("cuda")
    device.find()
    assert device.read_back.collect() is None
    torch.cuda.synchronize()
    assert device.read_back.collect() is not None
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    # Brings the read that is done, and starts one behind the sleep.
    assert device.read_back.collect() is not None
    assert device.read_back.collect() is None
    torch.cuda.synchronize()
    assert device.read_back.collect() is not None
