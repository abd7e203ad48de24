"""fingerprint and baseline: the kernels of `canary_core.ops.torch.fingerprint`.

Each program takes tiles of slots through one source, or through a source and its narrow strip, such as its scales: one
look-up of a slot serves both. Sources of the same shape share a launch: Llama needs one, DeepSeek-V4's window pool too.
Long slots, such as recurrent states, go one by one through several sources abreast. `tiles` has the sizes of tiles,
`fold` the work on one.
"""

import triton
import triton.language as tl

from canary_core.batch import BatchView, SlotTable
from canary_core.ops.kernels.common import STATUS_OK, claim_of, report_record, split_head
from canary_core.ops.kernels.fold import FIELDS, STRIP, describe, fold, fold_abreast, spread
from canary_core.ops.kernels.launch import MOST_PROGRAMS, arguments, group_launches, jit
from canary_core.ops.kernels.tiles import SCRUB_TILES, WRITE_TILES
from canary_core.ops.launches import GroupLaunch
from canary_core.ops.state import RegionState
from canary_core.records import PLAN_RECORD, PLAN_WORDS, Clock, Counter, Descriptor, Kind, NullBytes, Phase

PLAN = tl.constexpr(PLAN_WORDS)
RECORD = tl.constexpr(PLAN_RECORD)
SURE = tl.constexpr(int(Descriptor.SURE))
CLOCK_NEXT = tl.constexpr(int(Clock.NEXT))
COUNT_RECORDED_BYTES = tl.constexpr(int(Counter.RECORDED_BYTES))
COUNT_UNSURE = tl.constexpr(int(Counter.UNSURE))
KIND_LOST_WRITE = tl.constexpr(int(Kind.LOST_WRITE))
KIND_NON_FINITE = tl.constexpr(int(Kind.NON_FINITE))
PHASE_POST = tl.constexpr(int(Phase.POST_FORWARD))
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
    p_records, p_words, p_claims, p_plan, p_heads, p_chains, p_cursors, p_counters, p_clock, p_ring, ring_rows, region,
    slots, null_first, null_end,
    p_descriptors, p_columns, p_keys, p_salts, p_fingerprints, sources,
    p_tokens, p_writers, tokens, judged_nulls,
    STRIPS: tl.constexpr, SLOTS: tl.constexpr, ABREAST: tl.constexpr,
):  # fmt: skip
    """Grid: programs of source groups, times any number of programs over the batch's tokens, and one more for a null
    slot where there are any."""
    fingerprint_written(
        p_records, p_claims, p_plan, p_counters, p_clock, p_ring, ring_rows, region, null_first, p_descriptors,
        p_columns, p_keys, p_salts, p_fingerprints, sources, p_tokens, p_writers, tokens, judged_nulls,
        STRIPS, SLOTS, ABREAST,
    )  # fmt: skip


