"""The check of a long forward's readable slots: rows with the same table leave spans to the first of them, see
`canary_core.ops.readers`."""

import triton
import triton.language as tl

from canary_core.batch import BatchView, SlotTable
from canary_core.ops import hashing, readers
from canary_core.ops.kernels.common import find_entry
from canary_core.ops.kernels.fields import OwnTokens, TablePlaces
from canary_core.ops.kernels.judge import JUDGED_TILE, ended_at, is_suspect, judge
from canary_core.ops.kernels.launch import VARYING, Launcher, jit, programs, region_arguments
from canary_core.ops.kernels.words import (
    CLOCK_STEP,
    COUNT_CHECKED_SLOTS,
    COUNT_SHARED_SLOTS,
    COUNT_UNKNOWN_SLOTS,
    CURSOR_CHECK_TILES,
)
from canary_core.ops.launches import Arguments, TableLaunches
from canary_core.ops.state import RegionState

WARPS = 4
PROGRAMS_PER_PROCESSOR = 6

ANCHOR = tl.constexpr(hashing.COMMON_ANCHOR)


def may_be_long(state: RegionState, batch: BatchView, table: SlotTable, tile: int) -> bool:
    """Whether rows may share spans of tiles of ``tile`` slots, by what the host knows: sizes, and no lengths."""
    region, (width, _, _) = state.region, table.bounds
    if region.attention_window or table.ring_slots or not 1 < batch.rows <= readers.MOST_ROWS:
        return False
    return batch.rows * min(width * table.page_size, region.slots) >= 2 * readers.SPANS * tile


def check_long(state: RegionState, given: Arguments, launches: TableLaunches, tile: int) -> None:
    """After the launch of `check`, which leaves these slots alone: looks at the readable slots of a long forward, or at
    nothing. One launch; may be captured."""
    launcher = launches.by_op.get("check_long")
    if launcher is None:
        sizes = {
            "TILE": tile,
            "JUDGED": min(tile, JUDGED_TILE),
            "SPANS": readers.SPANS,
            "SPAN_TILES": readers.SPAN_TILES,
        }
        columns = programs(state, PROGRAMS_PER_PROCESSOR)
        every = {"TABLE": launches.constants, **sizes}
        launcher = Launcher(check_long_kernel, state, (region_arguments(state),), every, columns, num_warps=WARPS)
        launches.by_op["check_long"] = launcher
    launcher((launcher.columns, 1), given)


