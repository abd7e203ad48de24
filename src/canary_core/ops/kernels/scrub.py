"""scrub: the kernel of `canary_core.ops.torch.scrub`. `fingerprint` explains how programs go over slots and sources."""

import triton
import triton.language as tl

from canary_core.ops.kernels.compare import compare
from canary_core.ops.kernels.fold import describe, tile_of
from canary_core.ops.kernels.launch import arguments, group_launches
from canary_core.ops.kernels.tiles import SCRUB_TILES
from canary_core.ops.kernels.words import (
    ARRIVED,
    COUNT_CHECKED_BYTES,
    COUNT_SCRUBBED_SLOTS,
    COUNTERS_END,
    CURSOR_PROBE,
    CURSOR_SCRUB,
    CURSOR_SCRUB_NEXT,
    CURSOR_SCRUB_PASS,
    CURSOR_SCRUB_RUNNING,
    CURSOR_SCRUB_SLOTS,
    PARKED,
    PHASE_SCRUB,
    PLACE_LIST,
    PLACE_PARKED,
    PLACE_PARKED_LISTED,
    PLACE_RUNNING,
    PLACE_RUNNING_LISTED,
    RECORD,
    RECORD_POSITION,
    REGION_GAUGES,
    STATE_VALUES,
    WRITTEN,
)
from canary_core.ops.state import RegionState

LIST_TILE = tl.constexpr(1024)
"""Slots passed at a time by the listing program."""


def scrub(state: RegionState, probed: bool = False) -> None:
    """As `canary_core.ops.torch.scrub.scrub`. One launch a source group; may be captured. ``probed`` is a kernel of its
    own, so that the usual one pays nothing."""
    given = state.launches.listed.get(probed)
    if given is None:
        given = state.launches.listed[probed] = arguments(state.listed, state.listed_slots, 1 if probed else None)
    for launch in group_launches(state, "scrub", scrub_kernel, SCRUB_TILES):
        # One more program lists what the next scrub compares.
        launch.launch((launch.blocks, 1 + launch.programs), given)


@triton.jit
def scrub_kernel(region, sources, p_listed, listed_slots, probed, BYTES: tl.constexpr):
    """Grid: any number of programs but one over tiles of `SLOTS` listed slots, by groups of sources. The first program
    of the first group makes the next list, since listing takes the longest. ``probed``: 1 compiles the probe of
    `Cursor.PROBE` in, None leaves it out."""
    SLOTS: tl.constexpr = BYTES.SLOTS
    source = describe(sources, 0, BYTES)
    strip = describe(sources, len(BYTES.STRIPS) - 1, BYTES)
    if tl.program_id(1) == 0:
        # Other sources have a launch or programs of their own; one list is for all of them.
        first = (source.column == 0) | (strip.column == 0)
        if BYTES.ABREAST > 0:
            first = tl.max(first.to(tl.int32), 0) > 0
        if first:
            list_next(region, p_listed, listed_slots)
    else:
        place = tl.load(region.p_cursors + CURSOR_SCRUB + PLACE_LIST)
        count = (place & 0xFFFFFFFF).to(tl.int32)
        probe = None
        if probed is not None:
            probe = tl.load(region.p_cursors + CURSOR_PROBE)
        p_slots = p_listed + (place >> 32) * listed_slots
        checked = tl.zeros((), tl.int64)
        for i in range(tl.program_id(1) - 1, (count + SLOTS - 1) // SLOTS, tl.num_programs(1) - 1):
            o_slot = tile_of(i, BYTES)
            m = o_slot < count
            slot = tl.load(p_slots + o_slot, mask=m, other=0).to(tl.int64)
            b_probe = None
            if probed is not None:
                b_probe = tl.where(i == 0, probe, 0)
            checked += compare(
                region, sources, source, strip, slot, m, tl.full(o_slot.shape, -1, tl.int64), None, 0, PHASE_SCRUB,
                BYTES, True, b_probe,
            )  # fmt: skip
        tl.atomic_add(region.p_counters + COUNT_CHECKED_BYTES, checked)


@triton.jit
def list_next(region, p_listed, listed_slots):
    """As `canary_core.ops.torch.scrub._list_next`, by one program. Reads one word for each slot passed."""
    slots = region.slots
    p_now, p_next = region.p_cursors + CURSOR_SCRUB, region.p_cursors + CURSOR_SCRUB_NEXT
    half = 1 - (tl.load(p_now + PLACE_LIST) >> 32)
    p_half = p_listed + half * listed_slots
    most = tl.minimum(tl.load(region.p_cursors + CURSOR_SCRUB_SLOTS), listed_slots).to(tl.int32)
    share = tl.minimum(tl.load(region.p_cursors + CURSOR_SCRUB_RUNNING), most).to(tl.int32)
    passes = tl.minimum(tl.load(region.p_cursors + CURSOR_SCRUB_PASS), slots).to(tl.int32)
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
            word = tl.load(region.p_words + slot.to(tl.int64) * RECORD + RECORD_POSITION, mask=m, other=0)
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
    p_gauges = region.p_counters + COUNTERS_END + region.index * REGION_GAUGES - PLACE_RUNNING
    tl.store(p_gauges + PLACE_RUNNING, running)
    tl.store(p_gauges + PLACE_RUNNING_LISTED, running_listed)
    tl.store(p_gauges + PLACE_PARKED, parked)
    tl.store(p_gauges + PLACE_PARKED_LISTED, parked_listed)
    tl.atomic_add(region.p_counters + COUNT_SCRUBBED_SLOTS, passed_running.to(tl.int64))
