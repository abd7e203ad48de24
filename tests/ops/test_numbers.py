"""How a number in an engine's table becomes a slot of a region."""

import pytest
import torch

from canary_core import AttachError, KVSource, Region, RegionKind
from canary_core.records import Status


def region(slots: int = 16, **about: object) -> Region:
    """Rows of one source."""
    return Region("r", slots, (KVSource(torch.zeros(slots, 8), "k", 0, 32, 32),), **about)


def test_numbers_are_slots_where_nothing_else_is_said():
    """Padding, the null slot and numbers beyond the pool are none."""
    numbers = torch.tensor([3, -1, 0, 15, 16, -7, 1 << 40], dtype=torch.int64)
    assert region(null_slot=0).slots_of(numbers).tolist() == [3, -1, -1, 15, -1, -1, -1]
    assert region().slots_of(torch.tensor([0, 5], dtype=torch.int32)).tolist() == [0, 5]


def test_a_null_block_is_several_slots():
    """Engines that pad with a whole block: none of its slots is a live token's, those beside it are."""
    padded = region(null_slot=4, null_slots=4)
    assert padded.slots_of(torch.tensor([3, 4, 5, 7, 8, 16])).tolist() == [3, -1, -1, -1, 8, -1]
    status = padded.status_of(torch.tensor([3, 4, 7, 8, 16, -2]))
    assert status.tolist() == [Status.OK, Status.NULL, Status.NULL, Status.OK, Status.RANGE, Status.NULL]
    assert list(padded.null_range) == [4, 5, 6, 7]
    assert list(region(null_slot=2).null_range) == [2]
    assert list(region().null_range) == []


@pytest.mark.parametrize(
    ("about", "says"),
    [
        ({"null_slot": 16}, "null_slot 16 is not one of its 16 slots"),
        ({"null_slot": -1}, "null_slot -1 is not one of its 16 slots"),
        ({"null_slot": 14, "null_slots": 4}, "null_slot 14 to 17 is not one of its 16 slots"),
        ({"null_slot": 0, "null_slots": 4, "null_reads": 5}, "null_reads counts some of the 4 null slots, got 5"),
        ({"null_reads": 1}, "null_reads counts some of the 0 null slots, got 1"),
        ({"null_slot": 0, "null_slots": 0}, "is at least 1, got null_slot=0 and null_slots=0"),
        ({"null_slots": 4}, "got null_slot=None and null_slots=4"),
    ],
)
def test_null_slots_that_are_no_slots_are_refused(about, says):
    """With the region's name, what was given, and what a region has."""
    with pytest.raises(AttachError, match="'r'") as refused:
        region(**about)
    assert says in str(refused.value)


def test_a_map_turns_numbers_into_slots():
    """A number that was evicted from the window has none, nor has one beyond the map."""
    slot_map = torch.tensor([0, 4, 0, 2, 99, -1], dtype=torch.int32)
    window = region(8, kind=RegionKind.WINDOW, window_tokens=4, slot_map=slot_map, null_slot=0)
    numbers = torch.tensor([1, 3, 2, 4, 5, 6, -1])
    assert window.slots_of(numbers).tolist() == [4, 2, -1, -1, -1, -1, -1]
    slot, status = window.resolve(numbers)
    assert slot.tolist() == [4, 2, 0, 99, -1, 6, -1]
    ok, null, beyond = Status.OK, Status.NULL, Status.RANGE
    assert status.tolist() == [ok, ok, null, beyond, null, beyond, null]


def test_tokens_of_a_group_share_a_slot():
    """Of a region that keeps one slot for several tokens."""
    compressed = region(kind=RegionKind.COMPRESSED, tokens_per_slot=4)
    assert compressed.slots_of(torch.tensor([0, 3, 4, 63, 64, -3])).tolist() == [0, 0, 1, 15, -1, -1]


def test_slots_of_a_page_take_turns_on_a_ring():
    """The page's number and the row of its ring make the slot."""
    ring = region(kind=RegionKind.RING, group_tokens=2, page_ring=(8, 4))
    assert ring.slots_of(torch.tensor([0, 5, 8, 15, 31, 32, -1])).tolist() == [0, 1, 4, 7, 15, -1, -1]


def test_rows_of_a_page_that_belong_to_others_are_out_of_range():
    """Pages of several layers in one tensor; what is found there is told as it is."""
    slot, status = region().resolve(torch.tensor([0, 4, 5, 7, 8, -1]), pool_page=(7, 5))
    assert slot.tolist() == [0, 4, 5, 5, 6, -1]
    assert status.tolist() == [Status.OK, Status.OK, Status.RANGE, Status.OK, Status.OK, Status.NULL]
