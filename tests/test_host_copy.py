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


@pytest.mark.gpu
def test_it_is_what_the_stream_had_come_to():
    """A change that is issued after the copy is not in it; shapes and types stay what they are."""
    flags = torch.zeros(3, dtype=torch.bool, device="cuda")
    # To load a kernel, or to pin memory, may wait for the device: both are done once before.
    for cycles in (1, SLEEP):
        numbers = torch.arange(1 << 20, device="cuda").view(1 << 10, -1)
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        slept = torch.cuda.Event()
        slept.record()
        numbers += 1
        copy = HostCopy(numbers, flags)
        numbers.zero_()
        early = not copy.arrived()
        in_time = not slept.query()
        if cycles == 1:
            copy.wait()
    if not in_time:
        pytest.skip("the host took longer to issue two copies than the device slept")
    assert early
    copy.wait()
    assert copy.arrived()
    assert torch.equal(copy.tensors[0], torch.arange(1, (1 << 20) + 1).view(1 << 10, -1))
    assert copy.tensors[1].tolist() == [False] * 3
    assert all(tensor.is_pinned() for tensor in copy.tensors)


@pytest.mark.gpu
def test_a_second_copy_takes_the_memory_of_the_first():
    """It has not arrived because the first one has, and brings what is there now."""
    numbers = torch.arange(1 << 16, device="cuda")
    copy = HostCopy(numbers)
    copy.wait()
    (host,) = copy.tensors
    torch.cuda._sleep(50_000_000)
    numbers += 1
    copy.start(numbers)
    assert not copy.arrived()
    copy.wait()
    assert copy.tensors[0] is host
    assert torch.equal(host, torch.arange(1, (1 << 16) + 1))


@pytest.mark.gpu
def test_what_is_given_up_is_kept_until_it_was_read():
    """Memory of a tensor that only the copy knows of is not handed out to somebody else before."""
    expected = torch.arange(1 << 20)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        numbers = torch.arange(1 << 20, device="cuda")
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda._sleep(10_000_000)
    copy = HostCopy(numbers)
    del numbers
    with torch.cuda.stream(side):
        other = torch.full((1 << 20,), -1, device="cuda")
    copy.wait()
    assert torch.equal(copy.tensors[0], expected)
    assert int(other[0]) == -1
