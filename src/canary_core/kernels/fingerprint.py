"""fingerprint, read_check, scrub, verify, baseline: the kernels of `canary_core.reference.fingerprint`.

Each program takes tiles of slots through one source, or through one and the narrow strip that goes with it, such as its
scales: a slot is then looked up once for both. Sources alike in shape share a launch: Llama needs one, DeepSeek-V4's
window pool too. What happens to a tile is in `fold` and `compare`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from canary_core.batch import BatchView, SlotTable
from canary_core.kernels.common import STATUS_OK, lookup, readable, report_record, split_head
from canary_core.kernels.compare import compare
from canary_core.kernels.fold import FIELDS, STRIP, describe, fold, strip_constants
from canary_core.kernels.launch import (
    VARYING,
    Launcher,
    TableConstants,
    arguments,
    batch_arguments,
    jit,
    programs,
    region_arguments,
    source_arguments,
)
from canary_core.records import PLAN_WORDS, READ_TILE, Clock, Counter, Cursor, Descriptor, Kind, Phase
from canary_core.state import RegionState


class Tile(NamedTuple):
    """How a kernel goes over slots: how many a program takes at a time, its warps, and loads of a slot in flight."""

    slots: int
    warps: int
    unrolled: int


WRITE_TILE = Tile(32, 4, 2)
SCRUB_TILE = Tile(32, 2, 2)
READ_CHECK_TILE = Tile(READ_TILE, 1, 3)
PROGRAMS_PER_PROCESSOR = 16
MOST_TILES = 32768
"""Programs over a batch's tokens; CUDA allows 65,535 in that dimension of a grid."""

PLAN = tl.constexpr(PLAN_WORDS)
SURE = tl.constexpr(int(Descriptor.SURE))
CLOCK_NEXT = tl.constexpr(int(Clock.NEXT))
CURSOR_SCRUB = tl.constexpr(int(Cursor.SCRUB))
CURSOR_SCRUB_NEXT = tl.constexpr(int(Cursor.SCRUB_NEXT))
CURSOR_SCRUB_SLOTS = tl.constexpr(int(Cursor.SCRUB_SLOTS))
CURSOR_READ = tl.constexpr(int(Cursor.READ))
CURSOR_READ_TILES = tl.constexpr(int(Cursor.READ_TILES))
COUNT_CHECKED_BYTES = tl.constexpr(int(Counter.CHECKED_BYTES))
COUNT_RECORDED_BYTES = tl.constexpr(int(Counter.RECORDED_BYTES))
COUNT_SCRUBBED_SLOTS = tl.constexpr(int(Counter.SCRUBBED_SLOTS))
COUNT_UNSURE = tl.constexpr(int(Counter.UNSURE))
KIND_LOST_WRITE = tl.constexpr(int(Kind.LOST_WRITE))
KIND_NON_FINITE = tl.constexpr(int(Kind.NON_FINITE))
PHASE_PRE = tl.constexpr(int(Phase.PRE_FORWARD))
PHASE_POST = tl.constexpr(int(Phase.POST_FORWARD))
PHASE_SCRUB = tl.constexpr(int(Phase.SCRUB))
PHASE_EVENT = tl.constexpr(int(Phase.EVENT))


