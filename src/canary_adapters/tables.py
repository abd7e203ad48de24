"""Tables read by attention, as `SlotTable`. No copy, no sync: cheap enough to build before every forward.

All of them raise `AttachError` on a wrong dtype, device or shape. ``write_slots`` is the engine's own list of the new
tokens' slots (int32 or int64 ``[tokens]``), if there is one.
"""

from dataclasses import replace

from torch import Tensor

from canary_core.batch import SlotTable
from canary_core.errors import AttachError
from canary_core.region import require_index_tensor, require_tensor


def slot_table(
    entries: Tensor,
    rows: Tensor | None = None,
    write_slots: Tensor | None = None,
    pool_page: tuple[int, int] | None = None,
) -> SlotTable:
    """One slot per token: ``entries`` ``[table rows, width]``, batch row ``r`` uses table row ``rows[r]`` (default
    ``r``). ``pool_page`` as in `SlotTable`: entries number the rows of a pool in which layers interleave."""
    return block_table(entries, 1, rows, write_slots, pool_page)


def block_table(
    entries: Tensor,
    page_size: int,
    rows: Tensor | None = None,
    write_slots: Tensor | None = None,
    pool_page: tuple[int, int] | None = None,
) -> SlotTable:
    """One page of ``page_size`` tokens an entry, else as `slot_table`. ``write_slots`` are slots, not pages."""
    table = SlotTable(entries, rows, page_size=page_size, write_slots=write_slots, pool_page=pool_page)
    # Rows that are the same memory: such a list is ragged, not a table.
    if entries.shape[0] > 1 and entries.stride(0) < entries.shape[1]:
        raise AttachError(
            f"slot table: rows overlap in memory, got shape {tuple(entries.shape)} with strides {entries.stride()}; "
            f"use ragged_table for one flat list"
        )
    return table


def ragged_table(
    flat: Tensor,
    starts: Tensor,
    write_slots: Tensor | None = None,
    pool_page: tuple[int, int] | None = None,
) -> SlotTable:
    """The slots of all requests in one list: position ``p`` of batch row ``r`` is ``flat[starts[r] + p]``.

    flat: int32 or int64 ``[slots]``, contiguous. starts: int32 or int64 ``[batch rows]``, on the same device; a start
    may be negative where only elements within ``flat`` are read (a row that lists its last tokens only).
    """
    require_tensor("ragged table: flat", flat)
    require_index_tensor("ragged table: flat", flat, flat.device, dims=1)
    require_index_tensor("ragged table: starts", starts, flat.device, dims=1)
    # One row as wide as the list, with a stride of 1 between rows: element starts[r] + p is then the entry of (r, p).
    entries = flat.as_strided((1, flat.shape[0]), (1, 1))
    return SlotTable(entries, starts, write_slots=write_slots, pool_page=pool_page)


def ring_table(table: SlotTable, ring_slots: int) -> SlotTable:
    """``table`` read as a ring: position ``p`` lies at the table's position ``p % ring_slots``, and a forward stores at
    most the last ``ring_slots`` of its new tokens. For a `slot_table`, `block_table` or `ragged_table`."""
    if ring_slots < 1:
        raise AttachError(f"ring table: ring_slots must be at least 1, got {ring_slots}; give the ring's length")
    if table.ring_slots:
        raise AttachError(
            f"ring table: the table already is a ring of {table.ring_slots} slots, got ring_slots={ring_slots}; give "
            f"the plain table"
        )
    width = table.entries.shape[1]
    # A ragged list doesn't know how many of its slots are one row's.
    ragged = table.rows is not None and table.entries.shape[0] == 1 and table.entries.stride(0) == 1
    if not ragged and width * table.page_size < ring_slots:
        raise AttachError(
            f"ring table: a ring of {ring_slots} slots needs as many in each row, got {tuple(table.entries.shape)} "
            f"entries of {table.page_size} slot(s); check ring_slots and page_size"
        )
    return replace(table, ring_slots=ring_slots)
