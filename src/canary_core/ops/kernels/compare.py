"""read_check, scrub, verify: the kernels of `canary_core.ops.torch.compare`, and their common part: the bytes of a tile
against the recorded fingerprints. `fingerprint` explains how programs go over slots and sources."""

import triton
import triton.language as tl
from torch import Tensor

from canary_core.batch import BatchView, SlotTable
from canary_core.ops.kernels.common import (
    ARRIVED,
    PARKED,
    READ_STATE,
    STATE_VALUES,
    STATUS_OK,
    WRITTEN,
    find_entry,
    readable,
    report_record,
    resolve_entry,
    split_head,
)
from canary_core.ops.kernels.fold import STRIP, describe, fold, fold_abreast, load_strip, spread
from canary_core.ops.kernels.launch import VARYING, arguments, batch_arguments, group_launches, jit, launch_over
from canary_core.ops.kernels.tiles import READ_CHECK_TILES, SCRUB_TILES, VERIFY_TILES
from canary_core.ops.state import RegionState
from canary_core.records import (
    COUNTERS,
    GAUGES,
    POSITION,
    PROBE,
    RECORD_WORDS,
    Clock,
    Counter,
    Cursor,
    Kind,
    Phase,
    ScrubWord,
)

LIST_TILE = tl.constexpr(1024)
"""Slots passed at a time by the listing program."""

CLOCK_NEXT = tl.constexpr(int(Clock.NEXT))
CURSOR_SCRUB = tl.constexpr(int(Cursor.SCRUB))
CURSOR_SCRUB_NEXT = tl.constexpr(int(Cursor.SCRUB_NEXT))
CURSOR_SCRUB_SLOTS = tl.constexpr(int(Cursor.SCRUB_SLOTS))
CURSOR_SCRUB_RUNNING = tl.constexpr(int(Cursor.SCRUB_RUNNING))
CURSOR_SCRUB_PASS = tl.constexpr(int(Cursor.SCRUB_PASS))
PLACE_LIST = tl.constexpr(int(ScrubWord.LIST))
PLACE_RUNNING = tl.constexpr(int(ScrubWord.RUNNING))
PLACE_RUNNING_LISTED = tl.constexpr(int(ScrubWord.RUNNING_LISTED))
PLACE_PARKED = tl.constexpr(int(ScrubWord.PARKED))
PLACE_PARKED_LISTED = tl.constexpr(int(ScrubWord.PARKED_LISTED))
CURSOR_PROBE = tl.constexpr(int(Cursor.PROBE))
COUNTERS_END = tl.constexpr(COUNTERS)
REGION_GAUGES = tl.constexpr(GAUGES)
RECORD = tl.constexpr(RECORD_WORDS)
POSITION_WORD = tl.constexpr(POSITION)
CURSOR_READ = tl.constexpr(int(Cursor.READ))
CURSOR_READ_TILES = tl.constexpr(int(Cursor.READ_TILES))
COUNT_CHECKED_BYTES = tl.constexpr(int(Counter.CHECKED_BYTES))
COUNT_SCRUBBED_SLOTS = tl.constexpr(int(Counter.SCRUBBED_SLOTS))
KIND_BYTES = tl.constexpr(int(Kind.BYTES))
KIND_PROBE = tl.constexpr(PROBE)
PHASE_PRE = tl.constexpr(int(Phase.PRE_FORWARD))
PHASE_SCRUB = tl.constexpr(int(Phase.SCRUB))
PHASE_EVENT = tl.constexpr(int(Phase.EVENT))


def read_check(state: RegionState, batch: BatchView, table: SlotTable) -> None:
    """As `canary_core.ops.torch.compare.read_check`. One launch a source group; may be captured."""
    given, launches = batch_arguments(state, batch, table)
    for launch in group_launches(state, "read_check", read_check_kernel, READ_CHECK_TILES, launches.constants):
        launch.launch((launch.blocks, launch.programs), given)