@triton.jit
def fingerprint_written(
    p_records, p_claims, p_plan, p_counters, p_clock, p_ring, ring_rows, region, null_first, p_descriptors, p_columns,
    p_keys, p_salts, p_fingerprints, sources, p_tokens, p_writers, tokens, judged_nulls,
    STRIPS: tl.constexpr, SLOTS: tl.constexpr, ABREAST: tl.constexpr,
):  # fmt: skip
    """A program takes tiles of `SLOTS` tokens; where sources are `ABREAST`, it looks up `SLOTS` tokens far apart and
    takes their slots one at a time."""
    step = tl.load(p_clock + CLOCK_NEXT)
    recorded = tl.zeros((), tl.int64)
    apart = tl.num_programs(1) - (judged_nulls > 0).to(tl.int32)
    looks = tl.program_id(1) == apart
    tokens = tl.where(looks, 0, tokens)
    if looks:
        look_at_null(
            p_records, p_counters, p_ring, ring_rows, region, p_descriptors, p_columns, p_keys, p_salts,
            p_fingerprints, sources, null_first + step % judged_nulls, step, STRIPS, SLOTS, ABREAST,
        )  # fmt: skip
    if ABREAST[0] > 0:
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
                usable = tl.load(p_claims + slot) == claim_of(step, o_token)
                recorded = record_tile(
                    p_claims, p_plan, p_counters, p_ring, ring_rows, region, p_descriptors, p_columns,
                    p_keys, p_salts, p_fingerprints, sources, p_tokens, p_writers, step, o_token, word, slot, usable,
                    recorded, STRIPS, ABREAST,
                )  # fmt: skip
    else:
        for i in range(tl.program_id(1), (tokens + SLOTS - 1) // SLOTS, apart):
            o_token = i * SLOTS + tl.arange(0, SLOTS).to(tl.int64)
            m_token = o_token < tokens
            word = tl.load(p_plan + o_token * PLAN, mask=m_token, other=0)
            slot = tl.load(p_plan + o_token * PLAN + 1, mask=m_token, other=0)
            usable = (word != 0) & ((word >> 32) - 1 == STATUS_OK)
            if tl.max(word, 0) > 0:
                recorded = record_tile(
                    p_claims, p_plan, p_counters, p_ring, ring_rows, region, p_descriptors, p_columns,
                    p_keys, p_salts, p_fingerprints, sources, p_tokens, p_writers, step, o_token, word, slot, usable,
                    recorded, STRIPS, ABREAST,
                )  # fmt: skip
    tl.atomic_add(p_counters + COUNT_RECORDED_BYTES, recorded)


@triton.jit
def record_tile(
    p_claims, p_plan, p_counters, p_ring, ring_rows, region, p_descriptors, p_columns, p_keys, p_salts,
    p_fingerprints, sources, p_tokens, p_writers, step, o_token, word, slot, usable, recorded,
    STRIPS: tl.constexpr, ABREAST: tl.constexpr,
):  # fmt: skip
    """Fingerprints and judges the bytes written by tokens ``o_token`` to ``slot``, a row of the tile each; returns
    ``recorded`` plus their number of bytes."""
    # All that is small is asked for before the bytes and looked at after them.
    claim = tl.load(p_claims + slot, mask=usable, other=0)
    token = tl.load(p_tokens + o_token, mask=usable, other=0).to(tl.int64)
    p_record = p_plan + o_token * PLAN + RECORD
    stored_first = tl.load(p_record, mask=usable, other=0)
    stored_third = tl.load(p_record + 2, mask=usable, other=0)
    for s in tl.static_range(len(STRIPS) // STRIP):
        source = describe(p_descriptors, p_columns, p_salts, len(STRIPS) // STRIP, s, ABREAST)
        p_old = p_fingerprints + slot * sources + source[0]
        present = usable & (slot.to(tl.int32) % STRIPS[s * STRIP] < source[6])
        old = tl.load(p_old, mask=present, other=0)
        if ABREAST[0] > 0:
            value, odd = fold_abreast(p_descriptors, source, p_keys, slot, present, STRIPS, s, True)
        else:
            value, odd = fold(p_descriptors, source, p_keys, slot, present, STRIPS, s, False, True)
        there = present & (claim == claim_of(step, o_token))
        tl.store(p_old, value, mask=there)
        recorded += tl.sum(there.to(tl.int64), 0) * (STRIPS[s * STRIP + 1] * STRIPS[s * STRIP + 2])
        stored_token, _ = split_head(stored_first)
        other = ((stored_third & 0xFFFFFFFF) == 0) | (stored_token != token)
        # As a block: beside one, Triton 3.9's interpreter does not take a scalar's comparison.
        sure = tl.load(p_descriptors + source[0] * FIELDS + SURE) + tl.zeros_like(old)
        same = there & (value == old) & (sure != 0)
        lost = same & other
        not_finite = there & (lost == 0) & (odd != 0)
        if tl.sum((same | not_finite).to(tl.int32), 0) > 0:
            tl.atomic_add(p_counters + COUNT_UNSURE, tl.sum((same & (other == 0)).to(tl.int64), 0))
            position = tl.load(p_plan + o_token * PLAN + 2, mask=there, other=0)
            writer = tl.load(p_writers + (word & 0xFFFFFFFF), mask=there, other=-1).to(tl.int64)
            kind = tl.where(lost, KIND_LOST_WRITE, KIND_NON_FINITE).to(tl.int64)
            report_record(
                p_counters, p_ring, ring_rows, kind, lost | not_finite, region, source[0], slot, position,
                token, p_record, there, old, value, writer, step * 8 + PHASE_POST,
            )  # fmt: skip
    return recorded


@triton.jit
def look_at_null(
    p_records, p_counters, p_ring, ring_rows, region, p_descriptors, p_columns, p_keys, p_salts, p_fingerprints,
    sources, null, step,
    STRIPS: tl.constexpr, SLOTS: tl.constexpr, ABREAST: tl.constexpr,
):  # fmt: skip
    """Whether all numbers of the null slot ``null`` are finite: reads the first row of the tile only."""
    for s in tl.static_range(len(STRIPS) // STRIP):
        source = describe(p_descriptors, p_columns, p_salts, len(STRIPS) // STRIP, s, ABREAST)
        if ABREAST[0] > 0:
            slot = spread(null, ABREAST)
            there = slot.to(tl.int32) % STRIPS[s * STRIP] < source[6]
            value, odd = fold_abreast(p_descriptors, source, p_keys, slot, there, STRIPS, s, True)
        else:
            o_slot = tl.arange(0, SLOTS)
            slot = null + tl.zeros((SLOTS,), tl.int64)
            there = (o_slot == 0) & (slot.to(tl.int32) % STRIPS[s * STRIP] < source[6])
            value, odd = fold(p_descriptors, source, p_keys, slot, there, STRIPS, s, False, True)
        p_known = p_fingerprints + slot * sources + source[0]
        known = tl.load(p_known, mask=there, other=0)
        bad = there & (odd != 0)
        tl.store(p_known, tl.where(bad, NULL_NOT_FINITE, NULL_FINITE).to(tl.int64), mask=there)
        if tl.sum(bad.to(tl.int32), 0) > 0:
            first = bad & (known != NULL_FINITE) & (known != NULL_NOT_FINITE)
            tl.atomic_add(p_counters + COUNT_UNSURE, tl.sum(first.to(tl.int64), 0))
            nobody = tl.full(slot.shape, -1, tl.int64)
            report_record(
                p_counters, p_ring, ring_rows, tl.full(slot.shape, KIND_NON_FINITE, tl.int64),
                bad & (known == NULL_FINITE), region, source[0], slot, nobody, nobody, p_records + slot * 4, there,
                known, value, tl.full((), -1, tl.int64), step * 8 + PHASE_POST,
            )  # fmt: skip


@triton.jit
def baseline_kernel(
    p_records, p_words, p_claims, p_plan, p_heads, p_chains, p_cursors, p_counters, p_clock, p_ring, ring_rows, region,
    slots, null_first, null_end,
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
