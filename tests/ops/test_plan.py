"""How a table is read: which slot each position of each row has."""

from dataclasses import replace

import pytest
import torch

from canary_adapters import ragged_table
from canary_core import KVSource, Region, RegionKind, SlotTable
from canary_core.errors import AttachError
from canary_core.ops.torch import plan
from canary_core.records import Status


def region() -> Region:
    """100 rows."""
    return Region("full", 100, (KVSource(torch.zeros(100, 8), "k", 0, 32, 32),))


def look(table: SlotTable, row: list[int], position: list[int]) -> tuple[list[int], list[int]]:
    """Slots and statuses of the given places."""
    slot, status = plan.lookup(region(), table, plan.Places(torch.tensor(row), torch.tensor(position)))
    return slot.tolist(), status.tolist()


def test_a_short_list_holds_late_positions():
    """A row that lists its last tokens only has positions far beyond the list's length: its start is negative."""
    table = ragged_table(torch.tensor([7, 8, 9, 5]), torch.tensor([-64, 3]))
    assert look(table, [0, 0, 1], [64, 66, 0]) == ([7, 9, 5], [Status.OK] * 3)


def test_beyond_a_list_nothing_is_read():
    """Elements before and after the list are out of range."""
    table = ragged_table(torch.tensor([7, 8, 9, 5]), torch.tensor([-64, 3]))
    assert look(table, [0, 1], [63, 1]) == ([-1, -1], [Status.RANGE] * 2)


def test_a_row_ends_where_the_next_begins():
    """In a table of rows a position beyond the row's width is out of range, not the next row's."""
    table = SlotTable(torch.arange(8).view(2, 4))
    assert look(table, [0, 0, 1], [3, 4, 4]) == ([3, -1, -1], [Status.OK, Status.RANGE, Status.RANGE])
    assert look(SlotTable(torch.arange(4).view(4, 1)), [1, 1], [0, 1]) == ([1, -1], [Status.OK, Status.RANGE])


def test_a_token_reads_those_of_its_own_chunk_only():
    """Of chunks of 8 tokens: nothing at a chunk's beginning, then all since; what a window passes is another matter."""
    chunks = replace(region(), kind=RegionKind.WINDOW, window_tokens=8, chunked=True)
    prefix = torch.tensor([0, 5, 8, 13, 16])
    assert plan._read_first(chunks, prefix, torch.ones(5)).tolist() == [0, 0, 8, 8, 16]
    assert [chunks.passed(int(n)) for n in prefix] == [0, 0, 8, 8, 16]
    assert [replace(chunks, chunked=False).passed(int(n)) for n in prefix] == [0, 0, 1, 6, 9]
    with pytest.raises(AttachError, match="chunked goes with kind=WINDOW, got kind=full"):
        replace(region(), chunked=True)
