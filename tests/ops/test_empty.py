"""Batches with nothing in them, and batches that are not of this pool."""

import pytest
import torch
from support.toy import ToyEngine

from canary_core import AttachError, BatchView, Canary, CanaryConfig, SlotTable


def empty(rows: int, region: str = "full") -> BatchView:
    """A batch of ``rows`` padding rows."""
    lens = torch.zeros(rows, dtype=torch.int32)
    table = SlotTable(torch.zeros(max(rows, 1), 4, dtype=torch.int32))
    return BatchView(lens, lens, torch.zeros(0, dtype=torch.int64), lens, {region: table})


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("rows", [0, 3])
def test_a_batch_of_nothing_is_a_forward_without_slots(backend, rows):
    """No rows, or padding rows only: counted as checked, nothing recorded, nothing found."""
    engine = ToyEngine()
    canary = Canary([engine.region()], CanaryConfig.load(mode="raise", backend=backend, read_check=-1))
    canary.step.before(empty(rows))
    canary.step.after(empty(rows))
    canary.drain()
    stats = canary.stats()
    assert stats["checked_forwards"] == 1
    assert stats["checked_slots"] == stats["recorded_slots"] == stats["violations"] == 0


def test_a_table_of_an_unknown_region_is_refused_by_name():
    """A batch for another region names it and the known ones; in log mode Canary goes off and the engine goes on."""
    engine = ToyEngine()
    loud = Canary([engine.region()], CanaryConfig.load(mode="raise"))
    with pytest.raises(AttachError, match=r"'swa'.*'full'"):
        loud.step.before(empty(1, "swa"))
    quiet = Canary([engine.region()], CanaryConfig.load(mode="log"))
    quiet.step.before(empty(1, "swa"))
    assert not quiet.enabled


def test_more_rows_than_a_kernel_takes_are_refused():
    """The limit is named, not met in a kernel."""
    canary = Canary([ToyEngine().region()], CanaryConfig.load(mode="raise"))
    with pytest.raises(AttachError, match="65536 rows"):
        canary.step.before(empty(65537))
