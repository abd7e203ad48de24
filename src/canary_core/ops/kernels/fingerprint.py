"""fingerprint, read_check, scrub, verify, baseline: the kernels of `canary_core.ops.reference.fingerprint`.

Each program takes tiles of slots through one source, or through one and the narrow strip that goes with it, such as its
scales: a slot is then looked up once for both. Sources alike in shape share a launch: Llama needs one, DeepSeek-V4's
window pool too. Long slots, such as recurrent states, go one by one through several sources abreast. How large tiles
are is in `tiles`, what happens to one in `fold` and `compare`.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from canary_core.batch import BatchView, SlotTable
from canary_core.ops.kernels.common import STATUS_OK, lookup, readable, report_record, split_head
from canary_core.ops.kernels.compare import compare
from canary_core.ops.kernels.fold import FIELDS, STRIP, describe, fold, fold_abreast
from canary_core.ops.kernels.launch import (
    VARYING,
    Launcher,
    arguments,
    batch_arguments,
    jit,
    programs,
    region_arguments,
    source_arguments,
)
from canary_core.ops.kernels.tiles import READ_CHECK_TILES, SCRUB_TILES, WRITE_TILES, Tiles, constants, is_long
from canary_core.ops.launches import GroupLaunch, TableConstants
from canary_core.ops.state import RegionState
from canary_core.records import PLAN_WORDS, Clock, Counter, Cursor, Descriptor, Kind, Phase

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
    """As `canary_core.ops.reference.fingerprint.fingerprint`. One launch a source group; may be captured."""
    if batch.tokens == 0:
        return
    given = arguments(batch.token_ids, batch.writers, batch.tokens)
    for launch in _launches(state, "fingerprint", fingerprint_kernel, WRITE_TILES):
        tiles = min(-(-batch.tokens // launch.slots), MOST_TILES)
        if launch.abreast:
            # A program's tokens are far apart: where only the last token of a row has a slot, the work is spread then.
            # And an odd number apart: else, of prefills whose lengths are powers of two, one program would get all.
            tiles = min(batch.tokens, launch.programs | 1)
        launch.launch((launch.blocks, tiles), given)


def read_check(state: RegionState, batch: BatchView, table: SlotTable) -> None:
    """As `canary_core.ops.reference.fingerprint.read_check`. One launch a source group; may be captured."""
    given, built_in = batch_arguments(state, batch, table)
    for launch in _launches(state, "read_check", read_check_kernel, READ_CHECK_TILES, built_in):
        launch.launch((launch.blocks, launch.programs), given)


def scrub(state: RegionState) -> None:
    """As `canary_core.ops.reference.fingerprint.scrub`. One launch a source group; may be captured."""
    for launch in _launches(state, "scrub", scrub_kernel, SCRUB_TILES):
        launch.launch((launch.blocks, launch.programs))


def verify(state: RegionState, slots: Tensor) -> None:
    """As `canary_core.ops.reference.fingerprint.verify`. One launch a source group."""
    given = arguments(slots, slots.shape[0])
    for launch in _launches(state, "verify", verify_kernel, SCRUB_TILES):
        needed = max(-(-slots.shape[0] // launch.slots), 1)
        launch.launch((launch.blocks, min(needed, launch.programs)), given)


def baseline(state: RegionState) -> None:
    """As `canary_core.ops.reference.fingerprint.baseline`. One launch a source group."""
    for launch in _launches(state, "baseline", baseline_kernel, SCRUB_TILES):
        launch.launch((launch.blocks, launch.programs))


def _launches(
    state: RegionState, op: str, kernel: Any, tiles: Tiles, table: TableConstants | None = None
) -> list[GroupLaunch]:
    """One for each source group of the region."""
    known = state.launches.by_group.get((op, table))
    if known is None:
        known = state.launches.by_group[op, table] = []
        for group in state.sources.groups:
            tile = tiles.long if is_long(state, group) else tiles.usual
            fixed = (region_arguments(state), source_arguments(state, group))
            every = {**(table._asdict() if table else {}), **constants(group.shapes, tile, len(group.columns))}
            blocks = -(-len(group.columns) // max(tile.abreast, 1))
            over_slots = max(-(-programs(state, PROGRAMS_PER_PROCESSOR) // blocks), 1)
            launcher = Launcher(kernel, state, fixed, every, num_warps=tile.warps)
            known.append(GroupLaunch(blocks, over_slots, tile.slots, tile.abreast, launcher))
    return known


@jit("tokens")
def fingerprint_kernel(
    p_records, p_words, p_claims, p_plan, p_heads, p_chains, p_cursors, p_counters, p_clock, p_ring, ring_rows, region,
    slots, null_slot,
    p_descriptors, p_columns, p_keys, p_salts, p_fingerprints, sources,
    p_tokens, p_writers, tokens,
    STRIPS: tl.constexpr, SLOTS: tl.constexpr, ABREAST: tl.constexpr,
):  # fmt: skip
    """Grid: programs of source groups, times any number of programs over the batch's tokens. A program takes tiles of
    `SLOTS` tokens; where sources are `ABREAST`, it looks up `SLOTS` tokens that are far apart and takes their slots one
    at a time."""
    step = tl.load(p_clock + CLOCK_NEXT)
    recorded = tl.zeros((), tl.int64)
    if ABREAST[0] > 0:
        apart = tl.num_programs(1)
        for i in range(tl.program_id(1), tokens, apart * SLOTS):
            o_looked = i + apart * tl.arange(0, SLOTS)
            b_word = tl.load(p_plan + o_looked.to(tl.int64) * PLAN, mask=o_looked < tokens, other=0)
            b_left = (b_word >> 32) - 1 == STATUS_OK
            for _ in range(tl.sum(b_left.to(tl.int32), 0)):
                next = tl.min(tl.where(b_left, o_looked, tokens), 0)
                b_left = b_left & (o_looked != next)
                o_token = spread(next, ABREAST)
                word = tl.load(p_plan + o_token * PLAN)
                slot = tl.load(p_plan + o_token * PLAN + 1)
                # The bytes of a slot that another token won are not asked for: a long one takes long.
                usable = tl.load(p_claims + slot) == (step << 32) + o_token + 1
                recorded = record_tile(
                    p_records, p_claims, p_plan, p_counters, p_ring, ring_rows, region, p_descriptors, p_columns,
                    p_keys, p_salts, p_fingerprints, sources, p_tokens, p_writers, step, o_token, word, slot, usable,
                    recorded, STRIPS, ABREAST,
                )  # fmt: skip
    else:
        for i in range(tl.program_id(1), (tokens + SLOTS - 1) // SLOTS, tl.num_programs(1)):
            o_token = i * SLOTS + tl.arange(0, SLOTS).to(tl.int64)
            m_token = o_token < tokens
            word = tl.load(p_plan + o_token * PLAN, mask=m_token, other=0)
            slot = tl.load(p_plan + o_token * PLAN + 1, mask=m_token, other=0)
            usable = (word != 0) & ((word >> 32) - 1 == STATUS_OK)
            if tl.max(word, 0) > 0:
                recorded = record_tile(
                    p_records, p_claims, p_plan, p_counters, p_ring, ring_rows, region, p_descriptors, p_columns,
                    p_keys, p_salts, p_fingerprints, sources, p_tokens, p_writers, step, o_token, word, slot, usable,
                    recorded, STRIPS, ABREAST,
                )  # fmt: skip
    tl.atomic_add(p_counters + COUNT_RECORDED_BYTES, recorded)


@triton.jit
def record_tile(
    p_records, p_claims, p_plan, p_counters, p_ring, ring_rows, region, p_descriptors, p_columns, p_keys, p_salts,
    p_fingerprints, sources, p_tokens, p_writers, step, o_token, word, slot, usable, recorded,
    STRIPS: tl.constexpr, ABREAST: tl.constexpr,
):  # fmt: skip
    """Fingerprints and judges what tokens ``o_token`` wrote to ``slot``, a row of the tile each; gives ``recorded`` and
    the bytes of them."""
    # All that is small is asked for before the bytes and looked at after them.
    claim = tl.load(p_claims + slot, mask=usable, other=0)
    token = tl.load(p_tokens + o_token, mask=usable, other=0).to(tl.int64)
    stored_first = tl.load(p_records + slot * 4, mask=usable, other=0)
    stored_third = tl.load(p_records + slot * 4 + 2, mask=usable, other=0)
    for s in tl.static_range(len(STRIPS) // STRIP):
        source = describe(p_descriptors, p_columns, p_salts, len(STRIPS) // STRIP, s, ABREAST)
        p_old = p_fingerprints + slot * sources + source[0]
        present = usable & (slot.to(tl.int32) % STRIPS[s * STRIP] < source[6])
        old = tl.load(p_old, mask=present, other=0)
        if ABREAST[0] > 0:
            value, odd = fold_abreast(p_descriptors, source, p_keys, slot, present, STRIPS, s, True)
        else:
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
    return recorded


@jit(*VARYING)
def read_check_kernel(
    p_records, p_words, p_claims, p_plan, p_heads, p_chains, p_cursors, p_counters, p_clock, p_ring, ring_rows, region,
    slots, null_slot,
    p_descriptors, p_columns, p_keys, p_salts, p_fingerprints, sources,
    p_prefix, p_new, p_writers, p_anchors, p_tokens, p_positions, p_expected, expected_width, expected_stride,
    p_table, p_rows, p_map, width, table_stride, extent, map_length, p_write_slots, write_length, rows, tokens,
    PAGE_SIZE: tl.constexpr, RING: tl.constexpr, STORED: tl.constexpr, WINDOW: tl.constexpr, ALIGN: tl.constexpr,
    POOL: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    STRIPS: tl.constexpr, SLOTS: tl.constexpr, ABREAST: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs over tiles of `SLOTS` readable places, by groups of sources."""
    N: tl.constexpr = len(STRIPS) // STRIP
    source = describe(p_descriptors, p_columns, p_salts, N, 0, ABREAST)
    strip = describe(p_descriptors, p_columns, p_salts, N, N - 1, ABREAST)
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
        if ABREAST[0] > 0:
            o_place = tl.arange(0, SLOTS)
            b_left = m
            for _ in range(tl.sum(m.to(tl.int32), 0)):
                one = o_place == tl.min(tl.where(b_left, o_place, SLOTS), 0)
                b_left = b_left & (one == 0)
                b_slot = spread(tl.sum(tl.where(one, slot, 0), 0), ABREAST)
                b_position = spread(tl.sum(tl.where(one, position, 0), 0), ABREAST)
                checked += compare(
                    p_descriptors, source, strip, p_keys, p_fingerprints, sources, p_records, p_counters, p_clock,
                    p_ring, ring_rows, region, b_slot, b_slot >= 0, b_position, p_writers, i_row, PHASE_PRE, STRIPS,
                    True,
                )  # fmt: skip
        else:
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
    STRIPS: tl.constexpr, SLOTS: tl.constexpr, ABREAST: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs over tiles of `SLOTS` slots, by groups of sources."""
    count = tl.minimum(tl.load(p_cursors + CURSOR_SCRUB_SLOTS), slots)
    begin = tl.load(p_cursors + CURSOR_SCRUB)
    N: tl.constexpr = len(STRIPS) // STRIP
    source = describe(p_descriptors, p_columns, p_salts, N, 0, ABREAST)
    strip = describe(p_descriptors, p_columns, p_salts, N, N - 1, ABREAST)
    # Other sources have a launch or programs of their own; each slot counts once.
    first = (source[0] == 0) | (strip[0] == 0)
    if ABREAST[0] > 0:
        first = tl.max(first.to(tl.int32), 0) > 0
    if first & (tl.program_id(1) == 0):
        tl.atomic_add(p_counters + COUNT_SCRUBBED_SLOTS, count)
        tl.store(p_cursors + CURSOR_SCRUB_NEXT, (begin + count) % slots)
    checked = tl.zeros((), tl.int64)
    for i in range(tl.program_id(1), ((count + SLOTS - 1) // SLOTS).to(tl.int32), tl.num_programs(1)):
        o_slot = i * SLOTS + tl.arange(0, SLOTS).to(tl.int64)
        if ABREAST[0] > 0:
            o_slot = spread(i, ABREAST)
        slot = begin + o_slot
        slot = tl.where(slot < slots, slot, slot - slots)
        checked += compare(
            p_descriptors, source, strip, p_keys, p_fingerprints, sources, p_records, p_counters, p_clock, p_ring,
            ring_rows, region, slot, o_slot < count, tl.full(o_slot.shape, -1, tl.int64), None, 0,
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
def baseline_kernel(
    p_records, p_words, p_claims, p_plan, p_heads, p_chains, p_cursors, p_counters, p_clock, p_ring, ring_rows, region,
    slots, null_slot,
    p_descriptors, p_columns, p_keys, p_salts, p_fingerprints, sources,
    STRIPS: tl.constexpr, SLOTS: tl.constexpr, ABREAST: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs over tiles of `SLOTS` slots, by groups of sources."""
    for i in range(tl.program_id(1), (slots + SLOTS - 1) // SLOTS, tl.num_programs(1)):
        slot = i * SLOTS + tl.arange(0, SLOTS).to(tl.int64)
        if ABREAST[0] > 0:
            slot = spread(i, ABREAST)
        for s in tl.static_range(len(STRIPS) // STRIP):
            source = describe(p_descriptors, p_columns, p_salts, len(STRIPS) // STRIP, s, ABREAST)
            there = (slot < slots) & (slot.to(tl.int32) % STRIPS[s * STRIP] < source[6])
            if ABREAST[0] > 0:
                value, _odd = fold_abreast(p_descriptors, source, p_keys, slot, there, STRIPS, s, False)
            else:
                value, _odd = fold(p_descriptors, source, p_keys, slot, there, STRIPS, s, False, False)
            tl.store(p_fingerprints + slot * sources + source[0], value, mask=there)


@triton.jit
def spread(number, ABREAST: tl.constexpr):
    """The same number in each row of a tile of sources abreast; int64."""
    ROWS: tl.constexpr = ABREAST[0]
    return number + tl.zeros((ROWS,), tl.int64)