@jit(*VARYING)
def check_long_kernel(
    region, batch, p_expected, table, p_write_slots,
    expected_width, expected_stride, width, table_stride, extent, map_length, write_length, rows, tokens,
    TABLE: tl.constexpr, TILE: tl.constexpr, JUDGED: tl.constexpr, SPANS: tl.constexpr, SPAN_TILES: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs. Work items: spans of readable slots, row after row; none in a shorter forward."""
    BLOCKS: tl.constexpr = TILE // JUDGED
    tl.static_assert(SPAN_TILES * BLOCKS <= 32)
    own_tokens = OwnTokens(p_tokens=p_expected, width=expected_width, stride=expected_stride)
    places = TablePlaces(
        p_entries=table.p_entries, width=width, extent=extent, p_map=table.p_map,
        map_length=map_length, slots=region.slots, null_first=region.null_first, null_end=region.null_end,
    )  # fmt: skip
    o_row = tl.arange(0, TABLE.ROWS)
    b_prefix = tl.maximum(tl.load(batch.p_prefix + o_row, mask=o_row < rows, other=0).to(tl.int32), 0) // TABLE.GROUP
    b_tiles = (b_prefix + TILE - 1) // TILE
    n_read = tl.sum(b_tiles, 0)
    long = (n_read >= 2 * SPANS) & (tl.load(region.p_cursors + CURSOR_CHECK_TILES) >= n_read)
    span_tiles = tl.maximum(tl.minimum(n_read // SPANS, SPAN_TILES), 1)
    b_spans = tl.where(long, (b_tiles + (span_tiles - 1)) // span_tiles, 0)
    b_end = tl.cumsum(b_spans, 0)
    step = tl.load(region.p_clock + CLOCK_STEP) + 1
    checked = tl.zeros((), tl.int64)
    shared = tl.zeros((), tl.int64)
    for i in range(tl.program_id(0), tl.max(b_end, 0), tl.num_programs(0)):
        i_row = tl.sum((b_end <= i).to(tl.int32), 0)
        i_span = i - tl.max(tl.where(b_end <= i, b_end, 0), 0)
        prefix = tl.maximum(tl.load(batch.p_prefix + i_row).to(tl.int64), 0) // TABLE.GROUP
        begin = i_span.to(tl.int64) * span_tiles * TILE
        stop = begin + span_tiles * TILE
        end = tl.minimum(stop, prefix)
        checked += end - begin
        n_tiles = ((end - begin + (TILE - 1)) // TILE).to(tl.int32)
        whole = (span_tiles > 1) & (stop < prefix)
        if whole:
            left = follows_another(
                batch, own_tokens, places, table, i_row, begin, stop, table_stride, rows, TABLE, TILE
            )
            shared += tl.where(left, stop - begin, 0)
            n_tiles = tl.where(left, 0, n_tiles)
        row_first = first_element(table, i_row, True, table_stride)
        writer = tl.load(batch.p_writers + i_row).to(tl.int64)
        # A bit for each block of a suspect tile.
        suspects = tl.zeros((), tl.int32)
        for i_tile in range(n_tiles):
            start = begin + i_tile * TILE
            suspect = is_suspect(
                region, own_tokens, places, start, tl.minimum(start + TILE, prefix), prefix, prefix * 0, i_row,
                row_first, writer, anchor_of(batch, i_row), TABLE, TILE,
            )  # fmt: skip
            suspects |= tl.where(suspect, (1 << BLOCKS) - 1, 0) << (i_tile * BLOCKS)
        if suspects != 0:
            judge_readers(
                region, batch, own_tokens, places, table, i_row, begin, suspects, span_tiles, prefix, step,
                table_stride, rows, TABLE, TILE, JUDGED,
            )  # fmt: skip
    tl.atomic_add(region.p_counters + COUNT_CHECKED_SLOTS, checked)
    tl.atomic_add(region.p_counters + COUNT_SHARED_SLOTS, shared)


@triton.jit
def judge_readers(
    region, batch, own_tokens, places, table, i_row, begin, suspects, span_tiles, prefix, step, table_stride, rows,
    TABLE: tl.constexpr, TILE: tl.constexpr, JUDGED: tl.constexpr,
):  # fmt: skip
    """Judges and reports a row's suspect blocks of the span from ``begin`` on, a bit each; and those where anything was
    found once more for each row that leaves the span to this one."""
    stop = begin + span_tiles * TILE
    o_later = tl.full((TABLE.ROWS,), TABLE.ROWS, tl.int32)
    n_readers = tl.full((), 1, tl.int32)
    whole = (span_tiles > 1) & (stop < prefix)
    if whole:
        o_later = led_by(batch, places, table, i_row, stop, table_stride, rows, TABLE)
        n_readers += tl.sum((o_later < TABLE.ROWS).to(tl.int32), 0)
    reader = i_row
    found_blocks = tl.zeros((), tl.int32)
    n_unknown = tl.zeros((), tl.int64)
    for number in range(n_readers):
        reads = number == 0
        later = number > 0
        if later:
            reader = tl.min(tl.where(o_later > reader, o_later, TABLE.ROWS), 0)
            reads = follows(batch, own_tokens, places, table, reader, i_row, begin, stop, table_stride, TABLE, TILE)
        if reads:
            own = tl.maximum(tl.load(batch.p_prefix + reader).to(tl.int64), 0) // TABLE.GROUP
            row_first = first_element(table, reader, True, table_stride)
            writer = tl.load(batch.p_writers + reader).to(tl.int64)
            anchor = anchor_of(batch, reader)
            chain_hash, chained = ended_at(region, writer, own)
            for i_block in range(span_tiles * (TILE // JUDGED)):
                if ((suspects >> i_block) & 1) != 0:
                    position = begin + i_block * JUDGED + tl.arange(0, JUDGED).to(tl.int64)
                    found, unknown = judge(
                        region, own_tokens, places, position, tl.minimum(stop, own), own, own * 0, reader, row_first,
                        writer, anchor, chain_hash, chained, step, TABLE, JUDGED, False,
                    )  # fmt: skip
                    if number == 0:
                        n_unknown += unknown
                        found_blocks |= (found > 0).to(tl.int32) << i_block
            tl.atomic_add(region.p_counters + COUNT_UNKNOWN_SLOTS, n_unknown)
        if number == 0:
            suspects = found_blocks


@triton.jit
def first_element(table, row, m, stride):
    """The element of a table with the first entry of batch rows."""
    first = row.to(tl.int64)
    if table.p_rows is not None:
        first = tl.load(table.p_rows + row, mask=m, other=0).to(tl.int64)
    return first * stride


@triton.jit
def with_last_entry(batch, places, table, i_row, stop, table_stride, rows, TABLE: tl.constexpr):
    """The numbers of all rows, a block; and whether each reads beyond position ``stop``, and has the entry of ``i_row``
    at the place before."""
    o_row = tl.arange(0, TABLE.ROWS)
    m = o_row < rows
    prefix = tl.load(batch.p_prefix + o_row, mask=m, other=0).to(tl.int64) // TABLE.GROUP
    o_own, _, there = find_entry(places, first_element(table, i_row, True, table_stride), stop - 1, TABLE)
    o_entry, _, present = find_entry(places, first_element(table, o_row, m, table_stride), stop - 1, TABLE)
    present = present & (prefix > stop) & there
    own = tl.load(places.p_entries + o_own, mask=there, other=0)
    entry = tl.load(places.p_entries + o_entry, mask=present, other=0)
    return o_row, present & (entry == own)


@triton.jit
def follows_another(
    batch, own_tokens, places, table, i_row, begin, stop, table_stride, rows,
    TABLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Whether the row leaves the span ``[begin, stop)`` to its leader."""
    o_row, b_alike = with_last_entry(batch, places, table, i_row, stop, table_stride, rows, TABLE)
    i_leader = tl.min(tl.where(b_alike, o_row, i_row), 0)
    same = i_leader < i_row
    if same:
        same = follows(batch, own_tokens, places, table, i_row, i_leader, begin, stop, table_stride, TABLE, TILE)
    return same


@triton.jit
def led_by(batch, places, table, i_row, stop, table_stride, rows, TABLE: tl.constexpr):
    """The rows that may follow a row in the span that ends before ``stop``, others as ``TABLE.ROWS``: a block."""
    o_row, b_alike = with_last_entry(batch, places, table, i_row, stop, table_stride, rows, TABLE)
    leads = tl.min(tl.where(b_alike, o_row, i_row), 0) == i_row
    return tl.where(b_alike & leads & (o_row > i_row), o_row, TABLE.ROWS)


@triton.jit
def follows(
    batch, own_tokens, places, table, i_row, i_leader, begin, stop, table_stride,
    TABLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Whether two rows have the same entries for positions ``[begin, stop)`` and the one before, and the same tokens
    and anchor of their own there."""
    GROUP: tl.constexpr = TABLE.GROUP
    o = tl.arange(0, TILE).to(tl.int64)
    differs = tl.zeros([TILE], tl.int32)
    ours = first_element(table, i_row, True, table_stride)
    theirs = first_element(table, i_leader, True, table_stride)
    end = (stop * GROUP - 1) // TABLE.PAGE_SIZE + 1
    for page in range((tl.maximum(begin, 1) * GROUP - 1) // TABLE.PAGE_SIZE, end, TILE):
        m = page + o < end
        inside = m & (page + o < places.width)
        o_ours, o_theirs = ours + page + o, theirs + page + o
        there = inside & (o_ours >= 0) & (o_ours < places.extent)
        also = inside & (o_theirs >= 0) & (o_theirs < places.extent)
        entry = tl.load(places.p_entries + o_ours, mask=there, other=0)
        other = tl.load(places.p_entries + o_theirs, mask=also, other=0)
        differs = differs | (m & ((there & also & (entry == other)) == 0)).to(tl.int32)
    if own_tokens.p_tokens is not None:
        for position in range(begin, stop, TILE):
            o_own = (position + o + 1) * GROUP - 1
            m = (position + o < stop) & (o_own < own_tokens.width)
            p_token = own_tokens.p_tokens + o_own
            token = tl.load(p_token + i_row.to(tl.int64) * own_tokens.stride, mask=m, other=0)
            other = tl.load(p_token + i_leader.to(tl.int64) * own_tokens.stride, mask=m, other=0)
            differs = differs | (token != other).to(tl.int32)
    same = tl.max(differs, 0) == 0
    if batch.p_anchors is not None:
        same = same & ((begin > 0) | (tl.load(batch.p_anchors + i_row) == tl.load(batch.p_anchors + i_leader)))
    return same


@triton.jit
def anchor_of(batch, i_row):
    """``h[-1]`` of a row."""
    anchor = ANCHOR + tl.zeros((), tl.int64)
    if batch.p_anchors is not None:
        anchor = tl.load(batch.p_anchors + i_row)
    return anchor