def fingerprint(state: RegionState, batch: BatchView, table: SlotTable) -> None:
    """As `canary_core.reference.fingerprint.fingerprint`. One launch a source group; may be captured."""
    tiles = min(-(-batch.tokens // WRITE_TILE.slots), MOST_TILES)
    if tiles == 0:
        return
    given = arguments(batch.token_ids, batch.writers, batch.tokens)
    for blocks, _, launcher in _launchers(state, fingerprint_kernel, WRITE_TILE):
        launcher((blocks, tiles), given)


def read_check(state: RegionState, batch: BatchView, table: SlotTable) -> None:
    """As `canary_core.reference.fingerprint.read_check`. One launch a source group; may be captured."""
    given, constants = batch_arguments(state, batch, table)
    for blocks, tiles, launcher in _launchers(state, read_check_kernel, READ_CHECK_TILE, constants):
        launcher((blocks, tiles), given)


def scrub(state: RegionState) -> None:
    """As `canary_core.reference.fingerprint.scrub`. One launch a source group; may be captured."""
    for blocks, tiles, launcher in _launchers(state, scrub_kernel, SCRUB_TILE):
        launcher((blocks, tiles))


def verify(state: RegionState, slots: Tensor) -> None:
    """As `canary_core.reference.fingerprint.verify`. One launch a source group."""
    given = arguments(slots, slots.shape[0])
    needed = max(-(-slots.shape[0] // SCRUB_TILE.slots), 1)
    for blocks, tiles, launcher in _launchers(state, verify_kernel, SCRUB_TILE):
        launcher((blocks, min(needed, tiles)), given)


def baseline(state: RegionState) -> None:
    """As `canary_core.reference.fingerprint.baseline`. One launch a source group."""
    for blocks, tiles, launcher in _launchers(state, baseline_kernel, SCRUB_TILE):
        launcher((blocks, tiles))


def _launchers(
    state: RegionState, kernel: Any, tile: Tile, table: TableConstants | None = None
) -> list[tuple[int, int, Launcher]]:
    """For each source group of the region its programs over sources, the programs over slots that fill the device with
    those, and its launcher."""
    # Not the kernel: to hash one is to hash its source, each time.
    key = (id(kernel), table)
    known: list[tuple[int, int, Launcher]] | None = state.arguments.get(key)
    if known is None:
        known = state.arguments[key] = []
        for group in state.groups:
            fixed = (region_arguments(state), source_arguments(state, group))
            strips = tuple(value for shape in group.shapes for value in strip_constants(shape, tile.unrolled))
            constants = {**(table._asdict() if table else {}), "STRIPS": strips, "SLOTS": tile.slots}
            blocks = len(group.columns)
            tiles = max(-(-programs(state, PROGRAMS_PER_PROCESSOR) // blocks), 1)
            known.append((blocks, tiles, Launcher(kernel, state, fixed, constants, num_warps=tile.warps)))
    return known


@jit("tokens")
def fingerprint_kernel(
    p_records, p_words, p_claims, p_plan, p_heads, p_chains, p_cursors, p_counters, p_clock, p_ring, ring_rows, region,
    slots, null_slot,
    p_descriptors, p_columns, p_keys, p_salts, p_fingerprints, sources,
    p_tokens, p_writers, tokens,
    STRIPS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs over tiles of `SLOTS` tokens, by groups of sources."""
    step = tl.load(p_clock + CLOCK_NEXT)
    recorded = tl.zeros((), tl.int64)
    for i in range(tl.program_id(1), (tokens + SLOTS - 1) // SLOTS, tl.num_programs(1)):
        o_token = i * SLOTS + tl.arange(0, SLOTS).to(tl.int64)
        m_token = o_token < tokens
        word = tl.load(p_plan + o_token * PLAN, mask=m_token, other=0)
        slot = tl.load(p_plan + o_token * PLAN + 1, mask=m_token, other=0)
        usable = (word != 0) & ((word >> 32) - 1 == STATUS_OK)
        if tl.max(word, 0) > 0:
            # All that is small is asked for before the bytes and looked at after them.
            claim = tl.load(p_claims + slot, mask=usable, other=0)
            token = tl.load(p_tokens + o_token, mask=usable, other=0).to(tl.int64)
            stored_first = tl.load(p_records + slot * 4, mask=usable, other=0)
            stored_third = tl.load(p_records + slot * 4 + 2, mask=usable, other=0)
            for s in tl.static_range(len(STRIPS) // STRIP):
                source = describe(p_descriptors, p_columns, p_salts, len(STRIPS) // STRIP, s)
                p_old = p_fingerprints + slot * sources + source[0]
                present = usable & (slot.to(tl.int32) % STRIPS[s * STRIP] < source[6])
                old = tl.load(p_old, mask=present, other=0)
                value, odd = fold(p_descriptors, source, p_keys, slot, present, STRIPS, s, False, True)
                there = present & (claim == (step << 32) + o_token + 1)
                tl.store(p_old, value, mask=there)
                recorded += tl.sum(there.to(tl.int64), 0) * (STRIPS[s * STRIP + 1] * STRIPS[s * STRIP + 2])
                stored_token, _ = split_head(stored_first)
                other = ((stored_third & 0xFFFFFFFF) == 0) | (stored_token != token)
                same = there & (value == old) & (tl.load(p_descriptors + source[0] * FIELDS + SURE) != 0)
                lost = same & other
                not_finite = there & (lost == 0) & (odd != 0)
                if tl.sum((same | not_finite).to(tl.int32), 0) > 0:
                    tl.atomic_add(p_counters + COUNT_UNSURE, tl.sum((same & (other == 0)).to(tl.int64), 0))
                    position = tl.load(p_plan + o_token * PLAN + 2, mask=there, other=0)
                    writer = tl.load(p_writers + (word & 0xFFFFFFFF), mask=there, other=-1).to(tl.int64)
                    kind = tl.where(lost, KIND_LOST_WRITE, KIND_NON_FINITE).to(tl.int64)
                    report_record(
                        p_counters, p_ring, ring_rows, kind, lost | not_finite, region, source[0], slot, position,
                        token, p_records, there, old, value, writer, step * 8 + PHASE_POST,
                    )  # fmt: skip
    tl.atomic_add(p_counters + COUNT_RECORDED_BYTES, recorded)


@jit(*VARYING)
def read_check_kernel(
    p_records, p_words, p_claims, p_plan, p_heads, p_chains, p_cursors, p_counters, p_clock, p_ring, ring_rows, region,
    slots, null_slot,
    p_descriptors, p_columns, p_keys, p_salts, p_fingerprints, sources,
    p_prefix, p_new, p_writers, p_anchors, p_tokens, p_positions, p_expected, expected_width, expected_stride,
    p_table, p_rows, p_map, width, table_stride, extent, map_length, p_write_slots, write_length, rows, tokens,
    PAGE_SIZE: tl.constexpr, RING: tl.constexpr, STORED: tl.constexpr, WINDOW: tl.constexpr, ALIGN: tl.constexpr,
    POOL: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    STRIPS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs over tiles of `SLOTS` readable places, by groups of sources."""
    N: tl.constexpr = len(STRIPS) // STRIP
    source = describe(p_descriptors, p_columns, p_salts, N, 0)
    strip = describe(p_descriptors, p_columns, p_salts, N, N - 1)
    o_row = tl.arange(0, ROWS)
    b_prefix = tl.maximum(tl.load(p_prefix + o_row, mask=o_row < rows, other=0).to(tl.int32), 0) // GROUP
    b_first = tl.zeros_like(b_prefix)
    if WINDOW > 0:
        b_first = b_prefix - readable(b_prefix, tl.load(p_new + o_row, mask=o_row < rows, other=0), WINDOW, ALIGN)
    b_row = o_row
    if p_rows is not None:
        b_row = tl.load(p_rows + o_row, mask=o_row < rows, other=0).to(tl.int32)
    b_tiles = (b_prefix - b_first + SLOTS - 1) // SLOTS
    b_tile_end = tl.cumsum(b_tiles, 0)
    total = tl.sum(b_tiles, 0)
    tiles = tl.minimum(tl.load(p_cursors + CURSOR_READ_TILES), total).to(tl.int32)
    # `check` has already moved the cursor past this forward's stretch.
    begin = ((tl.load(p_cursors + CURSOR_READ) - tiles + total) % tl.maximum(total, 1)).to(tl.int32)
    checked = tl.zeros((), tl.int64)
    step = tl.num_programs(1)
    i = tl.program_id(1)
    # A tile's slots are looked up while the bytes of the one before are read: one wait a tile, not two.
    slot, m, position, i_row = place(
        i, tiles, begin, total, o_row, b_prefix, b_first, b_tile_end, b_row, p_table, p_map, width, table_stride,
        extent, map_length, slots, null_slot, PAGE_SIZE, RING, POOL, GROUP, SLOTS,
    )  # fmt: skip
    while i < tiles:
        next_slot, next_m, next_position, next_row = place(
            i + step, tiles, begin, total, o_row, b_prefix, b_first, b_tile_end, b_row, p_table, p_map, width,
            table_stride, extent, map_length, slots, null_slot, PAGE_SIZE, RING, POOL, GROUP, SLOTS,
        )  # fmt: skip
        checked += compare(
            p_descriptors, source, strip, p_keys, p_fingerprints, sources, p_records, p_counters, p_clock, p_ring,
            ring_rows, region, slot, m, position, p_writers, i_row, PHASE_PRE, STRIPS, True,
        )  # fmt: skip
        slot, m, position, i_row = next_slot, next_m, next_position, next_row
        i += step
    tl.atomic_add(p_counters + COUNT_CHECKED_BYTES, checked)


@triton.jit
def place(
    i, tiles, begin, total, o_row, b_prefix, b_first, b_tile_end, b_row, p_table, p_map, width, table_stride, extent,
    map_length, slots, null_slot,
    PAGE_SIZE: tl.constexpr, RING: tl.constexpr, POOL: tl.constexpr, GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Slots of the ``i``-th of this forward's ``tiles``, whether each is one, its position, and the tile's row of the
    batch; none beyond the last tile."""
    i_tile = begin + i
    i_tile = tl.where(i_tile < total, i_tile, i_tile - total)
    i_row = tl.sum((b_tile_end <= i_tile).to(tl.int32), 0)
    i_inside = i_tile - tl.max(tl.where(b_tile_end <= i_tile, b_tile_end, 0), 0)
    prefix = tl.sum(tl.where(o_row == i_row, b_prefix, 0), 0).to(tl.int64)
    first = tl.sum(tl.where(o_row == i_row, b_first, 0), 0).to(tl.int64)
    row_first = tl.sum(tl.where(o_row == i_row, b_row, 0), 0).to(tl.int64)
    position = first + i_inside.to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    m = (position < prefix) & (i < tiles)
    slot, status = lookup(
        p_table, row_first * table_stride, position, width, extent, p_map, map_length, slots, null_slot, m, PAGE_SIZE,
        RING, POOL, GROUP,
    )  # fmt: skip
    return slot, m & (status == STATUS_OK), position, i_row


@triton.jit
def scrub_kernel(
    p_records, p_words, p_claims, p_plan, p_heads, p_chains, p_cursors, p_counters, p_clock, p_ring, ring_rows, region,
    slots, null_slot,
    p_descriptors, p_columns, p_keys, p_salts, p_fingerprints, sources,
    STRIPS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs over tiles of `SLOTS` slots, by groups of sources."""
    count = tl.minimum(tl.load(p_cursors + CURSOR_SCRUB_SLOTS), slots)
    begin = tl.load(p_cursors + CURSOR_SCRUB)
    N: tl.constexpr = len(STRIPS) // STRIP
    source = describe(p_descriptors, p_columns, p_salts, N, 0)
    strip = describe(p_descriptors, p_columns, p_salts, N, N - 1)
    # Other sources have a launch or programs of their own; each slot counts once.
    if ((source[0] == 0) | (strip[0] == 0)) & (tl.program_id(1) == 0):
        tl.atomic_add(p_counters + COUNT_SCRUBBED_SLOTS, count)
        tl.store(p_cursors + CURSOR_SCRUB_NEXT, (begin + count) % slots)
    checked = tl.zeros((), tl.int64)
    for i in range(tl.program_id(1), ((count + SLOTS - 1) // SLOTS).to(tl.int32), tl.num_programs(1)):
        o_slot = i * SLOTS + tl.arange(0, SLOTS).to(tl.int64)
        slot = begin + o_slot
        slot = tl.where(slot < slots, slot, slot - slots)
        checked += compare(
            p_descriptors, source, strip, p_keys, p_fingerprints, sources, p_records, p_counters, p_clock, p_ring,
            ring_rows, region, slot, o_slot < count, tl.full((SLOTS,), -1, tl.int64), None, 0,
            PHASE_SCRUB,
            STRIPS, False,
        )  # fmt: skip
    tl.atomic_add(p_counters + COUNT_CHECKED_BYTES, checked)


@jit("count")
def verify_kernel(
    p_records, p_words, p_claims, p_plan, p_heads, p_chains, p_cursors, p_counters, p_clock, p_ring, ring_rows, region,
    slots, null_slot,
    p_descriptors, p_columns, p_keys, p_salts, p_fingerprints, sources,
    p_slots, count,
    STRIPS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs over tiles of `SLOTS` of the listed slots, by groups of sources."""
    N: tl.constexpr = len(STRIPS) // STRIP
    source = describe(p_descriptors, p_columns, p_salts, N, 0)
    strip = describe(p_descriptors, p_columns, p_salts, N, N - 1)
    checked = tl.zeros((), tl.int64)
    for i in range(tl.program_id(1), (count + SLOTS - 1) // SLOTS, tl.num_programs(1)):
        o_slot = i * SLOTS + tl.arange(0, SLOTS)
        slot = tl.load(p_slots + o_slot, mask=o_slot < count, other=-1).to(tl.int64)
        m = (slot >= 0) & (slot < slots)
        checked += compare(
            p_descriptors, source, strip, p_keys, p_fingerprints, sources, p_records, p_counters, p_clock, p_ring,
            ring_rows, region, slot, m, tl.full((SLOTS,), -1, tl.int64), None, 0, PHASE_EVENT, STRIPS, False,
        )  # fmt: skip
    tl.atomic_add(p_counters + COUNT_CHECKED_BYTES, checked)


@triton.jit
def baseline_kernel(
    p_records, p_words, p_claims, p_plan, p_heads, p_chains, p_cursors, p_counters, p_clock, p_ring, ring_rows, region,
    slots, null_slot,
    p_descriptors, p_columns, p_keys, p_salts, p_fingerprints, sources,
    STRIPS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs over tiles of `SLOTS` slots, by groups of sources."""
    for i in range(tl.program_id(1), (slots + SLOTS - 1) // SLOTS, tl.num_programs(1)):
        slot = i * SLOTS + tl.arange(0, SLOTS).to(tl.int64)
        for s in tl.static_range(len(STRIPS) // STRIP):
            source = describe(p_descriptors, p_columns, p_salts, len(STRIPS) // STRIP, s)
            there = (slot < slots) & (slot.to(tl.int32) % STRIPS[s * STRIP] < source[6])
            value, _odd = fold(p_descriptors, source, p_keys, slot, there, STRIPS, s, False, False)
            tl.store(p_fingerprints + slot * sources + source[0], value, mask=there)
