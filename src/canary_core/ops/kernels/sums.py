"""Fingerprints shared by several sources, in the byte kernels: see `canary_core.ops.sums` and
`canary_core.ops.torch.sums`.

A program goes through the sources of its group with one tile of slots, and keeps both numbers of each slot in
registers. Only after a difference the sources are read again one by one, for the one that is damaged.
"""

import triton
import triton.language as tl

from canary_core.ops.kernels.common import claim_of, report_record, split_head
from canary_core.ops.kernels.fold import fold_rows, fold_sums, group, has_bytes, part
from canary_core.ops.kernels.words import (
    CLOCK_NEXT,
    CONTENT_TOKENS,
    COUNT_UNSURE,
    KIND_BYTES,
    KIND_LOST_WRITE,
    KIND_NON_FINITE,
    KIND_PROBE,
    PHASE_POST,
    PLAN,
    PLANNED_RECORD,
    READ_STATE,
    SOURCE_FIELDS,
    SOURCE_SURE,
    WRITTEN,
)
from canary_core.records import NullBytes

NULL_FINITE = tl.constexpr(int(NullBytes.FINITE))
NULL_NOT_FINITE = tl.constexpr(int(NullBytes.NOT_FINITE))


@triton.jit
def compare_sums(
    region, sources, slot, m, position, p_writers, i_row, phase,
    BYTES: tl.constexpr, probe=None,
):  # fmt: skip
    """As `compare.compare`, for slots that are written or looked at closely. A group's number after the last source is
    the source of its findings where several of its sources have changed, and of its probes."""
    named = sources.named + group(sources, BYTES)
    p_old = sources.p_fingerprints + slot * sources.count + group(sources, BYTES) * 2
    old, old_second = tl.load(p_old, mask=m, other=0), tl.load(p_old + 1, mask=m, other=0)
    if probe is not None:
        b_asked = (tl.arange(0, slot.shape[0]) == 0) & (tl.zeros_like(slot) + probe == named + 1)
        old = tl.where(b_asked, ~old, old)
    first, second, parts, _odd = fold_sums(sources, slot, m, BYTES, False)
    by, weighted = first - old, second - old_second
    differs = (parts > 0) & ((by != 0) | (weighted != 0))
    compared = tl.sum(tl.where(differs, 0, parts).to(tl.int64), 0)
    if tl.sum(differs.to(tl.int32), 0) > 0:
        # Read now: another stream may have announced meanwhile that bytes arrive there (`SlotEvents.expect`).
        head = tl.load(region.p_records + slot * 4, mask=m, other=0, volatile=True)
        token, _word = split_head(head)
        known = (head >> 32 & READ_STATE == WRITTEN) & (old != 0)
        alone = differs & known & (by != 0)
        kind = tl.full(slot.shape, KIND_BYTES, tl.int64)
        if probe is not None:
            known = known | b_asked
            alone = alone & (b_asked == 0)
            kind = tl.where(b_asked, KIND_PROBE, KIND_BYTES).to(tl.int64)
        differs = differs & known
        compared += tl.sum(tl.where(differs, parts, 0).to(tl.int64), 0)
        writer = tl.full((), -1, tl.int64)
        if p_writers is not None:
            writer = tl.load(p_writers + i_row).to(tl.int64)
        step = tl.load(region.p_clock + CLOCK_NEXT) * 8 + phase
        o_position = position + tl.zeros_like(slot)
        if len(position.shape) == 0:
            o_position += tl.arange(0, slot.shape[0])
        left = differs
        for i in range(BYTES.PARTS + 1):
            # After the last source: what no single one explains.
            rest = i == BYTES.PARTS
            source = part(sources, tl.minimum(i, BYTES.PARTS - 1), BYTES)
            weight = tl.load(sources.p_weights + source.column)
            changed = alone & has_bytes(source, slot, BYTES, 0) & (by * weight == weighted)
            changed = tl.where(rest, left, changed)
            if tl.sum(changed.to(tl.int32), 0) > 0:
                value, _bits = fold_rows(sources, source, slot, changed & (rest == 0), BYTES, 0, False, False)
                found, stored = tl.where(rest, first, value), tl.where(rest, old, value - by)
                report_record(
                    region, kind, changed, tl.where(rest, named, source.column), slot, o_position, token,
                    region.p_records + slot * 4, m, stored, found, writer, step,
                )  # fmt: skip
            left = left & (changed == 0)
    return compared * BYTES.STRIPS[0].slot_bytes


