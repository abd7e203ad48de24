"""read_check: the kernel of `canary_core.ops.torch.read_check`. `fingerprint` explains how programs go over slots and
sources."""

import triton
import triton.language as tl

from canary_core.batch import BatchView, SlotTable
from canary_core.ops.kernels.common import find_entry, readable, resolve_entry
from canary_core.ops.kernels.compare import compare
from canary_core.ops.kernels.fields import TablePlaces
from canary_core.ops.kernels.fold import describe, spread
from canary_core.ops.kernels.launch import VARYING, batch_arguments, group_launches, jit
from canary_core.ops.kernels.tiles import READ_CHECK_TILES
from canary_core.ops.kernels.words import COUNT_CHECKED_BYTES, CURSOR_READ, CURSOR_READ_TILES, PHASE_PRE, STATUS_OK
from canary_core.ops.state import RegionState


def read_check(state: RegionState, batch: BatchView, table: SlotTable) -> None:
    """As `canary_core.ops.torch.read_check.read_check`. One launch a source group; may be captured."""
    given, launches = batch_arguments(state, batch, table)
    for launch in group_launches(state, "read_check", read_check_kernel, READ_CHECK_TILES, launches.constants):
        launch.launch((launch.blocks, launch.programs), given)


@jit(*VARYING)
def read_check_kernel(
    region, sources, batch, p_expected, table, p_write_slots,
    expected_width, expected_stride, width, table_stride, extent, map_length, write_length, rows, tokens,
    TABLE: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs, which share tiles of `SLOTS` readable places, by groups of sources. A program takes
    consecutive tiles and walks through the rows of the batch: its place is a few numbers, while tiles in turns would
    keep all rows in registers across the loop."""
    SLOTS: tl.constexpr = BYTES.SLOTS
    places = TablePlaces(
        p_entries=table.p_entries, width=width, extent=extent, p_map=table.p_map,
        map_length=map_length, slots=region.slots, null_first=region.null_first, null_end=region.null_end,
    )  # fmt: skip
    source = describe(sources, 0, BYTES)
    strip = describe(sources, len(BYTES.STRIPS) - 1, BYTES)
    i_row, i_inside, left = begin_stretch(region, batch, rows, TABLE, SLOTS)
    row_first, first, prefix = begin_row(batch, table, i_row, rows, table_stride, TABLE)
    position = first + i_inside * SLOTS
    o_place = tl.arange(0, SLOTS)
    entry = load_entries(places, row_first, position, prefix, TABLE, SLOTS)
    checked = tl.zeros((), tl.int64)
    while left > 0:
        o_position = position + o_place
        _element, column, m = find_entry(places, row_first, o_position, TABLE)
        m = (o_position < prefix) & m
        slot, status = resolve_entry(places, entry, column, m, TABLE)
        m = m & (status == STATUS_OK)
        this_position, this_row = position, tl.where(i_row < rows, i_row, i_row - rows)
        # The next tile's entries are asked for before this one's bytes, and looked at after them.
        left -= 1
        position += SLOTS
        # Twice round at most, should an engine change its lengths meanwhile: a kernel must end.
        while (position >= prefix) & (left > 0) & (i_row < 2 * rows):
            i_row += 1
            row_first, position, prefix = begin_row(batch, table, i_row, rows, table_stride, TABLE)
        entry = load_entries(places, row_first, position, prefix, TABLE, SLOTS)
        if BYTES.ABREAST > 0:
            b_left = m
            for _ in range(tl.sum(m.to(tl.int32), 0)):
                i_place = tl.min(tl.where(b_left, o_place, SLOTS), 0)
                one = o_place == i_place
                b_left = b_left & (one == 0)
                b_slot = spread(tl.sum(tl.where(one, slot, 0), 0), BYTES)
                checked += compare(
                    region, sources, source, strip, b_slot, b_slot >= 0, spread(this_position + i_place, BYTES),
                    batch.p_writers, this_row, PHASE_PRE, BYTES, True,
                )  # fmt: skip
        else:
            checked += compare(
                region, sources, source, strip, slot, m, this_position, batch.p_writers, this_row, PHASE_PRE, BYTES,
                True,
            )  # fmt: skip
    tl.atomic_add(region.p_counters + COUNT_CHECKED_BYTES, checked)


@triton.jit
def begin_stretch(region, batch, rows, TABLE: tl.constexpr, SLOTS: tl.constexpr):
    """The first tile of the program: its row of the batch, and its number within the row; and the number of consecutive
    tiles. After the last tile of the last row comes the first of the first row."""
    o_row = tl.arange(0, TABLE.ROWS)
    b_prefix = tl.maximum(tl.load(batch.p_prefix + o_row, mask=o_row < rows, other=0).to(tl.int32), 0) // TABLE.GROUP
    b_first = tl.zeros_like(b_prefix)
    if TABLE.WINDOW > 0:
        b_first = b_prefix - readable(b_prefix, tl.load(batch.p_new + o_row, mask=o_row < rows, other=0), TABLE)
    b_tiles = (b_prefix - b_first + SLOTS - 1) // SLOTS
    b_tile_end = tl.cumsum(b_tiles, 0)
    total = tl.sum(b_tiles, 0)
    tiles = tl.minimum(tl.load(region.p_cursors + CURSOR_READ_TILES), total).to(tl.int32)
    # `check` has already moved the cursor past this forward's tiles.
    begin = ((tl.load(region.p_cursors + CURSOR_READ) - tiles + total) % tl.maximum(total, 1)).to(tl.int32)
    # Shared out as evenly as can be: the first ones take one more.
    pid = tl.program_id(1)
    each = tiles // tl.num_programs(1)
    over = tiles - each * tl.num_programs(1)
    i_tile = begin + pid * each + tl.minimum(pid, over)
    i_tile = tl.where(i_tile < total, i_tile, i_tile - total)
    i_row = tl.sum((b_tile_end <= i_tile).to(tl.int32), 0)
    i_inside = i_tile - tl.max(tl.where(b_tile_end <= i_tile, b_tile_end, 0), 0)
    return i_row, i_inside, each + (pid < over).to(tl.int32)


@triton.jit
def begin_row(batch, table, i_row, rows, table_stride, TABLE: tl.constexpr):
    """The row's first element in the table, the first place to read, and the end of the places; none for no row. After
    the last row comes the first again."""
    i_row = tl.where(i_row < rows, i_row, i_row - rows)
    prefix = tl.maximum(tl.load(batch.p_prefix + i_row, mask=i_row < rows, other=0).to(tl.int32), 0) // TABLE.GROUP
    first = tl.zeros_like(prefix)
    if TABLE.WINDOW > 0:
        first = prefix - readable(prefix, tl.load(batch.p_new + i_row, mask=i_row < rows, other=0), TABLE)
    row = i_row.to(tl.int64)
    if table.p_rows is not None:
        row = tl.load(table.p_rows + i_row, mask=i_row < rows, other=0).to(tl.int64)
    return row * table_stride, first, prefix


@triton.jit
def load_entries(places, row_first, position, prefix, TABLE: tl.constexpr, SLOTS: tl.constexpr):
    """The table's entries of a tile, for the places from ``position`` to before ``prefix``."""
    o_position = position + tl.arange(0, SLOTS)
    element, _column, m = find_entry(places, row_first, o_position, TABLE)
    return tl.load(places.p_entries + element, mask=(o_position < prefix) & m, other=-1)
