"""Sampled tokens within `check` and `record`: the parts of their kernels for `canary_core.ops.samples`."""

import triton
import triton.language as tl

from canary_core.ops.kernels.common import load_head, lookup, split_head
from canary_core.ops.kernels.fields import SampleFields
from canary_core.ops.kernels.launch import arguments
from canary_core.ops.kernels.words import READ_WORD, STATE_VALUES, STATUS_OK, WRITTEN
from canary_core.ops.launches import Arguments
from canary_core.ops.state import RegionState
from canary_core.records import (
    NO_SAMPLE,
    NOT_SAMPLED,
    SAMPLE_POSITION_BITS,
    SAMPLE_TOKEN_BITS,
    SAMPLE_TOKENS,
    SAMPLE_WRITER_BITS,
    SAMPLE_WRITERS,
    TAIL_WORDS,
)

KEPT = tl.constexpr(SAMPLE_TOKENS)
KEPT_WRITERS = tl.constexpr(SAMPLE_WRITERS)
TOKEN_BITS = tl.constexpr(SAMPLE_TOKEN_BITS)
TOKEN_VALUES = tl.constexpr(1 << SAMPLE_TOKEN_BITS)
POSITION_BITS = tl.constexpr(SAMPLE_POSITION_BITS)
POSITION_VALUES = tl.constexpr(1 << SAMPLE_POSITION_BITS)
WRITER_SHIFT = tl.constexpr(SAMPLE_TOKEN_BITS + SAMPLE_POSITION_BITS)
WRITER_VALUES = tl.constexpr(1 << SAMPLE_WRITER_BITS)
TAIL = tl.constexpr(TAIL_WORDS)
NONE_GIVEN = tl.constexpr(NO_SAMPLE)
LEFT_OUT = tl.constexpr(NOT_SAMPLED)
ROWS_AT_ONCE = tl.constexpr(32)


def sample_arguments(state: RegionState) -> Arguments:
    """``samples``."""
    samples = state.samples
    if samples is None:
        return arguments(SampleFields(None, None, None, None, 0))
    return arguments(SampleFields(samples.table, samples.given, samples.ends, samples.tails, samples.rows))


@triton.jit
def remember(samples):
    """As `ops.torch.samples.remember`; for one program, without a wait by others."""
    o_back = tl.arange(0, KEPT).to(tl.int64)
    n_rows = tl.load(samples.p_ends)
    for first in range(0, n_rows, ROWS_AT_ONCE):
        o_row = first + tl.arange(0, ROWS_AT_ONCE).to(tl.int64)
        m_row = o_row < n_rows
        end = tl.load(samples.p_ends + 1 + o_row, mask=m_row, other=0)[:, None]
        # All that was given for these rows at once: one load after the other would each wait for the last one's store.
        o_given = (KEPT - 1 - o_back) * samples.rows
        p_token = samples.p_given + o_given[None, :] + o_row[:, None]
        token = tl.load(p_token, mask=m_row[:, None], other=LEFT_OUT)  # [ROWS_AT_ONCE, KEPT]
        position = ((end >> TOKEN_BITS) & (POSITION_VALUES - 1)) - o_back[None, :]
        sample = tl.where((token >= 0) & (token < TOKEN_VALUES), end - o_back[None, :] * TOKEN_VALUES + token, 0)
        own = m_row[:, None] & (end != 0)
        p_kept = samples.p_samples + (end >> WRITER_SHIFT) % KEPT_WRITERS * KEPT + (position + KEPT) % KEPT
        # Beside the given tokens, not after them.
        known = tl.load(p_kept, mask=own, other=0)
        goes_on = tl.max(((token >= 0) & (token < TOKEN_VALUES)).to(tl.int32), axis=1)[:, None] > 0
        later = goes_on & (known >= end + TOKEN_VALUES) & ((known >> WRITER_SHIFT) == (end >> WRITER_SHIFT))
        said = own & (position > 0) & (token != LEFT_OUT)
        tl.store(p_kept, tl.where(said, sample, 0), mask=said | (own & later))
        tl.store(
            p_token, tl.where(o_back[None, :] == 0, NONE_GIVEN, LEFT_OUT) + tl.zeros_like(token), mask=m_row[:, None]
        )


@triton.jit
def note_tail(region, samples, places, row_first, prefix, read_first, i_row, TABLE: tl.constexpr):
    """As `ops.torch.samples.note_tails`, for one row."""
    o_last = tl.arange(0, KEPT).to(tl.int64)
    position = prefix - KEPT + o_last
    m = position >= tl.maximum(read_first, 1)
    slot, status = lookup(places, row_first, position, m, TABLE)
    usable = m & (status == STATUS_OK)
    first, _ = load_head(region.p_records, slot, usable)
    token, stored = split_head(first)
    holds = usable & ((stored & READ_WORD) == position * STATE_VALUES + WRITTEN)
    holds = holds & (position < POSITION_VALUES) & (token >= 0) & (token < TOKEN_VALUES)
    p_tail = samples.p_tails + (i_row.to(tl.int64) * KEPT + o_last) * TAIL
    tl.store(p_tail, tl.where(holds, (position << TOKEN_BITS) | token, 0))
    tl.store(p_tail + 1, tl.where(holds, slot, -1))
    tl.store(p_tail + 2, tl.load(region.p_records + slot * 4 + 2, mask=holds, other=-1))


@triton.jit
def sampled(samples, writer, position, m):
    """`ops.torch.samples.sampled`: the token sampled for the writer at each position, -1 where unknown."""
    # The writer may be a scalar, whose comparison Triton 3.9's interpreter does not take beside a block's.
    m = m & (tl.where(writer >= 0, position, 0) > 0) & (position < POSITION_VALUES)
    kept = tl.maximum(writer, 0) % KEPT_WRITERS * KEPT + tl.where(m, position, 0) % KEPT
    sample = tl.load(samples.p_samples + kept, mask=m, other=0)
    own = ((tl.maximum(writer, 0) % WRITER_VALUES) << POSITION_BITS) | position
    return tl.where(m & ((sample >> TOKEN_BITS) == own), sample & (TOKEN_VALUES - 1), -1)


@triton.jit
def note_ends(samples, p_writers, b_prefix, b_new, o_row, rows):
    """As `ops.torch.samples.note_ends`; for one program. Blocks of all rows."""
    m_row = o_row < rows
    writer = tl.load(p_writers + o_row, mask=m_row, other=-1).to(tl.int64)
    end = b_prefix.to(tl.int64) + b_new.to(tl.int64)
    known = (writer >= 0) & (b_new > 0) & (end < POSITION_VALUES)
    sample = (((tl.maximum(writer, 0) % WRITER_VALUES) << POSITION_BITS) | end) << TOKEN_BITS
    tl.store(samples.p_ends, rows)
    tl.store(samples.p_ends + 1 + o_row, tl.where(known, sample, 0), mask=m_row)
