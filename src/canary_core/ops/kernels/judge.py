"""The judgement of readable places in `check`: of a tile as a whole, and of a suspect tile's places one by one."""

import triton
import triton.language as tl

from canary_core.ops.kernels.common import (
    load_head,
    lookup,
    mix,
    report_record,
    split_head,
)
from canary_core.ops.kernels.words import (
    ALLOCATED,
    CHAIN_ENTRIES,
    CONTENT_BITS,
    COUNT_UNKNOWN_SLOTS,
    FREED,
    KIND_FREED,
    KIND_NULL_SLOT,
    KIND_POSITION,
    KIND_PREFIX,
    KIND_SLOT_RANGE,
    KIND_TOKEN,
    KIND_UNWRITTEN,
    PHASE_PRE,
    READ_WORD,
    STATE_VALUES,
    STATUS_NULL,
    STATUS_OK,
    STATUS_RANGE,
    UNKNOWN,
    UNWRITTEN,
    WRITTEN,
)

NOTHING = tl.constexpr(-1)

JUDGED_TILE = 128
"""Places of a suspect tile that are judged at once."""


@triton.jit
def is_suspect(
    region, own_tokens, places, start, end, prefix, read_first, i_row, row_first, writer, anchor,
    TABLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Whether anything is wrong or unknown in a row's tile of positions from ``start`` to before ``end``."""
    GROUP: tl.constexpr = TABLE.GROUP
    j = tl.arange(0, TILE).to(tl.int64)
    position = start + j
    m = position < end
    slot, status = lookup(places, row_first, position, m, TABLE)
    # The hash before the tile: the row's anchor, or of the record before; a window begins with none.
    inside = start > read_first
    prior = tl.maximum(start - 1, 0)
    prior_slot, prior_status = lookup(places, row_first, prior, inside, TABLE)
    usable = m & (status == STATUS_OK)
    prior_usable = inside & (prior_status == STATUS_OK)
    first, hash = load_head(region.p_records, slot, usable)
    prior_first, before = load_head(region.p_records, prior_slot, prior_usable)
    token, stored = split_head(first)
    good = ((stored & READ_WORD) == position * STATE_VALUES + WRITTEN) & (hash != 0)
    if own_tokens.p_tokens is not None:
        o_own = (position + 1) * GROUP - 1
        p_token = own_tokens.p_tokens + i_row.to(tl.int64) * own_tokens.stride + o_own
        expected = tl.load(p_token, mask=m & (o_own < own_tokens.width), other=-1).to(tl.int64)
        good = good & ((expected < 0) | (expected == token))
    good = good & usable
    _, prior_stored = split_head(prior_first)
    known = (start == read_first) | (
        prior_usable & ((prior_stored & READ_WORD) == prior * STATE_VALUES + WRITTEN) & (before != 0)
    )
    before = tl.where(start == 0, anchor, before)

    # With e[j] = h[j] - h[j-1] - mix[j], all of which must be 0, sum((j + linked) * e[j]) needs no h[j-1]. A
    # foreign run of n slots leaves n times the difference of two hashes, so it is missed once in 2**54.
    linked = ((start == 0) | inside).to(tl.int64)
    weight = tl.where(j == end - start - 1, j + linked, -1)
    terms = tl.where(m, weight * hash - (j + linked) * mix(token, position), 0)
    remainder, n_good = tl.reduce((terms, good.to(tl.int32)), 0, add_pairs)
    suspect = (remainder != linked * before) | (n_good < end - start) | (known == 0)
    if end == prefix:
        chain_hash, chained = ended_at(region, writer, prefix)
        suspect = suspect | (chained & (tl.sum(tl.where(position == prefix - 1, hash, 0), 0) != chain_hash))
    return suspect


@triton.jit
def judge(
    region, own_tokens, places, position, end, prefix, read_first, i_row, row_first, writer, anchor,
    chain_hash, chained, step,
    TABLE: tl.constexpr, JUDGED: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """Judges and reports places of a suspect tile, each with the record before; gives how many were reported, and how
    many are unknown. `COUNTS`: adds these to the counter."""
    GROUP: tl.constexpr = TABLE.GROUP
    m = position < end
    slot, status = lookup(places, row_first, position, m, TABLE)
    usable = m & (status == STATUS_OK)
    first, hash = load_head(region.p_records, slot, usable)
    token, stored = split_head(first)
    expected = tl.full((JUDGED,), -1, tl.int64)
    if own_tokens.p_tokens is not None:
        o_own = (position + 1) * GROUP - 1
        p_token = own_tokens.p_tokens + i_row.to(tl.int64) * own_tokens.stride + o_own
        expected = tl.load(p_token, mask=m & (o_own < own_tokens.width), other=-1).to(tl.int64)
    own = (expected < 0) | (expected == token)

    m_link = m & (position > read_first)
    prior = position - 1
    prior_slot, prior_status = lookup(places, row_first, prior, m_link, TABLE)
    prior_usable = m_link & (prior_status == STATUS_OK)
    prior_first, prior_hash = load_head(region.p_records, prior_slot, prior_usable)
    _, prior_stored = split_head(prior_first)
    prior_known = prior_usable & ((prior_stored & READ_WORD) == prior * STATE_VALUES + WRITTEN) & (prior_hash != 0)
    prior_hash = tl.where(position == 0, anchor, prior_hash)
    should_be = prior_hash + mix(token, position)
    link_ok = (hash == should_be) | (hash == 0) | ((prior_known | (position == 0)) == 0)
    at_end = (position == prefix - 1) & chained & (hash != 0)
    end_ok = (at_end == 0) | (hash == chain_hash)

    state = tl.where((stored & FREED) != 0, FREED, stored & CONTENT_BITS)
    placed = usable & ((stored & READ_WORD) == position * STATE_VALUES + WRITTEN)
    kind = tl.full((JUDGED,), NOTHING, tl.int64)
    kind = tl.where(placed & own & ((link_ok & end_ok) == 0), KIND_PREFIX, kind)
    kind = tl.where(placed & (own == 0), KIND_TOKEN, kind)
    kind = tl.where(usable & (state == WRITTEN) & (placed == 0), KIND_POSITION, kind)
    kind = tl.where(usable & (state == FREED), KIND_FREED, kind)
    kind = tl.where(usable & ((state == UNWRITTEN) | (state == ALLOCATED)), KIND_UNWRITTEN, kind)
    kind = tl.where(m & (status == STATUS_NULL), KIND_NULL_SLOT, kind)
    kind = tl.where(m & (status == STATUS_RANGE), KIND_SLOT_RANGE, kind)
    unknown = (usable & (state == UNKNOWN)).to(tl.int64)
    if COUNTS:
        tl.atomic_add(region.p_counters + COUNT_UNKNOWN_SLOTS, tl.sum(unknown, 0))
    found = tl.where(kind == KIND_PREFIX, tl.where(link_ok, chain_hash, should_be), -1)
    report_record(
        region, kind, kind >= 0, -1, slot, position, expected, region.p_records + slot * 4, usable,
        tl.where(usable, hash, -1), found, writer, step * 8 + PHASE_PRE,
    )  # fmt: skip
    return tl.sum((kind >= 0).to(tl.int32), 0), tl.sum(unknown, 0)


@triton.jit
def add_pairs(a, b, c, d):
    """Adds two pairs: two sums in one reduction."""
    return a + c, b + d


@triton.jit
def ended_at(region, writer, length):
    """The final hash of the writer's sequence, and whether the sequence is known to have ended at ``length``."""
    p_entry = region.p_chains + (tl.maximum(writer, 0) % CHAIN_ENTRIES) * 2
    hash = tl.load(p_entry + 1)
    known = (writer >= 0) & (length > 0) & (tl.load(p_entry) == ((writer << 32) | length)) & (hash != 0)
    return hash, known
