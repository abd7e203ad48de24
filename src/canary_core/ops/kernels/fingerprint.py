"""fingerprint and baseline: the kernels of `canary_core.ops.torch.fingerprint`.

Each program takes tiles of slots through one source, or through a source and its narrow strip, such as its scales: one
look-up of a slot serves both. Sources of the same shape share a launch: Llama needs one, DeepSeek-V4's window pool too.
Long slots, such as recurrent states, go one by one through several sources abreast. `tiles` has the sizes of tiles,
`fold` the work on one.
"""

import triton
import triton.language as tl

from canary_core.batch import BatchView, SlotTable
from canary_core.ops.kernels.common import claim_of, report_record, split_head
from canary_core.ops.kernels.fold import describe, fold, has_bytes, keep, spread
from canary_core.ops.kernels.launch import MOST_PROGRAMS, arguments, group_launches, jit
from canary_core.ops.kernels.sums import look_at_null_sums, record_sums
from canary_core.ops.kernels.tiles import SCRUB_TILES, WRITE_TILES
from canary_core.ops.kernels.words import (
    CLOCK_NEXT,
    CONTENT_TOKENS,
    COUNT_RECORDED_BYTES,
    COUNT_UNSURE,
    KIND_LOST_WRITE,
    KIND_NON_FINITE,
    PHASE_POST,
    PLAN,
    PLANNED_RECORD,
    SOURCE_FIELDS,
    SOURCE_SURE,
    STATUS_OK,
)
from canary_core.ops.launches import GroupLaunch
from canary_core.ops.state import RegionState
from canary_core.records import NullBytes

NULL_FINITE = tl.constexpr(int(NullBytes.FINITE))
NULL_NOT_FINITE = tl.constexpr(int(NullBytes.NOT_FINITE))


def fingerprint(state: RegionState, batch: BatchView, table: SlotTable) -> None:
    """As `canary_core.ops.torch.fingerprint.fingerprint`. One launch a source group; may be captured."""
    if batch.tokens == 0:
        return
    for launch in written_launches(state):
        fingerprint_group(state, batch, launch)


def written_launches(state: RegionState) -> list[GroupLaunch]:
    """One for each source group."""
    return group_launches(state, "fingerprint", fingerprint_kernel, WRITE_TILES)


