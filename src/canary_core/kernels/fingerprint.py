"""fingerprint, read_check, scrub, verify, baseline: the kernels of `canary_core.reference.fingerprint`.

Each program takes tiles of slots through one source, or through one and the narrow strip that goes with it, such as its
scales: a slot is then looked up once for both. Sources alike in shape share a launch: Llama needs one, DeepSeek-V4's
window pool too. The inner loop is a masked 16-byte load, a widening multiply and an add per 4 bytes: memory is the
limit, not arithmetic.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from canary_core.batch import BatchView, SlotTable
from canary_core.kernels.common import STATE_VALUES, STATUS_OK, WRITTEN, lookup, report_record, split_head
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
from canary_core.records import DESCRIPTOR_WORDS, PLAN_WORDS, READ_TILE, Clock, Counter, Cursor, Descriptor, Kind, Phase
from canary_core.state import RegionState, SourceGroup, SourceShape

COLUMNS = 32
"""Words of a slot in one load: 8 lanes of 16 bytes."""


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

STRIP = tl.constexpr(6)
"""Constants of one source of a group in ``STRIPS``, one flat tuple: page size, chunks, bytes of a chunk, alignment,
words of a load, loads in flight."""
FIELDS = tl.constexpr(DESCRIPTOR_WORDS)
PLAN = tl.constexpr(PLAN_WORDS)
ADDRESS = tl.constexpr(int(Descriptor.ADDRESS))
PAGE_STRIDE = tl.constexpr(int(Descriptor.PAGE_STRIDE))
SLOT_STRIDE = tl.constexpr(int(Descriptor.SLOT_STRIDE))
CHUNK_COUNT = tl.constexpr(int(Descriptor.CHUNKS))
CHUNK_STRIDE = tl.constexpr(int(Descriptor.CHUNK_STRIDE))
CHUNK_LENGTH = tl.constexpr(int(Descriptor.CHUNK_BYTES))
PRESENT = tl.constexpr(int(Descriptor.PRESENT))
SURE = tl.constexpr(int(Descriptor.SURE))
EXPONENT = tl.constexpr(int(Descriptor.EXPONENT))
INCREMENT = tl.constexpr(int(Descriptor.INCREMENT))
CARRY = tl.constexpr(int(Descriptor.CARRY))
CLOCK_NEXT = tl.constexpr(int(Clock.NEXT))
CURSOR_SCRUB = tl.constexpr(int(Cursor.SCRUB))
CURSOR_SCRUB_SLOTS = tl.constexpr(int(Cursor.SCRUB_SLOTS))
CURSOR_READ = tl.constexpr(int(Cursor.READ))
CURSOR_READ_TILES = tl.constexpr(int(Cursor.READ_TILES))
COUNT_CHECKED_BYTES = tl.constexpr(int(Counter.CHECKED_BYTES))
COUNT_RECORDED_BYTES = tl.constexpr(int(Counter.RECORDED_BYTES))
COUNT_SCRUBBED_SLOTS = tl.constexpr(int(Counter.SCRUBBED_SLOTS))
COUNT_UNSURE = tl.constexpr(int(Counter.UNSURE))
KIND_BYTES = tl.constexpr(int(Kind.BYTES))
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
    for group, launcher in _launchers(state, fingerprint_kernel, WRITE_TILE):
        launcher((len(group.columns), tiles), given)


def read_check(state: RegionState, batch: BatchView, table: SlotTable) -> None:
    """As `canary_core.reference.fingerprint.read_check`. One launch a source group; may be captured."""
    given, constants = batch_arguments(state, batch, table)
    for group, launcher in _launchers(state, read_check_kernel, READ_CHECK_TILE, constants):
        launcher((len(group.columns), _tiles(state, group)), given)


def scrub(state: RegionState) -> None:
    """As `canary_core.reference.fingerprint.scrub`. One launch a source group; may be captured."""
    for group, launcher in _launchers(state, scrub_kernel, SCRUB_TILE):
        launcher((len(group.columns), _tiles(state, group)))


def verify(state: RegionState, slots: Tensor) -> None:
    """As `canary_core.reference.fingerprint.verify`. One launch a source group."""
    given = arguments(slots, slots.shape[0])
    tiles = max(-(-slots.shape[0] // SCRUB_TILE.slots), 1)
    for group, launcher in _launchers(state, verify_kernel, SCRUB_TILE):
        launcher((len(group.columns), min(tiles, _tiles(state, group))), given)


def baseline(state: RegionState) -> None:
    """As `canary_core.reference.fingerprint.baseline`. One launch a source group."""
    for group, launcher in _launchers(state, baseline_kernel, SCRUB_TILE):
        launcher((len(group.columns), _tiles(state, group)))


def _launchers(
    state: RegionState, kernel: Any, tile: Tile, table: TableConstants | None = None
) -> list[tuple[SourceGroup, Launcher]]:
    """One launcher for each source group of the region."""
    key = (kernel, table)
    known: list[tuple[SourceGroup, Launcher]] | None = state.arguments.get(key)
    if known is None:
        known = state.arguments[key] = []
        for group in state.groups:
            fixed = (region_arguments(state), source_arguments(state, group))
            strips = tuple(value for shape in group.shapes for value in _strip(shape, tile))
            constants = {**(table._asdict() if table else {}), "STRIPS": strips, "SLOTS": tile.slots}
            known.append((group, Launcher(kernel, state, fixed, constants, num_warps=tile.warps)))
    return known


def _tiles(state: RegionState, group: SourceGroup) -> int:
    """Programs over slots, so that with those over sources the device is full."""
    return max(-(-programs(state, PROGRAMS_PER_PROCESSOR) // len(group.columns)), 1)


def _strip(shape: SourceShape, tile: Tile) -> tuple[int, ...]:
    """The `STRIP` constants of a source: loads are the widest up to `COLUMNS` that divide a slot, so that no lane is
    masked off, else `COLUMNS`."""
    words = shape.words
    widest = max(w for w in (1, 2, 4, 8, 16, 32) if w <= COLUMNS and words % w == 0)
    block = COLUMNS
    if widest >= min(4, words):
        block = widest
    elif words < COLUMNS:
        block = 1 << (words - 1).bit_length()
    blocks = -(-words // block)
    return (*shape, block, max(n for n in range(1, tile.unrolled + 1) if blocks % n == 0))


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
    PAGE_SIZE: tl.constexpr, RING: tl.constexpr, STORED: tl.constexpr, WINDOW: tl.constexpr, POOL_ROWS: tl.constexpr,
    POOL_SLOTS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
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
        b_first = tl.maximum(b_prefix - (WINDOW - 1), 0)
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
        extent, map_length, slots, null_slot, PAGE_SIZE, RING, POOL_ROWS, POOL_SLOTS, GROUP, SLOTS,
    )  # fmt: skip
    while i < tiles:
        next_slot, next_m, next_position, next_row = place(
            i + step, tiles, begin, total, o_row, b_prefix, b_first, b_tile_end, b_row, p_table, p_map, width,
            table_stride, extent, map_length, slots, null_slot, PAGE_SIZE, RING, POOL_ROWS, POOL_SLOTS, GROUP, SLOTS,
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
    PAGE_SIZE: tl.constexpr, RING: tl.constexpr, POOL_ROWS: tl.constexpr, POOL_SLOTS: tl.constexpr, GROUP: tl.constexpr,
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
        RING, POOL_ROWS, POOL_SLOTS, GROUP,
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


@triton.jit
def compare(
    p_descriptors, source, strip, p_keys, p_fingerprints, sources, p_records, p_counters, p_clock, p_ring, ring_rows,
    region, slot, m, position, p_writers, i_row, phase,
    STRIPS: tl.constexpr, EAGER: tl.constexpr,
):  # fmt: skip
    """Compares the bytes of written slots, in a ``source`` and the ``strip`` that may go with it, with their
    fingerprints and reports BYTES; gives the bytes compared. A fingerprint of 0 is not known and is not compared.
    `EAGER` asks only of slots that differ whether they were written: right where nearly all are. What differs is rare,
    so all doubt about it (written after all? known?) is settled there and costs the others no register."""
    if not EAGER:
        m = m & is_written(tl.load(p_records + slot * 4, mask=m, other=0))
    present = m & (slot.to(tl.int32) % STRIPS[0] < source[6])
    old = tl.load(p_fingerprints + slot * sources + source[0], mask=present, other=0)
    if len(STRIPS) > STRIP:
        # Asked for before the wide source's bytes and looked at after them, so that there is one wait, not two.
        strip_present = m & (slot.to(tl.int32) % STRIPS[STRIP] < strip[6])
        strip_old = tl.load(p_fingerprints + slot * sources + strip[0], mask=strip_present, other=0)
        strip_words, strip_keys = load_strip(strip, p_keys, slot, strip_present, STRIPS)
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
        # Read now: another stream may have announced meanwhile that bytes arrive there (`Canary.expect_slots`).
        first = tl.load(p_records + slot * 4, mask=m, other=0, volatile=True)
        token, _word = split_head(first)
        written = m & is_written(first)
        differs = differs & written & (old != 0)
        writer = tl.full((), -1, tl.int64)
        if p_writers is not None:
            writer = tl.load(p_writers + i_row).to(tl.int64)
        step = tl.load(p_clock + CLOCK_NEXT) * 8 + phase
        kind = tl.full(slot.shape, KIND_BYTES, tl.int64)
        compared += tl.sum(differs.to(tl.int64), 0) * (STRIPS[1] * STRIPS[2])
        report_record(
            p_counters, p_ring, ring_rows, kind, differs, region, source[0], slot, position, token, p_records,
            written, old, value, writer, step,
        )  # fmt: skip
        if len(STRIPS) > STRIP:
            strip_differs = strip_differs & written & (strip_old != 0)
            compared += tl.sum(strip_differs.to(tl.int64), 0) * (STRIPS[STRIP + 1] * STRIPS[STRIP + 2])
            report_record(
                p_counters, p_ring, ring_rows, kind, strip_differs, region, strip[0], slot, position, token,
                p_records, written, strip_old, strip_value, writer, step,
            )  # fmt: skip
    return compared


@triton.jit
def is_written(first):
    """Whether the record that begins with ``first`` says that its slot holds something that was written."""
    return (first >> 32 & (STATE_VALUES - 1)) == WRITTEN


@triton.jit
def describe(p_descriptors, p_columns, p_salts, N: tl.constexpr, S: tl.constexpr):
    """The `S`-th of the `N` sources of this program: its column, salt, address, strides of page, slot and chunk in
    bytes, slots of a page that have bytes, words of a slot."""
    column = tl.load(p_columns + tl.program_id(0) * N + S)
    p_source = p_descriptors + column * FIELDS
    chunk_words = (tl.load(p_source + CHUNK_LENGTH) + 3) // 4
    words = (tl.load(p_source + CHUNK_COUNT) * chunk_words).to(tl.int32)
    return (
        column, tl.load(p_salts + column), tl.load(p_source + ADDRESS), tl.load(p_source + PAGE_STRIDE),
        tl.load(p_source + SLOT_STRIDE), tl.load(p_source + CHUNK_STRIDE), tl.load(p_source + PRESENT), words,
    )  # fmt: skip


@triton.jit
def fold(
    p_descriptors, source, p_keys, slot, m,
    STRIPS: tl.constexpr, S: tl.constexpr, ROLLED: tl.constexpr, FLOATS: tl.constexpr,
):  # fmt: skip
    """Fingerprint of each slot in the ``source`` of strip `S`, int64, and, with `FLOATS`, a number that isn't 0 where a
    float has all its exponent bits set. `ROLLED` keeps the compiler from unrolling the loop over a slot."""
    CHUNK_WORDS: tl.constexpr = (STRIPS[S * STRIP + 2] + 3) // 4
    WORDS: tl.constexpr = STRIPS[S * STRIP + 1] * CHUNK_WORDS
    BLOCK_WORDS: tl.constexpr = STRIPS[S * STRIP + 4]
    UNROLL: tl.constexpr = STRIPS[S * STRIP + 5]
    first = first_byte(source, slot, STRIPS[S * STRIP])
    # Sums stay in their column until the end: a few lanes share a slot, so one short reduction ends each tile.
    total = tl.zeros((slot.shape[0], BLOCK_WORDS), tl.uint64)
    odd = tl.zeros((slot.shape[0], BLOCK_WORDS), tl.uint32)
    if FLOATS:
        p_source = p_descriptors + source[0] * FIELDS
        exponent = tl.load(p_source + EXPONENT).to(tl.uint32)
        increment = tl.load(p_source + INCREMENT).to(tl.uint32)
        carry = tl.load(p_source + CARRY).to(tl.uint32)
    # A few blocks at a time: their loads are in flight together. More of them would only crowd each other out of the
    # first cache, so where that matters the compiler is not told the number of rounds: it can't unroll them then.
    words = WORDS
    if ROLLED:
        words = source[7]
    for w in range(0, words, BLOCK_WORDS * UNROLL):
        for u in tl.static_range(UNROLL):
            o_word = w + u * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
            word = load_words(
                source[2], first, source[5], m, o_word, STRIPS[S * STRIP + 2], WORDS, STRIPS[S * STRIP + 3],
                BLOCK_WORDS, UNROLL,
            )  # fmt: skip
            key = tl.load(p_keys + o_word, mask=o_word < WORDS, other=0).to(tl.uint64, bitcast=True)
            total += word.to(tl.uint64) * key[None, :]
            if FLOATS:
                odd = odd | (((word & exponent) + increment) & carry)
    found = tl.zeros_like(slot).to(tl.uint32)
    if FLOATS:
        found = tl.max(odd, 1)
    return source[1] + tl.sum(total, 1).to(tl.int64, bitcast=True), found


@triton.jit
def load_strip(source, p_keys, slot, m, STRIPS: tl.constexpr):
    """All words of each slot in the second source of a group, and their keys: uint64 ``[slots, words]``."""
    CHUNK_BYTES: tl.constexpr = STRIPS[STRIP + 2]
    BLOCK_WORDS: tl.constexpr = STRIPS[STRIP + 4]
    WORDS: tl.constexpr = STRIPS[STRIP + 1] * ((CHUNK_BYTES + 3) // 4)
    o_word = tl.arange(0, BLOCK_WORDS)
    word = load_words(
        source[2], first_byte(source, slot, STRIPS[STRIP]), source[5], m, o_word, CHUNK_BYTES, WORDS, STRIPS[STRIP + 3],
        BLOCK_WORDS, 1,
    )  # fmt: skip
    key = tl.load(p_keys + o_word, mask=o_word < WORDS, other=0).to(tl.uint64, bitcast=True)
    return word.to(tl.uint64), key[None, :]


@triton.jit
def first_byte(source, slot, SOURCE_PAGE: tl.constexpr):
    """Where each slot begins, in bytes from the source's address."""
    first = (slot.to(tl.int32) // SOURCE_PAGE).to(tl.int64) * source[3]
    if SOURCE_PAGE > 1:
        first += (slot.to(tl.int32) % SOURCE_PAGE).to(tl.int64) * source[4]
    return first


@triton.jit
def load_words(
    address, first, chunk_stride, m, o_word,
    CHUNK_BYTES: tl.constexpr, WORDS: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK_WORDS: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Words ``o_word`` of each slot, which begins ``first`` bytes after ``address``; 0 beyond the slot's end and where
    ``m`` is false."""  # [slots, BLOCK_WORDS]
    CHUNK_WORDS: tl.constexpr = (CHUNK_BYTES + 3) // 4
    m_word = m[:, None] & tl.full((1, BLOCK_WORDS), True, tl.int1)
    if WORDS % (BLOCK_WORDS * UNROLL) != 0:
        m_word = m_word & (o_word < WORDS)[None, :]
    if ALIGNMENT >= 4:
        p_words = tl.multiple_of(tl.multiple_of(address, ALIGNMENT).to(tl.pointer_type(tl.uint32)), ALIGNMENT)
        offset = o_word
        if WORDS > CHUNK_WORDS:
            chunk_words = tl.multiple_of(chunk_stride // 4, ALIGNMENT // 4)
            offset = o_word // CHUNK_WORDS * chunk_words + o_word % CHUNK_WORDS
        p_word = p_words + tl.multiple_of(first // 4, ALIGNMENT // 4)[:, None] + offset[None, :]
        word = tl.load(p_word, mask=m_word, other=0, eviction_policy="evict_first")
    else:
        inside = o_word % CHUNK_WORDS * 4
        offset = o_word // CHUNK_WORDS * chunk_stride + inside
        p_byte = address.to(tl.pointer_type(tl.uint8)) + first[:, None] + offset[None, :]
        word = tl.zeros((m.shape[0], BLOCK_WORDS), tl.uint32)
        for b in tl.static_range(4):
            m_byte = m_word & (inside + b < CHUNK_BYTES)[None, :]
            word = word | (tl.load(p_byte + b, mask=m_byte, other=0).to(tl.uint32) << (8 * b))
    return word
