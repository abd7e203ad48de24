"""`BatchRows`: rows of a batch's requests, kept from one forward to the next, for each stream."""

import pytest
import torch

from canary_adapters import BatchRows
from canary_core.runtime import streams

REQUESTS = ["a", "b"]


def test_the_same_requests_keep_their_rows():
    """Others, and the same in another order, have rows of their own; after `clear` all are made anew."""
    rows, made = BatchRows(torch.device("cpu")), []

    def make() -> torch.Tensor:
        made.append(len(made))
        return torch.tensor([len(made)])

    kept = rows.of(REQUESTS, make)
    assert rows.of(list(REQUESTS), make) is kept
    assert rows.of(REQUESTS[::-1], make) is not kept
    rows.of(REQUESTS, make)
    rows.clear()
    rows.of(REQUESTS, make)
    assert len(made) == 4


def test_each_stream_has_its_own_rows(monkeypatch):
    """Streams by their handles; without a GPU those are made up."""
    handle = 1
    monkeypatch.setattr(streams, "_on_gpu", lambda device: True)
    monkeypatch.setattr(streams, "current_handle", lambda device: handle)
    rows = BatchRows(torch.device("cpu"))
    first = rows.of(REQUESTS, lambda: torch.tensor([1]))
    handle = 2
    other = rows.of(REQUESTS, lambda: torch.tensor([2]))
    assert other is not first
    handle = 1
    assert rows.of(REQUESTS, lambda: torch.tensor([3])) is first


@pytest.mark.gpu
def test_a_stream_reads_no_rows_that_another_one_has_yet_to_copy():
    """The stream that was first is busy, so its copy comes late."""
    device = torch.device("cuda")
    rows, busy, side = BatchRows(device), torch.cuda.Stream(device), torch.cuda.Stream(device)

    def make() -> torch.Tensor:
        return torch.arange(1000).pin_memory().to(device, non_blocking=True)

    with torch.cuda.stream(busy):
        torch.cuda._sleep(1 << 31)
        rows.of(REQUESTS, make)
    with torch.cuda.stream(side):
        found = rows.of(REQUESTS, make).clone()
    side.synchronize()
    assert not busy.query()
    assert torch.equal(found.cpu(), torch.arange(1000))