def fingerprint_group(state: RegionState, batch: BatchView, launch: GroupLaunch) -> None:
    """Of one source group."""
    tiles = min(-(-batch.tokens // launch.slots), MOST_PROGRAMS)
    if launch.abreast:
        # A program's tokens are far apart: where only the last token of a row has a slot, the work is spread then. And
        # an odd number apart: else, of prefills whose lengths are powers of two, one program would get all.
        tiles = min(batch.tokens, launch.programs | 1)
    given = arguments(batch.token_ids, batch.writers, batch.tokens, state.judged_nulls)
    # One more program looks at a null slot.
    launch.launch((launch.blocks, tiles + (state.judged_nulls > 0)), given)


def baseline(state: RegionState) -> None:
    """As `canary_core.ops.torch.fingerprint.baseline`. One launch a source group."""
    for launch in group_launches(state, "baseline", baseline_kernel, SCRUB_TILES):
        launch.launch((launch.blocks, launch.programs))


@jit("tokens", "judged_nulls")
def fingerprint_kernel(
    region, sources, p_tokens, p_writers, tokens, judged_nulls,
    BYTES: tl.constexpr,
):  # fmt: skip
    """Grid: programs of source groups, times any number of programs over the batch's tokens, and one more for a null
    slot where there are any."""
    fingerprint_written(region, sources, p_tokens, p_writers, tokens, judged_nulls, BYTES)


@triton.jit
def fingerprint_written(region, sources, p_tokens, p_writers, tokens, judged_nulls, BYTES: tl.constexpr):
    """A program takes tiles of `SLOTS` tokens; where sources are `ABREAST`, it looks up `SLOTS` tokens far apart and
    takes their slots one at a time."""
    SLOTS: tl.constexpr = BYTES.SLOTS
    step = tl.load(region.p_clock + CLOCK_NEXT)
    recorded = tl.zeros((), tl.int64)
    apart = tl.num_programs(1) - (judged_nulls > 0).to(tl.int32)
    looks = tl.program_id(1) == apart
    tokens = tl.where(looks, 0, tokens)
    if looks:
        null = region.null_first + step % judged_nulls
        if BYTES.PARTS > 0:
            look_at_null_sums(region, sources, null, step, BYTES)
        else:
            look_at_null(region, sources, null, step, BYTES)
    if BYTES.ABREAST > 0:
        for i in range(tl.program_id(1), tokens, apart * SLOTS):
            o_looked = i + apart * tl.arange(0, SLOTS)
            b_word = tl.load(region.p_plan + o_looked.to(tl.int64) * PLAN, mask=o_looked < tokens, other=0)
            b_left = (b_word >> 32) - 1 == STATUS_OK
            for _ in range(tl.sum(b_left.to(tl.int32), 0)):
                next = tl.min(tl.where(b_left, o_looked, tokens), 0)
                b_left = b_left & (o_looked != next)
                o_token = spread(next, BYTES)
                word = tl.load(region.p_plan + o_token * PLAN)
                slot = tl.load(region.p_plan + o_token * PLAN + 1)
                # The bytes of a slot that another token won are not asked for: a long one takes long.
                usable = tl.load(region.p_claims + slot) == claim_of(step, o_token)
                recorded = record_tile(
                    region, sources, p_tokens, p_writers, step, o_token, word, slot, usable, recorded, BYTES
                )
    else:
        for i in range(tl.program_id(1), (tokens + SLOTS - 1) // SLOTS, apart):
            o_token = i * SLOTS + tl.arange(0, SLOTS).to(tl.int64)
            m_token = o_token < tokens
            word = tl.load(region.p_plan + o_token * PLAN, mask=m_token, other=0)
            slot = tl.load(region.p_plan + o_token * PLAN + 1, mask=m_token, other=0)
            usable = (word != 0) & ((word >> 32) - 1 == STATUS_OK)
            if tl.max(word, 0) > 0:
                recorded = record_tile(
                    region, sources, p_tokens, p_writers, step, o_token, word, slot, usable, recorded, BYTES
                )
    tl.atomic_add(region.p_counters + COUNT_RECORDED_BYTES, recorded)


@triton.jit
def record_tile(
    region, sources, p_tokens, p_writers, step, o_token, word, slot, usable, recorded,
    BYTES: tl.constexpr,
):  # fmt: skip
    """Fingerprints and judges the bytes written by tokens ``o_token`` to ``slot``, a row of the tile each; returns
    ``recorded`` plus their number of bytes."""
    if BYTES.PARTS > 0:
        recorded = record_sums(region, sources, p_tokens, p_writers, step, o_token, word, slot, usable, recorded, BYTES)
    else:
        recorded = record_each(region, sources, p_tokens, p_writers, step, o_token, word, slot, usable, recorded, BYTES)
    return recorded


@triton.jit
def record_each(
    region, sources, p_tokens, p_writers, step, o_token, word, slot, usable, recorded,
    BYTES: tl.constexpr,
):  # fmt: skip
    """`record_tile` where each source has a fingerprint of its own."""
    # All that is small is asked for before the bytes and looked at after them.
    claim = tl.load(region.p_claims + slot, mask=usable, other=0)
    token = tl.load(p_tokens + o_token, mask=usable, other=0).to(tl.int64)
    p_record = region.p_plan + o_token * PLAN + PLANNED_RECORD
    stored_first = tl.load(p_record, mask=usable, other=0)
    stored_third = tl.load(p_record + 2, mask=usable, other=0)
    for s in tl.static_range(len(BYTES.STRIPS)):
        source = describe(sources, s, BYTES)
        p_old = sources.p_fingerprints + slot * sources.count + source.column
        present = usable & has_bytes(source, slot, BYTES, s)
        old = tl.load(p_old, mask=present, other=0)
        value, odd = fold(sources, source, slot, present, BYTES, s, False, True)
        there = present & (claim == claim_of(step, o_token))
        tl.store(p_old, value, mask=there)
        recorded += tl.sum(there.to(tl.int64), 0) * BYTES.STRIPS[s].slot_bytes
        stored_token, _ = split_head(stored_first)
        other = ((stored_third & 0xFFFFFFFF) == 0) | (stored_token != token)
        other &= tl.maximum(stored_token, token) < CONTENT_TOKENS
        # As a block: beside one, Triton 3.9's interpreter does not take a scalar's comparison.
        sure = tl.load(sources.p_descriptors + source.column * SOURCE_FIELDS + SOURCE_SURE) + tl.zeros_like(old)
        same = there & (value == old) & (sure != 0)
        lost = same & other
        not_finite = there & (lost == 0) & (odd != 0)
        if tl.sum((same | not_finite).to(tl.int32), 0) > 0:
            tl.atomic_add(region.p_counters + COUNT_UNSURE, tl.sum((same & (other == 0)).to(tl.int64), 0))
            position = tl.load(region.p_plan + o_token * PLAN + 2, mask=there, other=0)
            writer = tl.load(p_writers + (word & 0xFFFFFFFF), mask=there, other=-1).to(tl.int64)
            kind = tl.where(lost, KIND_LOST_WRITE, KIND_NON_FINITE).to(tl.int64)
            report_record(
                region, kind, lost | not_finite, source.column, slot, position, token, p_record, there, old, value,
                writer, step * 8 + PHASE_POST,
            )  # fmt: skip
    return recorded


@triton.jit
def look_at_null(region, sources, null, step, BYTES: tl.constexpr):
    """Whether all numbers of the null slot ``null`` are finite: reads the first row of the tile only."""
    SLOTS: tl.constexpr = BYTES.SLOTS
    for s in tl.static_range(len(BYTES.STRIPS)):
        source = describe(sources, s, BYTES)
        if BYTES.ABREAST > 0:
            slot = spread(null, BYTES)
            there = has_bytes(source, slot, BYTES, s)
        else:
            o_slot = tl.arange(0, SLOTS)
            slot = null + tl.zeros((SLOTS,), tl.int64)
            there = (o_slot == 0) & has_bytes(source, slot, BYTES, s)
        value, odd = fold(sources, source, slot, there, BYTES, s, False, True)
        p_known = sources.p_fingerprints + slot * sources.count + source.column
        known = tl.load(p_known, mask=there, other=0)
        bad = there & (odd != 0)
        tl.store(p_known, tl.where(bad, NULL_NOT_FINITE, NULL_FINITE).to(tl.int64), mask=there)
        if tl.sum(bad.to(tl.int32), 0) > 0:
            first = bad & (known != NULL_FINITE) & (known != NULL_NOT_FINITE)
            tl.atomic_add(region.p_counters + COUNT_UNSURE, tl.sum(first.to(tl.int64), 0))
            nobody = tl.full(slot.shape, -1, tl.int64)
            report_record(
                region, tl.full(slot.shape, KIND_NON_FINITE, tl.int64), bad & (known == NULL_FINITE), source.column,
                slot, nobody, nobody, region.p_records + slot * 4, there, known, value, tl.full((), -1, tl.int64),
                step * 8 + PHASE_POST,
            )  # fmt: skip


@triton.jit
def baseline_kernel(region, sources, BYTES: tl.constexpr):
    """Grid: any number of programs over tiles of `SLOTS` slots, by groups of sources."""
    SLOTS: tl.constexpr = BYTES.SLOTS
    for i in range(tl.program_id(1), (region.slots + SLOTS - 1) // SLOTS, tl.num_programs(1)):
        slot = i * SLOTS + tl.arange(0, SLOTS).to(tl.int64)
        if BYTES.ABREAST > 0:
            slot = spread(i, BYTES)
        keep(sources, sources.p_fingerprints, slot, slot < region.slots, BYTES)
