"""`HostCopy`: tensors come to the host without a wait, as they were when they were asked for."""

import pytest
import torch

from canary_core.runtime.host_copy import HostCopy


def test_on_a_cpu_nothing_is_copied():
    """The tensors are on the host already, so they have arrived."""
    numbers, flags = torch.arange(5), torch.ones(2, dtype=torch.bool)
    copy = HostCopy(numbers, flags)
    assert copy.arrived()
    copy.wait()
    assert [a is b for a, b in zip(copy.tensors, (numbers, flags), strict=True)] == [True, True]


def test_a_second_copy_goes_where_the_first_one_went():
    """On a CPU it is the tensors themselves, as they are now."""
    numbers = torch.arange(5)
    copy = HostCopy(numbers)
    numbers += 1
    copy.start(numbers)
    assert copy.arrived()
    assert copy.tensors[0].tolist() == [1, 2, 3, 4, 5]


def test_nothing_has_arrived_at_once():
    """A copy of no tensors."""
    assert HostCopy().arrived()


SLEEP = 400_000_000
"""Cycles of a GPU, a fifth of a second."""


def beside_a_sleep(issue):
    """What ``issue`` gave while the device slept all the time. Called again, with longer and longer sleeps, where the
    host was slower: on a busy machine, or where a kernel is loaded or memory pinned, which may wait for the device."""
    cycles = SLEEP
    while True:
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        slept = torch.cuda.Event()
        slept.record()
        given = issue()
        if not slept.query():
            return given
        cycles *= 4


@pytest.mark.gpu
def test_it_is_what_the_stream_had_come_to():
    """A change that is issued after the copy is not in it; shapes and types stay what they are."""
    flags = torch.zeros(3, dtype=torch.bool, device="cuda")
    numbers = torch.arange(1 << 20, device="cuda").view(1 << 10, -1)

    def issue() -> tuple[HostCopy, bool]:
        numbers.fill_(7)
        copy = HostCopy(numbers, flags)
        numbers.zero_()
        return copy, copy.arrived()

    copy, at_once = beside_a_sleep(issue)
    assert not at_once
    copy.wait()
    assert copy.arrived()
    assert torch.equal(copy.tensors[0], torch.full((1 << 10, 1 << 10), 7))
    assert copy.tensors[1].tolist() == [False] * 3
    assert all(tensor.is_pinned() for tensor in copy.tensors)


@pytest.mark.gpu
def test_a_second_copy_takes_the_memory_of_the_first():
    """It has not arrived because the first one has, and brings what is there now."""
    numbers = torch.arange(1 << 16, device="cuda")
    copy = HostCopy(numbers)
    copy.wait()
    (host,) = copy.tensors
    added = []

    def issue() -> bool:
        added.append(1)
        numbers.add_(1)
        copy.start(numbers)
        return copy.arrived()

    assert not beside_a_sleep(issue)
    copy.wait()
    assert copy.tensors[0] is host
    assert torch.equal(host, torch.arange(len(added), (1 << 16) + len(added)))