def scrub(state: RegionState, probed: bool = False) -> None:
    """As `canary_core.ops.torch.compare.scrub`. One launch a source group; may be captured. ``probed`` is a kernel of
    its own, so that the usual one pays nothing."""
    given = state.launches.listed
    if given is None:
        given = state.launches.listed = arguments(state.listed)
    op, kernel = ("scrub_probed", scrub_probed_kernel) if probed else ("scrub", scrub_kernel)
    for launch in group_launches(state, op, kernel, SCRUB_TILES):
        # One more program lists what the next scrub compares.
        launch.launch((launch.blocks, 1 + launch.programs), given)


def verify(state: RegionState, slots: Tensor) -> None:
    """As `canary_core.ops.torch.compare.verify`. One launch a source group."""
    launch_over(state, "verify", verify_kernel, VERIFY_TILES, slots)


@jit(*VARYING)
def read_check_kernel(
    p_records, p_words, p_claims, p_plan, p_heads, p_chains, p_cursors, p_counters, p_clock, p_ring, ring_rows, region,
    slots, null_first, null_end,
    p_descriptors, p_columns, p_keys, p_salts, p_fingerprints, sources,
    p_prefix, p_new, p_writers, p_anchors, p_tokens, p_positions, p_expected, p_table, p_rows, p_map, p_write_slots,
    expected_width, expected_stride, width, table_stride, extent, map_length, write_length, rows, tokens,
    PAGE_SIZE: tl.constexpr, RING: tl.constexpr, STORED: tl.constexpr, WINDOW: tl.constexpr, ALIGN: tl.constexpr,
    POOL: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    STRIPS: tl.constexpr, SLOTS: tl.constexpr, ABREAST: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs, which share tiles of `SLOTS` readable places, by groups of sources. A program takes
    consecutive tiles and walks through the rows of the batch: its place is a few numbers, while tiles in turns would
    keep all rows in registers across the loop."""
    N: tl.constexpr = len(STRIPS) // STRIP
    source = describe(p_descriptors, p_columns, p_salts, N, 0, ABREAST)
    strip = describe(p_descriptors, p_columns, p_salts, N, N - 1, ABREAST)
    i_row, i_inside, left = begin_stretch(p_cursors, p_prefix, p_new, rows, WINDOW, ALIGN, GROUP, ROWS, SLOTS)
    row_first, first, prefix = begin_row(p_prefix, p_new, p_rows, i_row, rows, table_stride, WINDOW, ALIGN, GROUP)
    position = first + i_inside * SLOTS
    o_place = tl.arange(0, SLOTS)
    entry = load_entries(p_table, row_first, position, prefix, width, extent, PAGE_SIZE, RING, GROUP, SLOTS)
    checked = tl.zeros((), tl.int64)
    while left > 0:
        o_position = position + o_place
        _element, column, m = find_entry(row_first, o_position, width, extent, PAGE_SIZE, RING, GROUP)
        m = (o_position < prefix) & m
        slot, status = resolve_entry(
            entry, column, p_map, map_length, slots, null_first, null_end, m, PAGE_SIZE, POOL, GROUP
        )  # fmt: skip
        m = m & (status == STATUS_OK)
        this_position, this_row = position, tl.where(i_row < rows, i_row, i_row - rows)
        # The next tile's entries are asked for before this one's bytes, and looked at after them.
        left -= 1
        position += SLOTS
        # Twice round at most, should an engine change its lengths meanwhile: a kernel must end.
        while (position >= prefix) & (left > 0) & (i_row < 2 * rows):
            i_row += 1
            row_first, position, prefix = begin_row(
                p_prefix, p_new, p_rows, i_row, rows, table_stride, WINDOW, ALIGN, GROUP
            )
        entry = load_entries(p_table, row_first, position, prefix, width, extent, PAGE_SIZE, RING, GROUP, SLOTS)
        if ABREAST[0] > 0:
            b_left = m
            for _ in range(tl.sum(m.to(tl.int32), 0)):
                i_place = tl.min(tl.where(b_left, o_place, SLOTS), 0)
                one = o_place == i_place
                b_left = b_left & (one == 0)
                b_slot = spread(tl.sum(tl.where(one, slot, 0), 0), ABREAST)
                checked += compare(
                    p_descriptors, source, strip, p_keys, p_fingerprints, sources, p_records, p_counters, p_clock,
                    p_ring, ring_rows, region, b_slot, b_slot >= 0, spread(this_position + i_place, ABREAST),
                    p_writers, this_row, PHASE_PRE, STRIPS, True,
                )  # fmt: skip
        else:
            checked += compare(
                p_descriptors, source, strip, p_keys, p_fingerprints, sources, p_records, p_counters, p_clock, p_ring,
                ring_rows, region, slot, m, this_position, p_writers, this_row, PHASE_PRE, STRIPS, True,
            )  # fmt: skip
    tl.atomic_add(p_counters + COUNT_CHECKED_BYTES, checked)


@triton.jit
def begin_stretch(
    p_cursors, p_prefix, p_new, rows,
    WINDOW: tl.constexpr, ALIGN: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The first tile of the program: its row of the batch, and its number within the row; and the number of consecutive
    tiles. After the last tile of the last row comes the first of the first row."""
    o_row = tl.arange(0, ROWS)
    b_prefix = tl.maximum(tl.load(p_prefix + o_row, mask=o_row < rows, other=0).to(tl.int32), 0) // GROUP
    b_first = tl.zeros_like(b_prefix)
    if WINDOW > 0:
        b_first = b_prefix - readable(b_prefix, tl.load(p_new + o_row, mask=o_row < rows, other=0), WINDOW, ALIGN)
    b_tiles = (b_prefix - b_first + SLOTS - 1) // SLOTS
    b_tile_end = tl.cumsum(b_tiles, 0)
    total = tl.sum(b_tiles, 0)
    tiles = tl.minimum(tl.load(p_cursors + CURSOR_READ_TILES), total).to(tl.int32)
    # `check` has already moved the cursor past this forward's tiles.
    begin = ((tl.load(p_cursors + CURSOR_READ) - tiles + total) % tl.maximum(total, 1)).to(tl.int32)
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
def begin_row(
    p_prefix, p_new, p_rows, i_row, rows, table_stride,
    WINDOW: tl.constexpr, ALIGN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The row's first element in the table, the first place to read, and the end of the places; none for no row. After
    the last row comes the first again."""
    i_row = tl.where(i_row < rows, i_row, i_row - rows)
    prefix = tl.maximum(tl.load(p_prefix + i_row, mask=i_row < rows, other=0).to(tl.int32), 0) // GROUP
    first = tl.zeros_like(prefix)
    if WINDOW > 0:
        first = prefix - readable(prefix, tl.load(p_new + i_row, mask=i_row < rows, other=0), WINDOW, ALIGN)
    row = i_row.to(tl.int64)
    if p_rows is not None:
        row = tl.load(p_rows + i_row, mask=i_row < rows, other=0).to(tl.int64)
    return row * table_stride, first, prefix


@triton.jit
def load_entries(
    p_table, row_first, position, prefix, width, extent,
    PAGE_SIZE: tl.constexpr, RING: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The table's entries of a tile, for the places from ``position`` to before ``prefix``."""
    o_position = position + tl.arange(0, SLOTS)
    element, _column, m = find_entry(row_first, o_position, width, extent, PAGE_SIZE, RING, GROUP)
    return tl.load(p_table + element, mask=(o_position < prefix) & m, other=-1)


@triton.jit
def scrub_kernel(
    p_records, p_words, p_claims, p_plan, p_heads, p_chains, p_cursors, p_counters, p_clock, p_ring, ring_rows, region,
    slots, null_first, null_end,
    p_descriptors, p_columns, p_keys, p_salts, p_fingerprints, sources,
    p_listed,
    STRIPS: tl.constexpr, SLOTS: tl.constexpr, ABREAST: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs but one over tiles of `SLOTS` listed slots, by groups of sources. The first program
    of the first group makes the next list, since listing takes the longest."""
    scrub_tiles(
        p_words, p_cursors, p_listed, region, slots, p_descriptors, p_columns, p_keys, p_salts, p_fingerprints, sources,
        p_records, p_counters, p_clock, p_ring, ring_rows, STRIPS, SLOTS, ABREAST, False,
    )  # fmt: skip


@triton.jit
def scrub_probed_kernel(
    p_records, p_words, p_claims, p_plan, p_heads, p_chains, p_cursors, p_counters, p_clock, p_ring, ring_rows, region,
    slots, null_first, null_end,
    p_descriptors, p_columns, p_keys, p_salts, p_fingerprints, sources,
    p_listed,
    STRIPS: tl.constexpr, SLOTS: tl.constexpr, ABREAST: tl.constexpr,
):  # fmt: skip
    """As `scrub_kernel`, with the probe of `Cursor.PROBE`."""
    scrub_tiles(
        p_words, p_cursors, p_listed, region, slots, p_descriptors, p_columns, p_keys, p_salts, p_fingerprints, sources,
        p_records, p_counters, p_clock, p_ring, ring_rows, STRIPS, SLOTS, ABREAST, True,
    )  # fmt: skip


@triton.jit
def scrub_tiles(
    p_words, p_cursors, p_listed, region, slots, p_descriptors, p_columns, p_keys, p_salts, p_fingerprints, sources,
    p_records, p_counters, p_clock, p_ring, ring_rows,
    STRIPS: tl.constexpr, SLOTS: tl.constexpr, ABREAST: tl.constexpr, PROBED: tl.constexpr,
):  # fmt: skip
    """One program of a scrub: lists the next slots, or compares tiles of listed slots."""
    N: tl.constexpr = len(STRIPS) // STRIP
    source = describe(p_descriptors, p_columns, p_salts, N, 0, ABREAST)
    strip = describe(p_descriptors, p_columns, p_salts, N, N - 1, ABREAST)
    if tl.program_id(1) == 0:
        # Other sources have a launch or programs of their own; one list is for all of them.
        first = (source[0] == 0) | (strip[0] == 0)
        if ABREAST[0] > 0:
            first = tl.max(first.to(tl.int32), 0) > 0
        if first:
            list_next(p_words, p_cursors, p_counters, p_listed, region, slots)
    else:
        place = tl.load(p_cursors + CURSOR_SCRUB + PLACE_LIST)
        count = (place & 0xFFFFFFFF).to(tl.int32)
        probe = None
        if PROBED:
            probe = tl.load(p_cursors + CURSOR_PROBE)
        p_slots = p_listed + (place >> 32) * slots
        checked = tl.zeros((), tl.int64)
        for i in range(tl.program_id(1) - 1, (count + SLOTS - 1) // SLOTS, tl.num_programs(1) - 1):
            o_slot = i * SLOTS + tl.arange(0, SLOTS)
            if ABREAST[0] > 0:
                o_slot = spread(i, ABREAST)
            m = o_slot < count
            slot = tl.load(p_slots + o_slot, mask=m, other=0).to(tl.int64)
            b_probe = None
            if PROBED:
                b_probe = tl.where(i == 0, probe, 0)
            checked += compare(
                p_descriptors, source, strip, p_keys, p_fingerprints, sources, p_records, p_counters, p_clock, p_ring,
                ring_rows, region, slot, m, tl.full(o_slot.shape, -1, tl.int64), None, 0, PHASE_SCRUB,
                STRIPS, True, b_probe,
            )  # fmt: skip
        tl.atomic_add(p_counters + COUNT_CHECKED_BYTES, checked)


@triton.jit
def list_next(p_words, p_cursors, p_counters, p_listed, region, slots):
    """As `canary_core.ops.torch.compare._list_next`, by one program. Reads one word for each slot passed."""
    p_now, p_next = p_cursors + CURSOR_SCRUB, p_cursors + CURSOR_SCRUB_NEXT
    half = 1 - (tl.load(p_now + PLACE_LIST) >> 32)
    p_half = p_listed + half * slots
    most = tl.minimum(tl.load(p_cursors + CURSOR_SCRUB_SLOTS), slots).to(tl.int32)
    share = tl.minimum(tl.load(p_cursors + CURSOR_SCRUB_RUNNING), most).to(tl.int32)
    passes = tl.minimum(tl.load(p_cursors + CURSOR_SCRUB_PASS), slots).to(tl.int32)
    running, parked = tl.load(p_now + PLACE_RUNNING), tl.load(p_now + PLACE_PARKED)
    listed = tl.zeros((), tl.int32)
    n_running = tl.zeros((), tl.int32)
    passed_running = tl.zeros((), tl.int32)
    passed_parked = tl.zeros((), tl.int32)
    # Running ones up to their share, parked ones, then running ones again.
    for turn in range(3):
        is_parked = turn == 1
        sort = tl.where(is_parked, WRITTEN | PARKED, WRITTEN)
        begin = (tl.where(is_parked, parked, running) % slots).to(tl.int32)
        passed = tl.where(is_parked, passed_parked, passed_running)
        room = tl.where(turn == 0, share, most) - listed
        found = tl.zeros((), tl.int32)
        while (passed < passes) & (found < room):
            o_tile = tl.arange(0, LIST_TILE)
            m = passed + o_tile < passes
            slot = begin + passed + o_tile
            slot = tl.where(slot < slots, slot, slot - slots)
            word = tl.load(p_words + slot.to(tl.int64) * RECORD + POSITION_WORD, mask=m, other=0)
            is_sort = m & ((word & (STATE_VALUES - 1 - ARRIVED)) == sort)
            rank = tl.cumsum(is_sort.to(tl.int32), 0)
            left = room - found
            taken = is_sort & (rank <= left)
            tl.store(p_half + listed + found + rank - 1, slot, mask=taken)
            # All are passed, unless there is no room for the next one.
            last = tl.max(tl.where(taken & (rank == left), o_tile + 1, 0), 0)
            passed = tl.where(last > 0, passed + last, tl.minimum(passed + LIST_TILE, passes))
            found += tl.minimum(tl.max(rank, 0), left)
        passed_running = tl.where(is_parked, passed_running, passed)
        passed_parked = tl.where(is_parked, passed, passed_parked)
        n_running += tl.where(is_parked, 0, found)
        listed += found
    running += passed_running
    parked += passed_parked
    running_listed = tl.load(p_now + PLACE_RUNNING_LISTED) + n_running
    parked_listed = tl.load(p_now + PLACE_PARKED_LISTED) + (listed - n_running)
    tl.store(p_next + PLACE_LIST, (half << 32) + listed)
    tl.store(p_next + PLACE_RUNNING, running)
    tl.store(p_next + PLACE_RUNNING_LISTED, running_listed)
    tl.store(p_next + PLACE_PARKED, parked)
    tl.store(p_next + PLACE_PARKED_LISTED, parked_listed)
    p_gauges = p_counters + COUNTERS_END + region * REGION_GAUGES - PLACE_RUNNING
    tl.store(p_gauges + PLACE_RUNNING, running)
    tl.store(p_gauges + PLACE_RUNNING_LISTED, running_listed)
    tl.store(p_gauges + PLACE_PARKED, parked)
    tl.store(p_gauges + PLACE_PARKED_LISTED, parked_listed)
    tl.atomic_add(p_counters + COUNT_SCRUBBED_SLOTS, passed_running.to(tl.int64))


@jit("count")
def verify_kernel(
    p_records, p_words, p_claims, p_plan, p_heads, p_chains, p_cursors, p_counters, p_clock, p_ring, ring_rows, region,
    slots, null_first, null_end,
    p_descriptors, p_columns, p_keys, p_salts, p_fingerprints, sources,
    p_slots, count,
    STRIPS: tl.constexpr, SLOTS: tl.constexpr, ABREAST: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs over tiles of `SLOTS` of the listed slots, by groups of sources."""
    N: tl.constexpr = len(STRIPS) // STRIP
    source = describe(p_descriptors, p_columns, p_salts, N, 0, ABREAST)
    strip = describe(p_descriptors, p_columns, p_salts, N, N - 1, ABREAST)
    checked = tl.zeros((), tl.int64)
    for i in range(tl.program_id(1), (count + SLOTS - 1) // SLOTS, tl.num_programs(1)):
        o_slot = i * SLOTS + tl.arange(0, SLOTS)
        if ABREAST[0] > 0:
            o_slot = spread(i, ABREAST)
        slot = tl.load(p_slots + o_slot, mask=o_slot < count, other=-1).to(tl.int64)
        m = (slot >= 0) & (slot < slots)
        checked += compare(
            p_descriptors, source, strip, p_keys, p_fingerprints, sources, p_records, p_counters, p_clock, p_ring,
            ring_rows, region, slot, m, tl.full(o_slot.shape, -1, tl.int64), None, 0, PHASE_EVENT, STRIPS, False,
        )  # fmt: skip
    tl.atomic_add(p_counters + COUNT_CHECKED_BYTES, checked)


@triton.jit
def compare(
    p_descriptors, source, strip, p_keys, p_fingerprints, sources, p_records, p_counters, p_clock, p_ring, ring_rows,
    region, slot, m, position, p_writers, i_row, phase,
    STRIPS: tl.constexpr, EAGER: tl.constexpr, probe=None,
):  # fmt: skip
    """Compares the bytes of written slots, each a row of the tile, with their fingerprints and reports BYTES; returns
    the number of bytes compared. ``source``: see `fold.describe`; ``strip``: the narrow source beside the wide one, if
    `STRIPS` has one. A fingerprint of 0 is unknown and not compared. ``probe``: the source, plus one, whose fingerprint
    of the tile's first slot reports PROBE; 0 for none. A probe inverts all bits of the whole tile's fingerprints, so
    that the tile is looked at closely.

    Only after a difference, which is rare, the kernel asks whether the slot was written and its fingerprint known: so
    these checks cost other slots no register. Two exceptions: without `EAGER` (for tiles with many empty slots) the
    kernel first asks whether a slot was written; and for long slots, slow to read and mostly unknown, whether the
    fingerprint is known.
    """
    ABREAST: tl.constexpr = len(source[0].shape) > 0
    if not EAGER:
        m = m & is_written(tl.load(p_records + slot * 4, mask=m, other=0))
    present = m & (slot.to(tl.int32) % STRIPS[0] < source[6])
    old = tl.load(p_fingerprints + slot * sources + source[0], mask=present, other=0)
    if probe is not None:
        flip = tl.where(probe != 0, -1, 0).to(tl.int64)
        old = old ^ flip
    if ABREAST:
        present = present & (old != 0)
    if len(STRIPS) > STRIP:
        # Asked for before the wide source's bytes and looked at after them, so that there is one wait, not two.
        strip_present = m & (slot.to(tl.int32) % STRIPS[STRIP] < strip[6])
        strip_old = tl.load(p_fingerprints + slot * sources + strip[0], mask=strip_present, other=0)
        if probe is not None:
            strip_old = strip_old ^ flip
        strip_words, strip_keys = load_strip(strip, p_keys, slot, strip_present, STRIPS)
    if ABREAST:
        value, _odd = fold_abreast(p_descriptors, source, p_keys, slot, present, STRIPS, 0, False)
    else:
        value, _odd = fold(p_descriptors, source, p_keys, slot, present, STRIPS, 0, True, False)
    differs = present & (value != old)
    suspect = differs
    if len(STRIPS) > STRIP:
        strip_value = strip[1] + tl.sum(strip_words * strip_keys, 1).to(tl.int64, bitcast=True)
        strip_differs = strip_present & (strip_value != strip_old)
        suspect = suspect | strip_differs
    compared = tl.sum((present & (differs == 0)).to(tl.int64), 0) * (STRIPS[1] * STRIPS[2])
    if len(STRIPS) > STRIP:
        alike = (strip_present & (strip_differs == 0)).to(tl.int64)
        compared += tl.sum(alike, 0) * (STRIPS[STRIP + 1] * STRIPS[STRIP + 2])
    if tl.sum(suspect.to(tl.int32), 0) > 0:
        # Read now: another stream may have announced meanwhile that bytes arrive there (`SlotEvents.expect`).
        first = tl.load(p_records + slot * 4, mask=m, other=0, volatile=True)
        token, _word = split_head(first)
        written = m & is_written(first)
        kind = tl.full(slot.shape, KIND_BYTES, tl.int64)
        stored, strip_kind = old, kind
        if probe is not None:
            # As blocks: beside one, Triton 3.9's interpreter does not take a scalar's comparison.
            b_probe = tl.zeros_like(slot) + probe
            if not ABREAST:
                b_probe = tl.where(tl.arange(0, slot.shape[0]) == 0, b_probe, 0)
            asked = b_probe == source[0] + 1
            stored = tl.where(asked, old, old ^ flip)
            compared += tl.sum((differs & (value == stored)).to(tl.int64), 0) * (STRIPS[1] * STRIPS[2])
            differs = differs & (value != stored) & (asked | (written & (stored != 0)))
            kind = tl.where(asked, KIND_PROBE, KIND_BYTES).to(tl.int64)
        else:
            differs = differs & written & (old != 0)
        writer = tl.full((), -1, tl.int64)
        if p_writers is not None:
            writer = tl.load(p_writers + i_row).to(tl.int64)
        step = tl.load(p_clock + CLOCK_NEXT) * 8 + phase
        o_position = position + tl.zeros_like(slot)
        if len(position.shape) == 0:
            o_position += tl.arange(0, slot.shape[0])
        compared += tl.sum(differs.to(tl.int64), 0) * (STRIPS[1] * STRIPS[2])
        report_record(
            p_counters, p_ring, ring_rows, kind, differs, region, source[0], slot, o_position, token,
            p_records + slot * 4, m, stored, value, writer, step,
        )  # fmt: skip
        if len(STRIPS) > STRIP:
            strip_stored = strip_old
            if probe is not None:
                strip_asked = b_probe == strip[0] + 1
                strip_stored = tl.where(strip_asked, strip_old, strip_old ^ flip)
                same = strip_differs & (strip_value == strip_stored)
                compared += tl.sum(same.to(tl.int64), 0) * (STRIPS[STRIP + 1] * STRIPS[STRIP + 2])
                strip_differs = strip_differs & (strip_value != strip_stored)
                strip_differs = strip_differs & (strip_asked | (written & (strip_stored != 0)))
                strip_kind = tl.where(strip_asked, KIND_PROBE, KIND_BYTES).to(tl.int64)
            else:
                strip_differs = strip_differs & written & (strip_old != 0)
            compared += tl.sum(strip_differs.to(tl.int64), 0) * (STRIPS[STRIP + 1] * STRIPS[STRIP + 2])
            report_record(
                p_counters, p_ring, ring_rows, strip_kind, strip_differs, region, strip[0], slot, o_position, token,
                p_records + slot * 4, m, strip_stored, strip_value, writer, step,
            )  # fmt: skip
    return compared


@triton.jit
def is_written(first):
    """Whether the record with head ``first`` describes a written slot."""
    return (first >> 32 & READ_STATE) == WRITTEN
