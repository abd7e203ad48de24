import pytest
import torch

from canary_adapters import block_table, ragged_table, ring_table, slot_table
from canary_core.batch import SlotTable

ENTRIES, STARTS = torch.zeros(4, 6, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)


def _slot(table: SlotTable, row: int, position: int) -> int:
    """The contract of `SlotTable`, element by element."""
    q = position % table.ring_slots if table.ring_slots else position
    table_row = row if table.rows is None else int(table.rows[row])
    element = table_row * table.entries.stride(0) + q // table.page_size
    entry = int(table.entries.as_strided((1,), (1,), table.entries.storage_offset() + element)[0])
    number = entry * table.page_size + q % table.page_size
    if table.pool_page is None:
        return number
    rows, slots = table.pool_page
    return number // rows * slots + number % rows


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slot_table(dtype):
    """One slot a token, rows picked from a larger table with spare columns."""
    entries = torch.randperm(63).to(dtype).view(7, 9)[:, 1:8]
    rows = torch.tensor([5, 0, 3], dtype=dtype)
    table = slot_table(entries, rows)
    assert [[_slot(table, r, p) for p in range(7)] for r in range(3)] == entries[rows.long()].tolist()
    plain = slot_table(entries)
    assert [[_slot(plain, r, p) for p in range(7)] for r in range(7)] == entries.tolist()


def test_block_table():
    """One page an entry; the engine's write list stays as it is."""
    pages, write = torch.tensor([[3, 1, 9], [2, 0, 4]]), torch.tensor([14, 10])
    table = block_table(pages, 5, torch.tensor([1, 0]), write)
    expected = [[int(pages[r, p // 5]) * 5 + p % 5 for p in range(15)] for r in (1, 0)]
    assert [[_slot(table, r, p) for p in range(15)] for r in range(2)] == expected
    assert table.write_slots is write


@pytest.mark.parametrize("lengths", [[3, 0, 5, 1], [1], [7]])
def test_ragged_table(lengths):
    """One flat list of all rows' slots; a slice of a longer one as well, and starts before it."""
    flat = torch.randperm(40)[4 : 4 + sum(lengths)]
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    table = ragged_table(flat, starts)
    for row, part in enumerate(flat.split(lengths)):
        assert [_slot(table, row, p) for p in range(lengths[row])] == part.tolist()
    tail = ragged_table(flat, starts - 10)
    assert _slot(tail, 0, 10) == int(flat[0])


def test_ring_table():
    """Position p lies at p % ring_slots of any table; a forward stores no more than the ring holds."""
    pages = torch.tensor([[3, 1], [2, 0]])
    ring = ring_table(block_table(pages, 4), 7)
    assert [_slot(ring, 1, p) for p in range(20)] == [int(pages[1, p % 7 // 4]) * 4 + p % 7 % 4 for p in range(20)]
    assert (ring.ring_slots, ring.stored_tokens) == (7, 7)
    flat = ring_table(ragged_table(torch.arange(10, 16), torch.tensor([0, 3])), 3)
    assert [_slot(flat, 1, p) for p in range(6)] == [13, 14, 15, 13, 14, 15]


def test_interleaved_pool():
    """Entries number the pool's rows; slots count the layer's own."""
    table = slot_table(torch.tensor([[25, 2, 48]]), pool_page=(24, 4))
    assert [_slot(table, 0, p) for p in range(3)] == [5, 2, 8]
    pages = block_table(torch.tensor([[6, 0]]), 4, pool_page=(24, 4))
    assert [_slot(pages, 0, p) for p in range(8)] == [4, 5, 6, 7, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("call", "facts"),
    [
        pytest.param(lambda: slot_table(ENTRIES.float()), ["int32 or int64", "float32"], id="entries_of_floats"),
        pytest.param(lambda: slot_table(ENTRIES[0]), ["2 dimension", "(6,)"], id="one_row_of_entries"),
        pytest.param(lambda: slot_table(ENTRIES.T), ["contiguous", "(1, 6)"], id="entries_transposed"),
        pytest.param(lambda: slot_table(ENTRIES, STARTS.float()), ["rows", "float32"], id="rows_of_floats"),
        pytest.param(
            lambda: slot_table(ENTRIES, write_slots=ENTRIES),
            ["write_slots", "(4, 6)"],
            id="write_slots_of_two_dimensions",
        ),
        pytest.param(
            lambda: slot_table(ENTRIES, STARTS.to("meta")), ["rows", "cpu", "meta"], id="rows_on_another_device"
        ),
        pytest.param(
            lambda: slot_table(ENTRIES[:1].expand(4, 6)), ["overlap", "(0, 1)", "ragged_table"], id="expanded_entries"
        ),
        pytest.param(lambda: slot_table(ENTRIES, pool_page=(4, 5)), ["pool_page", "(4, 5)"], id="pool_page"),
        pytest.param(lambda: block_table(ENTRIES, 0), ["page_size=0"], id="no_page_size"),
        pytest.param(lambda: ragged_table(ENTRIES, STARTS), ["flat", "(4, 6)"], id="flat_of_two_dimensions"),
        pytest.param(lambda: ragged_table(STARTS.short(), STARTS), ["flat", "int16"], id="flat_of_int16"),
        pytest.param(lambda: ragged_table(STARTS[::2], STARTS), ["flat", "contiguous"], id="flat_with_gaps"),
        pytest.param(
            lambda: ragged_table(STARTS, STARTS.to("meta")), ["starts", "meta"], id="starts_on_another_device"
        ),
        pytest.param(lambda: ring_table(slot_table(ENTRIES), 0), ["got 0"], id="no_ring"),
        pytest.param(lambda: ring_table(slot_table(ENTRIES), 7), ["7 slots", "(4, 6)"], id="ring_beyond_the_row"),
        pytest.param(
            lambda: ring_table(ring_table(slot_table(ENTRIES), 6), 3),
            ["ring of 6", "ring_slots=3"],
            id="ring_of_a_ring",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, facts, refusal):
    """Wrong dtypes, shapes, devices and sizes."""
    refusal(call, *facts)
