"""Compares the bytes of a tile with what was recorded of them."""

import triton
import triton.language as tl

from canary_core.ops.kernels.common import STATE_VALUES, WRITTEN, report_record, split_head
from canary_core.ops.kernels.fold import STRIP, fold, fold_abreast, load_strip
from canary_core.records import Clock, Kind

CLOCK_NEXT = tl.constexpr(int(Clock.NEXT))
KIND_BYTES = tl.constexpr(int(Kind.BYTES))


@triton.jit
def compare(
    p_descriptors, source, strip, p_keys, p_fingerprints, sources, p_records, p_counters, p_clock, p_ring, ring_rows,
    region, slot, m, position, p_writers, i_row, phase,
    STRIPS: tl.constexpr, EAGER: tl.constexpr,
):  # fmt: skip
    """Compares the bytes of written slots, each a row of the tile, with their fingerprints and reports BYTES; gives how
    many bytes were compared. ``source``: see `fold.describe`; ``strip``: the narrow source that goes with it, if
    `STRIPS` has one. A fingerprint of 0 is not known and is not compared.

    Only where bytes differ, which is rare, it is looked at whether the slot was written and its fingerprint known:
    these checks cost the other slots no register. Two exceptions: without `EAGER` (for tiles of which many slots hold
    nothing) it is looked at first whether a slot was written, and of long slots, which take long to read and of which
    most are not known, whether the fingerprint is."""
    ABREAST: tl.constexpr = len(source[0].shape) > 0
    if not EAGER:
        m = m & is_written(tl.load(p_records + slot * 4, mask=m, other=0))
    present = m & (slot.to(tl.int32) % STRIPS[0] < source[6])
    old = tl.load(p_fingerprints + slot * sources + source[0], mask=present, other=0)
    if ABREAST:
        present = present & (old != 0)
    if len(STRIPS) > STRIP:
        # Asked for before the wide source's bytes and looked at after them, so that there is one wait, not two.
        strip_present = m & (slot.to(tl.int32) % STRIPS[STRIP] < strip[6])
        strip_old = tl.load(p_fingerprints + slot * sources + strip[0], mask=strip_present, other=0)
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
