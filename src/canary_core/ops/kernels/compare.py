"""The common part of read_check, scrub and verify: the bytes of a tile against the recorded fingerprints."""

import triton
import triton.language as tl

from canary_core.ops.kernels.common import report_record, split_head
from canary_core.ops.kernels.fold import fold, has_bytes, load_strip
from canary_core.ops.kernels.sums import compare_sums
from canary_core.ops.kernels.words import CLOCK_NEXT, KIND_BYTES, KIND_PROBE, READ_STATE, WRITTEN


@triton.jit
def compare(
    region, sources, source, strip, slot, m, position, p_writers, i_row, phase,
    BYTES: tl.constexpr, EAGER: tl.constexpr, probe=None,
):  # fmt: skip
    """Compares the bytes of written slots, each a row of the tile, with their fingerprints and reports BYTES; returns
    the number of bytes compared. ``source``: see `fold.describe`; ``strip``: the narrow source beside the wide one, if
    `BYTES` has one. A fingerprint of 0 is unknown and not compared. ``probe``: the source, plus one, whose fingerprint
    of the tile's first slot reports PROBE; 0 for none. A probe inverts all bits of the whole tile's fingerprints, so
    that the tile is looked at closely.

    Only after a difference, which is rare, the kernel asks whether the slot was written and its fingerprint known: so
    these checks cost other slots no register. Two exceptions: without `EAGER` (for tiles with many empty slots) the
    kernel first asks whether a slot was written; and for long slots, slow to read and mostly unknown, whether the
    fingerprint is known.
    """
    if not EAGER:
        m = m & is_written(tl.load(region.p_records + slot * 4, mask=m, other=0))
    if BYTES.PARTS > 0:
        compared = compare_sums(region, sources, slot, m, position, p_writers, i_row, phase, BYTES, probe)
    else:
        compared = compare_each(
            region, sources, source, strip, slot, m, position, p_writers, i_row, phase, BYTES, probe
        )
    return compared


@triton.jit
def compare_each(
    region, sources, source, strip, slot, m, position, p_writers, i_row, phase,
    BYTES: tl.constexpr, probe=None,
):  # fmt: skip
    """`compare` where each source has a fingerprint of its own."""
    ABREAST: tl.constexpr = BYTES.ABREAST > 0
    present = m & has_bytes(source, slot, BYTES, 0)
    old = tl.load(sources.p_fingerprints + slot * sources.count + source.column, mask=present, other=0)
    if probe is not None:
        flip = tl.where(probe != 0, -1, 0).to(tl.int64)
        old = old ^ flip
    if ABREAST:
        present = present & (old != 0)
    if len(BYTES.STRIPS) > 1:
        # Asked for before the wide source's bytes and looked at after them, so that there is one wait, not two.
        strip_present = m & has_bytes(strip, slot, BYTES, 1)
        strip_old = tl.load(sources.p_fingerprints + slot * sources.count + strip.column, mask=strip_present, other=0)
        if probe is not None:
            strip_old = strip_old ^ flip
        strip_words, strip_keys = load_strip(sources, strip, slot, strip_present, BYTES, 1)
    value, _odd = fold(sources, source, slot, present, BYTES, 0, True, False)
    differs = present & (value != old)
    suspect = differs
    if len(BYTES.STRIPS) > 1:
        strip_value = strip.salt + tl.sum(strip_words * strip_keys, 1).to(tl.int64, bitcast=True)
        strip_differs = strip_present & (strip_value != strip_old)
        suspect = suspect | strip_differs
    compared = tl.sum((present & (differs == 0)).to(tl.int64), 0) * BYTES.STRIPS[0].slot_bytes
    if len(BYTES.STRIPS) > 1:
        alike = (strip_present & (strip_differs == 0)).to(tl.int64)
        compared += tl.sum(alike, 0) * BYTES.STRIPS[1].slot_bytes
    if tl.sum(suspect.to(tl.int32), 0) > 0:
        # Read now: another stream may have announced meanwhile that bytes arrive there (`SlotEvents.expect`).
        first = tl.load(region.p_records + slot * 4, mask=m, other=0, volatile=True)
        token, _word = split_head(first)
        written = m & is_written(first)
        kind = tl.full(slot.shape, KIND_BYTES, tl.int64)
        stored, strip_kind = old, kind
        if probe is not None:
            # As blocks: beside one, Triton 3.9's interpreter does not take a scalar's comparison.
            b_probe = tl.zeros_like(slot) + probe
            if not ABREAST:
                b_probe = tl.where(tl.arange(0, slot.shape[0]) == 0, b_probe, 0)
            asked = b_probe == source.column + 1
            stored = tl.where(asked, old, old ^ flip)
            compared += tl.sum((differs & (value == stored)).to(tl.int64), 0) * BYTES.STRIPS[0].slot_bytes
            differs = differs & (value != stored) & (asked | (written & (stored != 0)))
            kind = tl.where(asked, KIND_PROBE, KIND_BYTES).to(tl.int64)
        else:
            differs = differs & written & (old != 0)
        writer = tl.full((), -1, tl.int64)
        if p_writers is not None:
            writer = tl.load(p_writers + i_row).to(tl.int64)
        step = tl.load(region.p_clock + CLOCK_NEXT) * 8 + phase
        o_position = position + tl.zeros_like(slot)
        if len(position.shape) == 0:
            o_position += tl.arange(0, slot.shape[0])
        compared += tl.sum(differs.to(tl.int64), 0) * BYTES.STRIPS[0].slot_bytes
        report_record(
            region, kind, differs, source.column, slot, o_position, token, region.p_records + slot * 4, m, stored,
            value, writer, step,
        )  # fmt: skip
        if len(BYTES.STRIPS) > 1:
            strip_stored = strip_old
            if probe is not None:
                strip_asked = b_probe == strip.column + 1
                strip_stored = tl.where(strip_asked, strip_old, strip_old ^ flip)
                same = strip_differs & (strip_value == strip_stored)
                compared += tl.sum(same.to(tl.int64), 0) * BYTES.STRIPS[1].slot_bytes
                strip_differs = strip_differs & (strip_value != strip_stored)
                strip_differs = strip_differs & (strip_asked | (written & (strip_stored != 0)))
                strip_kind = tl.where(strip_asked, KIND_PROBE, KIND_BYTES).to(tl.int64)
            else:
                strip_differs = strip_differs & written & (strip_old != 0)
            compared += tl.sum(strip_differs.to(tl.int64), 0) * BYTES.STRIPS[1].slot_bytes
            report_record(
                region, strip_kind, strip_differs, strip.column, slot, o_position, token, region.p_records + slot * 4,
                m, strip_stored, strip_value, writer, step,
            )  # fmt: skip
    return compared


@triton.jit
def is_written(first):
    """Whether the record with head ``first`` describes a written slot."""
    return (first >> 32 & READ_STATE) == WRITTEN