@triton.jit
def record_sums(
    region, sources, p_tokens, p_writers, step, o_token, word, slot, usable, recorded,
    BYTES: tl.constexpr,
):  # fmt: skip
    """As `fingerprint.record_tile`. A write is lost where it left all sources of the group as they were."""
    claim = tl.load(region.p_claims + slot, mask=usable, other=0)
    token = tl.load(p_tokens + o_token, mask=usable, other=0).to(tl.int64)
    p_record = region.p_plan + o_token * PLAN + PLANNED_RECORD
    stored_first = tl.load(p_record, mask=usable, other=0)
    stored_third = tl.load(p_record + 2, mask=usable, other=0)
    p_old = sources.p_fingerprints + slot * sources.count + group(sources, BYTES) * 2
    old, old_second = tl.load(p_old, mask=usable, other=0), tl.load(p_old + 1, mask=usable, other=0)
    first, second, parts, odd = fold_sums(sources, slot, usable, BYTES, True)
    there = (parts > 0) & (claim == claim_of(step, o_token))
    tl.store(p_old, first, mask=there)
    tl.store(p_old + 1, second, mask=there)
    recorded += tl.sum(tl.where(there, parts, 0).to(tl.int64), 0) * BYTES.STRIPS[0].slot_bytes
    stored_token, _ = split_head(stored_first)
    other = ((stored_third & 0xFFFFFFFF) == 0) | (stored_token != token)
    other &= tl.maximum(stored_token, token) < CONTENT_TOKENS
    p_sure = sources.p_descriptors + part(sources, 0, BYTES).column * SOURCE_FIELDS + SOURCE_SURE
    sure = tl.load(p_sure) + tl.zeros_like(old)
    same = there & (first == old) & (second == old_second) & (sure != 0)
    lost = same & other
    not_finite = there & (lost == 0) & (odd != 0)
    if tl.sum((same | not_finite).to(tl.int32), 0) > 0:
        tl.atomic_add(region.p_counters + COUNT_UNSURE, tl.sum((same & (other == 0)).to(tl.int64), 0))
        position = tl.load(region.p_plan + o_token * PLAN + 2, mask=there, other=0)
        writer = tl.load(p_writers + (word & 0xFFFFFFFF), mask=there, other=-1).to(tl.int64)
        report_record(
            region, tl.full(slot.shape, KIND_LOST_WRITE, tl.int64), lost, sources.named + group(sources, BYTES), slot,
            position, token, p_record, there, old, first, writer, step * 8 + PHASE_POST,
        )  # fmt: skip
        report_not_finite(
            region, sources, slot, not_finite, position, token, p_record, there, writer, step, BYTES,
        )  # fmt: skip
    return recorded


@triton.jit
def report_not_finite(
    region, sources, slot, m, position, token, p_record, there, writer, step,
    BYTES: tl.constexpr,
):  # fmt: skip
    """Reports NON_FINITE for each source of the group in which a slot, where ``m``, has such a number."""
    if tl.sum(m.to(tl.int32), 0) > 0:
        for i in range(BYTES.PARTS):
            source = part(sources, i, BYTES)
            of_source = m & has_bytes(source, slot, BYTES, 0)
            value, bits = fold_rows(sources, source, slot, of_source, BYTES, 0, False, True)
            report_record(
                region, tl.full(slot.shape, KIND_NON_FINITE, tl.int64), of_source & (bits != 0), source.column, slot,
                position, token, p_record, there, tl.zeros_like(value), value, writer, step * 8 + PHASE_POST,
            )  # fmt: skip


@triton.jit
def look_at_null_sums(region, sources, null, step, BYTES: tl.constexpr):
    """As `fingerprint.look_at_null`."""
    SLOTS: tl.constexpr = BYTES.SLOTS
    slot = null + tl.zeros((SLOTS,), tl.int64)
    _first, _second, parts, odd = fold_sums(sources, slot, tl.arange(0, SLOTS) == 0, BYTES, True)
    there = parts > 0
    p_known = sources.p_fingerprints + slot * sources.count + group(sources, BYTES) * 2
    known = tl.load(p_known, mask=there, other=0)
    bad = there & (odd != 0)
    found = tl.where(bad, NULL_NOT_FINITE, NULL_FINITE).to(tl.int64)
    tl.store(p_known, found, mask=there)
    tl.store(p_known + 1, found, mask=there)
    if tl.sum(bad.to(tl.int32), 0) > 0:
        unsure = bad & (known != NULL_FINITE) & (known != NULL_NOT_FINITE)
        tl.atomic_add(region.p_counters + COUNT_UNSURE, tl.sum(unsure.to(tl.int64), 0))
        nobody = tl.full(slot.shape, -1, tl.int64)
        report_not_finite(
            region, sources, slot, bad & (known == NULL_FINITE), nobody, nobody, region.p_records + slot * 4, there,
            tl.full((), -1, tl.int64), step, BYTES,
        )  # fmt: skip
